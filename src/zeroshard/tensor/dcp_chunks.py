"""Interface of sharded tensors to torch.distributed.checkpoint (DCP), which sees the boxes that this rank holds.

    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=path)
    dcp.load({"model": model.state_dict()}, checkpoint_id=path)          # in place, as with DTensor

DCP asks a tensor for its chunks, then for the tensor of each chunk. `LocalBox` is that tensor: reads see a plain tensor, and a
copy into it writes to the parameter where it rests, and to its master weights. What dcp.async_save writes later, from a thread or
another process, are `HostSlice`s, copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, SupportsIndex

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..utils import torch_compat
from ..utils.torch_compat import OpOverload, tree_map_only
from .chunks import Box, boxes_of
from .home import Sliced

if TYPE_CHECKING:  # these imports take a second
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

aten = torch.ops.aten


class LocalBox(torch.Tensor):
    """A box of this rank's slice, or a part of it: `copy_` writes to the slice at rest, every other operation reads it."""

    _tensor: Sliced
    _first: int  # first element of the box in the slice

    @staticmethod
    def __new__(cls, tensor: Sliced, size: Sequence[int], stride: Sequence[int], first: int) -> LocalBox:
        made = torch_compat.make_wrapper_subclass(cls, size, stride, dtype=tensor.dtype, device=tensor.device)
        made._tensor, made._first = tensor, first
        return made

    __torch_function__ = torch_compat.disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func is aten.detach.default:
            return LocalBox(args[0]._tensor, args[0].shape, args[0].stride(), args[0]._first)
        if func is aten.slice.Tensor:
            return args[0]._sliced(*args[1:])
        if func is aten.copy_.default and isinstance(args[0], LocalBox):
            target, source = args[0], args[1]
            values, stride, first = source._plain() if isinstance(source, LocalBox) else source, target.stride(), target._first
            target._tensor._begin_write()
            local = target._tensor._local
            local.as_strided(target.shape, stride, local.storage_offset() + first).copy_(values)
            stop = first + 1 + sum((s - 1) * t for s, t in zip(target.shape, stride, strict=True))
            target._tensor._end_write(local[first:stop], first)
            return target
        return func(*tree_map_only(LocalBox, LocalBox._plain, args), **(kwargs or {}))  # a read: on a plain copy or view

    def _sliced(self, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> LocalBox:
        assert step == 1, "DCP takes boxes"
        begin, end, _ = slice(start, stop).indices(self.shape[dim])
        size = [max(end - begin, 0) if d == dim else extent for d, extent in enumerate(self.shape)]
        return LocalBox(self._tensor, size, self.stride(), self._first + begin * self.stride(dim))

    def _plain(self) -> Tensor:
        local = self._tensor._local
        return local.as_strided(self.shape, self.stride(), local.storage_offset() + self._first)

    def storage(self) -> torch.TypedStorage:
        """Return the storage of the whole slice; DCP then copies the box out of it."""
        return self._plain().storage()

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple:
        return self._plain().clone().__reduce_ex__(protocol)


def _write_items(fqn: str, shape: tuple[int, ...], dtype: torch.dtype, boxes: list[Box]) -> list[WriteItem]:
    """Return what a rank writes that holds these boxes of a tensor. All ranks write a tensor without elements, of which DCP keeps one."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    size, properties = torch.Size(shape), TensorProperties(dtype=dtype)
    if size.numel() == 0:
        boxes = [Box((0,) * len(size), tuple(size))]
    return [
        WriteItem(
            index=MetadataIndex(fqn, box.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)), properties, size
            ),
        )
        for box in boxes
    ]


class HasChunks(Sliced):
    """Mixin of sharded tensors: the methods that DCP calls (torch/distributed/_checkpointable.py)."""

    def _boxes(self) -> list[tuple[Box, int]]:
        """Return (box, its first element in this rank's slice), in order. Raise CheckpointError for a tensor-parallel shard."""
        if self._home.distributed:
            raise CheckpointError(
                f"{self._home.name}: torch.distributed.checkpoint would take this rank's part of tensor parallelism for the whole. Use "
                "zs.save and zs.load, or give it zs.full_state_dict(model)."
            )
        found, at = [], 0
        for box in boxes_of(tuple(self.shape), self._home.start, self._home.stop):
            found.append((box, at))
            at += box.numel
        return found

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """Return what this rank writes."""
        return _write_items(fqn, tuple(self.shape), self.dtype, [box for box, _ in self._boxes()])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes that this rank holds."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box, _ in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the box at an offset. Raise ValueError if this rank holds none there."""
        offset = None if index.offset is None else tuple(index.offset)
        for box, first in self._boxes():
            if offset in (None, box.offsets):
                return LocalBox(self, box.sizes, torch.empty(box.sizes, device="meta").stride(), first)
        if self.shape.numel() == 0:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        raise ValueError(f"{index.fqn}: this rank holds no box at {offset} of {tuple(self.shape)}")


class HostSlice(torch.Tensor):
    """A copy on the host of what this rank holds of a sharded tensor, for DCP to save when the tensor has other values already.

    It can be pickled, for DCP's process that saves; nothing is computed with it.
    """

    _local: Tensor
    _boxes: list[tuple[Box, int]]  # (box, its first element in _local)

    @staticmethod
    def __new__(cls, local: Tensor, shape: tuple[int, ...], boxes: list[tuple[Box, int]]) -> HostSlice:
        made = torch_compat.make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made._local, made._boxes = local, boxes
        return made

    @classmethod
    def of(cls, tensor: HasChunks) -> HostSlice:
        """Return a copy of this rank's slice of a tensor."""
        local = tensor._local.detach()
        copy = torch.empty(local.shape, dtype=local.dtype, device="cpu").copy_(local)
        return cls(copy, tuple(tensor.shape), tensor._boxes())

    __torch_function__ = torch_compat.disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> NoReturn:
        raise CheckpointError(f"{func}: expected torch.distributed.checkpoint to save this copy of a slice, and nothing else.")

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"HostSlice(shape={tuple(self.shape)}, {self._local.numel()} elements)"

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        return HostSlice, (self._local, tuple(self.shape), self._boxes)

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """Return what this rank writes."""
        return _write_items(fqn, tuple(self.shape), self.dtype, [box for box, _ in self._boxes])

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the box at an offset. Raise ValueError if the copy has none there."""
        for box, first in self._boxes:
            if index.offset is None or tuple(index.offset) == box.offsets:
                return self._local[first : first + box.numel].view(box.sizes)
        if 0 in self.shape:
            return torch.empty(tuple(self.shape), dtype=self.dtype)
        raise ValueError(f"{index.fqn}: this rank holds no box at {index.offset} of {tuple(self.shape)}")
