"""Names of Lightning that are no interface of it (releases.py): what its Trainer sets on a strategy."""

from __future__ import annotations

from typing import Any

from torch import nn

from .releases import lacking
from .torch_compat import NormBase

NAMES = {"_layer_sync": "Trainer(sync_batchnorm=...) with a zeroshard strategy"}


def synchronise_layers(strategy: Any, model: nn.Module) -> None:
    """Make the batch norms of a model those of all ranks, if the Trainer was asked for it.

    Raise ConfigError for a model with batch norms where the strategy is not told what was asked for.
    """
    if hasattr(strategy, "_layer_sync"):
        if strategy._layer_sync:
            strategy._layer_sync.apply(model)
    elif any(isinstance(module, NormBase) for module in model.modules()):
        raise lacking("lightning", "_layer_sync of a strategy", NAMES["_layer_sync"])
