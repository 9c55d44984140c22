"""Memory of constant size through which states pass between tiers, and to files.

`BufferPool`: buffers of one size for shards and gradients between tiers, and for files of checkpoints. `Arena`: one block of
memory through which optimizer states pass.

Threads: one at a time may be in a pool, which is checked (`ThreadsMet`): the rank's own thread or, in a backward on a GPU,
autograd's thread while the rank's own waits. A HostStepper and its Arena are used in the thread of a delayed step.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..config import Tier
from ..engine.ledger import STAGING, Ledger
from ..errors import OffloadIOError
from ..utils.one_thread import Turn, one_thread
from ..utils.work import Work


class BufferPool:
    """A pool of usually `count` buffers of `nbytes` each, allocated when they are first taken, or all at once by `grow`.

    make: nbytes -> memory (nbytes,) uint8, on `tier`. category: of their entries in the ledger.
    """

    def __init__(
        self, ledger: Ledger, count: int, nbytes: int, make: Callable[[int], Tensor], tier: Tier, category: str = STAGING
    ) -> None:
        self.ledger, self.count, self.nbytes, self.make, self.tier = ledger, count, nbytes, make, tier
        self.category = category
        self.turn = Turn(f"the pool of buffers between tiers ({tier.value})")
        self._free: list[tuple[Tensor, Work | None]] = []  # (buffer, what still reads or writes it)
        self._made = 0
        self.made_nbytes = 0  # bytes of all buffers, free and taken

    @one_thread
    def take(self, wait: bool = False, in_line: bool = False) -> Tensor | None:
        """Take a buffer (nbytes,) uint8 that nothing uses any more; None where there is none.

        wait: wait for the work that uses the buffer given back first, so that None means that every buffer is taken. in_line: the
        device's current stream waits for that work instead of the host (device memory only).
        """
        if self._made < self.count:  # also while one is free, so that the number of buffers does not depend on timing
            return self.take_further()
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
    def grow(self, count: int) -> None:
        """Allocate buffers until there are at least `count`, for `borrow`."""
        while self._made < count:
            self._free.append((self.take_further(), None))
            self.count = max(self.count, self._made)

    @one_thread
    def borrow(self) -> Tensor | None:
        """Take the free buffer that was given back last, whose pages exist; None where none is free. None is allocated."""
        return self._settled(-1) if self._free else None

    @property
    def free(self) -> int:
        """Number of free buffers."""
        return len(self._free)

    @one_thread
    def take_fitting(self, nbytes: int) -> Tensor:
        """Take a buffer of at least `nbytes`, the size of all from now on; smaller ones are dropped when they are free.

        If none is free, wait for the one that was given back first; if none was given back, allocate a further one: a wait could
        deadlock.
        """
        if nbytes > self.nbytes:
            self.nbytes = nbytes
            self._drop_surplus()
        buffer = self.take(wait=True)
        while buffer is not None and buffer.nbytes < self.nbytes:
            self.lose(buffer)
            buffer = self.take(wait=True)
        return self.take_further() if buffer is None else buffer

    @one_thread
    def give(self, buffer: Tensor, pending: Work | None = None) -> None:
        """Give a buffer back; it may be taken again when `pending` is done."""
        self._free.append((buffer, pending))
        self._drop_surplus()

    def _drop_surplus(self) -> None:
        """Drop free buffers beyond `count`, and those that have become too small."""
        if self._made <= self.count and self.made_nbytes == self._made * self.nbytes:
            return
        for position, (buffer, pending) in reversed(list(enumerate(self._free))):
            surplus = self._made > self.count or buffer.nbytes < self.nbytes
            if surplus and (pending is None or pending.done()):
                self.lose(self._settled(position))

    @one_thread
    def take_further(self) -> Tensor:
        """Allocate a buffer and take it, even beyond `count`, for a need that can not wait. `give` drops surplus buffers."""
        buffer = self.make(self.nbytes)
        self._made += 1
        self.made_nbytes += self.nbytes
        self.ledger.enter(self.category, self.nbytes, self.tier)
        return buffer

    @one_thread
    def lose(self, buffer: Tensor) -> None:
        """Write off a buffer that was taken and will not be given back."""
        self._made -= 1
        self.made_nbytes -= buffer.nbytes
        self.ledger.strike(self.category, buffer.nbytes, self.tier)

    @one_thread
    def give_back(self) -> None:
        """Drop the memory of free buffers; new ones are allocated when they are needed."""
        while self._free:
            self.lose(self._settled(0))

    @one_thread
    def close(self) -> None:
        """Drop all buffers."""
        for _, pending in self._free:
            with contextlib.suppress(OffloadIOError):  # its data is not needed any more
                pending.wait() if pending is not None else None
        self._free.clear()
        self.ledger.strike(self.category, self.made_nbytes, self.tier)
        self._made = self.made_nbytes = self.count = 0


class Arena:
    """One block of memory from which pieces of any size are taken in turn, and given back in about that order.

        | free | being written | stepped | being read | free |          pieces follow one another, in a ring
               tail (the oldest)                      head

    Slabs of any size share the memory without gaps; in a pool each would take a whole buffer. `reserve` allocates the memory, at
    most `limit_nbytes`, when the caller first knows how much it can use.

    make: nbytes -> memory (nbytes,) uint8, on `tier`, page-aligned. turn: the Turn of the object that owns the arena.
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
        """Bytes of memory that the arena has now."""
        return 0 if self.memory is None else self.memory.numel()

    def lacks(self, nbytes: int) -> bool:
        """Return True where `reserve(nbytes)` would allocate more memory, for which no piece may be in use."""
        return self._wanted(nbytes) > self.nbytes

    def _wanted(self, nbytes: int) -> int:
        return min(-(-nbytes // self.align) * self.align, self.limit_nbytes)

    @one_thread
    def reserve(self, nbytes: int) -> None:
        """Replace the memory by `nbytes`, at most `limit_nbytes`; do nothing if it is as large, or while a piece is in use."""
        if not self.lacks(nbytes):
            return
        self.drain()
        if self._pieces:  # a piece is still in use: grow another time
            return
        self._drop()
        self.memory, self._head = self.make(self._wanted(nbytes)), 0
        self.ledger.enter(STAGING, self.nbytes, self.tier)

    @one_thread
    def take(self, nbytes: int, wait: bool = False) -> Tensor | None:
        """Take a piece (nbytes,) at a multiple of `align`.

        None where there is no room; with `wait`, only after waiting for all pieces at the tail that were given back.
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
            return 0 if size <= self.nbytes else None  # empty: begin anew at the start
        tail = self._pieces[0].begin
        if self._head > tail:  # free: behind the head, and before the tail
            if self._head + size <= self.nbytes:
                return self._head
            return 0 if size <= tail else None
        return self._head if self._head + size <= tail else None

    @one_thread
    def give(self, memory: Tensor, pending: Work | None = None) -> None:
        """Give a piece back; its memory may be taken again when `pending` is done."""
        piece = next(p for p in self._pieces if p.memory is memory)
        piece.given, piece.pending = True, pending

    def _reclaim(self, wait: bool) -> None:
        """Drop the pieces at the tail that are given back and no longer in use; with `wait`, wait for the first of them."""
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
        """Return when nothing uses the pieces that were given back."""
        for piece in self._pieces:
            if piece.given and piece.pending is not None:
                piece.pending.wait()
        self._reclaim(wait=False)

    @one_thread
    def give_back(self) -> None:
        """Drop the memory, unless a piece of it is in use; `reserve` allocates it again."""
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
            with contextlib.suppress(OffloadIOError):  # its data is not needed any more
                piece.pending.wait() if piece.pending is not None else None
        self._pieces.clear()
        self._drop()
        self.limit_nbytes = 0


@dataclass(eq=False)
class _Piece:
    """Bytes [begin, end) of an arena. given: it was given back; pending: the move that was still using it then."""

    begin: int
    end: int
    memory: Tensor
    given: bool = False
    pending: Work | None = None
