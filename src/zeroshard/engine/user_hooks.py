"""The program's post-accumulate hooks on parameters, which run in backward when a local gradient is complete.

    registered before zs.shard    runs before the gradient is sent: the parameter is whole; the hook may change or drop p.grad
    registered after zs.shard     runs after the gradient was sent: the parameter is as at rest

Both get the program's own parameter object. A hook that steps an optimizer raises, since ranks would get different values.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import ShardedWriteError
from ..utils.torch_compat import exchange, post_accumulate_hooks, version

if TYPE_CHECKING:
    from .unit import ParamGroup

_DEPTH = 5  # levels of references that are searched: function, object, dictionary, optimizer
_MOST = 100_000  # number of objects that are searched
ONE_OPTIMIZER = (
    "Remove the hook, and give zs.shard one optimizer of all these parameters (with groups where options differ); call its step after "
    "backward. To save memory: from stage 2 on each rank keeps a slice of the gradients, and offload_gradient moves it off the device."
)


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
    if isinstance(item, UserHook):
        return [item.hook]
    if isinstance(item, nn.Module):  # the program's own attributes, without parameters and submodules
        return [value for name, value in vars(item).items() if not name.startswith("_")]
    if isinstance(item, type) or not hasattr(item, "__dict__"):
        return ()
    return [*vars(item).values(), getattr(type(item), "__call__", None)]  # noqa: B004  # the function itself


class UserHook:
    """Wrapper that calls a hook with the program's parameter object, and raises if the hook has written to the value."""

    def __init__(self, hook: Callable[[Tensor], object], group: ParamGroup, index: int, whole: bool) -> None:
        """whole: the hook runs before the gradient is sent, with the unit gathered."""
        self.hook, self._group, self._index, self._whole = hook, weakref.ref(group), index, whole  # weak: see gradient_hook

    def __call__(self, given: Tensor) -> None:
        group = self._group()
        if group is None or not self._whole:
            self.hook(given if group is None else group.params[self._index])
            return
        param, compute, before = group.params[self._index], given, version(given)
        if param is not compute:
            group.runtime.need(group.unit, group.unit.writes)
            exchange(param, compute)  # the program's object is whole until the hook returns
        try:
            self.hook(param)
        finally:
            if param is not compute:
                exchange(param, compute)
        if version(given) != before:
            raise ShardedWriteError(
                f"{group.specs[self._index].name}: a hook has written this parameter in backward, where each rank has the gradient of its own "
                f"batch: ranks would get different values. Write after backward, on all ranks; or, if it steps an optimizer: {ONE_OPTIMIZER}"
            )


def adopt(group: ParamGroup, index: int, compute: Tensor) -> None:
    """Wrap, by `UserHook`, the hooks of parameter `index` from before zs.shard, which moved to its compute parameter."""
    hooks = post_accumulate_hooks(compute)
    for key, hook in hooks.items():
        hooks[key] = UserHook(hook, group, index, whole=True)


def give_back(param: Tensor) -> None:
    """Unwrap the hooks of a parameter on close; the inverse of `adopt`."""
    hooks = post_accumulate_hooks(param)
    for key, hook in hooks.items():
        hooks[key] = hook.hook if isinstance(hook, UserHook) else hook
