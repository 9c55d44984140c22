"""Casts at the edges of a model, and the dynamic loss scale of fp16.

The ordinary loop calls `loss.backward()` on an unscaled loss, so the scale is applied where the gradient enters the
model: outputs leave in fp32, and the gradient that comes back for them is multiplied there, still in fp32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def find_tensors(value: Any, depth: int = 4) -> list[Tensor]:
    """Every tensor in nested tuples, lists, dicts, dataclasses and plain objects."""
    if isinstance(value, Tensor):
        return [value]
    if value is None or isinstance(value, (str, bytes, int, float, torch.nn.Module)) or depth == 0:
        return []
    if isinstance(value, (list, tuple, set)):
        items: Any = value
    elif isinstance(value, dict):
        items = value.values()
    elif hasattr(value, "__dict__"):
        items = vars(value).values()
    else:
        return []
    return [tensor for item in items for tensor in find_tensors(item, depth - 1)]


def map_tensors(fn: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with fn applied to its tensors: nested tuples, lists, dicts, and dataclasses."""
    if isinstance(value, Tensor):
        return fn(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, dict)):
        changes = {f.name: map_tensors(fn, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **changes)
    if isinstance(value, dict) and type(value) is not dict:
        for key in list(value):  # an OrderedDict with attributes, as transformers' outputs are: keep the object
            value[key] = map_tensors(fn, value[key])
        return value
    if isinstance(value, (list, tuple, dict)):
        return tree_map_only(Tensor, fn, value)
    return value


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating-point tensors (not fp64) in `dtype`."""

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.dtype not in (dtype, torch.float64):
            return tensor.to(dtype)
        return tensor

    return map_tensors(cast, value)


class LossScaler:
    """The loss scale: fixed, or dynamic (halved on overflow, doubled after `window` good steps)."""

    def __init__(self, scale: float, dynamic: bool, window: int) -> None:
        self.scale, self.dynamic, self.window = scale, dynamic, window
        self.good_steps = 0

    def update(self, overflow: bool) -> None:
        """Note one step; every rank must pass the same value."""
        if not self.dynamic:
            return
        if overflow:
            self.scale, self.good_steps = max(self.scale / 2, 2.0**-14), 0
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.scale, self.good_steps = self.scale * 2, 0
