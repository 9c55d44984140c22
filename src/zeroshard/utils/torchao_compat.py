"""Names of torchao that are no interface of it (releases.py): the settings that its optimizers keep."""

from __future__ import annotations

from typing import Any

import torch

from .releases import taken

_FEATURE = "an optimizer of torchao (zs.shard takes Adam and AdamW)"
NAMES = dict.fromkeys(("block_size", "bf16_stochastic_round"), _FEATURE)


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the settings of all parameters."""
    return {name: taken(optimizer, "torchao", name, feature) for name, feature in NAMES.items()}
