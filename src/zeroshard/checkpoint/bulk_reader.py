"""Read a checkpoint in one pass: reads are noted first, then carried out in the order of the files and verified.

    add      tensor a <- file 0 [64, 900k)     tensor b <- file 0 [901k, 5M)     ...
    read     file 0 | window | window | ...    direct I/O, several ahead; checksum of each block
             -> copied to new tensors, which nothing refers to yet (new optimizer states)
             -> or kept in its buffer, while buffers last, if it belongs to a tensor in use, which may change only after all
                blocks are verified
    Kept     then serves the noted reads of tensors in use; it reads and verifies windows that were not kept once more

So a damaged block is found before anything has changed. Since checksums are of whole blocks, whole blocks are read: if two ranks
need parts of one block, both read it.

Allocating memory can take longer than reading the same bytes a second time: a hypervisor may have to provide the pages first (at
0.4 GiB/s in one measurement, docs/log.md), and page-locking takes time. So `Room` times its allocations, compares them with the
reads, and allocates no more once reading again is faster.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..comm.pool import BufferPool
from ..errors import CheckpointCorrupt, CheckpointError, OffloadIOError
from ..memory.io.aligned import ALIGN, bytes_of, round_up
from ..memory.io.async_file import Engine, File, Handle, open_file
from ..memory.io.tensor_reader import Stored, StoredCoded, StoredTensor, Stretch
from .manifest import Manifest
from .rank_file import BUFFER_NBYTES, DIGEST_NBYTES, compare_digests

WINDOW_NBYTES, SLOTS = 4 * DIGEST_NBYTES, 8  # size of one read; number of slots for passing memory
_WORTH = 1.0  # allocating may take this many times as long as reading the same bytes again
_SLACK_S = 0.005  # times below this are too short to compare
_PASSING = SLOTS * WINDOW_NBYTES // BUFFER_NBYTES  # number of buffers that the slots take
_AHEAD = 16  # number of windows that `ahead` reads before the needed ones are known
_AGAIN = 2  # number of windows that `_once_more` reads together: the one asked for, and the next


@dataclass(frozen=True)
class _Wanted:
    """A noted read of bytes [begin, end) of a file, elements of `dtype`.

    out: the destination; on the meta device if the caller will ask for these elements later (Kept.read).
    """

    begin: int
    end: int
    dtype: torch.dtype
    out: Tensor


@dataclass(frozen=True)
class _Window:
    """Bytes [begin, end) of a file, one read. lasts: the caller will ask for some of them later, so they should be kept."""

    begin: int
    end: int
    lasts: bool


@dataclass(frozen=True)
class _Landing:
    """A read in progress of a window, from byte `begin` on, into `memory`.

    kept: `memory` holds the window until the room is closed; else later windows are read into it.
    """

    begin: int
    memory: Tensor
    handle: Handle
    kept: bool


class Bulk:
    """Reads of one checkpoint of zs.save that are noted (`add`) and then carried out together (`read`); call `close` at the end."""

    def __init__(self, folder: Path, manifest: Manifest, room: Room) -> None:
        self.manifest, self.room = manifest, room
        self.entries = {folder / file.name: file for file in manifest.files}
        self.wanted: dict[Path, list[_Wanted]] = {}
        self._coded: list[tuple[StoredCoded, Tensor, int, Tensor]] = []  # (tensor, its bytes once read, first element, values)
        self._engine, self._files = Engine(), dict[Path, File]()
        self._ahead: dict[tuple[Path, int, int], _Landing] = {}
        self._under_way: deque[_Landing] = deque()
        self._first: list[_Landing] = []  # the first reads, begun in a row from the time `_started` on: they measure the pace
        self._started = 0.0

    def close(self) -> None:
        """Wait for reads in progress, and give the buffers back."""
        self._engine.close()
        for file in self._files.values():
            file.close()
        self.room.close()

    def ahead(self, path: Path) -> None:
        """Begin to read a file into free buffers, since this rank will probably need most of it. `read` raises its I/O errors."""
        for begin, end in itertools.islice(_cut(0, self.entries[path].nbytes), _AHEAD):
            memory = self.room.lasting(end - begin, None)
            if memory is None:
                return
            with suppress(OffloadIOError):
                self._ahead[path, begin, end] = self.begin(path, begin, memory, kept=True)

    def add(self, stored: Stored, start: int, out: Tensor) -> None:
        """Note a read of elements [start, start + n) of a stored tensor into `out` (n,); on meta: for a later `Kept.read`."""
        for at, first, place in stored.parts(start, out):
            if isinstance(at, StoredCoded):
                begin, coded = at.around(first, place)
                self.add(at.coded, begin, coded)
                self._coded += [] if place.is_meta else [(at, coded, first, place)]
            elif place.numel():
                self.wanted.setdefault(at.path, []).append(_wanted(at, first, place))

    @torch.no_grad()
    def read(self, most: int) -> Kept:
        """Read and verify all noted reads. most: bytes of memory, besides the pool's, that may be allocated to keep windows.

        Raises CheckpointCorrupt, or CheckpointError if a file cannot be read; the contents of destinations are then undefined.
        """
        kept, wanted = Kept(self), {path: sorted(noted, key=lambda each: each.begin) for path, noted in self.wanted.items()}
        windows = {path: _windows(noted, self.entries[path].nbytes) for path, noted in wanted.items()}
        new = [
            window for path, found in windows.items() for window in found if (path, window.begin, window.end) not in self._ahead
        ]
        self.room.plan([window.end - window.begin for window in new if window.lasts], all(window.lasts for window in new), most)
        try:
            for path, noted in wanted.items():
                remaining, delivered = deque(noted), 0
                for landing in self._verified(path, windows[path]):
                    delivered += _deliver(landing.begin, landing.memory, remaining)
                    kept.note(path, landing)
                nbytes = sum(each.end - each.begin for each in noted)
                assert delivered == nbytes, f"{path}: {delivered} of {nbytes} bytes"
        except OffloadIOError as error:
            raise CheckpointError(f"{error}. Nothing was changed.") from None
        for stored, coded, first, place in self._coded:
            stored.decode(coded, first, place)
        self.wanted, self._coded = {}, []
        return kept

    def begin(self, path: Path, begin: int, memory: Tensor, kept: bool) -> _Landing:
        """Start to read a window. Raises OffloadIOError."""
        if path not in self._files:
            self._files[path] = open_file(path, self.entries[path].nbytes)
        self._started = self._started or time.monotonic()
        landing = _Landing(begin, memory, self._engine.read(self._files[path], begin, memory), kept)
        if len(self._first) < SLOTS:
            self._first.append(landing)
        return landing

    def check(self, path: Path, landing: _Landing) -> _Landing:
        """Wait until a window has been read, compare its checksums, and return it. Raises OffloadIOError, CheckpointCorrupt."""
        landing.handle.wait()
        compare_digests(path, self.entries[path].digests, landing.begin, bytes_of(landing.memory))
        return landing

    def _verified(self, path: Path, windows: list[_Window]) -> Iterator[_Landing]:
        """Yield the windows of a file, in order, each after its checksums have been compared.

        Memory of a window that is not kept is valid until SLOTS further windows have been requested.
        """
        for window in windows:
            if len(self._under_way) == SLOTS:
                yield self.check(path, self._under_way.popleft())
            landing = self._ahead.pop((path, window.begin, window.end), None)
            if landing is None:
                nbytes = window.end - window.begin
                memory = self.room.lasting(nbytes, self._pace) if window.lasts else None
                kept = memory is not None
                landing = self.begin(path, window.begin, memory if memory is not None else self.room.passing(nbytes), kept)
            self._under_way.append(landing)
        while self._under_way:
            yield self.check(path, self._under_way.popleft())

    def _pace(self) -> float | None:
        """Return the measured seconds for reading one byte; None if nothing has been read."""
        if not self._first:
            return None
        with suppress(OffloadIOError):  # `check` raises it when this window is needed
            self._first[0].handle.wait()
        # reads overlap, so one alone would show too slow a disk
        done = [landing for landing in self._first if landing.handle.done()]
        return (max(landing.handle.ended for landing in done) - self._started) / sum(landing.memory.numel() for landing in done)


def _wanted(stored: StoredTensor, start: int, out: Tensor) -> _Wanted:
    begin = stored.offset + start * stored.dtype.itemsize
    return _Wanted(begin, begin + out.numel() * stored.dtype.itemsize, stored.dtype, out)


def _windows(wanted: list[_Wanted], file_nbytes: int) -> list[_Window]:
    """Return the blocks that cover the noted reads (in order), joined to windows of adjacent blocks."""
    spans = [(0, 0)]
    for each in wanted:
        first = each.begin // DIGEST_NBYTES * DIGEST_NBYTES
        last = min(-(-each.end // DIGEST_NBYTES) * DIGEST_NBYTES, file_nbytes)
        begin, end = spans[-1]
        if first > end:
            spans.append((first, last))
        else:
            spans[-1] = begin, max(end, last)
    asked, windows = deque(each for each in wanted if each.out.is_meta), []
    for begin, end in (window for span in spans for window in _cut(*span)):
        while asked and asked[0].end <= begin:
            asked.popleft()
        windows.append(
            _Window(begin, end, bool(asked) and asked[0].begin < end)
        )  # lasts if a read that is asked for later overlaps it
    return windows


def _cut(begin: int, end: int) -> Iterator[tuple[int, int]]:
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


class Kept:
    """Result of `Bulk.read`: `read` serves noted reads from the kept windows.

    It reads and verifies a window again for which there was no memory. Reads that were not noted, of small tensors that
    `resolver.check_digests` has verified, go to the file.
    """

    def __init__(self, bulk: Bulk) -> None:
        self.bulk = bulk
        self.windows: dict[Path, list[tuple[int, int, Tensor | None]]] = {}  # (first byte, nbytes, memory if kept), in order
        self._again: OrderedDict[tuple[Path, int], tuple[_Landing, Tensor]] = OrderedDict()  # LRU of windows read again
        self._checked: set[tuple[Path, int]] = set()

    def note(self, path: Path, landing: _Landing) -> None:
        """Record the next window of a file."""
        memory = landing.memory
        self.windows.setdefault(path, []).append((landing.begin, memory.numel(), memory if landing.kept else None))

    @torch.no_grad()
    def read(self, stored: Stored, start: int, out: Tensor) -> None:
        """Fill `out` (n,) with elements [start, start + n) of a stored tensor. Raises OSError, OffloadIOError, CheckpointCorrupt."""
        for at, first, place in stored.parts(start, out):
            if isinstance(at, StoredCoded):
                at_byte, coded = at.around(first, place)
                self.read(at.coded, at_byte, coded)
                at.decode(coded, first, place)
                continue
            if not place.numel():
                continue
            wanted = deque([_wanted(at, first, place)])
            begin, end = wanted[0].begin, wanted[0].end
            windows, delivered = self.windows.get(at.path, []), 0
            for number in range(max(bisect_right(windows, begin, key=lambda window: window[0]) - 1, 0), len(windows)):
                window, nbytes, memory = windows[number]
                if window >= end:
                    break
                if window + nbytes > begin:
                    delivered += _deliver(window, self._once_more(at.path, number) if memory is None else memory, wanted)
            if delivered != end - begin:
                at.fill(first, place)

    def _once_more(self, path: Path, number: int) -> Tensor:
        """Read a window that was not kept again, verify it, and return its memory. Start to read the next such window, too."""
        windows, key = self.windows[path], (path, number)
        if key in self._again:
            self._again.move_to_end(key)
        for other in range(number, min(number + _AGAIN, len(windows))):
            begin, nbytes, memory = windows[other]
            if memory is None and (path, other) not in self._again:
                slot = self._slot()
                self._again[path, other] = self.bulk.begin(path, begin, slot[:nbytes], kept=False), slot
        landing, _ = self._again[key]
        if key not in self._checked:
            self.bulk.check(path, landing)
            self._checked.add(key)
        return landing.memory

    def _slot(self) -> Tensor:
        """Return a slot for a window: a new one, or that of the least recently used window."""
        if len(self._again) < SLOTS:
            return self.bulk.room.passing(WINDOW_NBYTES)
        key, (landing, slot) = self._again.popitem(last=False)
        self._checked.discard(key)
        with suppress(OffloadIOError):  # its data is not needed, and so neither is its error
            landing.handle.wait()
        return slot


@dataclass
class Reading:
    """Reads that keep the first error in `error` and then do nothing, so that ranks stay in step and all raise it at the end.

    kept: the result of `Bulk.read`, from which tensors are then read; None: they are read from files.
    """

    kept: Kept | None = None
    error: Exception | None = None

    def guard(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return the same tensors with a `read` that keeps its error in `error` instead of raising it."""
        return {name: _Guarded(tensor.dtype, tensor.shape, tensor, self) for name, tensor in stored.items()}


