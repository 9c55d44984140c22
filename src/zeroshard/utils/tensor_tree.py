"""Tensors nested in containers and objects: found, replaced, cast.

What goes in and comes out may be nested in containers and objects. `look_through` finds tensors in all that can be
looked into; `map_tensors` replaces them where that can be done in a copy: tuples, lists, mappings and dataclasses.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import types
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_TENSORLESS = (
    type(None), str, bytes, bytearray, int, float, complex, range, type, enum.Enum, types.ModuleType, torch.nn.Module,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator,
)  # fmt: skip
_PLAIN = (tuple, list, dict)
_OPAQUE = (types.FunctionType, types.MethodType, functools.partial)  # what they have captured is not to be seen
_MOST_OBJECTS = 10_000  # looked into, for one output: a logger or a trainer in it may lead to everything there is


def find_tensors(value: Any) -> list[Tensor]:
    """Every tensor that `look_through` finds."""
    return look_through(value)[0]


def look_through(value: Any) -> tuple[list[Tensor], bool]:
    """(every tensor in nested containers and objects, each once; False where something could not be looked into)."""
    if isinstance(value, Tensor):
        return [value], True
    tensors: list[Tensor] = []
    seen: dict[int, Any] = {}  # holds what it has seen: an id is that of one object while this lives
    stack, complete = [value], True
    while stack:
        item = stack.pop()
        if item is None or id(item) in seen:
            continue
        if isinstance(item, Tensor):
            seen[id(item)] = item
            tensors.append(item)
            continue
        plain = type(item) in _PLAIN
        if not plain and isinstance(item, _TENSORLESS):
            continue
        seen[id(item)] = item
        inside = (list(item.values()) if type(item) is dict else item) if plain else _inside(item)
        if inside is None or len(seen) > _MOST_OBJECTS:
            complete = False
        else:
            stack.extend(reversed(inside))
    return tensors, complete


def _inside(item: Any) -> list[Any] | None:
    """What an object holds: its items, attributes and slots. None: there is no telling (a closure, an iterator)."""
    inside: list[Any] | None = None
    if isinstance(item, Mapping):
        inside = list(item.values())
    elif isinstance(item, (list, tuple, set, frozenset, deque)):
        inside = list(item)
    elif isinstance(item, _OPAQUE):
        return None
    attributes = getattr(item, "__dict__", None)
    if attributes is not None:
        inside = [*(inside or ()), *attributes.values()]
    for cls in type(item).__mro__:
        if "__slots__" in vars(cls):
            slots = [member for member in vars(cls).values() if isinstance(member, types.MemberDescriptorType)]
            inside = [*(inside or ()), *(_slot(item, slot) for slot in slots)]
    return inside


def _slot(item: Any, slot: Any) -> Any:
    try:
        return slot.__get__(item)
    except AttributeError:  # declared, and not set
        return None


def map_tensors(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with fn applied, once each, to the tensors in nested tuples, lists, mappings and dataclasses.

    What holds a changed tensor is copied, without running its `__init__`; the caller's own objects stay as they were.
    """
    if isinstance(value, Tensor):
        return fn(value)
    if torch.compiler.is_compiling():  # a policy inside a compiled block: what a tracer can follow, without objects
        return tree_map_only(Tensor, fn, value)
    return _mapped(fn, value, {})


def _mapped(fn: Callable[[Tensor], Tensor], item: Any, results: dict[int, Any]) -> Any:
    """results: id of each object -> what became of it."""
    if isinstance(item, _TENSORLESS):
        return item
    if id(item) not in results:
        results[id(item)] = item  # where a circle closes
        results[id(item)] = fn(item) if isinstance(item, Tensor) else _rebuilt(fn, item, results)
    return results[id(item)]


def _rebuilt(fn: Callable[[Tensor], Tensor], item: Any, results: dict[int, Any]) -> Any:
    """`item`, or a copy with what was changed in it."""
    if isinstance(item, (list, tuple)):
        items = [_mapped(fn, old, results) for old in item]
        return item if all(new is old for new, old in zip(items, item, strict=True)) else _sequence_of(items, item)
    if isinstance(item, MutableMapping):  # transformers' outputs set their attributes with their items
        old = dict(item.items())
    elif dataclasses.is_dataclass(item):
        old = {f.name: getattr(item, f.name) for f in dataclasses.fields(item) if hasattr(item, f.name)}
    else:
        return item
    mapped = {key: _mapped(fn, value, results) for key, value in old.items()}
    changes = {key: new for key, new in mapped.items() if new is not old[key]}
    if not changes:
        return item
    result = copy.copy(item)
    for key, new in changes.items():
        if isinstance(item, MutableMapping):
            result[key] = new
        else:
            object.__setattr__(result, key, new)  # also of frozen ones
    return result


def _sequence_of(items: list[Any], like: Any) -> Any:
    """A list or tuple of the class of `like`, named ones and subclasses included."""
    if isinstance(like, list):
        result = copy.copy(like)
        result[:] = items
        return result
    return type(like)._make(items) if hasattr(like, "_make") else type(like)(items)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating-point tensors (not fp64) in `dtype`."""

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.dtype not in (dtype, torch.float64):
            return tensor.to(dtype)
        return tensor

    return map_tensors(cast, value)
