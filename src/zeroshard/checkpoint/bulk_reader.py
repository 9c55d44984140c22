"""Read a checkpoint in one pass: reads are noted first, then carried out in the order of the files and verified.

    add      tensor a <- file 0 [64, 900k)     tensor b <- file 0 [901k, 5M)     ...
    read     file 0 | window | window | ...    direct I/O, several ahead; checksum of each block
             -> copied to new tensors, which nothing refers to yet (new optimizer states)
             -> or to a copy beside a tensor in use, which may change only after all blocks are verified

So a damaged block is found before anything has changed. Since checksums are of whole blocks, whole blocks are read: if two ranks
need parts of one block, both read it. Copies lie in free buffers of the model's saves, then in new memory. What of a tensor in use
there is no memory for is verified, and read and verified again when the tensor may change.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..comm.pool import BufferPool
from ..errors import CheckpointCorrupt, CheckpointError, OffloadIOError
from ..memory.io.aligned import ALIGN, bytes_of, empty
from ..memory.io.async_file import Engine, Handle, open_file
from ..memory.io.tensor_reader import Stored, StoredCoded
from .file_writer import BUFFER_NBYTES, DIGEST_NBYTES, compare_digests
from .manifest import Manifest

WINDOW_NBYTES, SLOTS = 4 * DIGEST_NBYTES, 8  # size of one read; number of reads at a time
_APART = 64  # alignment of copies in a buffer
_FREELY_NBYTES = 4 * BUFFER_NBYTES  # bytes of copies for which providing memory is not timed
_SLACK_S = 0.005  # times below this are too short to compare


@dataclass(frozen=True)
class _Wanted:
    """A noted read of bytes [begin, end) of a file, elements of `dtype`, into `out`; on the meta device: only to be verified."""

    begin: int
    end: int
    dtype: torch.dtype
    out: Tensor


class Bulk:
    """Reads of one checkpoint of zs.save that are noted (`add`) and then carried out together (`read`); call `close` at the end."""

    def __init__(self, folder: Path, manifest: Manifest, pool: BufferPool) -> None:
        """pool: buffers of the model's saves, of which free ones are borrowed until `close`."""
        self.manifest, self.pool = manifest, pool
        self.entries = {folder / file.name: file for file in manifest.files}
        self.wanted: dict[Path, list[_Wanted]] = {}
        self._in_use: list[
            tuple[Stored, int, Tensor]
        ] = []  # noted reads for tensors in use: (tensor, first element, meta tensor)
        self._copies: dict[tuple[int, int, int], list[Tensor]] = {}  # (id of the stored tensor, first element, number) -> values
        self._coded: list[tuple[StoredCoded, Tensor, int, Tensor]] = []  # (tensor, its bytes once read, first element, values)
        self._engine = Engine()
        self._lent = [buffer for _ in range(SLOTS * WINDOW_NBYTES // BUFFER_NBYTES) if (buffer := pool.borrow()) is not None]
        self._most = self._made_nbytes = 0  # bytes that may still be allocated for copies, and that have been
        self._making_s = self._pace = 0.0  # seconds for providing these, and for reading a byte

    def close(self) -> None:
        """Wait for reads in progress, give the buffers back, and drop the copies."""
        self._engine.close()
        for buffer in self._lent:
            self.pool.give(buffer)
        self._lent, self._in_use, self._copies = [], [], {}

    def add(self, stored: Stored, start: int, out: Tensor) -> None:
        """Note a read of elements [start, start + n) of a stored tensor into `out` (n,); on meta: for a later `take`."""
        stored = stored.stored if isinstance(stored, _Guarded) else stored
        self._in_use.append((stored, start, out)) if out.is_meta else self._add(stored, start, out)

    def _add(self, stored: Stored, start: int, out: Tensor) -> None:
        for at, first, place in stored.parts(start, out):
            if isinstance(at, StoredCoded):
                begin, coded = at.around(first, place)
                self._add(at.coded, begin, coded)
                self._coded += [] if place.is_meta else [(at, coded, first, place)]
            elif place.numel():
                begin, size = at.offset + first * at.dtype.itemsize, at.dtype.itemsize
                self.wanted.setdefault(at.path, []).append(_Wanted(begin, begin + place.numel() * size, at.dtype, place))

    @torch.no_grad()
    def read(self, most: int) -> None:
        """Read and verify all noted reads. most: bytes that may be allocated for copies beside tensors in use.

        Raises CheckpointCorrupt, or CheckpointError if a file cannot be read; the contents of destinations are then undefined.
        """
        self._most = most
        new = [self.pool.make(BUFFER_NBYTES) for _ in range(SLOTS * WINDOW_NBYTES // BUFFER_NBYTES - len(self._lent))]
        self._slots = itertools.cycle([slot for buffer in (*self._lent, *new) for slot in buffer.split(WINDOW_NBYTES)])
        try:
            left = empty(0, torch.uint8)  # of a buffer for copies
            for stored, start, out in sorted(self._in_use, key=lambda noted: noted[2].nbytes):
                left = self._add_copies(stored, start, out, left)
            self._carry_out()
        except OffloadIOError as error:
            raise CheckpointError(f"{error}. Nothing was changed.") from None

    def _add_copies(self, stored: Stored, start: int, out: Tensor, left: Tensor) -> Tensor:
        """Note reads into copies, in `left` and further buffers, of what there is memory for. Return what is left of the last one."""
        done, size, copies = 0, out.dtype.itemsize, list[Tensor]()
        while done < out.numel():
            left = left if left.numel() >= size else self._further()
            if not (count := min(left.numel() // size, out.numel() - done)):
                self._add(stored, start + done, out[done:])  # only to be verified
                break
            copies.append(left[: count * size].view(out.dtype))
            self._add(stored, start + done, copies[-1])
            done, left = done + count, left[-(-count * size // _APART) * _APART :]
        self._copies[id(stored), start, out.numel()] = copies
        return left

    def _further(self) -> Tensor:
        """Return a further buffer for copies, (n,) uint8: a free one of the pool, or a new one; (0,) if there is none.

        Some systems provide pages more slowly than a disk reads (docs/log.md, 2026-11-22): then reading twice takes less time.
        """
        if (buffer := self.pool.borrow()) is not None:
            self._lent.append(buffer)
            return buffer
        nbytes, begin = max(min(self._most, BUFFER_NBYTES), 0), time.monotonic()
        self._most -= nbytes
        try:
            buffer = empty(nbytes, torch.uint8)
        except (MemoryError, RuntimeError, OSError):  # torch raises RuntimeError where memory is short
            self._most = 0
            return empty(0, torch.uint8)
        if self._made_nbytes >= _FREELY_NBYTES and nbytes:
            buffer[::ALIGN].zero_()  # pages are provided when they are first touched
            self._making_s += time.monotonic() - begin
            self._pace = self._pace or self._measured()
            if self._making_s > _SLACK_S + self._pace * (self._made_nbytes + nbytes - _FREELY_NBYTES):
                self._most = 0
        self._made_nbytes += nbytes
        return buffer

    def _measured(self) -> float:
        """Return the seconds for reading a byte. Raises OffloadIOError."""
        path, entry = max(self.entries.items(), key=lambda item: item[1].nbytes)
        file, begin = open_file(path, entry.nbytes), time.monotonic()
        try:
            windows = itertools.islice(
                _windows([_Wanted(0, entry.nbytes, torch.uint8, empty(0, torch.uint8))], entry.nbytes), SLOTS
            )
            reads = [self._engine.read(file, at, next(self._slots)[: end - at]) for at, end in windows]
            for read in reads:
                read.wait()
        finally:
            file.close()
        return (time.monotonic() - begin) / min(entry.nbytes, SLOTS * WINDOW_NBYTES)

    def _carry_out(self) -> None:
        """Read and verify what is noted. Raises OffloadIOError, CheckpointCorrupt."""
        wanted, coded_tensors, self.wanted, self._coded = self.wanted, self._coded, {}, []
        for path, noted in wanted.items():
            remaining, delivered = deque(sorted(noted, key=lambda each: each.begin)), 0
            for begin, memory in self._verified(path, _windows(remaining, self.entries[path].nbytes)):
                delivered += _deliver(begin, memory, remaining)
            nbytes = sum(each.end - each.begin for each in noted)
            assert delivered == nbytes, f"{path}: {delivered} of {nbytes} bytes"
        for stored, coded, first, place in coded_tensors:
            stored.decode(coded, first, place)

    @torch.no_grad()
    def take(self, stored: Stored, start: int, out: Tensor) -> None:
        """Fill `out` (n,) with elements [start, start + n) of a stored tensor, from copies, or else from its file.

        What was noted is verified again where it is read again, since the file may have changed. Raises OSError, OffloadIOError,
        CheckpointCorrupt.
        """
        copies, done = self._copies.pop((id(stored), start, out.numel()), None), 0
        if copies is None:
            stored.read(start, out)
            return
        for copy in copies:
            out[done : done + copy.numel()].copy_(copy)
            done += copy.numel()
        if done < out.numel():
            self._add(stored, start + done, out[done:])
            self._carry_out()

    def _verified(self, path: Path, windows: Iterator[tuple[int, int]]) -> Iterator[tuple[int, Tensor]]:
        """Yield (first byte, memory) of each window of a file, in order, after its checksums have been compared.

        The memory is valid until the next window is asked for.
        """
        under_way: deque[tuple[int, Tensor, Handle]] = deque()
        file = open_file(path, self.entries[path].nbytes)
        try:
            for window in itertools.chain(windows, itertools.repeat(None, SLOTS)):
                if under_way and (window is None or len(under_way) == SLOTS):
                    begin, memory, handle = under_way.popleft()
                    handle.wait()
                    compare_digests(path, self.entries[path].digests, begin, bytes_of(memory))
                    yield begin, memory
                if window is not None:
                    memory = next(self._slots)[: window[1] - window[0]]
                    under_way.append((window[0], memory, self._engine.read(file, window[0], memory)))
        finally:
            file.close()


def _windows(wanted: Iterable[_Wanted], file_nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield [begin, end) of the blocks that cover the noted reads (in order), as windows of adjacent blocks."""
    spans = [(0, 0)]
    for each in wanted:
        first = each.begin // DIGEST_NBYTES * DIGEST_NBYTES
        last = min(-(-each.end // DIGEST_NBYTES) * DIGEST_NBYTES, file_nbytes)
        begin, end = spans[-1]
        if first > end:
            spans.append((first, last))
        else:
            spans[-1] = begin, max(end, last)
    for begin, end in spans:
        for at in range(begin, end, WINDOW_NBYTES):
            yield at, min(at + WINDOW_NBYTES, end)


def _deliver(begin: int, memory: Tensor, wanted: deque[_Wanted]) -> int:
    """Copy a window's bytes to the noted reads that overlap it; return how many. Reads that end before it are removed."""
    end, delivered = begin + memory.numel(), 0
    while wanted and wanted[0].end <= begin:
        wanted.popleft()
    for each in wanted:
        if each.begin >= end:
            break
        first, last = max(each.begin, begin), min(each.end, end)
        if first < last:
            size = each.dtype.itemsize
            delivered += last - first
            if not each.out.is_meta:
                values = memory[first - begin : last - begin].view(each.dtype)
                each.out[(first - each.begin) // size : (last - each.begin) // size].copy_(values)
    return delivered


@dataclass
class Reading:
    """Reads that keep the first error in `error` and then do nothing, so that ranks stay in step and all raise it at the end.

    bulk: has read the tensors already; None: they are read from their files.
    """

    bulk: Bulk | None = None
    error: Exception | None = None

    def close(self) -> None:
        """Close `bulk`; what is read from now on is read from files."""
        if self.bulk is not None:
            self.bulk.close()

    def guard(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return the same tensors with a `read` that keeps its error in `error` instead of raising it."""
        return {name: _Guarded(tensor.dtype, tensor.shape, tensor, self) for name, tensor in stored.items()}


@dataclass(frozen=True)
class _Guarded(Stored):
    dtype: torch.dtype
    shape: tuple[int, ...]
    stored: Stored
    reading: Reading

    def read(self, start: int, out: Tensor) -> None:
        bulk = self.reading.bulk
        if self.reading.error is None:
            try:
                self.stored.read(start, out) if bulk is None else bulk.take(self.stored, start, out)
            except (OSError, OffloadIOError, CheckpointCorrupt) as error:
                self.reading.error = error
