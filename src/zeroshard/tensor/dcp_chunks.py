"""Interface of sharded tensors to torch.distributed.checkpoint (DCP), which sees the boxes that this rank holds.

    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=path)
    dcp.load({"model": model.state_dict()}, checkpoint_id=path)          # in place, as with DTensor

DCP asks a tensor for its chunks, then for the tensor of each chunk. `LocalBox` is that tensor: reads see a plain tensor, and a
copy into it writes to the parameter where it rests, and to its master weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, SupportsIndex

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


def write_items(fqn: str, shape: tuple[int, ...], dtype: torch.dtype, boxes: list[Box]) -> list[WriteItem]:
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
            tensor_data=TensorWriteData(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)), properties, size),
        )
        for box in boxes
    ]


class HasChunks(Sliced):
    """Mixin of sharded tensors: the methods that DCP calls (torch/distributed/_checkpointable.py)."""

    def held_boxes(self) -> list[tuple[Box, int]]:
        """Return (box, its first element in this rank's slice), in order. Raise CheckpointError for a part of tensor
        parallelism that shows itself as a tensor (zs.shard): DCP would take it for the whole."""
        home = self._home
        if home.hidden_cut is not None and home.hidden_cut.part is not None:
            return [(box, first - home.start) for box, first in home.hidden_cut.part.boxes(home.start, home.stop)]
        if home.distributed:
            raise CheckpointError(
                f"{home.name}: torch.distributed.checkpoint would take this rank's part of tensor parallelism for the whole. Use "
                "zs.save and zs.load, give it zs.full_state_dict(model), or shard the model by zeroshard.fsdp."
            )
        found, at = [], 0
        for box in boxes_of(tuple(self.shape), home.start, home.stop):
            found.append((box, at))
            at += box.numel
        return found

    def boxes_to_write(self) -> list[tuple[Box, int]]:
        """Return `held_boxes`; none where another rank along model axes holds the same values and writes them (`Home.saved_here`)."""
        return self.held_boxes() if self._home.saved_here else []

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """Return what this rank writes."""
        return write_items(fqn, tuple(self.shape), self.dtype, [box for box, _ in self.boxes_to_write()])

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the boxes that this rank holds, of a tensor that DCP is about to load (collective for a parameter: it is to be written)."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        if self._of_parameter:
            self._home.before_load()
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box, _ in self.held_boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the box at an offset. Raise ValueError if this rank holds none there."""
        offset = None if index.offset is None else tuple(index.offset)
        for box, first in self.held_boxes():
            if offset in (None, box.offsets):
                return LocalBox(self, box.sizes, torch.empty(box.sizes, device="meta").stride(), first)
        if self.shape.numel() == 0:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        raise ValueError(f"{index.fqn}: this rank holds no box at {offset} of {tuple(self.shape)}")
