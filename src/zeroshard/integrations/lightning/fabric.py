"""The strategy of Lightning's Fabric.

fabric.init_module       zs.init: parameters are sharded from the start
fabric.setup             zs.shard(module, optimizer)
no_backward_sync         zs.accumulate; clip_gradients: zs.clip_grad_norm_; save and load: zs.save and zs.load
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import zeroshard as zs

from ...errors import ConfigError
from ...seam import engine_behind
from .sharding import Sharding, whole_state_dict

if TYPE_CHECKING:
    from ...assembly.sharded_optimizer import ShardedOptimizer


class _Around(nn.Module):
    """Wrapper of the model that Fabric calls: methods that Fabric redirects through its forward run the model's own hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.module(*args, **kwargs)


def _inner(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, _Around) else module


class _Accumulation:
    """Fabric's object for backwards without communication; it uses zs.accumulate."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        return zs.accumulate(_inner(module)) if enabled else contextlib.nullcontext()


class FabricSharding(Sharding):
    """ZeRO for Lightning's Fabric: FabricZeroshardStrategy(stage=3, **options of zs.shard), on CPU (gloo) and GPU (NCCL).

    Model and optimizer are set up together: fabric.setup(model, optimizer).
    """

    precision_name = "precision"
    precision = Sharding._plugin

    def __init__(self, stage: int = 3, **settings: Any) -> None:
        super().__init__(stage, **settings)
        for name, value in vars(self).items():  # the object that Fabric asks has this method, whatever its name
            if hasattr(value, "no_backward_sync"):
                setattr(self, name, _Accumulation())

    # -- set up ------------------------------------------------------------------------------------------------------

    def module_init_context(self, empty_init: bool | None = None) -> contextlib.ExitStack:
        """Return a context that makes modules sharded, on this rank's device; empty_init: on the meta device, whole."""
        stack = contextlib.ExitStack()
        stack.enter_context(torch.device("meta") if empty_init else self.root_device)
        if not empty_init:
            stack.enter_context(zs.init(**self.shard_options()))
        return stack

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list, scheduler: object = None) -> tuple:
        self._shard(module, optimizers)
        return _Around(module), optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a model without an optimizer, for evaluation (collective)."""
        self._shard(module, [])
        return _Around(module)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        raise ConfigError("a sharded model and its optimizer are set up together: fabric.setup(model, optimizer).")

    # -- gradients ---------------------------------------------------------------------------------------------------

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip, and return the norm before clipping (collective). In fp16 a non-finite norm is no error: the step is skipped."""
        if float(norm_type) != 2.0:
            raise ConfigError(f"norm_type: expected 2, got {norm_type}: the norm over all ranks is that of zs.clip_grad_norm_.")
        norm = zs.clip_grad_norm_(_inner(module), max_norm)
        if error_if_nonfinite and not math.isfinite(norm) and not self.precision.precision.startswith("16"):
            raise RuntimeError(f"the norm of gradients is {norm.item()}: it can not be clipped (error_if_nonfinite=True).")
        return norm

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, object]:
        return whole_state_dict(_inner(module))

    def get_optimizer_state(self, optimizer: ShardedOptimizer) -> dict[str, object]:
        return zs.full_optimizer_state_dict(engine_behind(optimizer).model, every_rank=True)

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, object], strict: bool = True) -> None:
        _inner(module).load_state_dict(state_dict, strict=strict)

    def save_checkpoint(
        self, path: str | os.PathLike, state: Mapping[str, object], storage_options: object = None, filter: object = None
    ) -> None:
        """Save a checkpoint (collective). state: by name, the model, perhaps its optimizer, values, objects with state_dict."""
        if self._state_dict_type == "full":
            super().save_checkpoint(path, state, storage_options, filter)
            return
        if filter:
            raise ConfigError("filter: a sharded checkpoint can not be filtered. Give the strategy state_dict_type='full'.")
        model, optimizer, rest = _parts(state)
        rest = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in rest.items()}
        self._save(path, model, optimizer, rest, storage_options)

    def load_checkpoint(
        self, path: str | os.PathLike, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a folder that save_checkpoint wrote, or a file (collective). Return the saved entries that `state` lacks."""
        path = Path(self.broadcast(path))
        if not path.is_dir():
            return super().load_checkpoint(path, state, strict=strict, weights_only=weights_only)
        model, optimizer, rest = _parts({"model": state} if isinstance(state, nn.Module) else state or {})
        found = self._load(path, model, optimizer, weights_only)
        if strict and (missing := rest.keys() - found.keys()):
            raise KeyError(f"{path} has no {', '.join(sorted(missing))} (strict=True); it has {', '.join(sorted(found))}.")
        for name in rest.keys() & found.keys():
            if hasattr(rest[name], "load_state_dict"):
                rest[name].load_state_dict(found.pop(name))
            else:
                state[name] = found.pop(name)
        return found


def _parts(state: Mapping[str, object]) -> tuple[nn.Module, torch.optim.Optimizer | None, dict[str, Any]]:
    """Return (model, optimizer or None, the rest). Raises ConfigError unless there is one model and at most one optimizer."""
    models = {name: value for name, value in state.items() if isinstance(value, nn.Module)}
    optimizers = {name: value for name, value in state.items() if isinstance(value, torch.optim.Optimizer)}
    if len(models) != 1 or len(optimizers) > 1:
        got = f"{len(models)} models and {len(optimizers)} optimizers"
        raise ConfigError(f"state: expected one model that fabric.setup returned, and at most its optimizer, got {got}.")
    rest = {name: value for name, value in state.items() if name not in models and name not in optimizers}
    return _inner(next(iter(models.values()))), next(iter(optimizers.values()), None), rest
