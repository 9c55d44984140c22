"""The writer of all large files of checkpoints and exports: ranges of bytes go through buffers to a file, in bulk.

    ranges --fill--> buffers --digest, write--> file          a written buffer goes back to its pool

A full buffer is digested while the engine's threads write it (tiers/io/async_file.py). With few buffers copying and writing
overlap; with enough for everything in memory, the filled buffers are a snapshot. rank_file.py has the ranges of a rank's file,
safetensors.py those of a model's file that all ranks write together, export.py those of an export.

Checksums: XXH3-64 of every block of DIGEST_NBYTES of the file (the last block: of what is left).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from errno import EIO
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from ..config import Tier
from ..errors import CheckpointCorrupt, CheckpointError, OffloadIOError
from ..seam import BufferPool, Ledger
from ..tiers.io import Engine, File, Handle, open_file
from ..utils.aligned import bytes_of, empty_aligned
from ..utils.work import Work

BUFFER_NBYTES = 16 << 20
FIRST_NBYTES = 4 << 20  # filled part of a synchronous save's first buffer: the disk is idle until it is full
ROTATING = 4  # buffers that a synchronous save uses, even if a snapshot has left more
DIGEST_NBYTES = 1 << 20
_CACHED_NBYTES = 1 << 20  # buffers of files that are written through the page cache
_PIECE_ALIGN = 64  # alignment in a buffer of a range that does not follow the one before


@dataclass(frozen=True)
class Elements:
    """Elements of a tensor, wherever it rests. read(first, out): start to copy those from number `first` on to `out` (n,)."""

    dtype: torch.dtype
    numel: int
    read: Callable[[int, Tensor], Work]


Range = tuple[int, bytes | Elements]  # the first byte in the file, and what is to be written from there on


def digest_count(nbytes: int) -> int:
    """Return the number of checksums of a file."""
    return -(-nbytes // DIGEST_NBYTES)


def digests_of(memory: bytes | memoryview) -> Iterator[str]:
    """Yield the checksum of each block of bytes of a file, from the beginning of a block on."""
    for begin in range(0, len(memory), DIGEST_NBYTES):
        yield xxhash.xxh3_64_hexdigest(memory[begin : begin + DIGEST_NBYTES])


def compare_digests(path: Path, expected: Sequence[str], offset: int, memory: memoryview) -> None:
    """Raise CheckpointCorrupt if bytes of a file, from `offset` on, have other checksums. expected: those of the whole file."""
    for number, actual in enumerate(digests_of(memory), offset // DIGEST_NBYTES):
        if actual != expected[number]:
            raise CheckpointCorrupt(str(path), number * DIGEST_NBYTES, f"checksum {expected[number]}", f"checksum {actual}")


class FileWriter:
    """Writer of ranges of one file: call `fill` once, or several times for parts, and then `finish`. After an error, call `abandon`.

        a buffer    pool --buffer--> _buffer, filled by _put --_emit--> _full --_advance--> _writes --_retire--> pool

    Threads: one at a time; `stop` in any.
    """

    def __init__(
        self, file: File, ranges: Iterable[Range], engine: Engine, pool: BufferPool, *, eager: bool = True, digested: bool = False
    ) -> None:
        """digested: make checksums of the file; `ranges` then covers it, in order.

        eager: write while `fill` copies. If False, write in `finish` or when buffers run out, so as not to slow the copying.
        """
        self.file, self.engine, self.pool, self.eager, self.digested = file, engine, pool, eager, digested
        self.digests: list[str] = []
        self.error: Exception | None = None  # first error; nothing more is written after it
        self._ranges, self._copied = iter(ranges), 0  # what is still to be copied; number of Elements that have been
        self._buffer: Tensor | None = None  # the buffer that is being filled
        self._pieces: list[list[int]] = []  # ranges of the file in it: [offset in the file, begin and end in the buffer]
        self._limit = min(FIRST_NBYTES, pool.nbytes) if eager else pool.nbytes  # most bytes that are filled of the next buffer
        self._reads: list[Work] = []  # reads into it that are in progress
        self._full: deque[tuple[Tensor, list[list[int]]]] = deque()  # buffers to be written
        self._writes: deque[tuple[Tensor, list[Handle]]] = deque()  # buffers that are being written
        self._writing = eager  # whether full buffers are written already, or only queued

    @torch.no_grad()
    def fill(self, most: int | None = None) -> None:
        """Copy ranges into buffers until the first `most` Elements are copied, or (None) everything is.

        Returns early if writing has failed.
        """
        try:
            while self.error is None and (most is None or self._copied < most):
                found = next(self._ranges, None)
                if found is None:
                    break
                self._put(*found)
                self._copied += isinstance(found[1], Elements)
        finally:
            self._settle()
        if most is None:
            self._emit()

    def finish(self) -> None:
        """Write what is left, and sync the file. Raises OffloadIOError, or whatever else ended the writing."""
        self._drain()
        try:
            if self.error is None:
                self.file.sync()
        except OffloadIOError as error:
            self.error = error
        self.file.close()
        if self.error is None and self.digested and len(self.digests) != digest_count(self.file.nbytes):
            count = f"{len(self.digests)} of {digest_count(self.file.nbytes)}"
            self.error = CheckpointError(f"{self.file.path}: only {count} MiB were written; save again.")
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Make the writer fail, because the save has: `fill` returns soon, and `finish` raises."""
        self.error = self.error or OffloadIOError(self.file.path, 0, EIO, "writing (stopped, as the save has failed)")

    def abandon(self) -> None:
        """Stop writing, return all buffers to the pool, and close the file."""
        self.stop()
        self._ranges = iter(())
        self._emit()
        self._drain()
        self.file.close()

    # -- copying -------------------------------------------------------------------------------------------------------

    def _put(self, offset: int, content: bytes | Elements) -> None:
        """Append a range, unless writing has failed."""
        numel, size = (len(content), 1) if isinstance(content, bytes) else (content.numel, content.dtype.itemsize)
        done = 0
        while done < numel and (room := self._room(offset + done * size, size)) is not None:
            count = min(room.numel() // size, numel - done)
            part = room[: count * size]
            if isinstance(content, bytes):
                bytes_of(part)[:] = content[done : done + count]
            else:
                self._reads.append(content.read(done, part.view(content.dtype)))
            self._pieces[-1][2] += count * size
            done += count

    def _room(self, offset: int, size: int) -> Tensor | None:
        """Return memory for elements of `size` bytes that stand in the file from `offset` on, or None if writing has failed.

        It is the rest of the buffer or, where that is too small, the next buffer.
        """
        first, begin, at = self._pieces[-1] if self._pieces else (offset, 0, 0)
        follows = bool(self._pieces) and first + at - begin == offset and at % size == 0
        at = at if follows else -(-at // _PIECE_ALIGN) * _PIECE_ALIGN
        if self._buffer is None or self._limit - at < size:
            self._emit()
            self._buffer, at, follows = self.buffer(), 0, False
            if self._buffer is None:
                return None
        if not follows:
            self._pieces.append([offset, at, at])
        return self._buffer[at : self._limit]

    def _settle(self) -> None:
        """Wait until all reads into the buffer are done. Their sources may change afterwards."""
        reads, self._reads = self._reads, []
        failed: Exception | None = None
        for read in reads:  # all of them, even after an error: the buffer is used again, and no read may still write into it
            try:
                read.wait()
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _emit(self) -> None:
        """Wait for reads into the buffer, and queue it to be written."""
        self._settle()
        buffer, pieces, self._buffer, self._pieces = self._buffer, self._pieces, None, []
        if buffer is not None:
            self._limit = self.pool.nbytes
            self._full.append((buffer, pieces))
            self._advance()

    def buffer(self) -> Tensor | None:
        """Return the next buffer to fill, when one is free; None if writing has failed."""
        while self.error is None:
            self._advance()
            # copying further ahead of the disk would take cores from writing
            ahead = self.eager and len(self._full) + len(self._writes) >= ROTATING
            if not ahead and (buffer := self.pool.borrow()) is not None:
                return buffer
            self._writing = True
            self._advance()
            self._retire()
        return None

    # -- writing -------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Return written buffers to the pool and, where writing has begun, start to write further ones, and digest them.

        After an error further buffers only pass through.
        """
        while self._writes and all(handle.done() for handle in self._writes[0][1]):
            self._retire()
        while self._writing and self._full and len(self._writes) <= ROTATING // 2:
            buffer, pieces = self._full.popleft()
            handles: list[Handle] = []
            try:
                for offset, begin, end in pieces if self.error is None else ():
                    handles.append(self.engine.write(self.file, offset, buffer[begin:end]))
                    if self.digested:
                        self.digests += digests_of(bytes_of(buffer[begin:end]))
            except Exception as error:
                self.error = self.error or error
            self._writes.append((buffer, handles))  # even after an error: a write in progress still reads from the buffer

    def _drain(self) -> None:
        """Write all full buffers, and wait for them."""
        self._writing = True
        while self._full or self._writes:
            self._advance()
            self._retire()

    def _retire(self) -> None:
        """Wait for the first buffer that is being written, and return it to the pool."""
        if not self._writes:
            return
        buffer, handles = self._writes.popleft()
        for handle in handles:
            try:
                handle.wait()
            except Exception as error:
                self.error = self.error or error
        self.pool.give(buffer)


def write_ranges(path: Path, ranges: Iterable[Range]) -> None:
    """Write ranges of a file that exists, some MiB at a time, and sync it. Raises OffloadIOError, and what reading a range raises.

    It is written through the page cache: several ranks may write a file together, and direct I/O, which writes whole blocks,
    needs one writer.
    """
    pool = BufferPool(Ledger(), 0, _CACHED_NBYTES, empty_aligned, Tier.HOST)
    pool.grow(ROTATING)
    with Engine() as engine:
        writer = FileWriter(open_file(path, path.stat().st_size, direct=False), ranges, engine, pool)
        try:
            writer.fill()
            writer.finish()
        except BaseException:
            writer.abandon()
            raise
