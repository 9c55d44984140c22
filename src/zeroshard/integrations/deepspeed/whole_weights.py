"""Whole weights: gather those of an engine, to save them in one file for other programs; read those of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ... import api
from ...checkpoint.resolver import agreed
from ...checkpoint.source import Opened
from ...utils.dtypes import casts_to
from ...zero.runtime import runtime_of
from ...zero.tensor_stream import stream_full_tensors
from .engine_settings import Settings
from .logs import logger

_STREAM_NBYTES = 256 << 20  # bytes of tensors that are gathered at a time


def read_whole(opened: Opened, dtype: torch.dtype | None, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """Read a checkpoint's tensors into host memory, by name; tied names get one tensor.

    dtype: dtype of floating-point tensors; None: as stored. wanted: name -> whether to read the tensor.
    """
    ties, state = opened.tied(), {}
    for name, stored in opened.model.items():
        if name not in ties and wanted(name):
            flat = torch.empty(stored.numel, dtype=casts_to(stored.dtype, dtype), device="cpu")
            stored.read(0, flat)
            state[name] = flat.view(stored.shape)
    state.update({alias: state[name] for alias, name in ties.items() if name in state})
    return state


class WholeWeights(Settings):
    """Mixin of the engine: methods that return, save and load whole weights."""

    module: nn.Module

    def module_state_dict(
        self, destination: dict[str, object] | None = None, prefix: str = "", keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, object]:  # fmt: skip
        """Return the module's state dict; at stage 3 with whole tensors (collective)."""
        if self.zero_optimization_partition_weights():
            state: dict[str, object] = {f"{prefix}{name}": value for name, value in api.full_state_dict(self.module).items()}
        else:
            state = self.module.state_dict(prefix=prefix, keep_vars=keep_vars)
        state = self._without_frozen(state, prefix) if exclude_frozen_parameters else state
        if destination is None:
            return state
        destination.update(state)
        return destination

    def _without_frozen(self, state: Mapping[str, object], prefix: str = "") -> dict[str, object]:
        named = self.module.named_parameters(remove_duplicate=False)
        frozen = {f"{prefix}{name}" for name, param in named if not param.requires_grad}
        return {name: value for name, value in state.items() if name not in frozen}

    def _whole_on_rank_0(self, exclude_frozen_parameters: bool) -> dict[str, object] | None:
        """Return the state dict in host memory on rank 0, None on other ranks (collective).

        _STREAM_NBYTES are gathered at a time. Tied names get one tensor, and no other tensors share memory.
        """
        first = runtime_of(self.module).comm.rank == 0
        state = self.module.state_dict(keep_vars=True)
        order = self._without_frozen(state) if exclude_frozen_parameters else state
        frozen = state.keys() - order.keys()
        found: dict[str, object] = {}
        for part in stream_full_tensors(self.module, max_nbytes=_STREAM_NBYTES):
            copies: dict[int, Tensor] = {}  # id of a gathered tensor -> its copy, which tied names share
            for name, value in part.items() if first else ():
                if name not in frozen:
                    if id(value) not in copies:
                        copies[id(value)] = value.to("cpu", copy=True)
                    found[name] = copies[id(value)]
        found |= {name: value for name, value in order.items() if not isinstance(value, Tensor)}  # values of get_extra_state
        return {name: found.pop(name) for name in order if name in found} | found if first else None

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, object] | None:
        """Return whole weights in host memory on rank 0, None on others (collective)."""
        if not self.zero_optimization_partition_weights():
            raise ValueError("this function requires ZeRO-3 mode")
        return self._whole_on_rank_0(exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write whole weights to one file of torch.save, on rank 0 (collective); return True.

        If stage3_gather_16bit_weights_on_model_save is false at stage 3, write nothing and return False.
        """
        path = os.path.join(save_dir, save_filename)
        sharded = self.zero_optimization_partition_weights()
        if sharded and not self.zero_gather_16bit_weights_on_model_save():
            logger.warning(
                f"Did not save the model {path} because stage3_gather_16bit_weights_on_model_save is False: say true in the section "
                "zero_optimization, or take save_checkpoint and zero_to_fp32."
            )
            return False
        state = self._whole_on_rank_0(exclude_frozen_parameters)

        def write() -> None:
            if state is not None:
                os.makedirs(save_dir, exist_ok=True)
                torch.save(state, path)

        agreed(runtime_of(self.module).comm, "save_16bit_model: writing", write, path)
        return True

    save_fp16_model = save_16bit_model

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: Callable[..., object] | None = None,
        **unused: object,
    ) -> None:  # fmt: skip
        """Load whole tensors by name, or from a checkpoint's entry 'module'."""
        state = checkpoint.get("module", checkpoint) if isinstance(checkpoint, dict) else checkpoint
        if custom_load_fn is not None:
            custom_load_fn(src=state, dst=self.module)
        else:
            self.module.load_state_dict(state, strict=strict)
