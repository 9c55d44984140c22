"""Reductions that the backend sums (`sums="backend"`): NCCL's rings, trees and sums in the switch, as FSDP2 and DeepSpeed use them.

    ordered    each slice to its rank --all-to-all--> sum in fp32, in rank order      N - 1 messages, a whole tensor received
    backend    whole --reduce_scatter_tensor--> my slice                              nothing is kept here beside the slice

The sum is computed in the dtype that is sent. Its bits depend on the backend and the number of ranks, and are the same in each run
of these. Which rank sent a value that is not finite is not known. gloo makes a copy of the whole, and an all-reduce of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from ..engine.comm.base import Collective, Comm, DirectComm, Hop, Region, Wrapper
from ..engine.comm.control import Sent
from ..engine.comm.sums import exact_share


class BackendSums(Wrapper):
    """Comm whose reductions are those of a process group. Ranks start them in one order, by which the backend matches them."""

    comm: DirectComm

    def __init__(self, comm: DirectComm) -> None:
        super().__init__(comm)
        self._number = comm.open_sums()
        weakref.finalize(self, comm.drop_sums, self._number).atexit = False  # of a model that nobody has closed

    @property
    def queue(self) -> Comm:  # type: ignore[override]
        return self

    def release(self) -> None:
        self.comm.close_sums(self._number)
        super().release()

    def hops(self, kind: str, numel: int, dtype: torch.dtype, tag: int = 0) -> list[Hop]:
        sent = self.sent(numel * dtype.itemsize * (self.adds if kind == "reduce" else 1))
        return [Hop(sent, self.world_size)]

    def reduce(self, source: Region, out: Tensor, *, scale: float, accumulate: bool, tag: int, label: str) -> Collective:
        """Start a reduction as `Comm.reduce` does. Overwrites this rank's slice of `source` where `out` can not take the sum."""
        share = self._shrink(source.tensor)
        mine = source.tensor.view(self.world_size, -1)[self.rank]
        direct = not accumulate and out.dtype == mine.dtype
        factor = scale / share

        def finish() -> None:
            if accumulate:
                out.add_(mine, alpha=factor)
            elif direct or out.dtype.itemsize > mine.dtype.itemsize:
                (out if direct else out.copy_(mine)).mul_(factor)
            else:  # scaled before it is rounded
                out.copy_(mine.mul_(factor))

        return self.comm.reduce_scatter(out if direct else mine, source.tensor, finish, self._number, label)

    def all_reduce(self, tensor: Tensor, *, scale: float, label: str) -> Collective:
        """Start an all-reduce: `tensor` (n,) becomes `scale` times its sum over ranks."""
        share = self._shrink(tensor)

        def finish() -> None:
            tensor.mul_(scale / share)

        return self.comm.all_reduce(tensor, finish, self._number, label)

    def summed(self, numel: int, dtype: torch.dtype) -> Sequence[Hop]:
        """Return what this rank sends for an all-reduce of `world_size` slices of `numel` elements each."""
        return [Hop(Sent(*(2 * nbytes for nbytes in self.sent(numel * dtype.itemsize))), self.world_size)]

    def _shrink(self, tensor: Tensor) -> float:
        """Scale what is sent, so that sums in fp16 do not overflow, by a power of two; return it. It rounds subnormal values alone."""
        share = exact_share(self.world_size) if tensor.dtype == torch.float16 else 1.0
        if share != 1.0:
            tensor.mul_(share)
        return share
