"""Names of Lightning that are no interface of it (releases.py): what its Trainer sets on a strategy, and how its checkpoints know a
model of DTensors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from .releases import lacking
from .torch_compat import NormBase

_CHECKPOINTS = "save and load by ModelParallelStrategy of a model of zeroshard.fsdp"
NAMES = {
    "_layer_sync": "Trainer(sync_batchnorm=...) with a zeroshard strategy",
    **dict.fromkeys(("fabric.strategies.model_parallel", "_has_dtensor_modules"), _CHECKPOINTS),
}


def synchronise_layers(strategy: Any, model: nn.Module) -> None:
    """Make the batch norms of a model those of all ranks, if the Trainer was asked for it.

    Raise ConfigError for a model with batch norms where the strategy is not told what was asked for.
    """
    if hasattr(strategy, "_layer_sync"):
        if strategy._layer_sync:
            strategy._layer_sync.apply(model)
    elif any(isinstance(module, NormBase) for module in model.modules()):
        raise lacking("lightning", "_layer_sync of a strategy", NAMES["_layer_sync"])


def show_models(is_sharded: Callable[[object], bool]) -> None:
    """Let Lightning's ModelParallelStrategy save and load what `is_sharded` says, beside models of DTensors, which it looks for.

    It acts on the packages that the program has imported. Where one lacks the name, its saves and loads raise ConfigError.
    """
    for fabric, trainer in (("lightning.fabric", "lightning.pytorch"), ("lightning_fabric", "pytorch_lightning")):
        strategies = [sys.modules[f"{name}.strategies"] for name in (fabric, trainer) if f"{name}.strategies" in sys.modules]
        kinds = [kind for module in strategies if (kind := getattr(module, "ModelParallelStrategy", None)) is not None]
        module = sys.modules.get(f"{fabric}.strategies.model_parallel")
        if not kinds or getattr(module, "_shows_zeroshard", False):
            continue
        plain = getattr(module, "_has_dtensor_modules", None)
        if module is None or plain is None:
            for kind in kinds:
                kind.save_checkpoint = kind.load_checkpoint = _refused
            continue
        module._has_dtensor_modules = _either(plain, is_sharded)  # type: ignore[attr-defined]
        module._shows_zeroshard = True  # type: ignore[attr-defined]


def _either(plain: Callable[[object], bool], is_sharded: Callable[[object], bool]) -> Callable[[object], bool]:
    @functools.wraps(plain)
    def has_dtensor_modules(module: object) -> bool:
        return plain(module) or is_sharded(module)

    return has_dtensor_modules


def _refused(*_: object, **__: object) -> NoReturn:
    raise lacking("lightning", "_has_dtensor_modules", _CHECKPOINTS)
