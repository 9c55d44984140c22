"""Detects parameters that share memory: without sharding they share values, in flat buffers each would have its own.

    b.weight = a.weight                        a tie: one parameter, served
    b.weight = nn.Parameter(a.weight.data)     two parameters over one memory: refused, by both names

Two such parameters have two gradients, and an optimizer steps the memory twice, each time with other states: one flat
buffer can not do that. Views of one tensor that do not overlap share no element and are served.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..engine.parameter import ParamSpec
from ..errors import ShardedAccessError
from ..tensor.home import RangeHome
from ..tensor.sharded_tensor import ShardedTensor
from ..utils import torch_compat


@dataclass(frozen=True)
class Extent:
    """Extent of a tensor's elements: identity of the memory, first byte, and for each dimension count and stride in bytes."""

    memory: Hashable
    start: int
    dims: tuple[tuple[int, int], ...]  # (count, stride in bytes); the last one is (itemsize, 1)

    @property
    def stop(self) -> int:
        """Position after the last byte."""
        return self.start + 1 + sum((count - 1) * stride for count, stride in self.dims)

    @property
    def dense(self) -> bool:
        """True if the elements fill every byte from the first to the last."""
        return math.prod(count for count, _ in self.dims) == self.stop - self.start

    def overlaps(self, other: Extent) -> bool:
        """Return whether any byte belongs to both extents, which must be of the same memory."""
        begin, end = max(self.start, other.start), min(self.stop, other.stop)
        if begin >= end:
            return False
        if self.dense and other.dense:  # both fill the bytes where their ranges meet
            return True
        first = min(self.start, other.start)
        taken = torch.zeros(max(self.stop, other.stop) - first, dtype=torch.bool, device="cpu")
        self._within(taken, first).fill_(True)
        return bool(other._within(taken, first).any())

    def _within(self, memory: Tensor, first: int) -> Tensor:
        return memory.as_strided([count for count, _ in self.dims], [stride for _, stride in self.dims], self.start - first)


def _extent(memory: Hashable, start: int, tensor: Tensor) -> Extent:
    size = tensor.itemsize
    dims = [(count, stride * size) for count, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return Extent(memory, start, (*dims, (size, 1)))


class Origin:
    """Memory from which a parameter was cut under zs.init. Its weak reference keeps the storage's identity from being reused.

    slice: identity of the memory of this rank's slice; the origin is valid while the parameter holds this slice.
    """

    def __init__(self, whole: Tensor) -> None:
        self._storage = StorageWeakRef(whole.untyped_storage())
        self.extent = extent_in_storage(whole)
        self.slice: int | None = None


def extent_in_storage(tensor: Tensor) -> Extent:
    """Return the extent of a whole tensor within its storage, also on the meta device."""
    return _extent(
        ("storage", torch_compat.storage_id(tensor.untyped_storage())), int(tensor.storage_offset()) * tensor.itemsize, tensor
    )


def _extents(tensor: Tensor) -> Iterator[Extent]:
    """Yield all known extents of a parameter or buffer: by storage, by address, by slice, by origin."""
    if tensor.numel() == 0 or tensor.layout is not torch.strided:  # no element to share; or refused elsewhere
        return
    if not isinstance(tensor, ShardedTensor):
        yield extent_in_storage(tensor)
        if tensor.untyped_storage().device.type != "meta":  # fake tensors have no address; several storages may share one memory
            yield _extent(tensor.device, tensor.data_ptr(), tensor)
        return
    home: Any = tensor._home
    held = torch_compat.storage_id(tensor._local.untyped_storage())
    start = home.offset if isinstance(home, RangeHome) else 0
    yield Extent(("slices", held), start, ((tensor.numel(), 1),))
    origin = getattr(home, "origin", None)
    if origin is not None and origin.slice == held:
        yield origin.extent


_Lying = tuple[Extent, str, bool | None]  # extent, name, and whether it is trained (None: a buffer)


def check_sharing(model: nn.Module, specs: list[ParamSpec]) -> None:
    """Raise ShardedAccessError, with both names, if two parameters share memory, or a buffer and a trained parameter do."""
    tensors: list[tuple[str, Tensor, bool | None]] = [(s.name, s.original, s.requires_grad) for s in specs]
    tensors += [(name, buffer, None) for name, buffer in model.named_buffers()]
    found: dict[Hashable, list[_Lying]] = {}
    for name, tensor, trained in tensors:
        for extent in _extents(tensor):
            found.setdefault(extent.memory, []).append((extent, name, trained))
    for lying in found.values():
        before: list[_Lying] = []
        for entry in sorted(lying, key=lambda entry: entry[0].start):
            before = [other for other in before if other[0].stop > entry[0].start]
            for other in before:
                _check_pair(other, entry)
            before.append(entry)


def _check_pair(*pair: _Lying) -> None:
    (one, _, _), (other, _, _) = pair
    params = [name for _, name, trained in pair if trained is not None]
    buffers = [name for _, name, trained in pair if trained is None]
    if len(buffers) == 2 or (buffers and not any(trained for _, _, trained in pair)) or not one.overlaps(other):
        return
    if buffers:
        raise ShardedAccessError(
            f"{params[0]} and the buffer {buffers[0]} share memory, but zs.shard() moves the parameter to other memory: its training "
            "would not reach the buffer. Let the module read the parameter itself, or give the buffer memory of its own (.clone())."
        )
    raise ShardedAccessError(
        f"{' and '.join(params)} are two parameters that share memory, which zs.shard() can not keep: both would be stepped, each with "
        "a gradient and optimizer states of its own. Make them one, before the optimizer is built (module.weight = "
        "other.weight: a tie), or give one memory of its own (nn.Parameter(other.weight.detach().clone()))."
    )
