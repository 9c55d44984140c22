"""Causal attention of the last queries of a sequence, without a mask: `F.scaled_dot_product_attention(q, k, v, LAST_QUERIES)`.

    keys before the queries   k0 k1 k2 k3 |             all queries attend to all of them
    keys of the queries                   | k4 k5 k6    the ordinary causal square

On a CPU the two parts are computed one after the other and merged by their log-sum-exps, as blocks of keys are in
FlashAttention-2 (arXiv 2307.08691, section 3.1). On a GPU torch's kernels do it (torch.nn.attention.bias.causal_lower_right).
A mask is made where torch has no such kernel: with dropout on a CPU, for example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..utils.torch_compat import cpu_attention, cpu_attention_backward


class LastQueries:
    """Stands for the mask of an attention of q queries over k keys, k >= q, in which the last query sees all keys."""

    @staticmethod
    def __torch_function__(func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> Tensor:
        assert func is F.scaled_dot_product_attention, func
        return _attend(*args, **(kwargs or {}))


LAST_QUERIES: Any = LastQueries()


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: LastQueries, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Return the attention. query (B, H, q, D), key and value (B, K, k, D). H is a multiple of K."""
    q, k, on_cpu = query.shape[2], key.shape[2], query.device.type == "cpu"
    fits = query.dtype == key.dtype == value.dtype != torch.float64 and query.shape[-1] == value.shape[-1]
    if q < k and on_cpu and fits and not dropout_p and not torch.is_autocast_enabled("cpu"):
        return _LastQueries.apply(query, key, value, scale)
    options: dict[str, Any] = {"enable_gqa": True} if key.shape[1] != query.shape[1] else {}  # not all kernels have it
    if q == k:
        return F.scaled_dot_product_attention(query, key, value, None, dropout_p, True, scale=scale, **options)
    if on_cpu:
        mask: Any = query.new_ones(q, k, dtype=torch.bool).tril(k - q)
    else:
        from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler

        mask = causal_lower_right(q, k)
    return F.scaled_dot_product_attention(query, key, value, mask, dropout_p, scale=scale, **options)


class _LastQueries(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        parts = [cpu_attention(query, k, v, 0.0, causal, scale=scale) for k, v, causal in _halves(query, key, value)]
        total = torch.logaddexp(*(lse for _, lse in parts))  # (B, H, q)
        out = sum(part * (lse - total).exp().unsqueeze(-1) for part, lse in parts).to(query.dtype)
        ctx.save_for_backward(query, key, value, out, total)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        query, key, value, out, total = ctx.saved_tensors
        parts = [
            cpu_attention_backward(grad, query, k, v, out, total, 0.0, causal, scale=ctx.scale)
            for k, v, causal in _halves(query, key, value)
        ]
        of_query, of_key, of_value = zip(*parts, strict=True)
        return sum(of_query), torch.cat(of_key, dim=2), torch.cat(of_value, dim=2), None


def _halves(query: Tensor, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor, bool]]:
    """Return keys and values before the queries, and those of the queries' own tokens, which are causal."""
    begin = key.shape[2] - query.shape[2]
    return [(key[:, :, :begin], value[:, :, :begin], False), (key[:, :, begin:], value[:, :, begin:], True)]
