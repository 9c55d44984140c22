"""Sequence parallelism as in DeepSpeed-Ulysses: each rank along sp has part of the tokens, and in attention part of the heads.

    tokens of rank r, all heads  --all-to-all-->  all tokens, heads of rank r  --attention-->  --all-to-all-->  as before

Everything but attention computes each token by itself. Both all-to-alls are differentiable: the backward of one is the other.
`attach` puts them around the attention of Transformers' models, by its registry (transformers_attention.py), and of any other
module that calls torch.nn.functional.scaled_dot_product_attention: a TorchFunctionMode is active while such a module runs, also
where a checkpoint runs it again in backward.

Source: arXiv 2309.14509, sections 3.1 and 3.2.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from ..comm.base import DirectComm
from ..errors import ConfigError
from ..memory.ledger import STAGING, Ledger
from ..zero.runtime import Runtime

TRAFFIC = "all-to-all along sp"

_of_module: weakref.WeakKeyDictionary[nn.Module, SequenceParallel] = weakref.WeakKeyDictionary()
_local = threading.local()  # .inside: attention over whole sequences runs; .depth: forwards in which the mode is active


def sequence_of(module: nn.Module) -> SequenceParallel | None:
    """Return the SequenceParallel of a module of a model that was sharded over an axis sp, or None."""
    return _of_module.get(module)


class SequenceParallel:
    """The ranks along sp of this rank's place, which have the tokens of the same sequences, and a model's exchanges among them.

    calls: attentions so far. Threads: as the Comm.
    """

    def __init__(self, comm: DirectComm, ledger: Ledger) -> None:
        self.comm, self.ledger = comm, ledger
        self.rank, self.size = comm.rank, comm.world_size
        self.calls = 0
        self._held = 0  # bytes in the ledger

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
        work = self.comm.all_to_all(out, given, label)
        work.wait()
        self.ledger.sent(TRAFFIC, work.sent, label)
        if self.comm.mail_nbytes != self._held:
            self.ledger.strike(STAGING, self._held)
            self._held = self.comm.mail_nbytes
            self.ledger.enter(STAGING, self._held)
        received = zip(parts, out.split(sizes, dim=1), strict=True)
        return [rows.unflatten(1, part.shape[1:]).movedim(0, gather).flatten(gather, gather + 1) for part, rows in received]

    def whole(self, tensor: Tensor, label: str) -> Tensor:
        """Return (..., S) for this rank's part (..., S / size) of the last dimension (collective; not differentiable)."""
        with torch.no_grad():
            repeated = tensor.unsqueeze(0).expand(self.size, *tensor.shape)
            return self.swap([repeated], 0, repeated.ndim - 1, label).pop().squeeze(0)

    # -- attention -------------------------------------------------------------------------------------------

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
        return list(_Swap.apply(self, 1, 2, "attention: to heads", query, key, value))

    def to_tokens(self, out: Tensor, heads: int, tokens: int) -> Tensor:
        """Return this rank's tokens of all heads, for its heads of all tokens. heads, tokens: these dimensions of `out`."""
        return _Swap.apply(self, tokens, heads, "attention: to tokens", out)[0]

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Context of the attention over whole sequences, in which scaled_dot_product_attention is torch's own."""
        before, _local.inside = getattr(_local, "inside", False), True
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
        return None, None, None, None, *ctx.sequence.swap(grads, gather, scatter, f"{ctx.label}, backward")


class _Attention(TorchFunctionMode):
    """Mode in which scaled_dot_product_attention is over whole sequences."""

    def __init__(self, sequence: SequenceParallel) -> None:
        super().__init__()
        self.sequence = sequence

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.scaled_dot_product_attention and not getattr(_local, "inside", False):
            return self.sequence.attention(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            raise ConfigError(
                "sp: nn.MultiheadAttention computes its attention without leaving a place for the exchange of heads. Call "
                "F.scaled_dot_product_attention(query, key, value, is_causal=...) in a module of your own."
            )
        return func(*args, **(kwargs or {}))


# -- a model -------------------------------------------------------------------------------------------------------


def check(model: nn.Module, size: int) -> None:
    """Raise ConfigError if a model can not be sharded over `size` ranks along sp."""
    for name, module in model.named_modules():
        if _pretrained(module):
            from . import transformers_attention

            transformers_attention.check(name, module, size)


def attach(runtime: Runtime, comm: DirectComm) -> None:
    """Let the attention of a sharded model be over whole sequences. comm: the ranks along sp of this rank's place."""
    sequence = SequenceParallel(comm, runtime.tiers.ledger)
    covered: set[nn.Module] = set()
    for module in runtime.model.modules():
        _of_module[module] = sequence
        if _pretrained(module):
            from . import transformers_attention

            runtime.handles += transformers_attention.attach(module, sequence)
            covered.update(module.modules())
    for module in runtime.model.modules():
        if module not in covered and not type(module).__module__.startswith("torch.nn.modules"):
            runtime.handles += _with_mode(module, sequence)
    runtime.handles += [_Detached(runtime.model), runtime.model.register_forward_hook(_expect_calls(sequence, bool(covered)))]
    runtime.topology.notes.append(f"sequence parallelism: attention over the tokens of {sequence.size} ranks along sp (Ulysses)")


def _pretrained(module: nn.Module) -> bool:
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def _with_mode(module: nn.Module, sequence: SequenceParallel) -> list[Any]:
    """Return the handles of hooks between which the mode is active; nested modules do not enter it again."""

    @torch.compiler.disable
    def before(*_: object) -> None:
        _local.depth = getattr(_local, "depth", 0) + 1
        if _local.depth == 1:
            _local.mode = _Attention(sequence)
            _local.mode.__enter__()

    @torch.compiler.disable
    def after(*_: object) -> None:
        _local.depth -= 1
        if _local.depth == 0:
            _local.mode.__exit__(None, None, None)

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]


def _expect_calls(sequence: SequenceParallel, pretrained: bool) -> Callable[..., None]:
    """Return a forward hook that looks once, after a model's first forward, whether attention was exchanged in it."""
    forwards = 0

    def after(*_: object) -> None:
        nonlocal forwards
        forwards += 1
        if forwards > 1 or sequence.calls:
            return
        text = (
            "the mesh has an axis sp, and the forward called no F.scaled_dot_product_attention and no attention of Transformers' "
            "registry: each token is computed without those of other ranks"
        )
        if pretrained:
            raise ConfigError(f"sp: {text}. Shard this model over dp and tp.")
        if sequence.comm.ranks[sequence.rank] == 0:
            print(f"zeroshard: {text}", file=sys.stderr)

    return after


class _Detached:
    """Handle whose removal makes the modules of a model ordinary again."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def remove(self) -> None:
        """Forget the modules on close."""
        for module in self.model.modules():
            _of_module.pop(module, None)
