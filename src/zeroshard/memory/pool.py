"""Pools of constant size (ZeRO-R's CB, arXiv 1910.02054, 5.2.2).

`StagingPool`: regions through which gradients leave, and through which offloaded shards come to be gathered. `BufferPool`:
buffers of one size for shards and gradients between tiers. `Arena`: one stretch of memory through which optimizer states pass.

A gradient buffer is taken when a unit's first gradient appears and given back when its reduction has started; it
can be taken again once no rank reads it any more. Normally `count` buffers circulate, in turn: how many are touched does not
depend on how fast ranks and disks are. More exist as address space
only: they are touched when ranks use units in different orders and would otherwise wait for one another for ever, and
circulate from then on (ranks that use other experts in each step wait in the first ones alone).

Every region is one that peers can read (see comm.base), so allocation is collective and happens once, at the start.

Threads: one at a time may be in a pool, which is checked (`ThreadsMet`). That is the rank's own thread and, in a backward on a
GPU, autograd's, for which the former waits; an Arena belongs to its HostStepper, and is with it in the thread of a delayed step.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm.base import Comm, Region, Work
from ..config import Tier
from ..errors import OffloadIOError
from ..tensor.flat_layout import round_up
from ..utils.one_thread import Turn, one_thread
from .ledger import STAGING, Ledger
from .release import give_back, take_again

_PATIENCE_S = 0.05  # a wait for a free buffer that lasts this long is announced to the peers
_LONGEST_S = 5.0  # after this a further buffer is touched in any case


@dataclass
class _Buffer:
    region: Region  # bytes
    work: Work | None = None  # the reduction that reads it
    taken: bool = False
    touched: bool = False
    given: int = 0  # counts on with each `give`
    nbytes: int = 0  # that it had, where it was given back


class StagingPool:
    """`limit` buffers of `nbytes` each, of which `count` are normally in use."""

    def __init__(
        self, comm: Comm, ledger: Ledger, nbytes: int, count: int, limit: int, category: str = STAGING, *, passing: bool = False
    ) -> None:
        """passing: what takes one is under way, and gives it back by itself: worth waiting for."""
        self.passing, self.turn = passing, Turn(f"the pool of buffers ({category})")
        self.comm, self.ledger, self.count, self.category = comm, ledger, count, category
        self.nbytes = round_up(nbytes, comm.world_size)  # a region has world_size shards, also if it serves as one
        present = limit if comm.shares_memory and comm.world_size > 1 else count  # others must have opened all of them
        self._buffers = [self._new() for _ in range(present if nbytes else 0)]
        self._views: dict[tuple[int, int, torch.dtype, bool], Region] = {}
        self._given = 0
        self._longest_s = _LONGEST_S  # waited once in vain: not again for each buffer, until one comes free

    def _new(self) -> _Buffer:
        return _Buffer(self.comm.allocate(self.nbytes, torch.uint8, whole=True))

    @one_thread
    def take(self, numel: int, dtype: torch.dtype, *, whole: bool = True) -> tuple[int, Region]:
        """A free buffer as a region of `numel` elements (a whole one, or one shard); its number is for `give`."""
        assert numel * dtype.itemsize <= self.nbytes
        return self._prepare(self._find_free(), numel, dtype, whole)

    @one_thread
    def try_take(self, numel: int, dtype: torch.dtype, *, whole: bool = True) -> tuple[int, Region] | None:
        """As `take`, but None where it would have to wait."""
        for number in self._in_turn():
            buffer = self._buffers[number]
            if number < self.count and not buffer.taken and self._drained(number) and not self._just_given(buffer):
                return self._prepare(number, numel, dtype, whole)
        return None

    def _in_turn(self) -> list[int]:
        """All buffers, those first that were never given back, or longest ago."""
        return sorted(range(len(self._buffers)), key=lambda number: self._buffers[number].given)

    def _just_given(self, buffer: _Buffer) -> bool:
        """Imagined peers read each other's shards as well, and are a little late: what was given last, they are still reading."""
        return self.comm.imagined and self.comm.shares_memory and 0 < buffer.given == self._given

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
    def give(self, number: int, work: Work | None) -> None:
        """The buffer may be taken again when `work` has drained."""
        self._given += 1
        buffer = self._buffers[number]
        buffer.taken, buffer.work, buffer.given = False, work, self._given

    def _find_free(self) -> int:
        """A free buffer: wait for a slow peer, but not for one that itself waits."""
        if self.comm.imagined or not self.comm.waits_on_host:
            free = [n for n, each in enumerate(self._buffers) if not each.taken and (each.touched or n < self.count)]
            # the one whose reduction is furthest: that of the last may have just begun, and imagined peers are a little late
            number = min(free, key=lambda n: (not self._drained(n), self._buffers[n].given), default=None)
            if number is not None and (self._drained(number) or not self.comm.waits_on_host):
                return number  # `take` orders the streams; the host, which peers may need, goes on
        with self.comm.pending.waiting():
            return self._wait_for_free()

    def _wait_for_free(self) -> int:
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
                if (not waiting and not self.passing) or (announced and self.comm.peers_wait()):
                    return self._further()
                if waited > _PATIENCE_S and not announced:
                    announced = True
                    self.comm.announce("a staging buffer")
                self.comm.poll()
                time.sleep(2e-5)
        finally:
            if announced:
                self.comm.announce(None)

    def _drained(self, number: int) -> bool:
        work = self._buffers[number].work
        return work is None or work.drained()

    def _further(self) -> int:
        """A buffer beyond the usual number."""
        for number, buffer in enumerate(self._buffers[self.count :], self.count):
            if not buffer.taken and self._drained(number):
                return number
        if self.comm.shares_memory:
            for number, buffer in enumerate(self._buffers):
                if not buffer.taken:
                    return number  # `take` waits; a circle of waiting ranks is detected there
        self._buffers.append(self._new())
        return len(self._buffers) - 1

    def view(self, number: int, numel: int, dtype: torch.dtype, whole: bool) -> Region:
        """A buffer as a region of `numel` elements, taken or not."""
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
            view.siblings = lambda other: self.view(other, numel, dtype, whole)  # ranks choose buffers by themselves
            self._views[key] = view
        return self._views[key]

    @one_thread
    def give_back(self) -> None:
        """Between steps, when no rank reads them: their memory comes again when they are next taken."""
        for buffer in self._buffers:
            if buffer.touched and not buffer.taken:
                if buffer.work is not None:
                    buffer.work.drain()
                    buffer.work = None
                buffer.nbytes, buffer.touched = give_back(buffer.region.tensor), False
                self.ledger.strike(self.category, self.nbytes)

    @one_thread
    def close(self) -> None:
        """Drop all memory."""
        for buffer in self._buffers:
            if buffer.touched:
                self.ledger.strike(self.category, self.nbytes)
        self._buffers.clear()
        self._views.clear()


