"""Batches for an axis sp: of sequences that all ranks along sp have read, each rank keeps its part of the tokens.

input_ids         t0 t1 t2 t3 | t4 t5 t6  0        7 tokens over 2 ranks: one token is added and counts nowhere
position_ids       0  1  2  3 |  4  5  6  7
shift_labels      l1 l2 l3 l4 | l5 l6  x  x        labels of the next tokens, shifted before they are cut; x: -100
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..activations import router_loss
from ..activations.ulysses import sequence_of
from ..comm.mesh import NamedRanks, place_along
from ..errors import ConfigError
from ..seam import DirectComm, engine_of, exchange_values
from ..utils.aligned import host_bytes
from ..utils.axes import SP

if TYPE_CHECKING:
    Where = nn.Module | DeviceMesh | Mapping[str, int]

IGNORED = -100  # label of tokens without a target, as in torch's cross-entropy


def shard_sequence(batch: Mapping[str, Any] | Tensor, where: Where, *, shift_labels: bool = True, pad_token_id: int = 0) -> Any:
    """Return this rank's tokens of a batch that all ranks along sp have read (collective if `where` is a model).

        batch = zs.shard_sequence(batch, model)
        loss = model(**batch).loss
        zs.backward(model, loss, weight=batch["num_items_in_batch"])

    Args:
        batch: a mapping with `input_ids` (batch, tokens) or `inputs_embeds` (batch, tokens, width), or a tensor of such a shape.
            Other tensors with as many tokens in their second dimension, or in their last one, are cut as well.
        where: a model sharded over a mesh with an axis sp: its ranks check that they have the same batch. Or the mesh.
        shift_labels: `labels` are for a causal language model. The result has `labels` and `shift_labels`, the labels of the
            next tokens, and `num_items_in_batch`: the number of labels of the whole sequences, divided by the ranks along sp.
            Transformers' loss is then sum / num_items_in_batch, whose mean over the ranks is the mean over all labels. False:
            labels stand for their own tokens, and are only cut.
        pad_token_id: the token that is added where sp does not divide the tokens. Labels of added tokens are -100, and where a
            mask is given, it is 0. A mask is made without shift_labels, and for a model (not a mesh) that adds its router's loss.

    The result has `position_ids`, made if missing: (batch, tokens / sp). Without an axis sp the batch is not cut, but gets
    `position_ids` and shifted labels all the same.

    Raises ConfigError where ranks have different batches, or a mask is not of shape (batch, tokens), and ZeroshardError for a
    model that is not sharded.
    """
    rank, size, comm = _rank_along_sp(where)
    if not isinstance(batch, (Tensor, Mapping)):
        raise ConfigError(f"zs.shard_sequence: expected a mapping with input_ids, or a tensor, got {type(batch).__name__}.")
    entries: dict[str, Any] = {"input_ids": batch} if isinstance(batch, Tensor) else dict(batch)
    if comm is not None:
        check_same(entries, comm)
    mask_added = not shift_labels or (isinstance(where, nn.Module) and router_loss.is_added_by(where))
    found = cut(entries, rank, size, shift_labels=shift_labels, pad_token_id=pad_token_id, mask_added=mask_added)
    return found["input_ids"] if isinstance(batch, Tensor) else found


def cut(
    entries: dict[str, Any], rank: int, size: int, *, shift_labels: bool, pad_token_id: int = 0, mask_added: bool = True
) -> dict[str, Any]:
    """Return the tokens of rank `rank` of `size` of a batch, as `shard_sequence` does (not collective)."""
    given = (entries.get(name) for name in ("input_ids", "inputs_embeds"))
    sequences = next((value for value in given if isinstance(value, Tensor) and value.ndim >= 2), None)  # (batch, tokens, ...)
    if sequences is None:
        raise ConfigError(
            f"zs.shard_sequence: expected input_ids (batch, tokens) or inputs_embeds (batch, tokens, width), got {', '.join(entries) or 'nothing'}."
        )
    tokens = sequences.shape[1]
    mask, labels = entries.get("attention_mask"), entries.get("labels")
    if mask is not None and tuple(mask.shape) != tuple(sequences.shape[:2]):
        raise ConfigError(
            f"zs.shard_sequence: attention_mask: expected shape {tuple(sequences.shape[:2])} (batch, tokens), got {tuple(mask.shape)}. Masks of "
            "each layer are made from it after the cut."
        )
    if entries.get("position_ids") is None:
        entries["position_ids"] = torch.arange(tokens, device=sequences.device).repeat(sequences.shape[0], 1)
    if shift_labels and labels is not None and labels.shape == sequences.shape[:2]:
        labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1)
        entries["labels"] = entries["shift_labels"] = labels
        entries["num_items_in_batch"] = (labels != IGNORED).sum().item() / size  # no tensor, which precision="bf16" would round
    added = -tokens % size
    if added and mask_added and mask is None:  # else a causal model, whose tokens see none that come after them
        entries["attention_mask"] = torch.ones(sequences.shape[:2], dtype=torch.long, device=sequences.device)

    def own(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 2 or tokens not in (value.shape[1], value.shape[-1]):
            return value
        dim = 1 if value.shape[1] == tokens else value.ndim - 1
        if added:  # positions go on, labels are ignored, masks and others are 0
            last = value.narrow(dim, value.shape[dim] - 1, 1)
            fill = {"input_ids": pad_token_id, "labels": IGNORED, "shift_labels": IGNORED}.get(name, 0)
            more = torch.full_like(last, fill).repeat_interleave(added, dim)
            if name == "position_ids":
                more = last + torch.ones_like(more).cumsum(dim, dtype=more.dtype)
            value = torch.cat([value, more], dim=dim)
        return value.chunk(size, dim)[rank].contiguous()

    return {name: own(name, value) for name, value in entries.items()}


def _rank_along_sp(where: Where) -> tuple[int, int, DirectComm | None]:
    """Return this rank's index along sp, the number of ranks along it, and their Comm (None: `where` is a mesh, or has no sp)."""
    if isinstance(where, nn.Module):
        sequence = sequence_of(engine_of(where).model)
        return (sequence.rank, sequence.size, sequence.comm) if sequence is not None else (0, 1, None)
    if not isinstance(where, (Mapping, DeviceMesh)):
        raise ConfigError(f"zs.shard_sequence: expected a sharded model or a mesh, got {type(where).__name__}.")
    mesh = NamedRanks.of(where) if isinstance(where, Mapping) else where
    return *place_along(mesh, lambda name: name == SP), None


