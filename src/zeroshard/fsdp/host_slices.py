"""Copies of slices, which torch.distributed.checkpoint saves in the place of sharded tensors.

    dcp.async_save(state)                                           this rank's slices, as they are at the call: `HostSlice.of`
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(...))   this rank's rows, since such a file has one box of a tensor

The process of DCP that saves unpickles them, and so imports this package, which sees to its functions, too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..seam import Box, ShardedTensor
from ..tensor.dcp_chunks import write_items
from ..utils import torch_compat

Tree = Any  # nested dictionaries, lists and tuples, or a leaf of one

if TYPE_CHECKING:  # these imports take a second
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


class HostSlice(torch.Tensor):
    """A copy on the host of what this rank holds of a sharded tensor; nothing is computed with it."""

    local: Tensor
    boxes: list[tuple[Box, int]]  # (box, its first element in `local`)

    @staticmethod
    def __new__(cls, local: Tensor, shape: tuple[int, ...], boxes: list[tuple[Box, int]]) -> HostSlice:
        made = torch_compat.make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made.local, made.boxes = local, boxes
        return made

    @classmethod
    def of(cls, tensor: ShardedTensor) -> HostSlice:
        """Return a copy of this rank's slice of a tensor."""
        boxes, local = tensor.boxes_to_write(), tensor.to_local().detach()
        return cls(torch.empty(local.shape, dtype=local.dtype, device="cpu").copy_(local), tuple(tensor.shape), boxes)

    @classmethod
    def of_rows(cls, tensor: ShardedTensor, rank: int, ranks: int) -> HostSlice:
        """Return a copy of the rows that a rank has of a DTensor with Shard(0), which are one box (collective)."""
        tensor.held_boxes()  # raises for a part of tensor parallelism under zs.shard, which would be taken for the whole
        whole = tensor.full_tensor().detach()
        rows, shape = whole.view(1) if whole.dim() == 0 else whole, tuple(whole.shape)
        begin = min(-(-len(rows) // ranks) * rank, len(rows))
        mine = rows[begin : begin + -(-len(rows) // ranks)]
        box = Box((begin, *(0 for _ in shape[1:])), tuple(mine.shape)) if shape else Box((), ())
        return cls(mine.reshape(-1).clone().cpu(), shape, [(box, 0)] if mine.numel() else [])

    __torch_function__ = torch_compat.disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: object, types: Sequence[type], args: tuple = (), kwargs: dict | None = None) -> NoReturn:  # type: ignore[override]
        raise CheckpointError(f"{func}: expected torch.distributed.checkpoint to save this copy of a slice, and nothing else.")

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"HostSlice(shape={tuple(self.shape)}, {self.local.numel()} elements)"

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        return HostSlice, (self.local, tuple(self.shape), self.boxes)

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        """Return what this rank writes."""
        return write_items(fqn, tuple(self.shape), self.dtype, [box for box, _ in self.boxes])

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the box at an offset. Raise ValueError if the copy has none there."""
        for box, first in self.boxes:
            if index.offset is None or tuple(index.offset) == box.offsets:
                return self.local[first : first + box.numel].view(box.sizes)
        if 0 in self.shape:
            return torch.empty(tuple(self.shape), dtype=self.dtype)
        raise ValueError(f"{index.fqn}: this rank holds no box at {index.offset} of {tuple(self.shape)}")


def copies_of(tree: Tree) -> Tree:
    """Return nested dictionaries and lists with copies of slices in the place of sharded tensors."""
    return mapped(tree, lambda value: HostSlice.of(value) if isinstance(value, ShardedTensor) else value)


def in_one_box(tree: Tree) -> Tree:
    """Return nested dictionaries and lists with copies of rows in the place of sharded tensors (collective).

    Raise CheckpointError for a copy of a slice: other ranks can not be asked for the rest of its rows any more.
    """

    def rows(value: Tree) -> Tree:
        if isinstance(value, HostSlice):  # on all ranks, also where a slice is one box
            raise CheckpointError(
                "dcp.async_save of a model of zeroshard.fsdp to safetensors: a file has one box of a tensor for each rank, and a slice may be "
                "three. Save at once, dcp.save(..., storage_writer=HuggingFaceStorageWriter(...)), or what get_model_state_dict gives "
                "with StateDictOptions(full_state_dict=True)."
            )
        if not isinstance(value, ShardedTensor):
            return value
        return HostSlice.of_rows(value, *value.place)

    return mapped(tree, rows)


def mapped(tree: Tree, function: Callable[[Tree], Tree]) -> Tree:
    """Return nested dictionaries, lists and tuples with a function of each leaf; those in which no leaf changes as they are."""
    if isinstance(tree, dict):  # not by `map_tensors`: in a copy of an optimizer's own dictionary, a change would write the state
        found = {key: mapped(value, function) for key, value in tree.items()}
        return found if any(found[key] is not value for key, value in tree.items()) else tree
    if type(tree) in (list, tuple):
        leaves = [mapped(value, function) for value in tree]
        return type(tree)(leaves) if any(map(operator.is_not, leaves, tree)) else tree
    return function(tree)


def without_copies(tree: Tree) -> Tree:
    """Return a tree of `copies_of` with None in their places, for torch's stagers, which copy all else."""
    return mapped(tree, lambda value: None if isinstance(value, HostSlice) else value)


def with_copies(staged: Tree, copies: Tree) -> Tree:
    """Return a staged tree with the slices of another one in their places."""
    if isinstance(copies, dict):
        found = {key: with_copies(staged[key], value) for key, value in copies.items()}
        return found if any(found[key] is not staged[key] for key in found) else staged
    if type(copies) in (list, tuple):
        leaves = list(map(with_copies, staged, copies))
        return type(copies)(leaves) if any(map(operator.is_not, leaves, staged)) else staged
    return copies if isinstance(copies, HostSlice) else staged
