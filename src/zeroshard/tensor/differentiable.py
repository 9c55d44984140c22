"""Differentiable `full_tensor()` and `to_local()`: gradients of their results reach the parameter, as with a DTensor.

    5 * p.full_tensor().pow(2).sum()      every rank computes with the whole: gradients are averaged over ranks, as any others
    5 * p.to_local().pow(2).sum()         every rank computes with its slice: the loss is the ranks' sum, and is not averaged

Autograd accumulates these gradients on the compute parameter, together with those of forwards; they are reduced alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ShardedAccessError


class _Read(torch.autograd.Function):
    """Autograd function from `source` to a value read from it; `arrive` converts the value's gradient to one of `source`."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, value: Tensor, arrive: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.arrive = arrive
        return value.view_as(value)  # a new tensor: autograd treats an input that is returned in a way of its own

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.arrive(grad), None, None


def _read(tensor: Any, value: Tensor, sliced: bool) -> Tensor:
    """Return `value`, read from `tensor`, attached to its graph. sliced: `value` is this rank's slice, else the whole."""
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return value
    home = tensor._home
    arrive = home.arrival(sliced) if isinstance(tensor, nn.Parameter) else _lost(home.name)
    return _Read.apply(tensor.__dict__.get("_compute", tensor), value, arrive)  # gradients accumulate on the compute parameter


def _lost(name: str) -> Callable[[Tensor], Tensor]:
    def arrive(_: Tensor) -> Tensor:
        raise ShardedAccessError(
            f"{name}: backward reached what was computed with slices before full_tensor() or to_local() was called; that gradient would be "
            "lost. Call it on the parameter itself, and compute with the result: `p.full_tensor()[0]`, not `p[0].full_tensor()`."
        )

    return arrive


class ReadableSlices:
    """Mixin of sharded tensors: `to_local` and `full_tensor`."""

    _home: Any
    shape: torch.Size

    @property
    def _local(self) -> Tensor:
        raise NotImplementedError

    def to_local(self) -> Tensor:
        """Return this rank's slice (stop - start,), sharing memory: read only; write to the sharded tensor. Differentiable."""
        return _read(self, self._local, sliced=True)

    def full_tensor(self) -> Tensor:
        """Return a copy of the whole tensor on every rank (collective). Differentiable."""
        if isinstance(self, nn.Parameter) and not self._home.distributed:  # in a forward: gather the unit, as its operations do
            lent = self._home.lend(torch.clone, (self,), {})
            if lent is not NotImplemented:  # a forward runs, and its unit is gathered
                return lent
        return _read(self, self._home.gather_local(self._local).view(self.shape), sliced=False)


class ReadableWhole:
    """Mixin of parameters that are whole on every rank: `to_local` and `full_tensor`, without communication."""

    _home: Any

    def to_local(self) -> Tensor:
        """Return the slice that this rank would hold if the parameter were sharded, sharing memory. Differentiable."""
        return _read(self, self.detach().reshape(-1)[self._home.start : self._home.stop], sliced=True)  # type: ignore[attr-defined]

    def full_tensor(self) -> Tensor:
        """Return a copy of the parameter. Differentiable."""
        return _read(self, self.detach().clone(), sliced=False)  # type: ignore[attr-defined]
