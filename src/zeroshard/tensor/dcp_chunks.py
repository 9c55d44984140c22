"""Interface of sharded tensors to torch.distributed.checkpoint (DCP), which sees the boxes that this rank holds.

    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=path)
    dcp.load({"model": model.state_dict()}, checkpoint_id=path)          # in place, as with DTensor

DCP asks a tensor for its chunks, then for the tensor of each chunk. `LocalBox` is that tensor: reads see a plain tensor, and a
copy into it writes to the parameter where it rests, and to its master weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..utils import torch_compat
from ..utils.torch_compat import tree_map_only
from .chunks import Box, boxes_of

aten = torch.ops.aten


class Slice(Protocol):
    """The part of a sharded tensor's interface (tensor/sharded_tensor.py) that is used here."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    _home: Any

    @property
    def _local(self) -> Tensor:
        """This rank's slice."""

    def _write_strided(self, values: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> None:
        """Write `values` to elements of this rank's slice, selected as in torch.as_strided."""


class LocalBox(torch.Tensor):
    """A box of this rank's slice, or a part of it: `copy_` writes to the slice at rest, every other operation reads it."""

    _tensor: Slice
    _first: int  # first element of the box in the slice

    @staticmethod
    def __new__(cls, tensor: Slice, size: Sequence[int], stride: Sequence[int], first: int) -> LocalBox:
        made = torch_compat.make_wrapper_subclass(cls, size, stride, dtype=tensor.dtype, device=tensor.device)
        made._tensor, made._first = tensor, first
        return made

    __torch_function__ = torch_compat.disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # type: ignore[override]
        if func is aten.detach.default:
            return args[0]._part(args[0].shape, args[0]._first)
        if func is aten.slice.Tensor:
            return args[0]._sliced(*args[1:])
        if func is aten.copy_.default and isinstance(args[0], LocalBox):
            target, source = args[0], args[1]
            values = source._plain() if isinstance(source, LocalBox) else source
            target._tensor._write_strided(values, target.shape, target.stride(), target._first)
            return target
        return func(*tree_map_only(LocalBox, LocalBox._plain, args), **(kwargs or {}))  # a read: on a plain copy or view

    def _part(self, size: Sequence[int], first: int) -> LocalBox:
        return LocalBox(self._tensor, size, self.stride(), first)

    def _sliced(self, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> LocalBox:
        assert step == 1, "DCP takes boxes"
        begin, end, _ = slice(start, stop).indices(self.shape[dim])
        size = [max(end - begin, 0) if d == dim else extent for d, extent in enumerate(self.shape)]
        return self._part(size, self._first + begin * self.stride(dim))

    def _plain(self) -> Tensor:
        local = self._tensor._local
        return local.as_strided(self.shape, self.stride(), local.storage_offset() + self._first)

    def storage(self) -> Any:
        """Return the storage of the whole slice; DCP then copies the box out of it."""
        return self._plain().storage()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().clone().__reduce_ex__(protocol)


def boxes_in(tensor: Slice) -> list[tuple[Box, int]]:
    """Return (box, its first element in this rank's slice), in order. Raise CheckpointError for a tensor-parallel shard."""
    if tensor._home.distributed:
        raise CheckpointError(
            f"{tensor._home.name}: torch.distributed.checkpoint would take this rank's part of tensor parallelism for the whole. Use zs.save "
            "and zs.load, or give it zs.full_state_dict(model)."
        )
    found, at = [], 0
    for box in boxes_of(tuple(tensor.shape), tensor._home.start, tensor._home.stop):
        found.append((box, at))
        at += box.numel
    return found


def write_items(fqn: str, tensor: Slice) -> list[Any]:
    """Return DCP's WriteItems of this rank. All ranks write a tensor without elements, of which DCP keeps one."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    size, properties = torch.Size(tensor.shape), TensorProperties(dtype=tensor.dtype)
    boxes = [box for box, _ in boxes_in(tensor)] or ([Box((0,) * len(size), tuple(size))] if size.numel() == 0 else [])
    return [
        WriteItem(
            index=MetadataIndex(fqn, box.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)), properties, size),
        )
        for box in boxes
    ]


def chunk_list(tensor: Slice) -> list[Any]:
    """Return DCP's ChunkStorageMetadata of the boxes that this rank holds."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box, _ in boxes_in(tensor)]


def shard_at(tensor: Slice, index: Any) -> Tensor:
    """Return the box at the offset in DCP's MetadataIndex. Raise ValueError if this rank holds none there."""
    for box, first in boxes_in(tensor):
        if index.offset is None or tuple(index.offset) == box.offsets:
            return LocalBox(tensor, box.sizes, torch.empty(box.sizes, device="meta").stride(), first)
    if tensor.shape.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    raise ValueError(f"{index.fqn}: this rank holds no box at {tuple(index.offset)} of {tuple(tensor.shape)}")
