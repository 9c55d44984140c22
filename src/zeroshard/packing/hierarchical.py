"""Collectives in two hops: one between nodes, among the ranks with the same local rank (number in their node), one inside.

    world of R nodes x S local ranks     ranks are numbered by local rank:    rank = local_rank * R + node

    gather   shard --between--> R adjacent shards --inside--> all                    each byte enters a node once
    reduce   whole --inside, sum--> R shards --between, sum--> my shard              each sum leaves a node once

With this numbering the shards of one local rank are adjacent in the flat buffer, so that no hop has to reorder slices, as
ZeRO++'s qgZ does (arXiv 2306.10209, section 4.3).

The result of a gather's first hop may be kept until the shards are written, as a *secondary shard* (hpZ, ibid. section 4.2):
further gathers then communicate inside the node only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..engine.comm.base import Collective, Combine, Comm, Hop, Hops, Region, Reserved, Wrapper
from ..engine.comm.control import Sent
from ..engine.comm.pool import StagingPool
from ..engine.comm.sums import exact_share
from ..engine.ledger import SECONDARY, Ledger
from .backend_sums import BackendSums

_BUFFERS = 2  # number of buffers of each kind: one is filled while the other is read
_MOST_BUFFERS = 64  # most buffers of each kind, where ranks begin collectives in different orders


def buffers(most: int) -> tuple[int, int]:
    """Return the usual and the largest number of buffers for `most` collectives, which ranks may begin in different orders."""
    return _BUFFERS, min(max(most, _BUFFERS), _MOST_BUFFERS)


def all_reduce(
    comm: Comm, region: Region, then: Callable[[Collective], Collective], *, scale: float, tag: int, label: str
) -> Collective:
    """Start an all-reduce: a whole region becomes `scale` times the sum over ranks; then(work) is called with its gather."""
    if isinstance(comm, BackendSums):
        summed = comm.all_reduce(region.tensor, scale=scale, label=label)
        return Hops(comm.control, summed, lambda: then(summed), Sent(), label)
    part = region.tensor.view(comm.world_size, -1)[comm.rank]
    first = comm.reduce(region, part, scale=scale, accumulate=False, tag=tag, label=label)

    def spread() -> Collective:
        work = comm.gather(region.tensor, region, label, tag=tag)
        return Hops(comm.control, work, lambda: then(work), Sent(), label)

    return Hops(comm.control, first, spread, Sent(), label)


class HierarchicalComm(Wrapper):
    """Comm of all ranks of `world`, whose gathers and reductions take two hops."""

    def __init__(
        self, world: Comm, inner: Comm, outer: Comm, parts: Sequence[Sequence[int]], ledger: Ledger, *, keep: bool = False,
        sums: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        """inner: this rank's node; outer: the ranks with its local rank. parts: the ranks of each node, by local rank.

        keep: keep secondary shards. sums: dtype of the sums between the hops of a compressed reduction; an uncompressed one has
        sums in the dtype of its source.
        """
        super().__init__(world, inner, outer)
        self.inner, self.outer, self.ledger, self.keep, self.sums = inner, outer, ledger, keep, sums
        self._order = [node[local_rank] for local_rank in range(inner.world_size) for node in parts]
        self.rank = self._order.index(world.rank)
        self.ranks = [world.ranks[rank] for rank in self._order]
        self.nodes = [rank % outer.world_size for rank in range(self.world_size)]
        self.copies = self.drains_all = False  # peers must take part in both hops, and the second one ends later elsewhere
        self.shares_memory = inner.shares_memory or outer.shares_memory
        node = next(node for node in parts if world.rank in node)
        self._near = [rank for rank in range(self.world_size) if self._order[rank] in node]
        self._alike = [rank for rank in range(self.world_size) if rank // outer.world_size == self.rank // outer.world_size]
        self._secondary: dict[int, StagingPool] = {}  # region number -> memory of its secondary shard
        self._held: set[int] = set()  # regions whose secondary shard has the present values
        self._rows_nbytes = self._num_rows = self._num_sums = 0
        self._rows: StagingPool | None = None
        self._sums: StagingPool | None = None
        self._sums_nbytes = 0

    # -- memory ----------------------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype, *, whole: bool) -> Region:
        if self.comm.shares_memory:
            region = self.comm.allocate(numel, dtype, whole=whole)
            # imagined ranks have no wholes
            wholes = [region.wholes[r] for r in self._order] if whole and region.wholes else []
            return self._region(region, [region.shards[r] for r in self._order], wholes, whole)
        region = self.inner.allocate(numel, dtype, whole=whole)
        mine: dict[int, Tensor | None] = dict(zip(self._near, region.wholes if whole else region.shards, strict=False))
        everyone = [mine.get(rank) for rank in range(self.world_size)]
        return self._region(region, everyone, everyone if whole and region.wholes else [], whole)

    def _region(self, region: Region, shards: list[Tensor | None], wholes: list[Tensor | None], whole: bool) -> Region:
        if whole:
            known = wholes or [region.tensor if rank == self.rank else None for rank in range(self.world_size)]
            shards = [None if each is None else each.view(self.world_size, -1)[rank] for rank, each in enumerate(known)]
        shards[self.rank] = region.tensor.view(self.world_size, -1)[self.rank] if whole else region.tensor
        return Region(region.tensor, shards, wholes)

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Region | None:
        return None

    def _part(self, region: Region, members: list[int]) -> Region:
        """Return a region with the shards and wholes of `members` only."""
        part = Region(region.tensor, [region.shards[rank] for rank in members], number=region.number)
        part.wholes = [region.wholes[rank] for rank in members] if region.wholes else []
        if region.siblings is not None:
            others = region.siblings
            part.siblings = lambda number: self._part(others(number), members)
        return part

    def reserve(self, number: int, numel: int, dtype: torch.dtype) -> None:
        nbytes = numel * dtype.itemsize * self.outer.world_size
        if self.keep and number:
            if number not in self._secondary:
                self._secondary[number] = StagingPool(self.inner, self.ledger, nbytes, 1, 1, SECONDARY)
            return
        self._rows_nbytes, self._num_rows = max(self._rows_nbytes, nbytes), self._num_rows + 1
        if self._rows is not None and self._rows.nbytes < nbytes:
            self._open_rows()

    def reserve_slices(self, numel: int, dtype: torch.dtype) -> None:
        widest = torch.promote_types(self.sums or dtype, dtype)
        self.outer.reserve_slices(numel, widest)
        self.inner.reserve_slices(numel * self.outer.world_size, dtype)
        self._num_sums += 1
        self._sums_nbytes = max(self._sums_nbytes, numel * self.outer.world_size * widest.itemsize)

    def needed(self, values: Sequence[Reserved], slices: Sequence[Reserved]) -> int:
        nodes = self.outer.world_size
        rows = [numel * nodes * dtype.itemsize for numel, dtype in values]
        summed = [(numel, self.sums or dtype) for numel, dtype in slices]
        sums = max((numel * nodes * dtype.itemsize for numel, dtype in summed), default=0)
        held = sum(rows) if self.keep else _BUFFERS * max(rows, default=0)
        hops = self.inner.needed([], [(numel * nodes, dtype) for numel, dtype in slices]) + self.outer.needed([], summed)
        return held + _BUFFERS * sums + hops

    def open(self) -> None:
        super().open()
        self._open_rows()
        if self._sums is None:
            self._sums = StagingPool(self.outer, self.ledger, self._sums_nbytes, *buffers(self._num_sums), passing=True)

    def release(self) -> None:
        for pool in (self._rows, self._sums, *self._secondary.values()):
            pool.close() if pool is not None else None
        super().release()

    def _open_rows(self) -> None:
        self._rows.close() if self._rows is not None else None  # collectives under way keep references to their memory
        self._rows = StagingPool(self.inner, self.ledger, self._rows_nbytes, *buffers(self._num_rows), passing=True)

    def _sums_dtype(self, dtype: torch.dtype) -> torch.dtype:
        packed = self.inner.packs or self.outer.packs
        return torch.promote_types(self.sums, dtype) if packed and self.sums is not None else dtype

    def invalidate(self, number: int) -> None:
        self._held.discard(number)

    def holds(self, number: int) -> bool:
        return number in self._held

    # -- collectives -----------------------------------------------------------------------------------------

    def hops(self, kind: str, numel: int, dtype: torch.dtype, tag: int = 0) -> list[Hop]:
        inside = self.inner.hops(kind, numel * self.outer.world_size, dtype)
        if kind == "reduce":
            return inside + self.outer.hops(kind, numel, self._sums_dtype(dtype))
        return inside if kind == "gather again" and self.keep else self.outer.hops(kind, numel, dtype) + inside

    def gather(self, full: Tensor, source: Region, label: str, tag: int | None = None) -> Collective:
        number = source.number if tag is None else tag
        numel = full.numel() // self.inner.world_size
        if number in self._held:
            rows = self._secondary[number].view(0, numel, full.dtype, whole=False)
            rows = Region(rows.tensor, rows.shards, number=number)  # no siblings: all ranks use this buffer, not one of a pool
            return self.inner.gather(full, rows, f"{label} [secondary shard]")
        pool = self._secondary.get(number, self._rows)
        assert pool is not None
        slot, rows = pool.take(numel, full.dtype, whole=False)
        if number in self._secondary:
            pool.give(slot, None)  # the only buffer: it is refilled when the next gather finds `number` outdated
        first = self.outer.gather(rows.tensor, self._part(source, self._alike), label, tag)

        def inside() -> Collective:
            work = self.inner.gather(full, rows, label, tag=number)
            if number in self._secondary:
                self._held.add(number)
            else:
                pool.give(slot, work)
            return work

        return Hops(self.control, first, inside, self.volume("gather", numel // self.outer.world_size, full.dtype), label)

    def reduce(self, source: Region, out: Tensor, *, scale: float, accumulate: bool, tag: int, label: str) -> Collective:
        numel, dtype = out.numel() * self.outer.world_size, self._sums_dtype(source.tensor.dtype)
        pool = self._sums
        assert pool is not None
        slot, sums = pool.take(numel, dtype)
        share = exact_share(self.inner.world_size)
        first = self.inner.reduce(
            self._part(source, self._near), sums.tensor, scale=share, accumulate=False, tag=tag, label=label
        )

        def between() -> Collective:
            work = self.outer.reduce(sums, out, scale=scale / share, accumulate=accumulate, tag=tag, label=label)
            pool.give(slot, work)
            return work

        sent = self.volume("reduce", out.numel(), source.tensor.dtype)
        return Hops(self.control, first, between, sent, label, self.outer.queue)

    def collect(self, source: Region, combine: Combine, *, tag: int, label: str) -> Collective:
        raise NotImplementedError("collect() is not possible in two hops, of which the first sums: use reduce()")
