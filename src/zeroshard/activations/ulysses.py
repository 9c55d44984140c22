"""Sequence parallelism: each rank along sp has part of the tokens. In attention the ranks exchange tokens for heads (Ulysses),
and where there are more ranks than can share the heads, keys and values are gathered.

    tokens of rank r, all heads  --all-to-all-->  all tokens, heads of rank r  --attention-->  --all-to-all-->  as before

n ranks share H heads as g groups of u = gcd(n, H). The ranks of a group exchange their queries, so that each has the queries of
the group's tokens for 1 / u of the heads; it gets the keys and values of these heads from all n ranks:

    n = 4, H = 2, u = 2        head 0       head 1
    queries of ranks 0 and 3   rank 0       rank 3      a group has tokens from the head and from the tail of the sequence, so
    queries of ranks 1 and 2   rank 1       rank 2      that in causal attention all compute equally much (if u is even)

Everything but attention computes each token by itself. The exchanges are differentiable: the backward of an all-to-all is one the
other way, and a key that was sent to several groups gets the sum of their gradients. sequence_parallel.py puts them around the
attention of a model.

Sources: arXiv 2309.14509, sections 3.1 and 3.2 (heads); arXiv 2407.21783, section 3.3.2 (gathered keys, head and tail).
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..axes import Line
from ..errors import ConfigError
from ..utils import torch_compat
from ..utils.axes import SP
from .causal import LAST_QUERIES

# the modules of all models that are sharded over an axis sp; `sequence_of` and `active_in` look them up
of_module: weakref.WeakKeyDictionary[nn.Module, SequenceParallel] = weakref.WeakKeyDictionary()
_local = threading.local()  # .inside: attention over whole sequences runs


def sequence_of(module: nn.Module) -> SequenceParallel | None:
    """Return the SequenceParallel of a module of a model that was sharded over an axis sp, or None."""
    return of_module.get(module)


def active_in(module: nn.Module) -> SequenceParallel | None:
    """Return the SequenceParallel by which a module's attention is exchanged now, or None."""
    sequence = of_module.get(module)
    return None if sequence is None or (sequence.only_in_training and not module.training) else sequence


class Share(NamedTuple):
    """Names what a rank computes of an attention: a part of the heads, for the queries of the tokens of its group's ranks.

    among: how many ranks a group has. number: this rank's number among them, from 0, in the order of their tokens. group: the
    number of the group, of `groups`.
    """

    among: int
    number: int
    group: int
    groups: int

    def row(self, query: Any, length: int) -> Any:
        """Return the index in the sequence of query number `query` (an int or a tensor). length: number of tokens of a rank."""
        part, within = query // length, query % length
        turned = part % 2 * (self.groups - 1 - 2 * self.group)  # the order turns at each part: groups 0 1 2, 2 1 0, 0 1 2, ...
        return (part * self.groups + self.group + turned) * length + within

    @property
    def ranks(self) -> list[int]:
        """The ranks of the group, with which this one exchanges tokens for heads."""
        return [self.row(index, 1) for index in range(self.among)]

    def heads(self, count: int) -> slice:
        """Return this rank's heads of `count`, or its part of what there is for each head."""
        own = count // self.among
        return slice(self.number * own, (self.number + 1) * own)

    def runs(self, length: int) -> list[tuple[int, int]]:
        """Return where the queries begin and end in the sequence, run after run. length: number of tokens of a rank."""
        bounds: list[int] = []
        for begin, end in ((rank * length, (rank + 1) * length) for rank in self.ranks):
            bounds = [*bounds[:-1], end] if bounds and bounds[-1] == begin else [*bounds, begin, end]
        return list(zip(bounds[::2], bounds[1::2], strict=True))

    @torch_compat.disable_dynamo
    def causal(
        self, length: int, attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, tokens: int
    ) -> Tensor:
        """Return the causal attention of this rank's queries: each run of them attends to the keys before its end.

        attend: function of the queries, keys and values of a run. length: number of tokens of a rank. tokens: dimension of the
        queries in what it returns.
        """
        runs = self.runs(length)
        queries = query.split([end - begin for begin, end in runs], dim=2)
        parts = [attend(q, key[:, :, :end], value[:, :, :end]) for q, (_, end) in zip(queries, runs, strict=True)]
        return torch.cat(parts, dim=tokens)


