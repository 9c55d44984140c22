"""Reading a checkpoint once: what is needed is noted first, then read in the order of the files and verified on the way.

    note    tensor a <- file 0 [64, 900k)     tensor b <- file 0 [901k, 5M)     ...     destinations that nobody uses yet
    run     file 0 | block | block | block | ...    direct I/O, several windows ahead; checksum of each block, then copies

Destinations are fresh tensors, so a damaged block is found before anything has changed. Only whole blocks are read, each
once; ranks that share a block both read it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from ..errors import CheckpointCorrupt, CheckpointError, OffloadIOError
from ..memory.aligned import bytes_of, empty_aligned
from ..memory.files import Engine, File, Handle, open_file
from ..weights import StoredTensor
from .datafile import DIGEST_NBYTES
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
        self.folder, self.files = folder, {folder / file.name: file for file in manifest.files}
        self.wanted: dict[Path, list[_Wanted]] = {}
        self.delivered = 0  # bytes handed out

    def add(self, stored: StoredTensor, start: int, out: Tensor) -> None:
        """Note that elements [start, start + n) of a stored tensor are to be put into `out` (n,)."""
        begin = stored.offset + start * stored.dtype.itemsize
        end = begin + out.numel() * stored.dtype.itemsize
        if begin < end:
            self.wanted.setdefault(stored.path, []).append(_Wanted(begin, end, stored.dtype, out))

    @torch.no_grad()
    def run(self) -> None:
        """Read everything. Raises CheckpointCorrupt, or CheckpointError where a file cannot be read; destinations are of no use then."""
        buffers = [empty_aligned(_WINDOW_NBYTES) for _ in range(_WINDOWS)]
        with Engine() as engine:
            for path, wanted in self.wanted.items():
                self._read_file(path, sorted(wanted, key=lambda each: each.begin), engine, buffers)
        self.wanted = {}

    def _read_file(self, path: Path, wanted: list[_Wanted], engine: Engine, buffers: list[Tensor]) -> None:
        entry, before = self.files[path], self.delivered
        try:
            file = open_file(path, entry.nbytes)
        except OffloadIOError as error:
            raise CheckpointError(f"{error}. Nothing was changed.") from None
        under_way: deque[tuple[int, int, Tensor, Handle]] = deque()
        remaining, free = deque(wanted), list(buffers)
        try:
            for begin, end in _windows(wanted, entry.nbytes):
                if not free:
                    free.append(self._finish(file, entry, remaining, *under_way.popleft()))
                buffer = free.pop()
                under_way.append((begin, end, buffer, engine.read(file, begin, buffer[: end - begin])))
            while under_way:
                self._finish(file, entry, remaining, *under_way.popleft())
        finally:
            file.close()  # when the reads under way are done
        noted = sum(each.end - each.begin for each in wanted)
        assert self.delivered - before == noted, f"{path}: {self.delivered - before} of {noted} bytes"

    def _finish(
        self, file: File, entry: FileEntry, wanted: deque[_Wanted], begin: int, end: int, buffer: Tensor, handle: Handle
    ) -> Tensor:
        """Verify bytes [begin, end), which have been read, and hand them out; their memory."""
        try:
            handle.wait()
        except OffloadIOError as error:
            raise CheckpointError(f"{error}. Nothing was changed.") from None
        window = buffer[: end - begin]
        memory = bytes_of(window)
        for at in range(0, len(memory), DIGEST_NBYTES):
            expected, actual = entry.digests[(begin + at) // DIGEST_NBYTES], xxhash.xxh3_64_hexdigest(memory[at : at + DIGEST_NBYTES])
            if actual != expected:
                raise CheckpointCorrupt(file.path, begin + at, f"checksum {expected}", f"checksum {actual}")
        while wanted and wanted[0].end <= begin:
            wanted.popleft()
        for each in wanted:
            if each.begin >= end:
                break
            first, last = max(each.begin, begin), min(each.end, end)
            if first < last:
                size = each.dtype.itemsize
                self.delivered += last - first
                values = window[first - begin : last - begin].view(each.dtype)
                each.out[(first - each.begin) // size : (last - each.begin) // size].copy_(values)
        return buffer


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
