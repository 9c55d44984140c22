"""Base class of both strategies: options, Lightning's names of precisions, the layout of checkpoints, whole states.

sharded checkpoint    PATH/checkpoint/...     written by zs.save: every rank's part, and Lightning's own entries as an extra
full checkpoint       PATH                    a file of torch.save, as one process would write it (state_dict_type="full")
"""

from __future__ import annotations

import contextlib
import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import zeroshard as zs

from ...api import whole_state
from ...errors import ConfigError, did_you_mean
from ...seam import engine_behind

if TYPE_CHECKING:  # Lightning may be installed under another name
    from lightning.fabric.plugins import CheckpointIO, Precision
    from lightning.fabric.strategies import DDPStrategy

    from ...assembly.sharded_optimizer import ShardedOptimizer
else:
    DDPStrategy = object  # each package's own is the second base of the derived classes

PRECISIONS: dict[str, dict[str, str | bool]] = {
    "32-true": {"precision": "fp32"},
    "bf16-mixed": {"precision": "bf16"},  # with fp32 masters, and autocast around the step
    "16-mixed": {"precision": "fp16"},  # and with a dynamic loss scale
    "bf16-true": {"precision": "bf16", "master_weights": False},
    "16-true": {"precision": "fp16"},  # keeps masters: without them, Adam's eps would be 0 in fp16
}
STATE_DICT_TYPES = ("sharded", "full")
NAME = "checkpoint"


def precision_class(base: Any) -> type:
    """Return a precision plugin class, derived from a package's own (`base`), that leaves casts to zs.shard."""

    class ZeroshardPrecision(base):
        """Autocast for mixed precisions; zs.shard handles parameters, inputs, masters and the loss scale."""

        def __init__(self, precision: str, strategy: Sharding) -> None:
            self.precision, self._strategy = precision, strategy  # the strategy gets its device later

        def forward_context(self) -> contextlib.AbstractContextManager[object]:
            if not self.precision.endswith("-mixed"):
                return contextlib.nullcontext()
            dtype = torch.bfloat16 if self.precision.startswith("bf16") else torch.float16
            return torch.autocast(self._strategy.root_device.type, dtype=dtype, cache_enabled=False)

        def clip_grad_by_norm(self, optimizer: ShardedOptimizer, clip_val: float) -> None:
            zs.clip_grad_norm_(engine_behind(optimizer).model, clip_val)

    return ZeroshardPrecision


