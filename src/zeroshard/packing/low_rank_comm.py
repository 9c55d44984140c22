"""Reductions that send matrices as products of two thin ones: PowerSGD (arXiv 1905.13727), over any Comm.

    whole -> P --reduce, gather--> mean P -> Q --reduce, gather--> mean Q -> P Q^T, my shard of it

Two small all-reduces replace one reduction: their result is the same on all ranks, and each rank keeps its shard of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..engine.comm.base import Collective, Comm, Hop, Region, Reserved, Wrapper
from ..engine.comm.pool import StagingPool
from ..engine.flat_layout import round_up
from ..engine.ledger import RESIDUALS, Ledger, making
from .codecs import LowRank
from .hierarchical import all_reduce, buffers

_ALIGN = 32  # elements: shards of the factors begin at multiples of it, as in engine/flat_layout.py


class LowRankReductions(Wrapper):
    """Comm whose reductions send matrices in rank `rank`. Call `expect` before the first reduction of a tag."""

    def __init__(self, comm: Comm, rank: int, ledger: Ledger, active: Callable[[], bool]) -> None:
        super().__init__(comm)
        self.rank_of_factors, self.ledger, self.active = rank, ledger, active
        self.drains_all = False
        self._factors: dict[int, LowRank] = {}
        self._numel = 0
        self._pools: list[StagingPool] = []  # for the first (P) and for the second factors (Q)

    def expect(self, tag: int, slots: Sequence[tuple[int, Sequence[int]]], numel: int) -> None:
        """Make the LowRank of a tag. slots: (offset, shape) of each parameter; numel: elements of the whole tensor."""
        with making():
            factors = LowRank(slots, numel, rank=self.rank_of_factors, seed=tag, device=self.device)
        self._factors[tag] = factors
        self.ledger.enter(RESIDUALS, 4 * factors.state_numel)
        self._numel = max(self._numel, *map(self._padded, factors.sent_numels))

    def _padded(self, numel: int) -> int:
        return round_up(max(numel, 1), _ALIGN * self.world_size)

    def needed(self, values: Sequence[Reserved], slices: Sequence[Reserved]) -> int:
        """Return the bytes of the errors, which are as large as the reduced tensors; the factors are small beside them."""
        return 4 * self.world_size * sum(numel for numel, _ in slices) + self.comm.needed(values, slices)

    def open(self) -> None:
        self.comm.reserve(0, self._numel // self.world_size, torch.float32)
        self.comm.reserve_slices(self._numel // self.world_size, torch.float32)
        super().open()
        if not self._pools:
            usual, most = buffers(len(self._factors))
            nbytes = 4 * self._numel
            self._pools = [StagingPool(self.comm, self.ledger, nbytes, usual, most, passing=each) for each in (True, False)]

    def forget(self) -> None:
        for factors in self._factors.values():
            factors.forget()

    def release(self) -> None:
        for pool in self._pools:
            pool.close()
        self.ledger.strike(RESIDUALS, sum(4 * factors.state_numel for factors in self._factors.values()))
        self._factors = {}
        super().release()

    def hops(self, kind: str, numel: int, dtype: torch.dtype, tag: int = 0) -> list[Hop]:
        if kind != "reduce" or not self.active():
            return self.comm.hops(kind, numel, dtype, tag)
        if tag in self._factors:
            sent_numels = self._factors[tag].sent_numels
        else:  # formulas of the planner know no shapes: one square matrix
            sent_numels = (self.rank_of_factors * math.isqrt(numel * self.world_size),) * 2
        parts = [self._padded(sent) // self.world_size for sent in sent_numels]
        return [hop for part in parts for kind in ("reduce", "gather") for hop in self.comm.hops(kind, part, torch.float32)]

    def reduce(self, source: Region, out: Tensor, *, scale: float, accumulate: bool, tag: int, label: str) -> Collective:
        if not self.active():
            return self.comm.reduce(source, out, scale=scale, accumulate=accumulate, tag=tag, label=label)
        assert len(self._pools) == 2
        factors, flat = self._factors[tag], source.tensor
        slot, region = self._pools[0].take(self._padded(factors.sent_numels[0]), torch.float32)  # given back in `keep`

        def middle(mean: Tensor) -> Collective:
            other, thin = self._pools[1].take(self._padded(factors.sent_numels[1]), torch.float32)
            return self._all_reduce(factors.second(flat, mean), thin, tag, label, lambda mean, work: keep(mean, other, work))

        def keep(mean: Tensor, other: int, work: Collective) -> Collective:
            factors.finish(flat, mean)
            mine = flat.view(self.world_size, -1)[self.rank] * (scale * self.world_size * self.replicas)
            out.add_(mine) if accumulate else out.copy_(mine)
            self._pools[1].give(other, work)
            self._pools[0].give(slot, None)  # all ranks have read it: else the second all-reduce would not be over
            return Collective()

        first = self._all_reduce(factors.first(flat), region, tag, label, lambda mean, _: middle(mean))
        first.sent = self.volume("reduce", out.numel(), flat.dtype, tag)
        return first

    def _all_reduce(
        self, values: Tensor, region: Region, tag: int, label: str, then: Callable[[Tensor, Collective], Collective]
    ) -> Collective:
        """Start an all-reduce; at its end call then(mean, work): mean of `values` (n,) in `region`, and the gather's Collective."""
        numel = values.numel()
        region.tensor[:numel].copy_(values)
        region.tensor[numel:].zero_()
        scale = 1.0 / (self.world_size * self.replicas)
        return all_reduce(self.comm, region, lambda work: then(region.tensor[:numel], work), scale=scale, tag=tag, label=label)
