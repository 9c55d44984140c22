"""Cross entropy over a tiled vocabulary: the logits of one tile exist at a time, in forward and in backward.

    tile k      z_k = hidden W_k^T + b_k        (N, rows)   computed in forward and again in backward, never kept
                lse_k, picked_k, total_k        (N,) each   kept from forward to backward, in fp32
    together    lse = logsumexp_k(lse_k)        loss = lse - z[target]
    backward    dz_k = softmax(z_k) d(lse_k) + onehot d(picked_k) + d(total_k), then the two products with it

Each tile is gathered once in forward and once in backward. Statistics, and the sum of the tiles' gradients for `hidden`,
are in fp32 (fp64 for fp64) in any precision; matrix products run in the dtype of the weights, as in nn.Linear.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..axes import Tiled
from ..errors import ConfigError, ZeroshardError
from ..utils import torch_compat

REDUCTIONS = ("mean", "sum", "none")


def tiled_cross_entropy(
    hidden: Tensor,  # (..., dim)
    head: nn.Module,
    targets: Tensor,  # (...), integers
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return F.cross_entropy(head(hidden), targets) with the logits of one tile of the vocabulary at a time in memory.

    Call it inside the model's forward, where the model would call the head. In fp32 the loss and its gradients equal those of
    F.cross_entropy within a few units in the last place of the largest logit (tests/activations/test_tiling.py states the bounds). The
    loss is fp32, of shape (), or (...) for reduction="none".

    Args:
        head: a Linear that zs.tile() has cut. Of a whole one the logits are computed at once.

    Raises:
        ConfigError: an option or a shape is wrong. Targets outside the vocabulary raise as in torch.

    Source: ZeRO-Infinity, arXiv 2104.07857, section 5.1.3, with the log-sum-exp of Milakov and Gimelshein, arXiv 1805.02867.
    """
    _check(hidden, head, targets, reduction, label_smoothing)
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    labels = targets.reshape(-1)  # (N,)
    if not isinstance(head, Tiled) or head.dim != 0:
        logits = head(hidden)
        loss = F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).to(wide), labels,
            ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
        )  # fmt: skip
        return loss.view(targets.shape) if reduction == "none" else loss
    vocabulary, ignored = head.out_features, labels == ignore_index
    torch_compat.assert_async(
        (ignored | ((labels >= 0) & (labels < vocabulary))).all(),
        f"targets: expected classes 0 to {vocabulary - 1} or ignore_index={ignore_index}, got one outside.",
    )
    x = hidden.reshape(-1, hidden.shape[-1]).to(wide)  # (N, dim)
    stats = [tile(x, labels - tile.parts["weight"].start, label_smoothing > 0) for tile in head.tiles]
    lses, picks, totals = zip(*stats, strict=True)
    lse = torch.logsumexp(torch.stack(lses, dim=-1), dim=-1)
    # sums are added in the order of the tiles
    loss = lse - (1.0 - label_smoothing) * sum(picks[1:], picks[0])
    if label_smoothing > 0:
        loss = loss - label_smoothing / vocabulary * sum(totals[1:], totals[0])
    loss = loss.masked_fill(ignored, 0.0)
    if reduction == "none":
        return loss.view(targets.shape)
    return loss.sum() / (~ignored).sum() if reduction == "mean" else loss.sum()


def _check(hidden: Tensor, head: nn.Module, targets: Tensor, reduction: str, label_smoothing: float) -> None:
    if targets.is_floating_point():
        raise ConfigError("targets: expected class numbers, got floating-point values; class probabilities are not supported.")
    if hidden.shape[:-1] != targets.shape:
        raise ConfigError(
            f"targets: expected shape {tuple(hidden.shape[:-1])} (hidden without its last), got {tuple(targets.shape)}."
        )
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduction: expected one of {REDUCTIONS}, got {reduction!r}.")
    if isinstance(label_smoothing, bool) or not isinstance(label_smoothing, Real) or not 0.0 <= label_smoothing <= 1.0:
        raise ConfigError(f"label_smoothing: expected a number from 0 to 1, got {label_smoothing!r}.")
    if isinstance(head, Tiled) and head.stands_for is not nn.Linear:
        raise ConfigError(f"head: expected a Linear, whole or tiled, got a {type(head).__name__}.")
    if isinstance(head, Tiled) and head.dim == 0:
        hooks = [hook for hooks in torch_compat.forward_hooks(head) for hook in hooks.values()]
        if any(not getattr(hook, "__module__", "").startswith("zeroshard.") for hook in hooks):
            raise ZeroshardError(
                "tiled_cross_entropy: the head has forward hooks, which would not be called: there are no logits. Remove "
                "them, or use F.cross_entropy(head(hidden), targets)."
            )


class LogitStatistics(torch.autograd.Function):
    """Compute three numbers a row from one tile's logits (N, rows), which are not kept.

    The log-sum-exp; the target's logit (0 if the target is in another tile); with_total: the sum (else 0).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, with_total: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x: (N, dim) in fp32 or fp64; weight: (rows, dim); labels: (N,), relative to the tile's first row."""
        logits = _logits(x, weight, bias)
        lse = torch.logsumexp(logits, dim=-1)
        index, inside = _place(labels, weight.shape[0])
        picked = logits.gather(1, index).squeeze(1).masked_fill(~inside, 0.0)
        total = logits.sum(dim=-1) if with_total else torch.zeros_like(lse)
        ctx.save_for_backward(x, weight, bias, labels, lse)
        ctx.with_total = with_total
        return lse, picked, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_lse: Tensor, grad_picked: Tensor, grad_total: Tensor) -> tuple:
        """Compute the logits again, and their gradient in the same memory; return the gradients of x, weight and bias."""
        x, weight, bias, labels, lse = ctx.saved_tensors
        grad = _logits(x, weight, bias)
        lse = lse.masked_fill(lse == float("-inf"), 0.0)  # all logits are -inf: exp(-inf - 0) is 0, not nan
        grad.sub_(lse[:, None]).exp_().mul_(grad_lse[:, None])  # softmax of this tile's logits, times d(lse)
        index, inside = _place(labels, weight.shape[0])
        grad.scatter_add_(1, index, grad_picked.masked_fill(~inside, 0.0)[:, None])
        if ctx.with_total:
            grad.add_(grad_total[:, None])
        grad = grad.to(weight.dtype)
        grad_x = (grad @ weight).to(x.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = grad.t() @ x.to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = grad.sum(dim=0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the logits (N, rows), computed in the dtype of the weights and converted to that of x."""
    return F.linear(x.to(weight.dtype), weight, bias).to(x.dtype)


def _place(labels: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return each label's column (N, 1), clamped for labels of other tiles, and whether the label is in this tile (N,)."""
    return labels.clamp(0, rows - 1)[:, None], (labels >= 0) & (labels < rows)
