"""Pools of buffers of constant size (ZeRO-R's CB, arXiv 1910.02054, 5.2.2): regions from which a rank's peers read.

Gradients are reduced from them, and offloaded shards all-gathered. tiers/pool.py has pools of memory that no peer reads.

A gradient buffer is taken when a unit's first gradient comes and given back when its reduction has started; it can be taken
again once no rank reads it any more. Normally `count` buffers are used, in turn, so that the memory in use does not depend on the
speed of ranks and disks. Further buffers are used when ranks use units in different orders and would otherwise wait for ever, as
two ranks with a buffer each: rank 0 has started to reduce A and needs one for B, rank 1 has started B and needs one for A. They
stay in turn with the others, so ranks that use other experts in each step wait in the first steps only.

Where ranks share memory, peers read every region of a StagingPool (see engine/comm/base.py): all `limit` buffers are allocated
at the start (collective), and those never taken are address space alone. Elsewhere a further buffer is allocated when it is
needed.

Threads: one at a time may be in a pool, which is checked (`ThreadsMet`): the rank's own thread or, in a backward on a GPU,
autograd's thread while the rank's own waits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ...utils.one_thread import Turn, one_thread
from ...utils.release import give_back, take_again
from ...utils.work import pause
from ..flat_layout import round_up
from ..ledger import STAGING, Ledger
from .base import Collective, Comm, Region

_PATIENCE_S = 0.05  # a wait for a free buffer that lasts this long is announced to the peers
_LONGEST_S = 5.0  # a wait that lasts this long ends with a further buffer in any case


@dataclass
class _Buffer:
    region: Region  # of uint8
    work: Collective | None = None  # the collective that still reads it
    taken: bool = False
    touched: bool = False  # it has been taken before, so it takes memory
    given: int = 0  # number of the last `give` of this buffer, counted over the pool; 0: none
    nbytes: int = 0  # size for `take_again`, once its memory was given back to the system


class StagingPool:
    """A pool of buffers of `nbytes` each, of which `count` are normally in use; where ranks share memory, at most `limit`."""

    def __init__(
        self, comm: Comm, ledger: Ledger, nbytes: int, count: int, limit: int, category: str = STAGING, *, passing: bool = False
    ) -> None:
        """passing: running collectives give taken buffers back in a later hop, so a wait ends even where all are taken."""
        self.passing, self.turn = passing, Turn(f"the pool of buffers ({category})")
        self.comm, self.ledger, self.count, self.category = comm, ledger, count, category
        self.nbytes = round_up(nbytes, comm.world_size)  # a region has world_size shards, also where it serves as one shard
        present = limit if comm.shares_memory and comm.world_size > 1 else count  # peers must have mapped all of them
        self._buffers = [self._new() for _ in range(present if nbytes else 0)]
        self._views: dict[tuple[int, int, torch.dtype, bool], Region] = {}
        self._given = 0
        self._longest_s = _LONGEST_S  # _PATIENCE_S after a wait in vain, until a buffer has come free

    def _new(self) -> _Buffer:
        return _Buffer(self.comm.allocate(self.nbytes, torch.uint8, whole=True))

    @one_thread
    def take(self, numel: int, dtype: torch.dtype, *, whole: bool = True) -> tuple[int, Region]:
        """Take a free buffer: return its number, for `give`, and a region of `numel` elements over it (whole, or one shard)."""
        assert numel * dtype.itemsize <= self.nbytes
        if self.comm.control.alone or not self.comm.waits_on_host:  # alone, as in plans: a wait here would begin other hops
            free = [n for n, each in enumerate(self._buffers) if not each.taken and (each.touched or n < self.count)]
            # a drained buffer, else the one whose reduction began first, as it will be drained first
            number = min(free, key=lambda n: (not self._drained(n), self._buffers[n].given), default=None)
            if number is not None and (self._drained(number) or not self.comm.waits_on_host):
                # if not drained, `_prepare` orders the streams; the host goes on, as peers may wait for it
                return self._prepare(number, numel, dtype, whole)
        with self.comm.control.pending.waiting():
            number = self._wait_for_free()
        return self._prepare(number, numel, dtype, whole)

    @one_thread
    def try_take(self, numel: int, dtype: torch.dtype, *, whole: bool = True) -> tuple[int, Region] | None:
        """Take a free buffer as `take` does; return None where `take` would have to wait."""
        for number in self._in_turn():
            buffer = self._buffers[number]
            still_read = self.comm.peers_lag and 0 < buffer.given == self._given
            if number < self.count and not buffer.taken and self._drained(number) and not still_read:
                return self._prepare(number, numel, dtype, whole)
        return None

    def _in_turn(self) -> list[int]:
        """Return the numbers of all buffers: first buffers that were never given back, then in the order of giving back."""
        return sorted(range(len(self._buffers)), key=lambda number: self._buffers[number].given)

    def _prepare(self, number: int, numel: int, dtype: torch.dtype, whole: bool) -> tuple[int, Region]:
        buffer = self._buffers[number]
        if buffer.work is not None:
            buffer.work.drain()
            buffer.work = None
        if not buffer.touched:
            buffer.touched = True
            if buffer.nbytes:
                take_again(buffer.region.tensor, buffer.nbytes)
            self.ledger.enter(self.category, self.nbytes)
        buffer.taken = True
        return number, self.view(number, numel, dtype, whole)

    @one_thread
    def give(self, number: int, work: Collective | None) -> None:
        """Give a buffer back; it may be taken again when `work` has drained."""
        self._given += 1
        buffer = self._buffers[number]
        buffer.taken, buffer.work, buffer.given = False, work, self._given

    def _wait_for_free(self) -> int:
        """Return the number of a free buffer. Wait for peers that are slow; if a peer waits, too, use a further buffer."""
        begin, announced = time.monotonic(), False
        try:
            while True:
                waiting = False
                for number in self._in_turn():
                    buffer = self._buffers[number]
                    if buffer.taken or not (buffer.touched or number < self.count):
                        continue
                    if self._drained(number):
                        self._longest_s = _LONGEST_S
                        return number
                    waiting = True
                waited = time.monotonic() - begin
                if waited > self._longest_s:
                    self._longest_s = _PATIENCE_S
                    return self._further()
                # might wait for ever: all are taken, and this rank, which waits, gives none back; or a peer waits, too
                if (not waiting and not self.passing) or (announced and self.comm.control.peers_wait()):
                    return self._further()
                if waited > _PATIENCE_S and not announced:
                    announced = True
                    self.comm.control.announce("a staging buffer")
                self.comm.control.poll()
                pause(begin)
        finally:
            if announced:
                self.comm.control.announce(None)

    def _drained(self, number: int) -> bool:
        work = self._buffers[number].work
        return work is None or work.drained()

    def _further(self) -> int:
        """Return the number of a buffer beyond the usual `count`."""
        for number, buffer in enumerate(self._buffers[self.count :], self.count):
            if not buffer.taken and self._drained(number):
                return number
        if self.comm.shares_memory:
            for number, buffer in enumerate(self._buffers):
                if not buffer.taken:
                    return number  # none is left: `_prepare` waits for it, where a circle of waiting ranks ends in a StallError
        self._buffers.append(self._new())
        return len(self._buffers) - 1

    def view(self, number: int, numel: int, dtype: torch.dtype, whole: bool) -> Region:
        """Return a buffer, taken or not, as a region of `numel` elements."""
        key = (number, numel, dtype, whole)
        if key not in self._views:
            region = self._buffers[number].region
            nbytes = numel * dtype.itemsize
            view = self.comm.private(region.tensor[:nbytes].view(dtype), whole=whole)
            parts = [None if peer is None else peer[:nbytes].view(dtype) for peer in region.wholes]
            if whole:
                view.wholes = parts
                rows = [None if part is None else part.view(self.comm.world_size, -1)[rank] for rank, part in enumerate(parts)]
                view.shards = rows or view.shards
            elif parts:
                view.shards = list(parts)
            view.number = number
            view.siblings = lambda other: self.view(other, numel, dtype, whole)  # each rank chooses its own buffer
            self._views[key] = view
        return self._views[key]

    @one_thread
    def give_back(self) -> None:
        """Give the memory of free buffers back to the system, between steps, when no rank reads them; `take` gets it again."""
        for buffer in self._buffers:
            if buffer.touched and not buffer.taken:
                if buffer.work is not None:
                    buffer.work.drain()
                    buffer.work = None
                buffer.nbytes, buffer.touched = give_back(buffer.region.tensor), False
                self.ledger.strike(self.category, self.nbytes)

    @one_thread
    def close(self) -> None:
        """Drop all buffers."""
        for buffer in self._buffers:
            if buffer.touched:
                self.ledger.strike(self.category, self.nbytes)
        self._buffers.clear()
        self._views.clear()
