"""Names of bitsandbytes that are no interface of it (releases.py): how its optimizers tell with which settings they step a parameter."""

from __future__ import annotations

from typing import Any

import torch

from .releases import lacking, taken

_FEATURE = "an optimizer of bitsandbytes (zs.shard takes AdamW, Adam, Lion, SGD, RMSprop and Adagrad)"
_OVERRIDES = ("index2config", "pid2config", "module_weight_config_triple")  # of GlobalOptimManager
NAMES = dict.fromkeys(("get_config", "mng", *_OVERRIDES), _FEATURE)


def settings_of(optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the settings of each parameter, in the order of groups and parameters, and those that GlobalOptimManager overrides.

    Its own method that looks for parameters that are overridden by their module and name writes into the manager; this does not.
    """
    get, manager = (taken(optimizer, "bitsandbytes", name, _FEATURE) for name in ("get_config", "mng"))
    by_index, by_id, by_name = (taken(manager, "bitsandbytes", name, _FEATURE) for name in _OVERRIDES)
    found, overrides = [], []
    for number, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            given = by_index.get((number, place), {}) | by_id.get(id(param), {})
            for module, name, override in by_name:
                given |= override if getattr(module, name) is param else {}
            found.append(get(number, place, group) | given)
            overrides.append(given)
    for name in ("optim_bits", "min_8bit_size"):  # as the arguments of its constructors are called
        if any(name not in each for each in found):
            raise lacking("bitsandbytes", f"{name} in the result of get_config", _FEATURE)
    return found, overrides
