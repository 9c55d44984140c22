"""Sharding inside groups of ranks that are replicas of each other: HSDP, and MiCS (arXiv 2205.00119, section 3).

    gather   inside the group
    reduce   whole --inside, sum--> my shard --across, sum of a part--> my part of it --across, gather--> my shard

All groups get the same bits: for each element one rank computes the sum over the groups, and the other groups copy it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..engine.comm.base import Collective, Comm, Hop, Hops, Region, Reserved, Wrapper
from ..engine.comm.pool import StagingPool
from ..engine.comm.sums import exact_share
from ..engine.flat_layout import round_up
from ..engine.ledger import Ledger
from .backend_sums import BackendSums
from .hierarchical import all_reduce, buffers


class ReplicatedComm(Wrapper):
    """Comm of the ranks of one group (`inner`); reductions also sum over `outer`, the ranks of the same index in all groups."""

    def __init__(self, inner: Comm, outer: Comm, ledger: Ledger) -> None:
        super().__init__(inner, inner, outer)
        self.outer, self.ledger = outer, ledger
        self.drains_all = False
        self.replicas, self.replica = outer.world_size, outer.rank
        self._sums_nbytes = self._num_sums = 0
        self._sums: StagingPool | None = None

    def reserve_slices(self, numel: int, dtype: torch.dtype) -> None:
        part = round_up(numel, self.replicas) // self.replicas
        self.comm.reserve_slices(numel, dtype)
        self.outer.reserve_slices(part, dtype)
        self._num_sums += 1
        self._sums_nbytes = max(self._sums_nbytes, part * self.replicas * dtype.itemsize)

    def needed(self, values: Sequence[Reserved], slices: Sequence[Reserved]) -> int:
        parts = [(round_up(numel, self.replicas) // self.replicas, dtype) for numel, dtype in slices]
        sums = max((numel * self.replicas * dtype.itemsize for numel, dtype in parts), default=0)
        return buffers(0)[0] * sums + self.comm.needed(values, slices) + self.outer.needed([], parts)

    def open(self) -> None:
        super().open()
        if self._sums is None:
            self._sums = StagingPool(self.outer, self.ledger, self._sums_nbytes, *buffers(self._num_sums), passing=True)

    def release(self) -> None:
        self._sums.close() if self._sums is not None else None
        super().release()

    def hops(self, kind: str, numel: int, dtype: torch.dtype, tag: int = 0) -> list[Hop]:
        inside = self.comm.hops(kind, numel, dtype)
        if kind != "reduce":
            return inside
        part = round_up(numel, self.replicas) // self.replicas
        if isinstance(self.outer, BackendSums):
            return [*inside, *self.outer.summed(part, dtype)]
        return [*inside, *self.outer.hops("reduce", part, dtype), *self.outer.hops("gather", part, dtype)]

    def reduce(self, source: Region, out: Tensor, *, scale: float, accumulate: bool, tag: int, label: str) -> Collective:
        numel, sent = out.numel(), source.tensor.dtype
        pool = self._sums
        assert pool is not None
        slot, sums = pool.take(round_up(numel, self.replicas), sent)
        share = exact_share(self.world_size)
        first = self.comm.reduce(source, sums.tensor[:numel], scale=share, accumulate=False, tag=tag, label=label)

        def across() -> Collective:
            sums.tensor[numel:].zero_()  # padding to a multiple of the replicas
            return all_reduce(self.outer, sums, fill, scale=scale / share, tag=tag, label=label)  # undoes `share`

        def fill(work: Collective) -> Collective:
            total = sums.tensor[:numel]
            out.add_(total) if accumulate else out.copy_(total)
            pool.give(slot, work)
            return Collective()

        return Hops(self.outer.control, first, across, self.volume("reduce", numel, sent), label, self.outer.queue)