@dataclass(frozen=True)
class _Guarded(Stored):
    dtype: torch.dtype
    shape: tuple[int, ...]
    stored: Stored
    reading: Reading

    def parts(self, start: int, out: Tensor) -> Iterator[Stretch]:
        return self.stored.parts(start, out)

    def read(self, start: int, out: Tensor) -> None:
        kept = self.reading.kept
        if self.reading.error is None:
            try:
                self.stored.read(start, out) if kept is None else kept.read(self.stored, start, out)
            except (OSError, OffloadIOError, CheckpointCorrupt) as error:
                self.reading.error = error


class Room:
    """Memory for reading a checkpoint: buffers of the model's saves, borrowed from their pool until `close`, and new ones.

    lasting   memory that is valid until the room is closed; None if there is no more, or reading twice is faster
    passing   memory from a few slots in turn: valid until SLOTS further ones have been requested
    """

    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool
        self.most = 0  # bytes that may be allocated
        self._lent: list[Tensor] = []
        self._apart: list[Tensor] = []  # buffers that are split into the slots of `passing`
        self._slots: Iterator[Tensor] | None = None
        self._buffer: Tensor | None = None  # buffer of `lasting`, used up to `_at`
        self._at = 0
        self._made_nbytes, self._making_s, self._closed_to_more = 0, 0.0, False
        self._pace: float | None = None  # seconds to read a byte, measured before anything was allocated

    def close(self) -> None:
        """Return borrowed buffers to the pool and free new ones. The caller has waited for all reads into them."""
        for buffer in self._lent:
            self.pool.give(buffer)
        self._lent, self._apart, self._slots, self._buffer = [], [], None, None
        self._closed_to_more = True

    def plan(self, sizes: Iterable[int], all_last: bool, most: int) -> None:
        """Announce windows of these sizes for `lasting`, and reserve buffers for `passing` if it will be called.

        all_last: `passing` is called only if memory for `lasting` runs out. most: bytes that may be allocated besides the pool.
        """
        self.most = most
        count, at = 0, self._at if self._buffer is not None else BUFFER_NBYTES
        for nbytes in sizes:
            if at + nbytes > BUFFER_NBYTES:  # a window lies in one buffer
                count, at = count + 1, 0
            at += round_up(nbytes)
        if not all_last or count > self.pool.free:
            self._set_apart()

    def passing(self, nbytes: int) -> Tensor:
        """Return passing memory (nbytes,), at most a window. Raise MemoryError, RuntimeError or OSError without any."""
        if self._slots is None:
            self._set_apart()
            self._slots = itertools.cycle([slot for buffer in self._apart for slot in buffer.split(WINDOW_NBYTES)])
        return next(self._slots)[:nbytes]

    def lasting(self, nbytes: int, pace: Callable[[], float | None] | None) -> Tensor | None:
        """Return lasting memory (nbytes,), at most a window, or None.

        pace: returns the seconds to read a byte, or None. Without it: only from free buffers of the pool that `passing` will not
        need.
        """
        if self._buffer is None or self._at + nbytes > BUFFER_NBYTES:
            buffer = self._take() if pace is not None or self.pool.free > _PASSING else None
            if buffer is None and pace is not None:
                buffer = self._make(pace)
            if buffer is None:
                return None
            self._buffer, self._at = buffer, 0
        begin = self._at
        self._at += round_up(nbytes)
        return self._buffer[begin : begin + nbytes]

    def _take(self) -> Tensor | None:
        buffer = self.pool.borrow()
        if buffer is not None:
            self._lent.append(buffer)
        return buffer

    def _set_apart(self) -> None:
        while len(self._apart) < _PASSING:
            buffer = self._take()
            self._apart.append(self.pool.make(BUFFER_NBYTES) if buffer is None else buffer)

    def _make(self, pace: Callable[[], float | None]) -> Tensor | None:
        """Allocate a buffer. Return None if there is no memory, or touching its pages is slower than reading again."""
        if self._closed_to_more or self._made_nbytes + BUFFER_NBYTES > self.most:
            return None
        if self._pace is None:
            self._pace = pace()
        begin, nbytes = time.monotonic(), self._made_nbytes + BUFFER_NBYTES
        try:
            buffer = self.pool.make(BUFFER_NBYTES)
        except (MemoryError, RuntimeError, OSError):  # torch raises RuntimeError where memory is short
            self._closed_to_more = True
            return None
        made = time.monotonic()
        for end in range(WINDOW_NBYTES, BUFFER_NBYTES + 1, WINDOW_NBYTES):
            buffer[end - WINDOW_NBYTES : end : ALIGN].zero_()  # pages are provided when they are first touched
            touching_s = time.monotonic() - made
            expected_s = self._making_s + made - begin + touching_s * BUFFER_NBYTES / end
            if self._pace is not None and expected_s > _SLACK_S + _WORTH * self._pace * nbytes:
                self._closed_to_more = True
                return None
        self._making_s, self._made_nbytes = expected_s, nbytes
        return buffer
