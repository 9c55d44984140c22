"""Places where the slices of activation checkpoints rest between forward and backward: device, host, disk.

    put -> Kept      the slice is copied to its place; its source may be freed at once
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

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..comm.streams import Streams
from ..config import Tier
from ..memory.io.async_file import empty_aligned
from ..memory.ledger import Ledger, making
from .free_list import Space

CHECKPOINTS = "activation checkpoints"  # category in the ledger
_SLOT_ALIGN = 512  # bytes: alignment of torch's CUDA allocator, and enough for every vector kernel


@dataclass(eq=False)
class Kept:
    """Handle of one slice at rest, (numel,) elements; only the Place that made it interprets the fields."""

    numel: int
    dtype: torch.dtype
    offset: int = -1  # in the arena or file; -1: an allocation of its own
    memory: Tensor | None = None  # (numel,), if it rests in memory
    writing: Any = None  # the write or copy that must finish before the slice can be read
    ahead: Any = None  # the read or copy that `fetch` started

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


KeptT = TypeVar("KeptT", bound=Kept)


class Place(ABC, Generic[KeptT]):
    """Abstract place where slices rest. Threads: one at a time, the one inside the Store (saved_tensors.py).

    allocations: number of allocations from the system; constant in the steady state. foreseen: number of slices expected
    to follow the first one in a forward, of its size.
    """

    tier: Tier
    foreseen = 0
    imagines = True  # whether `put` accepts the fake tensors of a dry run

    def __init__(self, tier: Tier, device: torch.device, streams: Streams, ledger: Ledger) -> None:
        self.tier, self.device, self.streams, self.ledger = tier, device, streams, ledger
        self.arena_nbytes = 0
        self.allocations = 0

    @abstractmethod
    def put(self, part: Tensor, numel: int) -> KeptT:
        """Copy `part`, contiguous and on the device, to the place, as a slice of `numel` elements (`part` may have fewer)."""

    @abstractmethod
    def fetch(self, kept: KeptT, wait: bool) -> None:
        """Start to copy a slice back to the device. wait=False: do nothing if that has to wait (for the slice's write)."""

    @abstractmethod
    def get(self, kept: KeptT) -> Tensor:
        """Return the slice (numel,) on the device; it is valid for work that is queued on the current stream before `done`."""

    @abstractmethod
    def done(self, kept: KeptT) -> None:
        """Release the copy that `fetch` or `get` made. The slice stays, and may be fetched again."""

    @abstractmethod
    def drop(self, kept: KeptT) -> None:
        """Release a slice; the inverse of `put`."""

    def settle(self) -> str | None:
        """Grow the arena to the largest need so far; return a message if it grew. The store calls it when no slice is kept."""
        return None

    def give_back(self) -> None:
        """Free the arena if no slice is kept. It is allocated again when needed."""

    @abstractmethod
    def close(self) -> None:
        """Free all memory and remove all files."""


class MemoryPlace(Place[Kept]):
    """Place for slices in an arena in the memory of the device or of the host."""

    def __init__(
        self, tier: Tier, device: torch.device, streams: Streams, ledger: Ledger, arena_nbytes: int, pin: bool = True
    ) -> None:
        super().__init__(tier, device, streams, ledger)
        self.away = tier is Tier.HOST and streams.separate_host
        self.pin = pin and device.type == "cuda"
        self._space = Space(0, _SLOT_ALIGN)
        self._arena: Tensor | None = None
        self._beyond_nbytes = self._beyond_peak = 0  # bytes of slices outside the arena: now; most since the arena was made
        self._needed_nbytes = 0  # most bytes at a time, in the arena and outside
        self._down: Any = None  # newest copy to the host; copies of one direction run in order
        self._up: Any = None  # newest copy from the host
        self._dying: list[tuple[Tensor, tuple[Any, Any]]] = []  # dropped memory outside the arena, and copies that may use it
        if arena_nbytes:
            self._renew(arena_nbytes)

    def put(self, part: Tensor, numel: int) -> Kept:
        self._bury()
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
            kept.writing = self._down = self.streams.copy(target, part, up=False)
            self.ledger.move(Tier.DEVICE, Tier.HOST, part.nbytes)
        else:
            target.copy_(part)
        self.ledger.enter(CHECKPOINTS, kept.nbytes, self.tier)
        return kept

    def fetch(self, kept: Kept, wait: bool) -> None:
        if not self.away or kept.ahead is not None:
            return
        assert kept.memory is not None
        self.streams.join(kept.writing)  # copies to and from the host run on different streams
        target = torch.empty(kept.numel, dtype=kept.dtype, device=self.device)
        self._up = self.streams.copy(target, kept.memory, up=True)
        kept.ahead = (target, self._up)
        self.ledger.move(Tier.HOST, Tier.DEVICE, kept.nbytes)

    def get(self, kept: Kept) -> Tensor:
        assert kept.memory is not None
        if not self.away:
            return kept.memory
        self.fetch(kept, wait=True)
        target, ticket = kept.ahead
        self.streams.join(ticket)
        return target

    def done(self, kept: Kept) -> None:
        if kept.ahead is not None:
            # the slot may be reused next: the copy into it is ordered after the current stream, which waits here for this one
            self.streams.join(kept.ahead[1])
            kept.ahead = None

    def drop(self, kept: Kept) -> None:
        self.done(kept)
        if kept.offset < 0:
            self._beyond_nbytes -= self._space.rounded(kept.nbytes)
            if self.away and kept.memory is not None:
                # the host frees memory at once, whatever streams have queued: keep it until the copies are finished
                self._dying.append((kept.memory, (self._down, self._up)))
        else:
            self._space.give(kept.offset, kept.nbytes)
        kept.memory = None
        self.ledger.strike(CHECKPOINTS, kept.nbytes, self.tier)

    def settle(self) -> str | None:
        if not self._beyond_peak or self._space.used_nbytes or self._beyond_nbytes:
            return None
        before = self.arena_nbytes
        # an arena that was large enough but fragmented grows by the bytes that found no gap
        self._renew(self._needed_nbytes if self._needed_nbytes > before else before + self._beyond_peak)
        return f"arena for activation checkpoints ({self.tier.value}): {before:,} -> {self.arena_nbytes:,} bytes"

    def _renew(self, nbytes: int) -> None:
        """Replace the (empty) arena by one of `nbytes`."""
        self._finish()
        # free the old arena first, so that there are never two; if the allocation fails there is none, which is a valid state
        self._arena, self._space, self.arena_nbytes = None, Space(0, _SLOT_ALIGN), 0
        self._beyond_peak = 0
        space = Space(nbytes, _SLOT_ALIGN)
        self._arena = self._allocate(space.nbytes)
        self._space, self.arena_nbytes = space, space.nbytes

    def _allocate(self, nbytes: int) -> Tensor:
        self.allocations += 1
        with making():
            if self.away:
                return empty_aligned(nbytes, pin=self.pin)
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _bury(self) -> None:
        """Free dropped memory that no copy uses any more."""
        while self._dying and all(ticket is None or self.streams.finished(ticket) for ticket in self._dying[0][1]):
            del self._dying[0]

    def _finish(self) -> None:
        """Wait until no copy uses the arena or dropped memory any more, and free the latter."""
        for ticket in (self._down, self._up):
            if ticket is not None:
                self.streams.finish(ticket)
        self._down = self._up = None
        self._dying.clear()

    def give_back(self) -> None:
        """Free the arena if no slice is kept."""
        if not (self._space.used_nbytes or self._beyond_nbytes):
            self.close()

    def close(self) -> None:
        self._finish()
        self._arena, self._space, self.arena_nbytes = None, Space(0, _SLOT_ALIGN), 0
