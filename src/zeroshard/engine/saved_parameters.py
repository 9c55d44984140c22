"""Saved-tensor hooks: autograd saves a handle in place of a gathered parameter, and backward gathers the unit on demand.

    forward     pack      a parameter, or a view of one -> SavedParameter (unit, offset, shape, strides)
    backward    restore   SavedParameter -> the same view of the unit's memory, which is gathered if it was released

So backward may reach an operation by any path: through the unit's outputs, whose hooks gather the unit ahead of the operation,
or past them, through a loss that a module keeps as an attribute. All other tensors go to the saved-tensor hooks around the unit.

Some code bypasses these hooks (a function that keeps a parameter in its `ctx` without `save_for_backward`, a user's own hooks
inside the unit's forward) and refers to the memory itself. Such references are counted (`ParamGroup.referred`): memory that
backward might reach without these hooks is not released but stays with the tensors that refer to it (`ParamGroup.detach`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..errors import ShardedAccessError
from ..utils import torch_compat
from ..utils.autograd import memory_of
from ..utils.saved_tensors import Outer, Packed, Saved, restore
from ..utils.torch_compat import is_traceable_wrapper_subclass
from .unit import ParamGroup, Unit


class SavedParameter:
    """Handle of a view of a unit's gathered memory. counted: what keeps an enclosing checkpoint's count (`Outer.count`)."""

    __slots__ = ("counted", "dtype", "group", "offset", "shape", "stride", "writes")

    def __init__(self, tensor: Tensor, group: ParamGroup, counted: object) -> None:
        self.group, self.dtype, self.writes, self.counted = group, tensor.dtype, group.unit.writes, counted
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()

    def restore(self) -> Tensor:
        """Return the view, gathering the unit if need be. Raise ShardedWriteError if its parameters were written meanwhile."""
        self.group.runtime.need(self.group.unit, self.writes)
        full = self.group.values.full.data  # a version counter of its own, which later gathers do not advance
        if full.dtype != self.dtype:
            full = full.view(self.dtype)
        return full.as_strided(self.shape, self.stride, self.offset)


class SavedWrapper:
    """Handle of a tensor of a subclass that wraps views of gathered memory, such as a DTensor. counted: as for SavedParameter."""

    __slots__ = ("context", "counted", "kind", "others", "parts", "shape", "stride")

    def __init__(self, tensor: Any, pack: Callable[[Tensor], Any], counted: object) -> None:
        """pack: function that returns, for each wrapped tensor, an object with a method `restore`."""
        names, self.context = tensor.__tensor_flatten__()
        inside = {name: getattr(tensor, name) for name in names}
        self.parts = {name: pack(part) for name, part in inside.items() if isinstance(part, Tensor)}
        self.others = {name: part for name, part in inside.items() if not isinstance(part, Tensor)}  # such as a mesh
        self.kind, self.shape, self.stride, self.counted = type(tensor), tensor.shape, tensor.stride(), counted

    def restore(self) -> Tensor:
        inside = self.others | {name: part.restore() for name, part in self.parts.items()}
        return self.kind.__tensor_unflatten__(inside, self.context, self.shape, self.stride)


class SavedParameters:
    """Saved-tensor hooks of one model's units. Each thread pushes and pops its own: torch's default hooks are per thread."""

    def __init__(self, units: list[Unit]) -> None:
        self._groups: dict[int, ParamGroup] = {}  # by identity of their storage
        for unit in units:
            self.follow(unit)

    def follow(self, unit: Unit) -> None:
        """Register the unit's gathered memory, in place of the memory that it had before."""
        self._groups = {memory: group for memory, group in self._groups.items() if group.unit is not unit}
        memories = ((memory_of(group.values.full), group) for group in unit.gathered if group.values.released)
        self._groups |= {memory: group for memory, group in memories if memory is not None}

    def push(self, unit: Unit) -> None:
        """Enable the hooks as a forward of the unit begins: autograd saves handles of gathered parameters until `pop`."""
        hooks = saved_tensors_hooks(_Hooks(self).pack, restore)
        try:
            hooks.__enter__()
        except RuntimeError as error:
            if not torch.is_grad_enabled():  # autograd saves nothing, so the hooks are not needed
                return
            raise ShardedAccessError(
                f"{unit.name}: saved-tensor hooks are disabled here ({error}), without which backward would read released parameters. "
                "Gather them around it: `with zs.gathered(model):`."
            ) from error
        unit.inside.hooks = hooks

    def pop(self, unit: Unit) -> None:
        """Disable the hooks as the forward ends, on the thread that called `push`."""
        if unit.forward is not None and unit.forward.hooks is not None:
            unit.forward.hooks.__exit__()

    def group_of(self, tensor: Tensor) -> ParamGroup | None:
        """Return the group whose gathered memory a tensor views, or None."""
        try:
            return self._groups.get(torch_compat.storage_id(tensor.untyped_storage()))
        except RuntimeError:  # sparse layouts and tensors under a torch.func transform have no storage
            return None


class _Hooks:
    """Saved-tensor hooks of one forward of a unit. outer: the hooks of the code around it, which get all other tensors."""

    def __init__(self, saved: SavedParameters) -> None:
        self.saved, self.outer = saved, Outer()
        around = getattr(self.outer.hooks[0], "__self__", None) if self.outer.hooks is not None else None
        if isinstance(around, _Hooks) and around.saved is saved:  # an enclosing unit's hooks know the same parameters
            self.outer = around.outer

    def pack(self, tensor: Tensor) -> SavedParameter | SavedWrapper | Packed | Saved:
        group = self.saved.group_of(tensor)
        if group is not None:
            return SavedParameter(tensor, group, self.outer.count(tensor))
        if type(tensor) is Tensor:
            return Saved(tensor) if self.outer.hooks is None else self.outer.pack(tensor)
        if self._wraps_parameters(tensor):
            return SavedWrapper(tensor, self._inner, self.outer.count(tensor))
        return self.outer.pack(tensor)

    def _inner(self, part: Tensor) -> SavedParameter | SavedWrapper | Saved:
        """Return the handle of a tensor inside a wrapper."""
        group = self.saved.group_of(part)
        if group is not None:
            return SavedParameter(part, group, None)
        return SavedWrapper(part, self._inner, None) if self._wraps_parameters(part) else Saved(part)

    def _wraps_parameters(self, tensor: Tensor) -> bool:
        if not is_traceable_wrapper_subclass(tensor):
            return False
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return any(
            self.saved.group_of(part) is not None or self._wraps_parameters(part) for part in parts if isinstance(part, Tensor)
        )
