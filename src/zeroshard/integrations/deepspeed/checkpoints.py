"""Checkpoints of the engine: zeroshard's own, in DeepSpeed's places (folder/tag, `latest`); those of the real DeepSpeed load too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import api
from ...checkpoint import loading, saving
from ...checkpoint.directory import LATEST, MANIFEST, write_whole
from ...comm.codec import exchange_values
from ...errors import CheckpointNotFound
from ...zero.runtime import runtime_of
from .logs import logger

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")  # not micro_steps: accumulation begins anew


class Checkpoints:
    """Mixed into the engine."""

    module: nn.Module

    def save_checkpoint(
        self, save_dir: str, tag: Any = None, client_state: dict[str, Any] | None = None, save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """Write save_dir/tag (collective): model, optimizer, scheduler, counters, client_state. A tag that exists is replaced.

        tag: None: global_step and the number. exclude_frozen_parameters: what is not trained is left out, and recorded.
        """
        if not save_dir:
            raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)  # type: ignore[attr-defined]
        tag = self._agreed(tag)
        pointer = Path(save_dir) / LATEST
        before = pointer.read_bytes() if not save_latest and pointer.exists() else None
        saving.save(
            save_dir, self.module, self.basic_optimizer, name=tag, step=self.global_steps,  # type: ignore[attr-defined]
            extra=self._extra(client_state or {}), trained_only=exclude_frozen_parameters, overwrite=True,
        )  # fmt: skip
        if not save_latest:  # a save always points to itself: point back
            comm = runtime_of(self.module).comm
            if comm.rank == 0:
                pointer.unlink() if before is None else write_whole(pointer, before)
            comm.exchange(b"", "save_checkpoint: latest as before")
        return True

    def _agreed(self, tag: str) -> str:
        """Rank 0's tag, where ranks differ and checkpoint.tag_validation does not make that an error."""
        config, comm = self._config, runtime_of(self.module).comm  # type: ignore[attr-defined]
        tags = exchange_values(comm, tag, "save_checkpoint: tag")
        if len(set(tags)) == 1:
            return tag
        told = f"[rank={comm.rank}] The checkpoint tag name '{tag}' is not consistent across all ranks: {tags}."
        assert not config.checkpoint_tag_validation_fail, told
        if config.checkpoint_tag_validation_enabled:
            logger.warning(f"{told} That of rank 0 is taken.")
        return tags[0]

    def _extra(self, client_state: dict[str, Any]) -> dict[str, Any]:
        extra = {"client_state": client_state, "engine": {name: getattr(self, name) for name in _COUNTERS}}
        scheduler = self.lr_scheduler  # type: ignore[attr-defined]
        return extra if scheduler is None else {**extra, "lr_scheduler": scheduler}

    def load_checkpoint(
        self, load_dir: str, tag: Any = None, load_module_strict: bool = True, load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True, load_module_only: bool = False, custom_load_fn: Any = None, trusted: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:  # fmt: skip
        """Load a checkpoint of any number of ranks (collective): (its path, client_state), or (None, None) without a `latest`.

        Also taken are those that the real DeepSpeed wrote. trusted: unpickle any object in client_state, which can run code.
        """
        if custom_load_fn is not None:
            raise TypeError("load_checkpoint(custom_load_fn=...): not served; change weights in `with deepspeed.zero.GatheredParameters`.")
        root = Path(load_dir)
        pointer = "latest_universal" if self._config.load_universal_checkpoint else LATEST  # type: ignore[attr-defined]
        tag = _latest(root, pointer) if tag is None else str(tag)
        if tag is None and pointer != LATEST:
            raise ValueError(f"Invalid for universal checkpoint: {root / pointer} does not exist; leave checkpoint.load_universal out")
        if tag is None:
            logger.warning(f"Unable to find latest file at {root / 'latest'}: pass a tag, or a folder that save_checkpoint wrote to.")
            return None, None
        with_optimizer = load_optimizer_states and not load_module_only
        scheduler = self.lr_scheduler if load_lr_scheduler_states and not load_module_only else None  # type: ignore[attr-defined]
        own = (root / tag / MANIFEST).exists()
        extra: dict[str, Any] = {}
        if own:
            extra = {"client_state": None, "engine": None}
            extra |= {} if scheduler is None else {"lr_scheduler": scheduler}
        elif not (root / tag).exists():
            raise CheckpointNotFound(f"load_checkpoint: no checkpoint {tag!r} in {root}. It has: {sorted(p.name for p in root.glob('*/'))[:20]}.")
        loaded = loading.load(
            root / tag, self.module, self.basic_optimizer if with_optimizer else None, extra=extra, rng=False, trusted=trusted  # type: ignore[attr-defined]
        )
        client_state = loaded.extra.get("client_state") or {}
        if not load_module_only:
            for name, value in (loaded.extra.get("engine") or {}).items():
                if name in _COUNTERS:
                    setattr(self, name, value)
        return str(loaded.path), client_state

    # -- whole weights -------------------------------------------------------------------------------------------

    def module_state_dict(self, exclude_frozen_parameters: bool = False, **unused: Any) -> dict[str, Tensor]:
        """The module's state dict; at stage 3 whole (collective)."""
        if self.zero_optimization_partition_weights():  # type: ignore[attr-defined]
            state = api.full_state_dict(self.module)
        else:
            state = self.module.state_dict()
        return self._without_frozen(state) if exclude_frozen_parameters else state

    def _without_frozen(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        frozen = {name for name, param in self.module.named_parameters(remove_duplicate=False) if not param.requires_grad}
        return {name: value for name, value in state.items() if name not in frozen}

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Whole weights on the host of rank 0, None on others (collective)."""
        if not self.zero_optimization_partition_weights():  # type: ignore[attr-defined]
            raise ValueError("this function requires ZeRO-3 mode")
        state = api.full_state_dict(self.module)
        if runtime_of(self.module).comm.rank:
            return None
        state = self._without_frozen(state) if exclude_frozen_parameters else state
        return {name: value.cpu() for name, value in state.items()}

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write whole weights to one file of torch.save, by rank 0 (collective). False, and no file, where the configuration's
        stage3_gather_16bit_weights_on_model_save is.
        """
        path = os.path.join(save_dir, save_filename)
        if self.zero_optimization_partition_weights():  # type: ignore[attr-defined]
            if not self.zero_gather_16bit_weights_on_model_save():  # type: ignore[attr-defined]
                logger.info(f"Did not save the model {path} because stage3_gather_16bit_weights_on_model_save is False")
                return False
            state = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        else:
            state = self.module_state_dict(exclude_frozen_parameters)
        if runtime_of(self.module).comm.rank == 0:
            assert state is not None
            os.makedirs(save_dir, exist_ok=True)
            torch.save({name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}, path)
        if dist.is_initialized():
            dist.barrier()
        return True

    save_fp16_model = save_16bit_model

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_module_state_dict(self, checkpoint: Any, strict: bool = True, **unused: Any) -> None:
        """Whole tensors by name, or a checkpoint that has them as 'module'."""
        state = checkpoint.get("module", checkpoint) if isinstance(checkpoint, dict) else checkpoint
        self.module.load_state_dict(state, strict=strict)


def _latest(root: Path, pointer: str = LATEST) -> str | None:
    try:
        lines = (root / pointer).read_text().split("\n")
    except (FileNotFoundError, NotADirectoryError):
        return None
    return lines[0].strip() or None
