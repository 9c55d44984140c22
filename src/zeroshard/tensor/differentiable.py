"""`full_tensor()` and `to_local()` for autograd: the gradient of what is computed with them reaches the parameter, as with a DTensor.

    5 * p.full_tensor().pow(2).sum()      every rank computes with the whole: the mean over ranks, as of any gradient
    5 * p.to_local().pow(2).sum()         every rank computes with its slice: together one loss, of which nothing is divided

It arrives at the tensor on which the gradients of forwards arrive, and is added, held back, and reduced with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ShardedAccessError


class _Read(torch.autograd.Function):
    """A value that was read from `source`; `arrive` makes of its gradient that of the source."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, value: Tensor, arrive: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.arrive = arrive
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.arrive(grad), None, None


def _read(tensor: Any, value: Tensor, sliced: bool) -> Tensor:
    """A value that `tensor` was asked for, in its graph. sliced: it is this rank's slice, else the whole."""
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return value
    home = tensor._home
    arrive = home.arrival(sliced) if isinstance(tensor, nn.Parameter) else _lost(home.name)
    return _Read.apply(tensor.__dict__.get("_compute", tensor), value, arrive)


def _lost(name: str) -> Callable[[Tensor], Tensor]:
    def arrive(_: Tensor) -> Tensor:
        raise ShardedAccessError(
            f"{name}: a gradient came to what was computed with slices before full_tensor() or to_local() was called, and would be lost. "
            "Call it on the parameter itself, and compute with the result: `p.full_tensor()[0]`, not `p[0].full_tensor()`."
        )

    return arrive


class ReadableSlices:
    """Mixed into sharded tensors."""

    _home: Any
    shape: torch.Size

    @property
    def _local(self) -> Tensor:
        raise NotImplementedError

    def to_local(self) -> Tensor:
        """This rank's slice, (stop - start,), sharing memory: read it; write through the sharded tensor. Gradients go through it."""
        return _read(self, self._local, sliced=True)

    def full_tensor(self) -> Tensor:
        """The whole tensor, a copy, on every rank (collective). Gradients go through it."""
        if isinstance(self, nn.Parameter) and not self._home.distributed:  # in a forward it is one of its operations
            lent = self._home.lend(torch.clone, (self,), {})
            if lent is not NotImplemented:
                return lent
        return _read(self, self._home.gather_local(self._local).view(self.shape), sliced=False)


class ReadableWhole:
    """Mixed into parameters that are whole on every rank: the same, without an exchange."""

    _home: Any

    def to_local(self) -> Tensor:
        """The slice that this rank would have if they were sharded, sharing memory; slices of all ranks make up the whole."""
        return _read(self, self.detach().reshape(-1)[self._home.start : self._home.stop], sliced=True)  # type: ignore[attr-defined]

    def full_tensor(self) -> Tensor:
        """A copy."""
        return _read(self, self.detach().clone(), sliced=False)  # type: ignore[attr-defined]