class Sharding(DDPStrategy):
    """First base class of the strategies, before Lightning's DDPStrategy; it has their options."""

    _precision_class: type
    precision_name: str  # of the property by which Lightning knows the precision plugin

    def __init__(
        self,
        stage: int = 3,
        *,
        state_dict_type: str = "sharded",
        trusted: bool = False,
        config: zs.Config | None = None,
        **settings: Any,
    ) -> None:
        """stage, config and the settings that zs.Config has go to zs.shard; all other settings go to Lightning's DDPStrategy.

        state_dict_type: form of written checkpoints: "sharded", a folder of all ranks' parts, or "full", one file.
        trusted: unpickle objects of any class (hyperparameters, states of callbacks) in sharded checkpoints, as zs.load does.
        Raises ConfigError for a wrong option.
        """
        known = set(zs.Config.__dataclass_fields__) - {"precision"} | {"preset"}
        if state_dict_type not in STATE_DICT_TYPES:
            raise ConfigError(f"state_dict_type: expected one of {STATE_DICT_TYPES}, got {state_dict_type!r}.")
        if settings.get("precision") in (*PRECISIONS, "fp32", "bf16", "fp16"):
            raise ConfigError("precision: give it to the Trainer or Fabric, e.g. precision='bf16-mixed'.")
        self._config, self._state_dict_type, self._trusted = config, state_dict_type, trusted
        self._check_io(settings.get("checkpoint_io"))
        self._options = {name: settings.pop(name) for name in list(settings) if name in known}
        self._options |= {"stage": stage} if config is None and "preset" not in self._options else {}
        zs.Config.build(config, **self._options)  # check options now, before ranks are started
        theirs = inspect.signature(super().__init__).parameters.values()
        if unknown := settings.keys() - {each.name for each in theirs if each.kind is not each.VAR_KEYWORD}:
            name, listed = min(unknown), ", ".join(sorted(known))
            raise ConfigError(f"unknown option {name!r}.{did_you_mean(name, known)} Known: {listed}, and those of DDPStrategy.")
        super().__init__(**settings)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The plugin that writes and reads checkpoints that are one file."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, given: CheckpointIO | None) -> None:
        self._check_io(given)
        super(Sharding, type(self)).checkpoint_io.fset(self, given)

    def _check_io(self, given: CheckpointIO | None) -> None:
        if given is not None and self._state_dict_type == "sharded":
            kind = type(given).__name__
            raise ConfigError(f"{kind}: sharded checkpoints are written by zs.save. Leave it out, or state_dict_type='full'.")

    def shard_options(self) -> dict[str, Any]:
        """Return the options of zs.shard and zs.init. Options of the strategy override those of the precision."""
        return {"config": self._config, **PRECISIONS[self._plugin.precision], **self._options}

    @property
    def _plugin(self) -> Precision:
        """Our precision plugin, in the place of the one that the Trainer or Fabric makes for `precision` and assigns."""
        given = getattr(super(), self.precision_name)
        return given if isinstance(given, self._precision_class) else self._precision_class("32-true", self)

    @_plugin.setter
    def _plugin(self, given: Precision | None) -> None:
        """Raise ConfigError for a precision that zs.shard does not have."""
        theirs = getattr(super(Sharding, type(self)), self.precision_name)
        if given is None or isinstance(given, self._precision_class):
            theirs.fset(self, given)
            return
        name = str(getattr(given, "precision", type(given).__name__))
        own = {"Precision", "HalfPrecision", "MixedPrecision"}
        if name not in PRECISIONS or type(given).__name__ not in own:
            known, kind = ", ".join(PRECISIONS), type(given).__name__
            raise ConfigError(f"precision: expected one of {known}, got {name!r} ({kind}): zeroshard casts by itself.")
        theirs.fset(self, self._precision_class(name, self))

    def _shard(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Call zs.shard with at most one optimizer, after zs.close if the model is sharded already (collective)."""
        if len(optimizers) > 1:
            raise ConfigError(
                f"expected one optimizer, got {len(optimizers)}: use one with several parameter groups, or strategy='ddp'."
            )
        if is_sharded(model):
            zs.close(model)
        zs.shard(model, *optimizers, **self.shard_options())

    def module_to_device(self, model: nn.Module) -> None:
        if not is_sharded(model) and not any(param.is_meta for param in model.parameters()):
            model.to(self.root_device)

    def _save(
        self,
        path: str | os.PathLike,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: dict[str, object],
        storage_options: object,
    ) -> None:
        """Write a folder with all ranks' parts, replacing an existing checkpoint (collective). Rank 0's `extra` is saved."""
        if storage_options is not None:
            raise ConfigError("storage_options: zs.save writes folders of this filesystem by itself. Leave it out.")
        extra, path = self.broadcast((extra, os.fspath(path)))  # zs.save raises if ranks pass different paths
        zs.save(path, model, optimizer, extra={"lightning": extra}, name=NAME, overwrite=True)

    def _load(
        self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, weights_only: bool | None
    ) -> dict[str, Any]:
        """Load a folder of `_save`, written at any world size and stage, and return the saved `extra` (collective)."""
        found = zs.load(path, model, optimizer, extra={"lightning": None}, trusted=self._trusted or weights_only is False)
        return found.extra["lightning"]

    @classmethod
    def register_strategies(cls, strategy_registry: object) -> None:
        """Do nothing: the package registers its strategies itself, under several names."""


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model is sharded by zs.shard."""
    return "_zeroshard" in model.__dict__


def whole_state_dict(model: nn.Module) -> dict[str, object]:
    """Return the model's whole state dict on the host, with the fp32 masters of parameters that have them (collective).

    Its names are those of `model.state_dict()`: Lightning loads such a file into modules that compile their parts themselves.
    """
    whole = whole_state(model, masters=True)
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in whole.items()}
