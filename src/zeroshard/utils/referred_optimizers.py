"""Search for optimizers that a function, such as a hook of the program, refers to."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_DEPTH = 5  # levels of references that are searched: function, object, dictionary, optimizer
_MOST = 100_000  # number of objects that are searched


def other_optimizers(roots: Iterable[object], optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, torch.optim.Optimizer]:
    """Return id of each parameter -> the optimizer that holds it, for optimizers that `roots` refer to.

    Leave out `optimizers` and others that wrap one of them. Search closures, defaults and globals of functions, bound objects, partial
    functions and containers.
    """
    found: dict[int, torch.optim.Optimizer] = {}
    own = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
    seen: dict[int, object] = {}  # keeps the objects alive, so that no id is reused
    stack = [(root, 0) for root in roots]
    while stack and len(seen) < _MOST:
        item, depth = stack.pop()
        if id(item) in seen or isinstance(item, (Tensor, types.ModuleType)):  # modules of Python lead everywhere
            continue
        seen[id(item)] = item
        if isinstance(item, torch.optim.Optimizer):
            groups = [group for group in item.param_groups if id(group) not in own]
            found |= {id(param): item for group in groups for param in group["params"]}
        elif depth < _DEPTH:
            stack += [(value, depth + 1) for value in _referred(item)]
    return found


def _referred(item: object) -> Iterable[object]:
    """Return the objects that a function, an object or a container refers to directly."""
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, (list, tuple, set, frozenset)):
        return item
    if isinstance(item, types.FunctionType):
        cells = [cell.cell_contents for cell in item.__closure__ or () if cell != types.CellType()]
        used = [item.__globals__[name] for name in item.__code__.co_names if name in item.__globals__]
        return [*cells, *used, *(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
    if isinstance(item, types.MethodType):
        return [item.__self__, item.__func__]
    if isinstance(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if isinstance(item, nn.Module):  # the program's own attributes, without parameters and submodules
        return [value for name, value in vars(item).items() if not name.startswith("_")]
    if isinstance(item, type) or not hasattr(item, "__dict__"):
        return ()
    return [*vars(item).values(), getattr(type(item), "__call__", None)]  # noqa: B004  # the function itself
