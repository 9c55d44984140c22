"""What autograd saves of gathered parameters: no memory, but where in which unit it was. Backward gathers the unit on demand.

    forward     pack      a parameter, or a view of one -> SavedParameter (unit, offset, shape, strides)
    backward    restore   SavedParameter -> the same view of the unit's memory, which is gathered where it was released

So it does not matter by which path backward comes to an operation: through the unit's outputs, which gathers the unit ahead of
the operation, or past them, through a loss that a module keeps as an attribute. Activations are saved as outside of the unit.

What does not pass these hooks (a function that keeps a parameter in its `ctx` without `save_for_backward`, hooks of a user inside of
the unit's forward) refers to the memory itself. Such references are counted (`ParamGroup.referred`), and memory that backward might
reach unseen is left to those who refer to it.
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
    """A view of a unit's gathered memory, to be made again. counted: what a checkpoint around it has for it (see `Outer.count`)."""

    __slots__ = ("counted", "dtype", "group", "offset", "shape", "stride", "writes")

    def __init__(self, tensor: Tensor, group: ParamGroup, counted: object) -> None:
        self.group, self.dtype, self.writes, self.counted = group, tensor.dtype, group.unit.writes, counted
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()

    def restore(self) -> Tensor:
        """The view again (collective where a gather is). Raises ShardedWriteError where its parameters were written meanwhile."""
        self.group.runtime.need(self.group.unit, self.writes)
        full = self.group.values.full.data  # with a count of writes of its own: later gathers are none
        if full.dtype != self.dtype:
            full = full.view(self.dtype)
        return full.as_strided(self.shape, self.stride, self.offset)


class SavedWrapper:
    """A tensor of a subclass that wraps such views, as a DTensor does. counted: as above."""

    __slots__ = ("context", "counted", "kind", "others", "parts", "shape", "stride")

    def __init__(self, tensor: Any, pack: Callable[[Tensor], Any], counted: object) -> None:
        """pack: gives an object with a method `restore` for a tensor that it wraps."""
        names, self.context = tensor.__tensor_flatten__()
        inside = {name: getattr(tensor, name) for name in names}
        self.parts = {name: pack(part) for name, part in inside.items() if isinstance(part, Tensor)}
        self.others = {name: part for name, part in inside.items() if not isinstance(part, Tensor)}  # a mesh
        self.kind, self.shape, self.stride, self.counted = type(tensor), tensor.shape, tensor.stride(), counted

    def restore(self) -> Tensor:
        inside = self.others | {name: part.restore() for name, part in self.parts.items()}
        return self.kind.__tensor_unflatten__(inside, self.context, self.shape, self.stride)


class SavedParameters:
    """The hooks of one model's units. Each thread pushes and pops its own, as torch's default hooks are each thread's own."""

    def __init__(self, units: list[Unit]) -> None:
        self._groups: dict[int, ParamGroup] = {}  # by identity of their memory
        for unit in units:
            self.follow(unit)

    def follow(self, unit: Unit) -> None:
        """The unit's memory is known from now on, in place of what it had before."""
        self._groups = {memory: group for memory, group in self._groups.items() if group.unit is not unit}
        if unit.memories:
            memories = ((memory_of(group.values.full), group) for group in unit.gathered)
            self._groups |= {memory: group for memory, group in memories if memory is not None}

    def push(self, unit: Unit) -> None:
        """A forward of the unit begins: what it saves of gathered parameters are handles."""
        hooks = saved_tensors_hooks(_Hooks(self).pack, restore)
        try:
            hooks.__enter__()
        except RuntimeError as error:
            if not torch.is_grad_enabled():
                return
            raise ShardedAccessError(
                f"{unit.name}: saved-tensor hooks are disabled here ({error}), without which backward would read released parameters. "
                "Gather them around it: `with zs.gathered(model):`."
            ) from error
        unit.inside.hooks = hooks

    def pop(self, unit: Unit) -> None:
        """It is over. On the thread of `push`."""
        if unit.forward is not None and unit.forward.hooks is not None:
            unit.forward.hooks.__exit__()

    def group_of(self, tensor: Tensor) -> ParamGroup | None:
        """Whose gathered memory a tensor has."""
        try:
            return self._groups.get(torch_compat.storage_id(tensor.untyped_storage()))
        except RuntimeError:  # of a layout, or a transform of torch.func, without memory of its own
            return None


class _Hooks:
    """Those of one forward of a unit. outer: the hooks around it."""

    def __init__(self, saved: SavedParameters) -> None:
        self.saved, self.outer = saved, Outer()
        around = getattr(self.outer.hooks[0], "__self__", None) if self.outer.hooks is not None else None
        if isinstance(around, _Hooks) and around.saved is saved:  # of a unit around this one: they know the same parameters
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
        """What is kept of a tensor inside of a wrapper."""
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
