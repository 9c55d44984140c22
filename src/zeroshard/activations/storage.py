"""Backings: where the slices of activation checkpoints rest between forward and backward: device, host, disk.

    put -> Kept      the slice is copied to its backing; its source may be freed at once
    fetch            start to bring it back, ahead of use
    get ... done     the slice on the device, valid in between
    drop             the slice is not needed any more

Memory is taken from an *arena*: one allocation of constant size in which every checkpoint has a slot (ZeRO, arXiv
1910.02054, 6.3: without it, long- and short-lived tensors interleave and memory is fragmented). A slice that does not fit
gets an allocation of its own, and `settle` replaces the arena by a larger one when it is empty. So the first step measures
the need, and later steps allocate nothing.

On a CPU the device's memory is the host's: DEVICE and HOST differ only in the ledger.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.streams import Copy, Streams
from ..config import Tier
from ..memory.io.async_file import File, empty_aligned
from ..memory.ledger import Ledger, making
from ..utils.work import OVER, Work

CHECKPOINTS = "activation checkpoints"  # category in the ledger
_SLOT_ALIGN = 512  # bytes: alignment of torch's CUDA allocator, and enough for every vector kernel


class Space:
    """A free list over the bytes [0, nbytes). First fit, neighbours joined; plain arithmetic, no memory.

        [ taken | free      | taken |  free        ]        free: (offset, nbytes), in order, never two side by side

    Offsets and lengths are multiples of `align`, so that slots are aligned as the range itself is. Checkpoints come and go like a
    stack, so the list of free ranges is short and first fit leaves no holes.
    """

    def __init__(self, nbytes: int, align: int) -> None:
        self.align = align
        self.nbytes = self.rounded(nbytes)
        self.used_nbytes = 0
        self._free: list[tuple[int, int]] = [(0, self.nbytes)] if self.nbytes else []

    def rounded(self, nbytes: int) -> int:
        """Return the bytes that a request of `nbytes` takes."""
        return -(-nbytes // self.align) * self.align

    def take(self, nbytes: int) -> int | None:
        """Take `nbytes` free bytes and return their offset, or None if there is no such gap."""
        nbytes = self.rounded(max(nbytes, 1))
        for index, (offset, length) in enumerate(self._free):
            if length >= nbytes:
                if length == nbytes:
                    del self._free[index]
                else:
                    self._free[index] = (offset + nbytes, length - nbytes)
                self.used_nbytes += nbytes
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Free the `nbytes` bytes at an offset that `take(nbytes)` returned."""
        nbytes = self.rounded(max(nbytes, 1))
        self.used_nbytes -= nbytes
        index = bisect.bisect(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + nbytes:
            nbytes += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            offset, before = self._free.pop(index - 1)
            nbytes, index = nbytes + before, index - 1
        self._free.insert(index, (offset, nbytes))


@dataclass(eq=False)
class Kept:
    """Handle of one slice at rest, (numel,) elements; only the Backing that made it interprets the fields."""

    numel: int
    dtype: torch.dtype
    offset: int = -1  # in the arena or file; -1: an allocation of its own
    memory: Tensor | None = None  # (numel,), if it rests in memory
    file: File | None = None  # if it rests in one
    space: Space | None = None  # free list of the file
    writing: Work | None = None  # the write or copy that must finish before the slice can be read
    ahead: tuple[Tensor, Work] | None = None  # the read or copy that `fetch` started, and the memory that it fills
    reading: Work | None = None  # set by `drop`: the read that must finish before the slot in the file is used again

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Backing(ABC):
    """Abstract memory or files where slices rest. Threads: one at a time, the one inside the Store (saved_tensors.py).

    allocations: number of allocations from the system; constant in the steady state. foreseen: number of slices expected
    to follow the first one in a forward, of its size.
    """

    tier: Tier
    foreseen = 0
    imagines = True  # whether `put` accepts the fake tensors of a dry run

    def __init__(self, tier: Tier, device: torch.device, streams: Streams, ledger: Ledger, pin: bool) -> None:
        self.tier, self.device, self.streams, self.ledger = tier, device, streams, ledger
        self.pin = pin and device.type == "cuda"
        self.arena_nbytes = 0
        self.allocations = 0

    def host_memory(self, nbytes: int) -> Tensor:
        """Return new page-aligned host memory (nbytes,) uint8, which the caller enters in the ledger."""
        self.allocations += 1
        with making():
            return empty_aligned(nbytes, pin=self.pin)

    @abstractmethod
    def put(self, part: Tensor, numel: int) -> Kept:
        """Copy `part`, contiguous and on the device, to the backing, as a slice of `numel` elements (`part` may have fewer)."""

    @abstractmethod
    def fetch(self, kept: Kept, wait: bool) -> None:
        """Start to copy a slice back to the device. wait=False: do nothing if that has to wait (for the slice's write)."""

    @abstractmethod
    def get(self, kept: Kept) -> Tensor:
        """Return the slice (numel,) on the device; it is valid for work that is queued on the current stream before `done`."""

    @abstractmethod
    def done(self, kept: Kept) -> None:
        """Release the copy that `fetch` or `get` made. The slice stays, and may be fetched again."""

    def drop(self, kept: Kept) -> None:
        """Release a slice; the inverse of `put`."""
        self.done(kept)
        self.ledger.strike(CHECKPOINTS, kept.nbytes, self.tier)

    def settle(self) -> str | None:
        """Grow the arena to the largest need so far; return a message if it grew. The store calls it when no slice is kept."""
        return None

    def give_back(self) -> None:
        """Free the arena if no slice is kept. It is allocated again when needed."""

    @abstractmethod
    def close(self) -> None:
        """Free all memory and remove all files."""


class MemoryBacking(Backing):
    """Backing for slices in an arena in the memory of the device or of the host."""

    def __init__(
        self, tier: Tier, device: torch.device, streams: Streams, ledger: Ledger, arena_nbytes: int, pin: bool = True
    ) -> None:
        super().__init__(tier, device, streams, ledger, pin)
        self.away = tier is Tier.HOST and streams.separate_host
        self._space = Space(0, _SLOT_ALIGN)
        self._arena: Tensor | None = None
        self._beyond_nbytes = self._beyond_peak = 0  # bytes of slices outside the arena: now; most since the arena was made
        self._needed_nbytes = 0  # most bytes at a time, in the arena and outside
        self._down: Work = OVER  # newest copy to the host; copies of one direction run in order
        self._up: Work = OVER  # newest copy from the host
        self._dying: list[tuple[Tensor, Work, Work]] = []  # dropped memory outside the arena, and copies that may use it
        if arena_nbytes:
            self._renew(arena_nbytes)

    def put(self, part: Tensor, numel: int) -> Kept:
        while self._dying and all(copy.done() for copy in self._dying[0][1:]):
            del self._dying[0]
        kept = Kept(numel, part.dtype)
        offset = self._space.take(kept.nbytes)
        if offset is None:
            memory = self._allocate(kept.nbytes)
            self._beyond_nbytes += self._space.rounded(kept.nbytes)
            self._beyond_peak = max(self._beyond_peak, self._beyond_nbytes)
            self._needed_nbytes = max(self._needed_nbytes, self._space.used_nbytes + self._beyond_nbytes)
        else:
            assert self._arena is not None
            kept.offset, memory = offset, self._arena[offset : offset + kept.nbytes]
        kept.memory = memory.view(part.dtype)
        target = kept.memory[: part.numel()]
        if self.away:
            kept.writing = self._down = Copy(self.streams, self.streams.copy(target, part, up=False))
            self.ledger.move(Tier.DEVICE, Tier.HOST, part.nbytes)
        else:
            target.copy_(part)
        self.ledger.enter(CHECKPOINTS, kept.nbytes, self.tier)
        return kept

    def fetch(self, kept: Kept, wait: bool) -> None:
        if not self.away or kept.ahead is not None:
            return
        assert kept.memory is not None and kept.writing is not None
        kept.writing.join()  # copies to and from the host run on different streams
        target = torch.empty(kept.numel, dtype=kept.dtype, device=self.device)
        self._up = Copy(self.streams, self.streams.copy(target, kept.memory, up=True))
        kept.ahead = (target, self._up)
        self.ledger.move(Tier.HOST, Tier.DEVICE, kept.nbytes)

    def get(self, kept: Kept) -> Tensor:
        assert kept.memory is not None
        if not self.away:
            return kept.memory
        self.fetch(kept, wait=True)
        assert kept.ahead is not None
        target, copy = kept.ahead
        copy.join()
        return target

    def done(self, kept: Kept) -> None:
        if kept.ahead is not None:
            # the slot may be reused next: the copy into it is ordered after the current stream, which waits here for this one
            kept.ahead[1].join()
            kept.ahead = None

    def drop(self, kept: Kept) -> None:
        super().drop(kept)
        if kept.offset < 0:
            self._beyond_nbytes -= self._space.rounded(kept.nbytes)
            if self.away and kept.memory is not None:
                # the host frees memory at once, whatever streams have queued: keep it until the copies are finished
                self._dying.append((kept.memory, self._down, self._up))
        else:
            self._space.give(kept.offset, kept.nbytes)
        kept.memory = None

    def settle(self) -> str | None:
        if not self._beyond_peak or self._space.used_nbytes or self._beyond_nbytes:
            return None
        before = self.arena_nbytes
        # an arena that was large enough but fragmented grows by the bytes that found no gap
        self._renew(self._needed_nbytes if self._needed_nbytes > before else before + self._beyond_peak)
        return f"arena for activation checkpoints ({self.tier.value}): {before:,} -> {self.arena_nbytes:,} bytes"

    def _renew(self, nbytes: int) -> None:
        """Replace the (empty) arena by one of `nbytes`."""
        self.close()  # first, so that there are never two; if the allocation fails there is none, which is a valid state
        self._beyond_peak = 0
        space = Space(nbytes, _SLOT_ALIGN)
        self._arena = self._allocate(space.nbytes)
        self._space, self.arena_nbytes = space, space.nbytes

    def _allocate(self, nbytes: int) -> Tensor:
        if self.away:
            return self.host_memory(nbytes)
        self.allocations += 1
        with making():
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def give_back(self) -> None:
        """Free the arena if no slice is kept."""
        if not (self._space.used_nbytes or self._beyond_nbytes):
            self.close()

    def close(self) -> None:
        self._down.wait()  # until no copy uses the arena or dropped memory any more
        self._up.wait()
        self._down = self._up = OVER
        self._dying.clear()
        self._arena, self._space, self.arena_nbytes = None, Space(0, _SLOT_ALIGN), 0
