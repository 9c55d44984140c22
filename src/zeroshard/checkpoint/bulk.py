"""Reading a checkpoint once: what is needed is noted first, then read in the order of the files and verified on the way.

    note        tensor a <- file 0 [64, 900k)     tensor b <- file 0 [901k, 5M)     ...
    run, keep   file 0 | block | block | block | ...    direct I/O, several windows ahead; checksum of each block
    run         -> copied, window by window, to destinations that nobody uses yet
    keep        -> the windows stay where they are, and whoever asks again gets what he noted from there

So a damaged block is found before anything has changed. Only whole blocks are read, each once; ranks that share a block
both read it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from ..errors import CheckpointCorrupt, CheckpointError, OffloadIOError
from ..memory.aligned import bytes_of, round_up
from ..memory.files import Engine, File, Handle, open_file
from ..weights import StoredTensor
from .datafile import BUFFER_NBYTES, DIGEST_NBYTES, Ring
from .manifest import FileEntry, Manifest

_WINDOW_NBYTES, _WINDOWS = 4 * DIGEST_NBYTES, 8  # of one read; reads under way


@dataclass(frozen=True)
class _Wanted:
    """Bytes [begin, end) of a file, which are elements of `dtype`, are to become `out`."""

    begin: int
    end: int
    dtype: torch.dtype
    out: Tensor


class Bulk:
    """Reads of one checkpoint of ours that are carried out together. `Stored.read(start, out, self)` notes one."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.files = {folder / file.name: file for file in manifest.files}
        self.wanted: dict[Path, list[_Wanted]] = {}

    def add(self, stored: StoredTensor, start: int, out: Tensor) -> None:
        """Note that elements [start, start + n) of a stored tensor are to be put into `out` (n,)."""
        begin = stored.offset + start * stored.dtype.itemsize
        end = begin + out.numel() * stored.dtype.itemsize
        if begin < end:
            self.wanted.setdefault(stored.path, []).append(_Wanted(begin, end, stored.dtype, out))

    @torch.no_grad()
    def run(self, ring: Ring) -> None:
        """Read everything into its destinations, through buffers of a ring that nobody else uses meanwhile.

        Raises CheckpointCorrupt, or CheckpointError where a file cannot be read; destinations are of no use then.
        """
        with ring.lent(_WINDOWS * _WINDOW_NBYTES // BUFFER_NBYTES) as lent, Engine() as engine:
            windows = itertools.cycle([window for buffer in lent for window in buffer.split(_WINDOW_NBYTES)])
            for path, wanted in self._in_order():
                remaining, delivered = deque(wanted), 0
                for begin, window in self._verified(path, wanted, engine, lambda nbytes: next(windows)[:nbytes]):
                    delivered += _deliver(begin, window, remaining)
                noted = sum(each.end - each.begin for each in wanted)
                assert delivered == noted, f"{path}: {delivered} of {noted} bytes"
        self.wanted = {}

    def buffers_to_keep(self) -> int:
        """How many buffers of a ring `keep` takes."""
        spans = [window for path, wanted in self._in_order() for window in _windows(wanted, self.files[path].nbytes)]
        return _Carver([]).count(end - begin for begin, end in spans)

    def keep(self, buffers: list[Tensor]) -> Kept:
        """Read everything into as many buffers as that takes; what has been noted is there as long as they are. Raises as `run`."""
        kept, carver = Kept(), _Carver(buffers)
        with Engine() as engine:
            for path, wanted in self._in_order():
                kept.windows[path] = list(self._verified(path, wanted, engine, carver.take))
        self.wanted = {}
        return kept

    def _in_order(self) -> Iterator[tuple[Path, list[_Wanted]]]:
        for path, wanted in self.wanted.items():
            yield path, sorted(wanted, key=lambda each: each.begin)

    def _verified(
        self, path: Path, wanted: list[_Wanted], engine: Engine, take: Callable[[int], Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        """(first byte, bytes) of the windows that hold what is wanted of a file, in order, when their checksums have been compared.

        take: gives memory of so many bytes. Before it is asked for the next but `_WINDOWS`, a window has been handed out.
        """
        entry = self.files[path]
        try:
            file = open_file(path, entry.nbytes)
        except OffloadIOError as error:
            raise CheckpointError(f"{error}. Nothing was changed.") from None
        under_way: deque[tuple[int, Tensor, Handle]] = deque()
        try:
            for begin, end in _windows(wanted, entry.nbytes):
                if len(under_way) == _WINDOWS:
                    yield _check(file, entry, *under_way.popleft())
                window = take(end - begin)
                under_way.append((begin, window, engine.read(file, begin, window)))
            while under_way:
                yield _check(file, entry, *under_way.popleft())
        finally:
            file.close()  # when the reads under way are done


def _windows(wanted: list[_Wanted], file_nbytes: int) -> Iterator[tuple[int, int]]:
    """The blocks that hold what is wanted (in order), as windows of adjacent ones."""
    begin = end = 0
    for each in wanted:
        first = each.begin // DIGEST_NBYTES * DIGEST_NBYTES
        last = min(-(-each.end // DIGEST_NBYTES) * DIGEST_NBYTES, file_nbytes)
        if first > end:
            yield from _cut(begin, end)
            begin = first
        end = max(end, last)
        while end - begin > 2 * _WINDOW_NBYTES:
            yield begin, begin + _WINDOW_NBYTES
            begin += _WINDOW_NBYTES
    yield from _cut(begin, end)


def _cut(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for at in range(begin, end, _WINDOW_NBYTES):
        yield at, min(at + _WINDOW_NBYTES, end)


def _check(file: File, entry: FileEntry, begin: int, window: Tensor, handle: Handle) -> tuple[int, Tensor]:
    """Wait for a window, and compare its checksums."""
    try:
        handle.wait()
    except OffloadIOError as error:
        raise CheckpointError(f"{error}. Nothing was changed.") from None
    memory = bytes_of(window)
    for at in range(0, len(memory), DIGEST_NBYTES):
        expected, actual = entry.digests[(begin + at) // DIGEST_NBYTES], xxhash.xxh3_64_hexdigest(memory[at : at + DIGEST_NBYTES])
        if actual != expected:
            raise CheckpointCorrupt(file.path, begin + at, f"checksum {expected}", f"checksum {actual}")
    return begin, window


def _deliver(begin: int, window: Tensor, wanted: deque[_Wanted]) -> int:
    """Hand out what is wanted of a window; how many bytes. wanted: in order; what ends before this window is taken away."""
    end, delivered = begin + window.numel(), 0
    while wanted and wanted[0].end <= begin:
        wanted.popleft()
    for each in wanted:
        if each.begin >= end:
            break
        first, last = max(each.begin, begin), min(each.end, end)
        if first < last:
            size = each.dtype.itemsize
            delivered += last - first
            values = window[first - begin : last - begin].view(each.dtype)
            each.out[(first - each.begin) // size : (last - each.begin) // size].copy_(values)
    return delivered


class Kept:
    """What `Bulk.keep` has read and verified. `Stored.read(start, out, self)` takes from it what was noted there.

    What was not is read from the file: small things that were verified by themselves (`opening.check_digests`).
    """

    def __init__(self) -> None:
        self.windows: dict[Path, list[tuple[int, Tensor]]] = {}  # (first byte, bytes), in order

    @torch.no_grad()
    def add(self, stored: StoredTensor, start: int, out: Tensor) -> None:
        """Fill `out` (n,) with elements [start, start + n) of a stored tensor."""
        begin = stored.offset + start * stored.dtype.itemsize
        end = begin + out.numel() * stored.dtype.itemsize
        wanted = deque([_Wanted(begin, end, stored.dtype, out)] if begin < end else [])
        windows, delivered = self.windows.get(stored.path, []), 0
        for number in range(max(bisect_right(windows, begin, key=lambda window: window[0]) - 1, 0), len(windows)):
            if windows[number][0] >= end:
                break
            delivered += _deliver(*windows[number], wanted)
        if delivered != end - begin:
            stored.read(start, out)


class _Carver:
    """Cuts buffers of BUFFER_NBYTES into windows, one behind the other, none across two."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self.buffers, self.number, self.at = buffers, 0, 0

    def take(self, nbytes: int) -> Tensor:
        """The next (nbytes,)."""
        number, at = self._place(nbytes)
        return self.buffers[number][at : at + nbytes]

    def count(self, sizes: Iterable[int]) -> int:
        """How many buffers windows of these sizes take."""
        return max((self._place(nbytes)[0] + 1 for nbytes in sizes), default=0)

    def _place(self, nbytes: int) -> tuple[int, int]:
        if self.at + nbytes > BUFFER_NBYTES:
            self.number, self.at = self.number + 1, 0
        number, at = self.number, self.at
        self.at += round_up(nbytes)
        return number, at
