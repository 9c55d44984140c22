"""Names of bitsandbytes that are no interface of it (releases.py): how its optimizers tell with which settings they step a parameter."""

from __future__ import annotations

from typing import Any

import torch

from .releases import lacking, taken

_FEATURE = "an optimizer of bitsandbytes (zs.shard takes AdamW, Adam, Lion, SGD, RMSprop and Adagrad)"
NAMES = dict.fromkeys(("check_overrides", "get_config"), _FEATURE)


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each parameter, in the order of groups and parameters: with what GlobalOptimManager overrides."""
    check, get = (taken(optimizer, "bitsandbytes", name, _FEATURE) for name in NAMES)
    check()  # as the first step does: of parameters that are overridden by their module and name
    groups = enumerate(optimizer.param_groups)
    found = [get(number, place, group) for number, group in groups for place in range(len(group["params"]))]
    for name in ("optim_bits", "min_8bit_size"):  # as the arguments of its constructors are called
        if any(name not in each for each in found):
            raise lacking("bitsandbytes", f"{name} in the result of get_config", _FEATURE)
    return found
