"""Differentiable `full_tensor()` and `to_local()`: gradients of their results reach the parameter, as with a DTensor.

    5 * p.full_tensor().pow(2).sum()      every rank computes with the whole: gradients are averaged over ranks, as any others
    5 * p.to_local().pow(2).sum()         every rank computes with its slice: the loss is the ranks' sum, and is not averaged

Two ranks, p cut as [1 2 | 3]: the losses are 70 and 70 in the first line, 25 and 45 in the second; in both p.grad is [10 20 30].
Autograd accumulates these gradients on the compute parameter, together with those of forwards; they are reduced alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from ..errors import ShardedAccessError
from .home import Home, Sliced


class _Context(Protocol):
    arrive: Callable[[Tensor], Tensor]


class _Read(torch.autograd.Function):
    """Autograd function from `source` to a value read from it; `arrive` converts the value's gradient to one of `source`."""

    @staticmethod
    def forward(ctx: _Context, source: Tensor, value: Tensor, arrive: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.arrive = arrive
        return value.view_as(value)  # not `value` itself: autograd treats an input that a function returns in a way of its own

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.arrive(grad), None, None


def read(tensor: Sliced | ReadableWhole, value: Tensor, sliced: bool) -> Tensor:
    """Return `value`, read from `tensor`, attached to its graph. sliced: `value` is this rank's slice, else the whole."""
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return value
    home = tensor._home  # after `value` was read: a released parameter, which has no home, raises the better error there

    def lost(_: Tensor) -> Tensor:
        raise ShardedAccessError(
            f"{home.name}: backward reached what was computed with slices before full_tensor() or to_local() was called; that gradient "
            "would be lost. Call it on the parameter itself, and compute with the result: `p.full_tensor()[0]`, not `p[0].full_tensor()`."
        )

    arrive = home.arrival(sliced) if isinstance(tensor, nn.Parameter) else lost
    return _Read.apply(tensor.__dict__.get("_compute", tensor), value, arrive)  # gradients accumulate on the compute parameter


class ReadableWhole(nn.Parameter):
    """Parameter that is whole on every rank: has `to_local` and `full_tensor`, without communication."""

    _home: Home

    def to_local(self) -> Tensor:
        """Return the slice that this rank would hold if the parameter were sharded, sharing memory. Differentiable."""
        return read(self, self.detach().reshape(-1)[self._home.start : self._home.stop], sliced=True)

    def full_tensor(self) -> Tensor:
        """Return a copy of the parameter. Differentiable."""
        return read(self, self.detach().clone(), sliced=False)
