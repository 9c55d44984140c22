"""Read a checkpoint in one pass: reads are noted first, then carried out in the order of the files and verified.

    add      tensor a <- file 0 [64, 900k)     tensor b <- file 0 [901k, 5M)     ...
    read     file 0 | window | window | ...    direct I/O, several ahead; checksum of each block
             -> copied to new tensors, which nothing refers to yet (new optimizer states)
             -> or to a copy beside a tensor in use, which may change only after all blocks are verified

So a damaged block is found before anything has changed. Since checksums are of whole blocks, whole blocks are read: if two ranks
need parts of one block, both read it. Copies lie in free buffers of the model's saves, then in a little new memory. What of tensors
in use has no copy is verified, and read and verified again when the tensors may change, in the order of the notes and ahead.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointCorrupt, CheckpointError, OffloadIOError
from ..seam import BufferPool
from ..state import Stored, StoredCoded
from ..tiers.io import Engine, File, Handle, open_file
from ..utils.aligned import bytes_of, empty
from .file_writer import BUFFER_NBYTES, DIGEST_NBYTES, compare_digests
from .manifest import Manifest

WINDOW_NBYTES, SLOTS = 4 * DIGEST_NBYTES, 8  # size of one read; number of reads at a time
_APART = 64  # alignment of copies in a buffer
# Bytes of new memory for copies, of the smallest tensors first, which share blocks. What is larger is sooner read twice than copied
# into memory whose pages the system must provide (400 MB: 0.40 s and 0.51).
_COPIED_NBYTES = 4 * BUFFER_NBYTES


@dataclass(frozen=True)
class _Wanted:
    """A noted read of bytes [begin, end) of a file, elements of `dtype`, into `out`; on the meta device: only to be verified."""

    begin: int
    end: int
    dtype: torch.dtype
    out: Tensor


_Key = tuple[int, int, int]  # of a noted read for a tensor in use: id of the stored tensor, first element, number of elements


def _wanted(at: Any, first: int, place: Tensor) -> _Wanted:
    """Return the read of elements [first, first + n) of a tensor in a file into `place` (n,)."""
    begin = at.offset + first * at.dtype.itemsize
    return _Wanted(begin, begin + place.numel() * at.dtype.itemsize, at.dtype, place)


def _by_file(parts: Iterable[tuple[Any, int, Tensor]]) -> dict[Path, deque[_Wanted]]:
    """Return the reads of the parts of a tensor (tensor in a file, first element, place) by file, in the order of their bytes."""
    found: dict[Path, list[_Wanted]] = {}
    for at, first, place in parts:
        if place.numel():
            found.setdefault(at.path, []).append(_wanted(at, first, place))
    return {path: deque(sorted(noted, key=lambda each: each.begin)) for path, noted in found.items()}


class Bulk:
    """Reads of one checkpoint of zs.save that are noted (`add`) and then carried out together (`read`); call `close` at the end."""

    def __init__(self, folder: Path, manifest: Manifest, pool: BufferPool) -> None:
        """pool: buffers of the model's saves, of which free ones are borrowed until `close`."""
        self.manifest, self.pool = manifest, pool
        self.entries = {folder / file.name: file for file in manifest.files}
        self.wanted: dict[Path, list[_Wanted]] = {}
        # noted reads for tensors in use: (tensor, first element, meta tensor)
        self._in_use: list[tuple[Stored, int, Tensor]] = []
        self._copies: dict[_Key, list[Tensor]] = {}
        self._files: dict[Path, File] = {}  # that are read a second time
        # second reads: (key, file, first byte, memory, read)
        self._under_way: deque[tuple[_Key, Path, int, Tensor, Handle]] = deque()
        self._upcoming: Iterator[tuple[_Key, Path, int, int]] | None = None  # further ones: (key, file, [begin, end) of a window)
        self._coded: list[tuple[StoredCoded, Tensor, int, Tensor]] = []  # (tensor, its bytes once read, first element, values)
        self._engine = Engine()
        self._lent = [buffer for _ in range(SLOTS * WINDOW_NBYTES // BUFFER_NBYTES) if (buffer := pool.borrow()) is not None]
        self._most = 0  # bytes that may still be allocated for copies

    def close(self) -> None:
        """Wait for reads in progress, give the buffers back, and drop the copies."""
        self._engine.close()
        for file in self._files.values():
            file.close()
        self._files, self._upcoming = {}, None
        self._under_way.clear()
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
                self.wanted.setdefault(at.path, []).append(_wanted(at, first, place))

    @torch.no_grad()
    def read(self, most: int) -> None:
        """Read and verify all noted reads. most: bytes that may be allocated for copies beside tensors in use.

        Raises CheckpointCorrupt, or CheckpointError if a file cannot be read; the contents of destinations are then undefined.
        """
        self._most = max(min(most, _COPIED_NBYTES), 0)
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
        """Return a further buffer for copies, (n,) uint8: a free one of the pool, or a new one; (0,) if there is none."""
        if (buffer := self.pool.borrow()) is not None:
            self._lent.append(buffer)
            return buffer
        nbytes = min(self._most, BUFFER_NBYTES)
        self._most -= nbytes
        try:
            return empty(nbytes, torch.uint8)
        except (MemoryError, RuntimeError, OSError):  # torch raises RuntimeError where memory is short
            self._most = 0
            return empty(0, torch.uint8)

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
        key, done = (id(stored), start, out.numel()), 0
        if key not in self._copies:
            stored.read(start, out)
            return
        for copy in self._copies[key]:
            out[done : done + copy.numel()].copy_(copy)
            done += copy.numel()
        if done < out.numel() and not self._take_again(key, stored, start + done, out[done:]):
            self._add(stored, start + done, out[done:])
            self._carry_out()
        del self._copies[key]

    def _take_again(self, key: _Key, stored: Stored, start: int, out: Tensor) -> bool:
        """Fill `out` from windows that are read ahead, in the order of the notes; return whether this read is the next of them."""
        if self._upcoming is None:
            self._upcoming = self._second_reads()
        self._read_ahead()
        if not self._under_way or self._under_way[0][0] != key:  # asked for in another order, or encoded: begin anew after it
            while self._under_way:
                self._under_way.popleft()[-1].wait()
            self._upcoming = None
            return False
        remaining, delivered = _by_file(stored.parts(start, out)), 0
        while self._under_way and self._under_way[0][0] == key:
            _, path, begin, memory, handle = self._under_way.popleft()
            handle.wait()
            compare_digests(path, self.entries[path].digests, begin, bytes_of(memory))
            delivered += _deliver(begin, memory, remaining[path])
            self._read_ahead()
        assert delivered == out.nbytes, f"{stored}: {delivered} of {out.nbytes} bytes"
        return True

    def _second_reads(self) -> Iterator[tuple[_Key, Path, int, int]]:
        """Yield the windows of tensors that are still to be taken and have no whole copy, in the order of the notes, but encoded ones."""
        for stored, start, out in self._in_use:
            key = id(stored), start, out.numel()
            done = sum(copy.numel() for copy in self._copies.get(key, ()))
            parts = list(stored.parts(start + done, out[done:])) if key in self._copies and done < out.numel() else []
            if any(isinstance(at, StoredCoded) for at, _, _ in parts):
                continue
            for path, noted in _by_file(parts).items():
                for begin, end in _windows(noted, self.entries[path].nbytes):
                    yield key, path, begin, end

    def _read_ahead(self) -> None:
        """Begin second reads until all slots are in use."""
        assert self._upcoming is not None
        for key, path, begin, end in itertools.islice(self._upcoming, SLOTS - len(self._under_way)):
            if path not in self._files:
                self._files[path] = open_file(path, self.entries[path].nbytes)
            memory = next(self._slots)[: end - begin]
            self._under_way.append((key, path, begin, memory, self._engine.read(self._files[path], begin, memory)))

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
