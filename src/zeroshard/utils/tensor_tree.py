"""Find, replace and cast tensors nested in containers and objects.

Inputs and outputs of modules may be nested in containers and objects. `find_tensors` finds tensors in items, attributes and
slots; `map_tensors` replaces them in copies of tuples, lists, mappings and dataclasses.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import operator
import types
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from .dtypes import follows_precision
from .torch_compat import tree_map_only

_TENSORLESS = (
    type(None), str, bytes, bytearray, int, float, complex, range, type, enum.Enum, types.ModuleType, torch.nn.Module,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator,
)  # fmt: skip
_T = TypeVar("_T")
_PLAIN = (tuple, list, dict)
_MOST_OBJECTS = 10_000  # most objects to search: a logger or a trainer in an output may refer to everything in the process


def find_tensors(value: object) -> list[Tensor]:
    """Return every tensor in nested containers and objects, each once. Closures and iterators cannot be searched."""
    if isinstance(value, Tensor):
        return [value]
    tensors: list[Tensor] = []
    seen: dict[int, object] = {}  # keeps the objects alive, so that no id is used again
    stack = [value]
    while stack and len(seen) <= _MOST_OBJECTS:
        item = stack.pop()
        if item is None or id(item) in seen:
            continue
        if isinstance(item, Tensor):
            seen[id(item)] = item
            tensors.append(item)
            continue
        plain: Any = item if type(item) in _PLAIN else None
        if plain is None and isinstance(item, _TENSORLESS):
            continue
        seen[id(item)] = item
        stack.extend(reversed(_inside(item) if plain is None else list(plain.values()) if type(plain) is dict else plain))
    return tensors


def _inside(item: object) -> list[object]:
    """Return the objects that an object refers to by items, attributes and slots."""
    inside: list[object] = []
    if isinstance(item, Mapping):
        inside = list(item.values())
    elif isinstance(item, (list, tuple, set, frozenset, deque)):
        inside = list(item)
    inside += getattr(item, "__dict__", {}).values()
    for cls in type(item).__mro__:
        if "__slots__" in vars(cls):
            slots = [member for member in vars(cls).values() if isinstance(member, types.MemberDescriptorType)]
            for slot in slots:
                with contextlib.suppress(AttributeError):  # a slot that is not set
                    inside.append(slot.__get__(item))
    return inside


def map_tensors(fn: Callable[[Tensor], Tensor], value: _T) -> _T:
    """Return `value` with fn applied, once each, to the tensors in nested tuples, lists, mappings and dataclasses.

    Containers of changed tensors are copied, without running `__init__`; the caller's own objects do not change.
    """
    if isinstance(value, Tensor):
        return fn(value)  # type: ignore[return-value]
    if torch.compiler.is_compiling():  # inside a compiled block: a tracer cannot follow the search through objects
        return tree_map_only(Tensor, fn, value)
    return Exchanged(fn, value).value


class Exchanged:
    """Arguments of a call with some tensors replaced. The callee gets copies of the containers that hold replaced tensors.

    value: the arguments for the callee. After the call, `hand_back` applies the callee's changes of these copies to the caller's
    lists, mappings and dataclasses: a module may append its loss to a list that it is given.
    """

    def __init__(self, fn: Callable[[Tensor], Tensor], value: object) -> None:
        """fn: returns the replacement of a tensor; called once for each."""
        self._fn = fn
        self._results: dict[int, object] = {}  # id of the caller's object -> the callee's object for it
        self._exchanged: list[tuple[Any, Any]] = []  # (caller's object, callee's copy)
        self.value: Any = self._mapped(value)
        self._before: list[Any] = [_content(new) for _, new in self._exchanged]

    def _mapped(self, item: object) -> object:
        if isinstance(item, _TENSORLESS):
            return item
        if id(item) not in self._results:
            self._results[id(item)] = item  # the result inside a reference cycle
            new = self._fn(item) if isinstance(item, Tensor) else self._rebuilt(item)
            self._results[id(item)] = new
            if new is not item:
                self._exchanged.append((item, new))
        return self._results[id(item)]

    def _rebuilt(self, item: object) -> object:
        """Return `item`, or a copy with the changed members."""
        if isinstance(item, (list, tuple)):
            items = [self._mapped(old) for old in item]
            if all(map(operator.is_, items, item)):
                return item
            if isinstance(item, tuple):  # also a named one
                return type(item)._make(items) if hasattr(item, "_make") else type(item)(items)
            result = copy.copy(item)
            result[:] = items
            return result
        old = _content(item)
        if not isinstance(old, dict):
            return item
        mapped = {key: self._mapped(value) for key, value in old.items()}
        changes = {key: new for key, new in mapped.items() if new is not old[key]}
        if not changes:
            return item
        changed = copy.copy(item)
        _change(changed, changes)
        return changed

    def hand_back(self) -> None:
        """Apply the callee's changes of copied containers to the caller's, with the caller's own tensors, after the call."""
        given = {id(new): old for old, new in self._exchanged}
        for (old, new), before in zip(self._exchanged, self._before, strict=True):
            now: Any = _content(new)
            if isinstance(now, list) and not (len(now) == len(before) and all(map(operator.is_, now, before))):
                old[:] = [given.get(id(item), item) for item in now]
            elif isinstance(now, dict):
                for key in before.keys() - now.keys():
                    del old[key]
                _change(old, {k: given.get(id(v), v) for k, v in now.items() if k not in before or before[k] is not v})


def _content(item: object) -> list | dict | None:
    """Return the current members of a list, a mapping or a dataclass; None for other objects."""
    if isinstance(item, list):
        return list(item)
    if isinstance(item, MutableMapping):  # such as transformers' outputs, whose attributes follow their items
        return dict(item.items())
    if dataclasses.is_dataclass(item):
        return {f.name: getattr(item, f.name) for f in dataclasses.fields(item) if hasattr(item, f.name)}
    return None


def _change(item: object, changes: dict) -> None:
    """Set items of a mapping, or fields of a dataclass (even a frozen one)."""
    for key, new in changes.items():
        if isinstance(item, MutableMapping):
            item[key] = new
        else:
            object.__setattr__(item, key, new)


def caster(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return a function that casts floating-point tensors (not fp64, fp8, fp4) to `dtype`, and returns others as they are."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if follows_precision(tensor.dtype) else tensor

    return cast


def cast_floating(value: _T, dtype: torch.dtype) -> _T:
    """Return `value` with its floating-point tensors (not fp64, fp8, fp4) cast to `dtype`."""
    return map_tensors(caster(dtype), value)