class BufferPool:
    """`count` buffers of `nbytes` each, made when they are first taken.

    make: nbytes -> memory (nbytes,) uint8, of `tier`.
    """

    def __init__(self, ledger: Ledger, count: int, nbytes: int, make: Callable[[int], Tensor], tier: Tier) -> None:
        self.ledger, self.count, self.nbytes, self.make, self.tier = ledger, count, nbytes, make, tier
        self.turn = Turn(f"the pool of buffers between tiers ({tier.value})")
        self._free: list[tuple[Tensor, Any]] = []  # buffer, what still reads or writes it
        self._made = 0

    @one_thread
    def take(self, wait: bool = False, in_line: bool = False) -> Tensor | None:
        """A free buffer (nbytes,) uint8. None where there is none yet, or (wait) none that anybody gave back.

        in_line: the current stream waits for what is still to be done with it, and not the host (device memory only).
        """
        if self._made < self.count:  # also where one is free already: how many there are is not to depend on timing
            self._made += 1
            self.ledger.enter(STAGING, self.nbytes, self.tier)
            return self.make(self.nbytes)
        for position, (_, pending) in enumerate(self._free):
            if pending is None or pending.done():
                return self._settled(position)
        return self._settled(0, in_line) if wait and self._free else None

    def _settled(self, position: int, in_line: bool = False) -> Tensor:
        buffer, pending = self._free.pop(position)
        if pending is not None:
            pending.join() if in_line else pending.wait()
        return buffer

    @one_thread
    def give(self, buffer: Tensor, pending: Any = None) -> None:
        """The buffer may be taken again when `pending` is done."""
        self._free.append((buffer, pending))
        for position, (_, others) in reversed(list(enumerate(self._free))):
            if self._made > self.count and (others is None or others.done()):
                self._settled(position)
                self.lose()

    @one_thread
    def take_further(self) -> Tensor:
        """A buffer beyond `count`, for a need that can not wait. As many are given up when they are free again."""
        self._made += 1
        self.ledger.enter(STAGING, self.nbytes, self.tier)
        return self.make(self.nbytes)

    @one_thread
    def lose(self) -> None:
        """A buffer that was taken will not come back."""
        self._made -= 1
        self.ledger.strike(STAGING, self.nbytes, self.tier)

    @one_thread
    def give_back(self) -> None:
        """Drop the memory of free buffers: others are made when they are needed."""
        while self._free:
            self._settled(0)
            self.lose()

    @one_thread
    def close(self) -> None:
        """Drop all memory."""
        for _, pending in self._free:
            with contextlib.suppress(OffloadIOError):  # nobody will use what it moved
                pending.wait() if pending is not None else None
        self._free.clear()
        self.ledger.strike(STAGING, self._made * self.nbytes, self.tier)
        self._made = self.count = 0


