"""A mixture of experts where there is no data, so that nobody knows which tokens go to which expert.

    tokens (n, dim) -> sort by expert (n * top_k, dim) -> products, gate, product -> back in order, weighted sum (n, dim)

So Transformers' "grouped_mm" computes, with which it trains by itself; its shapes and its flops do not depend on the routing. But its
kernel takes nothing but bf16 where tensors have no data, and the other implementations look at the routing, or copy an
expert for each token. `grouped_experts` has the shapes and flops of "grouped_mm", in any dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError

NAME = "zeroshard_planner"  # of `grouped_experts`, among Transformers' implementations


def group_experts(model: Any) -> None:
    """Let a model of Transformers compute its experts by `grouped_experts`."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:  # earlier ones have a module for each expert, which looks at the routing
        raise ConfigError("a model with experts is planned with transformers 5 or later: pip install -U transformers") from error
    ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts)
    if not model._can_set_experts_implementation():
        raise ConfigError(
            f"{type(model).__name__}: its experts read to which expert tokens are routed, and a plan has no values."
        )
    model.set_experts_implementation(NAME)


class _GroupedProduct(torch.autograd.Function):
    """Rows (S, in) by each one's expert of weights (experts, in, out): (S, out). Only shapes, bytes and flops are those of a grouped
    product: all rows go to one expert, since no routing changes these."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights)
        return rows @ weights[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        rows, weights = ctx.saved_tensors
        of_weights = torch.zeros_like(weights)
        torch.mm(rows.T, gradient, out=of_weights[0])
        return gradient @ weights[0].T, of_weights


def grouped_experts(experts: Any, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """(tokens, dim), of hidden (tokens, dim) with chosen experts and their scores (tokens, top_k). Its numbers mean nothing."""
    tokens, top_k = chosen.shape
    sorted_experts, order = torch.sort(chosen.reshape(-1))
    rows = hidden[order // top_k]  # (tokens * top_k, dim)
    gated = experts.has_gate

    def linear(rows: Tensor, name: str) -> Tensor:
        weights = getattr(experts, name)
        rows = _GroupedProduct.apply(rows, weights if experts.is_transposed else weights.transpose(-2, -1))
        return rows + getattr(experts, f"{name}_bias")[sorted_experts] if experts.has_bias else rows

    rows = linear(rows, "gate_up_proj" if gated else "up_proj")
    rows = linear(experts._apply_gate(rows) if gated else experts.act_fn(rows), "down_proj")
    rows = rows * scores.reshape(-1)[order][:, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    return rows[back].view(tokens, top_k, -1).sum(1).to(hidden.dtype)
