"""DiskBacking: slices of activation checkpoints in files (ZeRO-Infinity, arXiv 2104.07857, 5.1.2 and 5.2.3).

    forward    device -> host buffer -> file        writes overlap with the next blocks' computation
    backward   file -> host buffer -> device        reads run ahead, in the reverse of the order of packing

The host buffers are few and of constant size; a forward that is faster than the disk waits for one. A file is an arena, whose
slots every step uses again. A step that needs more adds a file; files never grow. Since files are sparse, a slice may still
find the disk full: free space is checked whenever the files hold more than ever before, and at the first slice also for the
slices that are expected to follow.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ..comm.fake import Watcher
from ..comm.pool import BufferPool
from ..comm.streams import Copy, Streams
from ..config import Offload, Tier
from ..errors import SwapError
from ..memory.io.async_file import ALIGN, Engine, File
from ..memory.io.swap_folder import SwapFolder
from ..memory.ledger import Ledger
from ..utils.host import ranks_here
from ..utils.work import OVER, Work
from .storage import CHECKPOINTS, Backing, Kept, Space

_NAME = "checkpoints"  # prefix of the files' names
_BUFFERS = "buffers of activation checkpoints"  # category in the ledger
_WRITING = 2  # host buffers for writes, in addition to those of prefetched reads


class DiskBacking(Backing):
    """Backing for slices in files, in a swap folder of this rank that is removed at the end."""

    imagines = False

    def __init__(
        self, offload: Offload, device: torch.device, streams: Streams, ledger: Ledger, arena_nbytes: int,
        prefetch: int, rank: int,
    ) -> None:  # fmt: skip
        super().__init__(Tier.DISK, device, streams, ledger, offload.pin_memory)
        self.away = streams.separate_host
        assert offload.path is not None
        self.ranks = ranks_here(1)  # ranks of this host, which may share the disk
        self.folder = SwapFolder(
            offload.path, rank=rank, needed_nbytes=arena_nbytes, host_needed_nbytes=arena_nbytes * self.ranks,
            any_filesystem=offload.any_filesystem,
        )  # fmt: skip
        self._checked_nbytes = arena_nbytes
        self.engine = Engine(checksum=offload.checksum)
        self.buffers = BufferPool(ledger, prefetch + 1 + _WRITING, 0, self.host_memory, Tier.HOST, _BUFFERS)
        self._files: list[tuple[File, Space]] = []
        self._leaving: deque[tuple[Kept, Tensor, Work]] = deque()  # (slice, its host buffer, the copy to it); not written yet
        self._dying: list[Kept] = []  # dropped slices that may still be being written or read
        if arena_nbytes:
            self._add_file(arena_nbytes)

    def put(self, part: Tensor, numel: int) -> Kept:
        self._bury()
        kept = Kept(numel, part.dtype)
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
        target = _as(buffer, kept)[: part.numel()]
        self.ledger.enter(CHECKPOINTS, kept.nbytes, Tier.DISK)
        if self.away:
            self.ledger.move(Tier.DEVICE, Tier.HOST, part.nbytes)
            self._leaving.append((kept, buffer, Copy(self.streams, self.streams.copy(target, part, up=False))))
            self._write(all_but=1)  # the copy of the previous slice has had a block's time to finish
        else:
            target.copy_(part)
            self._leaving.append((kept, buffer, OVER))
            self._write()
        return kept

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

    def _write(self, all_but: int = 0) -> None:
        """Start the writes of slices in host buffers, oldest first, except the newest `all_but`."""
        while len(self._leaving) > all_but:
            kept, buffer, copy = self._leaving.popleft()
            copy.wait()
            assert kept.file is not None
            kept.writing = self.engine.write(kept.file, kept.offset, _as(buffer, kept))
            self.ledger.move(Tier.HOST, Tier.DISK, kept.nbytes)
            self.buffers.give(buffer, kept.writing)

    def fetch(self, kept: Kept, wait: bool) -> None:
        if kept.ahead is not None:
            return
        if kept.writing is None:  # the slice is still in its host buffer: `put` leaves the newest unwritten
            self._write()
        assert kept.writing is not None and kept.file is not None
        if not wait and not kept.writing.done():
            return
        kept.writing.wait()
        buffer = self.buffers.take_fitting(kept.nbytes)
        kept.ahead = (buffer, self.engine.read(kept.file, kept.offset, _as(buffer, kept)))
        self.ledger.move(Tier.DISK, Tier.HOST, kept.nbytes)

    def get(self, kept: Kept) -> Tensor:
        self.fetch(kept, wait=True)
        assert kept.ahead is not None
        buffer, read = kept.ahead
        read.wait()
        if not self.away:
            return _as(buffer, kept)
        target = torch.empty(kept.numel, dtype=kept.dtype, device=self.device)
        copy = Copy(self.streams, self.streams.copy(target, _as(buffer, kept), up=True))
        self.ledger.move(Tier.HOST, Tier.DEVICE, kept.nbytes)
        copy.join()
        kept.ahead = (buffer, copy)
        return target

    def done(self, kept: Kept) -> None:
        if kept.ahead is not None:
            buffer, read = kept.ahead
            self.buffers.give(buffer, None if read.done() else read)  # if it is done, `get` has raised its error, if any
            kept.ahead = None

    def drop(self, kept: Kept) -> None:
        kept.reading = kept.ahead[1] if kept.ahead is not None else None
        super().drop(kept)
        self._dying.append(kept)

    def _bury(self) -> None:
        """Free the slots of dropped slices whose requests are done; an old one could else run after the slot's next write."""
        dying, self._dying = self._dying, []
        for kept in dying:
            if kept.writing is not None and kept.writing.done() and (kept.reading is None or kept.reading.done()):
                assert kept.space is not None
                kept.space.give(kept.offset, kept.nbytes)
            else:
                self._dying.append(kept)

    def close(self) -> None:
        self._write()
        self.buffers.close()
        self.engine.close()
        self.folder.close()
        self._files, self.arena_nbytes = [], 0


