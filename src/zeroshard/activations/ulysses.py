"""Sequence parallelism as in DeepSpeed-Ulysses: each rank along sp has part of the tokens, and in attention part of the heads.

    tokens of rank r, all heads  --all-to-all-->  all tokens, heads of rank r  --attention-->  --all-to-all-->  as before

Everything but attention computes each token by itself. Both all-to-alls are differentiable: the backward of one is the other.
sequence_parallel.py puts them around the attention of a model.

Source: arXiv 2309.14509, sections 3.1 and 3.2.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..errors import ConfigError
from ..utils.axes import SP
from ..zero.along_axis import Line

of_module: weakref.WeakKeyDictionary[nn.Module, SequenceParallel] = weakref.WeakKeyDictionary()
_local = threading.local()  # .inside: attention over whole sequences runs


def sequence_of(module: nn.Module) -> SequenceParallel | None:
    """Return the SequenceParallel of a module of a model that was sharded over an axis sp, or None."""
    return of_module.get(module)


def active_in(module: nn.Module) -> SequenceParallel | None:
    """Return the SequenceParallel by which a module's attention is exchanged now, or None."""
    sequence = of_module.get(module)
    return None if sequence is None or (sequence.only_in_training and not module.training) else sequence


class SequenceParallel:
    """The ranks along sp of this rank's place, which have the tokens of the same sequences, and a model's exchanges among them.

    calls: attentions so far. agreed: ranks have compared shapes in this forward. only_in_training: a model in evaluation mode attends to this rank's tokens alone. Threads: as the Comm.
    """

    only_in_training = False

    def __init__(self, line: Line) -> None:
        self.line, self.comm = line, line.comm
        self.rank, self.size = line.comm.rank, line.comm.world_size
        self.calls, self.agreed = 0, False

    # -- all-to-all ------------------------------------------------------------------------------------------

    def swap(self, tensors: Sequence[Tensor], scatter: int, gather: int, label: str) -> list[Tensor]:
        """Return tensors whose dimension `scatter` is this rank's part, and whose dimension `gather` is whole (collective).

        tensors: of one dtype and device, with dimension `scatter` whole and this rank's part of `gather`. One all-to-all.
        """
        size, first = self.size, tensors[0]
        sizes = [tensor.numel() // size for tensor in tensors]
        given, out = (torch.empty(size, sum(sizes), dtype=first.dtype, device=first.device) for _ in range(2))
        parts = [tensor.unflatten(scatter, (size, -1)).movedim(scatter, 0) for tensor in tensors]  # (size, ...)
        for part, rows in zip(parts, given.split(sizes, dim=1), strict=True):
            rows.unflatten(1, part.shape[1:]).copy_(part)
        self.line.all_to_all(out, given, label)
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

    @torch.compiler.disable
    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return query (B, H / n, S, D), key and value (B, K' / n, S, D) for this rank's tokens (B, H, S / n, D), (B, K, S / n, D).

        n: number of ranks along sp. K' is the least common multiple of K and n: key and value heads are repeated as often as that
        takes. Raises ConfigError if n does not divide H, or if there are not equally many queries and keys.
        """
        heads, size = query.shape[1], self.size
        if heads % size:
            fits = [each for each in range(1, heads + 1) if heads % each == 0]
            near = max(each for each in fits if each <= size)
            raise ConfigError(
                f"sp: {size} ranks share the {heads} heads of an attention, and {size} does not divide {heads}. Make a mesh with sp={near}, "
                "and give the other ranks to dp or tp."
            )
        if key.shape[2] != query.shape[2]:
            raise ConfigError(
                f"sp: an attention of {query.shape[2]} queries over {key.shape[2]} keys on this rank: over an axis sp, attention is of "
                "sequences to themselves, without cross-attention and without a cache of earlier tokens."
            )
        self.calls += 1
        times = size // math.gcd(key.shape[1], size)
        if times > 1:
            key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
        return list(_Swap.apply(self, 1, 2, f"{SP} all-to-all to heads", query, key, value))

    @torch.compiler.disable
    def to_tokens(self, out: Tensor, heads: int, tokens: int) -> Tensor:
        """Return this rank's tokens of all heads, for its heads of all tokens. heads, tokens: these dimensions of `out`."""
        return _Swap.apply(self, tokens, heads, f"{SP} all-to-all to tokens", out)[0]

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

    def heads_of(self, mask: Tensor, heads: int, tokens: int) -> Tensor:
        """Return this rank's heads of a mask over whole sequences of `tokens`. Raise ConfigError for any other mask."""
        if mask.shape[-1] != tokens or (mask.ndim > 1 and mask.shape[-2] not in (1, tokens)):
            raise ConfigError(
                f"sp: an attention has a mask of shape {tuple(mask.shape)}, and its sequences have {tokens} tokens over all ranks along sp. "
                "Pass the mask of whole sequences, (..., tokens, tokens), or is_causal=True; to models of Transformers a mask of "
                "(batch, tokens), which zs.shard_sequence cuts."
            )
        if mask.ndim < 3 or mask.shape[-3] == 1:
            return mask
        own = heads // self.size
        return mask.narrow(-3, self.rank * own, own)

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
        heads, options["enable_gqa"] = query.shape[1], True
        query, key, value = self.to_heads(query, key, value)
        mask = None if attn_mask is None else self.heads_of(attn_mask, heads, query.shape[2])
        if key.shape[1] == query.shape[1]:
            del options["enable_gqa"]  # not all kernels have it
        with self.inside():
            out = F.scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal, **options)
        return self.to_tokens(out, 1, 2)


class _Swap(torch.autograd.Function):
    """All-to-all of several tensors (`SequenceParallel.swap`); its backward exchanges the gradients the other way."""

    @staticmethod
    def forward(
        ctx: Any, sequence: SequenceParallel, scatter: int, gather: int, label: str, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.sequence, ctx.dims, ctx.label = sequence, (scatter, gather), label
        return tuple(sequence.swap(tensors, scatter, gather, label))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        scatter, gather = ctx.dims
        return None, None, None, None, *ctx.sequence.swap(grads, gather, scatter, f"{ctx.label} in backward")
