"""Backings: where the slices of activation checkpoints rest between forward and backward: device, host, disk.

    put -> Kept      the slice is copied to its backing; its source may be freed at once
    fetch            start to bring it back, ahead of use
    get ... done     the slice on the device, valid in between
    drop             the slice is not needed any more

Copies, host memory, files and requests are those of the tiers (tiers/storage.py). What is particular here: slices come and go
like a stack, sizes are known when a slice comes, and a failure of the disk ends a backward, not the use of the model.

Slices have slots in an *arena* of constant size, in memory or in a file (ZeRO, arXiv 1910.02054, 6.3: without it, long- and
short-lived tensors interleave and memory is fragmented). The first step measures the need, so later steps allocate nothing, unless
one needs more: a slice beyond the arena has memory of its own. On a CPU the device's memory is the host's.
"""

from __future__ import annotations

import bisect
import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..config import Offload, Tier
from ..errors import SwapError
from ..seam import BufferPool, Links, making
from ..tiers import imagine
from ..tiers.io import ALIGN, Engine, File, SwapFolder
from ..utils.host import ranks_here
from ..utils.work import OVER, Then, Work

CHECKPOINTS = "activation checkpoints"  # category in the ledger
_BUFFERS = "buffers of activation checkpoints"  # category of host buffers
_NAME = "checkpoints"  # prefix of the files' names
_SLOT_ALIGN = 512  # bytes: alignment of torch's CUDA allocator, and enough for every vector kernel
_WRITING = 2  # host buffers for writes, in addition to those of prefetched reads


class Space:
    """A free list over the bytes [0, nbytes). First fit, neighbours joined; plain arithmetic, no memory.

        [ taken | free      | taken |  free        ]        free: (begin, end), in order, never two side by side

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
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= nbytes:
                if end - begin > nbytes:
                    self._free[index] = (begin + nbytes, end)
                else:
                    del self._free[index]
                self.used_nbytes += nbytes
                return begin
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Free the `nbytes` bytes at an offset that `take(nbytes)` returned."""
        nbytes = self.rounded(max(nbytes, 1))
        self.used_nbytes -= nbytes
        begin, end = offset, offset + nbytes
        index = bisect.bisect(self._free, (begin, 0))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == begin:
            index -= 1
            begin = self._free.pop(index)[0]
        self._free.insert(index, (begin, end))


@dataclass(eq=False)
class Kept:
    """Handle of one slice at rest, (numel,) elements; only the Backing that made it interprets the fields."""

    numel: int
    dtype: torch.dtype
    nbytes: int
    space: Space | None = None  # the free list in which it has a slot, at `offset`; None: an allocation of its own
    offset: int = -1
    memory: Tensor | None = None  # (numel,), if it rests in memory
    file: File | None = None  # if it rests in one
    writing: Work = OVER  # the write or copy that must finish before the slice can be read
    ahead: tuple[Tensor, Work] | None = None  # the read or copy that `fetch` started, and the memory that it fills
    vain: Work | None = None  # the newest read whose copy was released before it was over; its slot waits for it


class Backing(ABC):
    """Abstract memory or files where slices rest. Threads: one at a time, the one inside the Store (saved_tensors.py).

    allocations: number of allocations from the system; constant in the steady state. foreseen: number of slices expected
    to follow the first one in a forward, of its size.
    """

    foreseen = 0
    imagines = True  # whether `put` accepts the fake tensors of a dry run

    def __init__(self, tier: Tier, links: Links, pin: bool) -> None:
        self.tier, self.links, self.ledger, self.device, self.pin = tier, links, links.ledger, links.device, pin
        self.arena_nbytes = self.allocations = 0

    def host_memory(self, nbytes: int) -> Tensor:
        """Return new page-aligned host memory (nbytes,) uint8, which the caller enters in the ledger."""
        self.allocations += 1
        return self.links.host_buffer(nbytes, self.pin)

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
    """Backing for slices in an arena in the memory of the device or of the host.

    A slice that does not fit gets an allocation of its own, and `settle` replaces the arena by a larger one when it is empty.
    """

    def __init__(self, tier: Tier, links: Links, arena_nbytes: int, pin: bool = True) -> None:
        super().__init__(tier, links, pin)
        self.away = tier is Tier.HOST and links.separate
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
        kept = Kept(numel, part.dtype, numel * part.dtype.itemsize)
        offset = self._space.take(kept.nbytes)
        if offset is None:
            memory = self._allocate(kept.nbytes)
            self._beyond_nbytes += self._space.rounded(kept.nbytes)
            self._beyond_peak = max(self._beyond_peak, self._beyond_nbytes)
            self._needed_nbytes = max(self._needed_nbytes, self._space.used_nbytes + self._beyond_nbytes)
        else:
            assert self._arena is not None
            kept.space, kept.offset, memory = self._space, offset, self._arena[offset : offset + kept.nbytes]
        kept.memory = memory.view(part.dtype)
        kept.writing = self._down = self.links.copy(kept.memory[: part.numel()], part, Tier.DEVICE, self.tier)
        self.ledger.enter(CHECKPOINTS, kept.nbytes, self.tier)
        return kept

    def fetch(self, kept: Kept, wait: bool) -> None:
        if not self.away or kept.ahead is not None:
            return
        assert kept.memory is not None
        kept.writing.join()  # copies to and from the host run on different streams
        target = torch.empty(kept.numel, dtype=kept.dtype, device=self.device)
        self._up = self.links.copy(target, kept.memory, Tier.HOST, Tier.DEVICE)
        kept.ahead = (target, self._up)

    def get(self, kept: Kept) -> Tensor:
        if not self.away:
            assert kept.memory is not None
            return kept.memory
        self.fetch(kept, wait=True)
        assert kept.ahead is not None
        kept.ahead[1].join()
        return kept.ahead[0]

    def done(self, kept: Kept) -> None:
        if kept.ahead is not None:
            # the slot may be reused next: the copy into it is ordered after the current stream, which waits here for this one
            kept.ahead[1].join()
            kept.ahead = None

    def drop(self, kept: Kept) -> None:
        super().drop(kept)
        if kept.space is not None:
            kept.space.give(kept.offset, kept.nbytes)
        else:
            self._beyond_nbytes -= self._space.rounded(kept.nbytes)
            if self.away and kept.memory is not None:
                # the host frees memory at once, whatever streams have queued: keep it until the copies are finished
                self._dying.append((kept.memory, self._down, self._up))
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
        if not (self._space.used_nbytes or self._beyond_nbytes):
            self.close()

    def close(self) -> None:
        self._down.wait()  # until no copy uses the arena or dropped memory any more
        self._up.wait()
        self._down = self._up = OVER
        self._dying.clear()
        self._arena, self._space, self.arena_nbytes = None, Space(0, _SLOT_ALIGN), 0