class ImaginedDiskBacking(Backing):
    """DiskBacking of a dry run: it takes host buffers and counts transfers, but writes nothing."""

    def __init__(self, device: torch.device, streams: Watcher, ledger: Ledger, prefetch: int) -> None:
        super().__init__(Tier.DISK, device, streams, ledger, pin=False)
        self.path = [Tier.DEVICE, Tier.HOST, Tier.DISK] if streams.separate_host else [Tier.HOST, Tier.DISK]
        self.moved = streams.moved
        self.buffers = BufferPool(ledger, prefetch + 1 + _WRITING, 0, self.host_memory, Tier.HOST, _BUFFERS)

    def _move(self, path: list[Tier], nbytes: int) -> Work:
        """Count a transfer along a path of two or more tiers."""
        for source, target in pairwise(path):
            self.ledger.move(source, target, nbytes)
            ticket = self.moved(source, target, nbytes)
        return Copy(self.streams, ticket)

    def put(self, part: Tensor, numel: int) -> Kept:
        kept = Kept(numel, part.dtype)
        buffer = self.buffers.take_fitting(kept.nbytes)
        self._move(self.path, kept.nbytes)
        self.buffers.give(buffer)
        self.ledger.enter(CHECKPOINTS, kept.nbytes, Tier.DISK)
        return kept

    def fetch(self, kept: Kept, wait: bool) -> None:
        if kept.ahead is None:
            kept.ahead = self.buffers.take_fitting(kept.nbytes), self._move(self.path[::-1], kept.nbytes)

    def get(self, kept: Kept) -> Tensor:
        self.fetch(kept, wait=True)
        assert kept.ahead is not None
        buffer, move = kept.ahead
        move.join()
        return torch.empty(kept.numel, dtype=kept.dtype, device=self.device) if self.streams.separate_host else _as(buffer, kept)

    def done(self, kept: Kept) -> None:
        if kept.ahead is not None:
            self.buffers.give(kept.ahead[0])
            kept.ahead = None

    def close(self) -> None:
        self.buffers.close()


def _taken_nbytes(path: Path) -> int:
    """Return the bytes that a file takes on the disk; 0 if it is gone (another rank may remove its files meanwhile)."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def _as(buffer: Tensor, kept: Kept) -> Tensor:
    """Return the part of a host buffer (bytes) that a slice fills, viewed in its dtype."""
    return buffer[: kept.nbytes].view(kept.dtype)