class SequenceParallel:
    """The ranks along sp of this rank's place, which have the tokens of the same sequences, and a model's exchanges among them.

    note: tells `zs.report` how attention is exchanged. tp: ranks along tp, each of which has 1 / tp of a model's heads. calls:
    attentions so far. agreed: ranks have compared shapes in this forward. only_in_training: a model in evaluation mode attends to
    this rank's tokens alone. Threads: as the Comm.
    """

    only_in_training = False

    def __init__(self, line: Line, note: Callable[[str], None], tp: int = 1) -> None:
        self.line, self.comm, self.note, self.tp = line, line.comm, note, tp
        self.rank, self.size = line.comm.rank, line.comm.world_size
        self.calls, self.agreed = 0, False

    def share(self, heads: int) -> Share:
        """Return what this rank computes of an attention of `heads` query heads."""
        among = math.gcd(heads, self.size)
        groups = self.size // among
        number, turn = divmod(self.rank, groups)
        return Share(among, number, groups - 1 - turn if number % 2 else turn, groups)

    # -- all-to-all ------------------------------------------------------------------------------------------

    def swap(
        self, tensors: Sequence[Tensor], scatter: int, gather: int, label: str, ranks: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Return tensors whose dimension `scatter` is this rank's part, and whose dimension `gather` is whole (collective).

        tensors: of one dtype and device, with dimension `scatter` whole and this rank's part of `gather`. One all-to-all.
        ranks: this one and those with which it exchanges, ascending; None: all along sp.
        """
        size, first = self.size if ranks is None else len(ranks), tensors[0]
        sizes = [tensor.numel() // size for tensor in tensors]
        given, out = (torch.empty(size, sum(sizes), dtype=first.dtype, device=first.device) for _ in range(2))
        parts = [tensor.unflatten(scatter, (size, -1)).movedim(scatter, 0) for tensor in tensors]  # (size, ...)
        for part, rows in zip(parts, given.split(sizes, dim=1), strict=True):
            rows.unflatten(1, part.shape[1:]).copy_(part)
        counts = None if ranks is None else [given.shape[1] if rank in ranks else 0 for rank in range(self.size)]
        self.line.all_to_all(out, given, label, counts, counts)
        received = zip(parts, out.split(sizes, dim=1), strict=True)
        return [rows.unflatten(1, part.shape[1:]).movedim(0, gather).flatten(gather, gather + 1) for part, rows in received]

    def whole(self, tensor: Tensor, label: str) -> Tensor:
        """Return (..., S) for this rank's part (..., S / size) of the last dimension (collective; not differentiable)."""
        with torch.no_grad():
            repeated = tensor.unsqueeze(0).expand(self.size, *tensor.shape)
            return self.swap([repeated], 0, repeated.ndim - 1, label).pop().squeeze(0)

    def agree(self, shape: Sequence[int], what: str) -> None:
        """Raise ConfigError, on all ranks, unless each has tensors of this shape (collective; once for each forward)."""
        told = self.comm.exchange(str(tuple(shape)).encode(), f"{SP}: shapes")
        if len(set(told)) > 1:
            shapes = ", ".join(f"rank {rank}: {text.decode()}" for rank, text in zip(self.comm.ranks, told, strict=True))
            raise ConfigError(
                f"sp: ranks along sp have {what} of different shapes ({shapes}), and attention takes equally many tokens from each. Cut the "
                "batch along its tokens by zs.shard_sequence(batch, model), which adds the missing ones."
            )

    # -- attention -------------------------------------------------------------------------------------------

    @torch_compat.disable_dynamo
    def to_heads(self, share: Share, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return query (B, H / u, S / g, D), key and value (B, K' / u, S, D), for those of S / n tokens and all heads.

        n = u g: number of ranks along sp, in g groups of u. K' is the least common multiple of K and u: key and value heads are
        repeated as often as that takes. Raises ConfigError if there are not equally many queries and keys.
        """
        if key.shape[2] != query.shape[2]:
            raise ConfigError(
                f"sp: an attention of {query.shape[2]} queries over {key.shape[2]} keys on this rank: over an axis sp, attention is of "
                "sequences to themselves, without cross-attention and without a cache of earlier tokens."
            )
        self.calls += 1
        among, groups, label = share.among, share.groups, f"{SP} all-to-all to heads"
        times = among // math.gcd(key.shape[1], among)
        if times > 1:
            key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
        if groups == 1:
            return list(_Swap.apply(self, None, 1, 2, label, query, key, value))
        self.note(f"sequence parallelism: groups of {among} exchange heads, and get keys and values of all {self.size} ranks")
        key, value = (each.unflatten(1, (among, -1)).repeat_interleave(groups, dim=1).flatten(1, 2) for each in (key, value))
        if among > 1:
            (query,) = _Swap.apply(self, share.ranks, 1, 2, label, query)
        return [query, *_Swap.apply(self, None, 1, 2, f"{SP} all-gather keys and values", key, value)]

    @torch_compat.disable_dynamo
    def to_tokens(self, share: Share, out: Tensor, heads: int, tokens: int) -> Tensor:
        """Return all heads of this rank's tokens, for its heads of its group's tokens. heads, tokens: dimensions of `out`."""
        if share.among == 1:
            return out
        ranks = None if share.groups == 1 else share.ranks
        return _Swap.apply(self, ranks, tokens, heads, f"{SP} all-to-all to tokens", out)[0]

    @property
    def is_inside(self) -> bool:
        """True while this thread is in `inside`."""
        return getattr(_local, "inside", False)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Context of the attention over whole sequences, in which scaled_dot_product_attention is torch's own."""
        before, _local.inside = self.is_inside, True
        try:
            yield
        finally:
            _local.inside = before

    def mask_of(self, share: Share, mask: Tensor, heads: int, queries: int, tokens: int) -> Tensor:
        """Return this rank's heads of a mask of `queries` over sequences of `tokens`. Raise ConfigError for any other mask."""
        if mask.shape[-1] != tokens or (mask.ndim > 1 and mask.shape[-2] not in (1, queries)):
            raise ConfigError(
                f"sp: an attention has a mask of shape {tuple(mask.shape)}, and its sequences have {tokens} tokens over all ranks along sp. "
                "Pass the mask of whole sequences, (..., tokens, tokens), or is_causal=True; to models of Transformers a mask of "
                "(batch, tokens), which zs.shard_sequence cuts."
            )
        return mask if mask.ndim < 3 or mask.shape[-3] == 1 else mask[..., share.heads(heads), :, :]

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Return F.scaled_dot_product_attention of whole sequences, for this rank's tokens: (B, H, S / n, D)."""
        if query.ndim != 4:
            raise ConfigError(f"sp: expected queries of shape (batch, heads, tokens, dim), got {tuple(query.shape)}.")
        if not self.agreed:
            self.agree(query.shape, "queries")
            self.agreed = True
        heads, length, options["enable_gqa"] = query.shape[1], query.shape[2], True
        share = self.share(heads)
        query, key, value = self.to_heads(share, query, key, value)
        tokens = key.shape[2]
        mask = None if attn_mask is None else self.mask_of(share, attn_mask, heads, tokens, tokens)
        if share.groups > 1 and mask is not None and mask.ndim > 1 and mask.shape[-2] > 1:
            mask = mask.index_select(-2, share.row(torch.arange(query.shape[2], device=mask.device), length))
        if key.shape[1] == query.shape[1]:
            del options["enable_gqa"]  # not all kernels have it

        def attend(query: Tensor, key: Tensor, value: Tensor, mask: Any = LAST_QUERIES, causal: bool = False) -> Tensor:
            return F.scaled_dot_product_attention(query, key, value, mask, dropout_p, causal, **options)

        with self.inside():
            if is_causal and mask is None and query.shape[2] < tokens:
                out = share.causal(length, attend, query, key, value, 2)
            else:
                out = attend(query, key, value, mask, is_causal)
        return self.to_tokens(share, out, 1, 2)


class _Swap(torch.autograd.Function):
    """All-to-all of several tensors (`SequenceParallel.swap`); its backward exchanges the gradients the other way."""

    @staticmethod
    def forward(
        ctx: Any, sequence: SequenceParallel, ranks: Sequence[int] | None, scatter: int, gather: int, label: str, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.sequence, ctx.ranks, ctx.dims, ctx.label = sequence, ranks, (scatter, gather), label
        return tuple(sequence.swap(tensors, scatter, gather, label, ranks))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        scatter, gather = ctx.dims
        return (None,) * 5 + tuple(ctx.sequence.swap(grads, gather, scatter, f"{ctx.label} in backward", ctx.ranks))