class _DiskBacking(Backing):
    """Base of backings on a disk, real or imagined: slices pass through a few host buffers of one size.

        forward    device -> host buffer -> file        writes overlap with the next blocks' computation
        backward   file -> host buffer -> device        reads run ahead, in the reverse of the order of packing

    A forward that is faster than the disk waits for a buffer. Source: ZeRO-Infinity, arXiv 2104.07857, 5.1.2 and 5.2.3.
    """

    def __init__(self, links: Links, pin: bool, prefetch: int) -> None:
        super().__init__(Tier.DISK, links, pin)
        self.path = (Tier.DEVICE, Tier.HOST, Tier.DISK) if links.separate else (Tier.HOST, Tier.DISK)
        self.buffers = BufferPool(self.ledger, prefetch + 1 + _WRITING, 0, self.host_memory, Tier.HOST, _BUFFERS)

    def done(self, kept: Kept) -> None:
        if kept.ahead is not None:
            buffer, read = kept.ahead
            pending = None if read.done() else read  # if it is done, `get` has raised its error, if any
            self.buffers.give(buffer, pending)
            kept.ahead, kept.vain = None, pending or kept.vain

    def close(self) -> None:
        self.buffers.close()


class DiskBacking(_DiskBacking):
    """Backing for slices in files, in a swap folder of this rank that is removed at the end.

    A file is an arena. A step that needs more adds a file; files never grow. Since files are sparse, a slice may still find the
    disk full: free space is checked whenever the files hold more than ever before, and at the first slice also for the slices
    that are expected to follow.
    """

    imagines = False

    def __init__(self, offload: Offload, links: Links, arena_nbytes: int, prefetch: int, rank: int) -> None:
        super().__init__(links, offload.pin_memory, prefetch)
        self.ranks = ranks_here(1)  # ranks of this host, which may share the disk
        assert offload.path is not None
        self.folder = SwapFolder(
            offload.path, rank=rank, needed_nbytes=arena_nbytes, host_needed_nbytes=arena_nbytes * self.ranks,
            any_filesystem=offload.any_filesystem,
        )  # fmt: skip
        self._checked_nbytes = arena_nbytes
        self.engine = Engine(checksum=offload.checksum)
        self._files: list[tuple[File, Space]] = []
        self._newest = Then(OVER, Work)  # on a separate device: the newest slice's copy to its host buffer, and then its write
        self._dying: list[Kept] = []  # dropped slices that may still be being written or read
        if arena_nbytes:
            self._add_file(arena_nbytes)

    def put(self, part: Tensor, numel: int) -> Kept:
        self._bury()
        kept = Kept(numel, part.dtype, numel * part.dtype.itemsize)
        self._check_space(kept.nbytes)
        buffer = self.buffers.take_fitting(kept.nbytes)
        for found in self._files:
            offset = found[1].take(kept.nbytes)
            if offset is not None:
                break
        else:  # doubling keeps files few; being sparse, they cost no space
            found = self._add_file(max(kept.nbytes, self.arena_nbytes))
            offset = found[1].take(kept.nbytes)
            assert offset is not None
        (kept.file, kept.space), kept.offset = found, offset
        self.ledger.enter(CHECKPOINTS, kept.nbytes, Tier.DISK)
        copy = self.links.copy(_as(buffer, kept)[: part.numel()], part, Tier.DEVICE, Tier.HOST)
        if self.links.separate:
            before, self._newest = self._newest, Then(copy, functools.partial(self._write, kept, buffer))
            kept.writing = self._newest
            before.start()  # the copy of the slice before has had a block's time to finish: wait for it, and start its write
        else:
            kept.writing = self._write(kept, buffer)
        self.buffers.give(buffer, kept.writing)
        return kept

    def _write(self, kept: Kept, buffer: Tensor) -> Work:
        """Start to write a slice from a host buffer to its file."""
        assert kept.file is not None
        write = self.engine.write(kept.file, kept.offset, _as(buffer, kept))
        self.ledger.move(Tier.HOST, Tier.DISK, kept.nbytes)
        return write

    def _check_space(self, nbytes: int) -> None:
        """Raise SwapError if the disk has no space for one more slice (at the first: also for those expected to follow)."""
        needed = sum(space.used_nbytes for _, space in self._files) + -(-nbytes // ALIGN) * ALIGN
        if needed <= self._checked_nbytes:
            return
        foreseen = needed if self._files else needed * (1 + self.foreseen)
        # files that exist need no more free space: this rank's, and those of all ranks below the same path
        mine = sum(map(_taken_nbytes, self.folder.path.glob(f"{_NAME}-*")))
        everyone = sum(map(_taken_nbytes, self.folder.path.parent.glob(f"zeroshard-swap-*/{_NAME}-*")))
        try:
            self.folder.check_space(foreseen - mine, max(foreseen * self.ranks - everyone, foreseen - mine))
        except SwapError as error:
            raise SwapError(
                f"{error}. The need was estimated as {1 + self.foreseen} activation checkpoints in a forward, each as large as the first: "
                "if the others are smaller, give the bytes of all of them as arena_nbytes="
            ) from None
        self._checked_nbytes = needed  # not `foreseen`, which is a guess

    def _add_file(self, nbytes: int) -> tuple[File, Space]:
        space = Space(nbytes, ALIGN)
        self._files.append((self.folder.file(f"{_NAME}-{len(self._files)}", space.nbytes), space))
        self.arena_nbytes += space.nbytes
        self.allocations += 1
        return self._files[-1]

    def fetch(self, kept: Kept, wait: bool) -> None:
        if kept.ahead is not None or not (wait or kept.writing.done()):
            return
        assert kept.file is not None
        kept.writing.wait()
        buffer = self.buffers.take_fitting(kept.nbytes)
        kept.ahead = (buffer, self.engine.read(kept.file, kept.offset, _as(buffer, kept)))
        self.ledger.move(Tier.DISK, Tier.HOST, kept.nbytes)

    def get(self, kept: Kept) -> Tensor:
        self.fetch(kept, wait=True)
        assert kept.ahead is not None
        buffer, read = kept.ahead
        read.wait()
        if not self.links.separate:
            return _as(buffer, kept)
        target = torch.empty(kept.numel, dtype=kept.dtype, device=self.device)
        copy = self.links.copy(target, _as(buffer, kept), Tier.HOST, Tier.DEVICE)
        copy.join()
        kept.ahead = (buffer, copy)
        return target

    def drop(self, kept: Kept) -> None:
        super().drop(kept)
        self._dying.append(kept)

    def _bury(self) -> None:
        """Free the slots of dropped slices whose requests are done; an old one could else run after the slot's next write."""
        dying, self._dying = self._dying, []
        for kept in dying:
            if kept.writing.done() and (kept.vain is None or kept.vain.done()):
                assert kept.space is not None
                kept.space.give(kept.offset, kept.nbytes)
            else:
                self._dying.append(kept)

    def close(self) -> None:
        super().close()
        self.engine.close()
        self.folder.close()
        self._files, self.arena_nbytes = [], 0


class ImaginedDiskBacking(_DiskBacking):
    """DiskBacking of a dry run: it takes host buffers and counts transfers, but writes nothing."""

    def put(self, part: Tensor, numel: int) -> Kept:
        kept = Kept(numel, part.dtype, numel * part.dtype.itemsize)
        buffer = self.buffers.take_fitting(kept.nbytes)
        imagine(self.links, *self.path, nbytes=kept.nbytes)
        self.buffers.give(buffer)
        self.ledger.enter(CHECKPOINTS, kept.nbytes, Tier.DISK)
        return kept

    def fetch(self, kept: Kept, wait: bool) -> None:
        if kept.ahead is None:
            kept.ahead = self.buffers.take_fitting(kept.nbytes), imagine(self.links, *self.path[::-1], nbytes=kept.nbytes)

    def get(self, kept: Kept) -> Tensor:
        self.fetch(kept, wait=True)
        assert kept.ahead is not None
        buffer, move = kept.ahead
        move.join()
        return torch.empty(kept.numel, dtype=kept.dtype, device=self.device) if self.links.separate else _as(buffer, kept)


def _taken_nbytes(path: Path) -> int:
    """Return the bytes that a file takes on the disk; 0 if it is gone (another rank may remove its files meanwhile)."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def _as(buffer: Tensor, kept: Kept) -> Tensor:
    """Return the part of a host buffer (bytes) that a slice fills, viewed in its dtype."""
    return buffer[: kept.nbytes].view(kept.dtype)