def check_same(entries: Mapping[str, Any], comm: DirectComm) -> None:
    """Raise ConfigError, on all ranks along sp, unless they have the same sequences (collective)."""
    if comm.imagined:  # its tensors have no values
        return
    tensors = {name: value for name, value in sorted(entries.items()) if isinstance(value, Tensor)}
    mine = {name: [list(value.shape), zlib.crc32(host_bytes(value))] for name, value in tensors.items()}
    everyone = exchange_values(comm, mine, "zs.shard_sequence")
    names = dict.fromkeys(name for told in everyone for name in told)
    different = next((name for name in names if any(told.get(name) != everyone[0].get(name) for told in everyone)), None)
    if different is None:
        return
    shapes = "; ".join(
        f"rank {rank}: {told.get(different, ['none'])[0]}" for rank, told in zip(comm.ranks, everyone, strict=True)
    )
    raise ConfigError(
        f"sp: ranks along it have different {different} ({shapes}), and each has tokens of the same sequences. Give them the "
        "same batches: zs.ShardedSampler(len(dataset), mesh=mesh), or a loader whose rank is the index along dp."
    )


class SequenceLoader:
    """Loader whose batches are cut along their tokens by `shard_sequence`. Other attributes are the loader's.

    for batch in zs.SequenceLoader(loader, model):
        loss = model(**batch).loss
    """

    def __init__(self, loader: Iterable[Any], where: Where, *, shift_labels: bool = True, pad_token_id: int = 0) -> None:
        _rank_along_sp(where)  # raises for anything but a sharded model or a mesh
        self.loader, self.where = loader, where
        self.options: dict[str, Any] = {"shift_labels": shift_labels, "pad_token_id": pad_token_id}

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield shard_sequence(batch, self.where, **self.options)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # of an object that copy or pickle is making
            raise AttributeError(name)
        return getattr(self.loader, name)
