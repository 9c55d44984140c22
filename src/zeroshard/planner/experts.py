"""The experts of a mixture in a dry run, which has no data and so does not know which tokens go to which expert.

    tokens (n, dim) -> sort by expert (n * top_k, dim) -> products, gate, product -> back in order, weighted sum (n, dim)

This is how Transformers' "grouped_mm", its default in training, computes; its shapes and flops do not depend on the routing. But
on tensors without data its kernel accepts bf16 only, and the other implementations read the routing, or copy an expert for
each token. `grouped_experts` has the shapes and flops of "grouped_mm" in any dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError

NAME = "zeroshard_planner"  # by which Transformers knows `grouped_experts`


def group_experts(model: Any) -> None:
    """Make a model of Transformers compute its experts by `grouped_experts`."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:  # earlier versions have a module for each expert, and read the routing
        raise ConfigError("a model with experts is planned with transformers 5 or later: pip install -U transformers") from error
    ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts)
    if not model._can_set_experts_implementation():
        raise ConfigError(f"{type(model).__name__}: its experts read the routing of tokens, which a plan does not have.")
    model.set_experts_implementation(NAME)


class _GroupedProduct(torch.autograd.Function):
    """A product of rows (S, in) and each one's expert of weights (experts, in, out): (S, out). Its shapes, bytes and flops are
    right, its values are not: all rows go to the first expert, since the routing changes only values."""

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
    """Return the output (tokens, dim) for hidden (tokens, dim), chosen and scores (tokens, top_k). Its values mean nothing."""
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
