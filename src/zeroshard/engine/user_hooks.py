"""The program's post-accumulate hooks on parameters, which run in backward when a local gradient is complete.

    registered before zs.shard    runs before the gradient is sent: the parameter is whole; the hook may change or drop p.grad
    registered after zs.shard     runs after the gradient was sent: the parameter is as at rest

Both get the program's own parameter object. A hook that steps an optimizer raises, since ranks would get different values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from ..errors import ShardedWriteError
from ..utils.torch_compat import exchange, post_accumulate_hooks, version

if TYPE_CHECKING:
    from .unit import ParamGroup

ONE_OPTIMIZER = (
    "Remove the hook, and give zs.shard one optimizer of all these parameters (with groups where options differ); call its step after "
    "backward. To save memory: from stage 2 on each rank keeps a slice of the gradients, and offload_gradient moves it off the device."
)


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