class Arena:
    """One stretch of memory from which pieces of any size are taken in turn, and given back in about that order.

        | free | in use . . . . . . . . | being written | free |        pieces follow one another and go round
               tail (the oldest)                        head

    So slabs of any size use all of it, where buffers of one size would each hold one slab, large or small. Memory comes in
    one allocation, when `reserve` is first told how much is of use, and never exceeds `limit_nbytes`.

    make: nbytes -> memory (nbytes,) uint8, of `tier`, page-aligned. turn: of the object whose arena it is.
    """

    def __init__(
        self, ledger: Ledger, limit_nbytes: int, align: int, make: Callable[[int], Tensor], tier: Tier, turn: Turn | None = None
    ) -> None:
        self.ledger, self.limit_nbytes, self.align, self.make, self.tier = ledger, limit_nbytes, align, make, tier
        self.turn = turn or Turn("an arena")
        self.memory: Tensor | None = None
        self._pieces: deque[_Piece] = deque()  # the oldest first
        self._head = 0

    @property
    def nbytes(self) -> int:
        """Of the memory that there is now."""
        return 0 if self.memory is None else self.memory.numel()

    def lacks(self, nbytes: int) -> bool:
        """True where `reserve` would make more memory, and so must find nothing in use."""
        return self._wanted(nbytes) > self.nbytes

    def _wanted(self, nbytes: int) -> int:
        return min(-(-nbytes // self.align) * self.align, self.limit_nbytes)

    @one_thread
    def reserve(self, nbytes: int) -> None:
        """So many bytes would be of use. More than before are made where nothing is in use."""
        if not self.lacks(nbytes):
            return
        self.drain()
        if self._pieces:
            return
        self._drop()
        self.memory, self._head = self.make(self._wanted(nbytes)), 0
        self.ledger.enter(STAGING, self.nbytes, self.tier)

    @one_thread
    def take(self, nbytes: int, wait: bool = False) -> Tensor | None:
        """A piece (nbytes,) at a multiple of `align`.

        None where there is no room: (wait) also after all that was given back has been waited for.
        """
        size = -(-nbytes // self.align) * self.align
        self._reclaim(wait=False)
        begin = self._place(size)
        while begin is None and wait and self._pieces and self._pieces[0].given:
            self._reclaim(wait=True)
            begin = self._place(size)
        if begin is None:
            return None
        assert self.memory is not None
        self._head = begin + size
        piece = _Piece(begin, begin + size, self.memory[begin : begin + nbytes])
        self._pieces.append(piece)
        return piece.memory

    def _place(self, size: int) -> int | None:
        if not self._pieces:
            return 0 if size <= self.nbytes else None
        tail = self._pieces[0].begin
        if self._head > tail:  # free: behind the head, and before the tail
            if self._head + size <= self.nbytes:
                return self._head
            return 0 if size <= tail else None
        return self._head if self._head + size <= tail else None

    @one_thread
    def give(self, memory: Tensor, pending: Any = None) -> None:
        """The piece may be taken again when `pending` is done."""
        piece = next(p for p in self._pieces if p.memory is memory)
        piece.given, piece.pending = True, pending

    def _reclaim(self, wait: bool) -> None:
        """Forget pieces at the tail that nobody uses any more; (wait) at least the first, if it was given back."""
        while self._pieces and self._pieces[0].given:
            pending = self._pieces[0].pending
            if pending is not None and not (wait or pending.done()):
                return
            piece = self._pieces.popleft()
            if piece.pending is not None:
                piece.pending.wait()
            wait = False

    @one_thread
    def drain(self) -> None:
        """Return when what was given back is used by nobody."""
        for piece in self._pieces:
            if piece.given and piece.pending is not None:
                piece.pending.wait()
        self._reclaim(wait=False)

    @one_thread
    def give_back(self) -> None:
        """Drop the memory where nothing is in use: `reserve` makes it again."""
        self.drain()
        if not self._pieces:
            self._drop()

    def _drop(self) -> None:
        self.ledger.strike(STAGING, self.nbytes, self.tier)
        self.memory = None

    @one_thread
    def close(self) -> None:
        """Drop all memory."""
        for piece in self._pieces:
            with contextlib.suppress(OffloadIOError):  # nobody will use what it moved
                piece.pending.wait() if piece.pending is not None else None
        self._pieces.clear()
        self._drop()
        self.limit_nbytes = 0


@dataclass(eq=False)
class _Piece:
    """Bytes [begin, end) of an arena. given: back; pending: what still reads or writes it then."""

    begin: int
    end: int
    memory: Tensor
    given: bool = False
    pending: Any = None
