"""One rank's data file: laid out once, filled from wherever tensors rest, written in bulk.

    contents --fill--> buffers --digest, write--> file          buffers of BUFFER_NBYTES go round

A full buffer is digested while the engine's threads write it (direct I/O, memory/io/async_file.py). With few buffers a save overlaps
copying and writing; with enough for everything in memory, the filled buffers are a snapshot. Tensors on disk are filled first,
so that they never take more than the few buffers; then tensors that users may write at any time; last the guarded ones (see
Contents), which can be filled while training goes on.

Checksums: XXH3-64 of every block of DIGEST_NBYTES of the file (the last block: of what is left).
"""

from __future__ import annotations

import dataclasses
import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from errno import EIO
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from ..comm.pool import BufferPool
from ..config import Tier
from ..errors import CheckpointCorrupt, CheckpointError, ConfigError, OffloadIOError
from ..memory.io.aligned import bytes_of
from ..memory.io.async_file import Engine, open_file
from ..memory.ledger import Ledger
from ..offload.storage import Tiers
from ..tensor.chunks import Box
from .dcp import ALIGN, archived, frame
from .state_map import Contents, Place

BUFFER_NBYTES = 16 << 20
FIRST_NBYTES = 4 << 20  # filled part of a synchronous save's first buffer: the disk is idle until it is full
ROTATING = 4  # buffers that a synchronous save uses, even if a snapshot has left more
DIGEST_NBYTES = 1 << 20


@dataclass(frozen=True)
class Blob:
    """One box of a tensor in the file: bytes [offset, offset + nbytes), of which the elements begin at `data`.

    place: number of the tensor in `FileLayout.places`. first: the box's first element among the rank's elements of it.
    """

    offset: int
    nbytes: int
    data: int
    place: int
    first: int
    box: Box
    prefix: bytes
    suffix: bytes


@dataclass
class FileLayout:
    """Layout of a rank's file. blobs: boxes of tensors, in the order of the file. objects: (name, offset, bytes), after them.

    at_once: number of blobs, from the first, that must be copied before training goes on.
    """

    places: list[Place]
    blobs: list[Blob]
    nbytes: int = 0
    at_once: int = 0
    objects: list[tuple[str, int, bytes]] = field(default_factory=list)

    @classmethod
    def of(cls, contents: Contents) -> FileLayout:
        """Return the layout of tensors, without objects. Equal places give an equal layout, which `Saver` relies on."""
        on_disk = [source.tier is Tier.DISK for source in contents.sources]
        order = sorted(range(len(contents.places)), key=lambda i: (not on_disk[i], contents.guarded[i]))
        blobs, end, at_once = [], 0, 0
        for number in order:
            place = contents.places[number]
            for box, first in place.boxes():
                prefix, suffix = frame(place.dtype, box.sizes)
                data = end + len(prefix)
                nbytes = len(prefix) + box.numel * place.dtype.itemsize + len(suffix)
                blobs.append(Blob(end, nbytes, data, number, first, box, prefix, suffix))
                at_once += on_disk[number] or not contents.guarded[number]
                end = -(-(end + nbytes) // ALIGN) * ALIGN
        return cls(contents.places, blobs, end, at_once)

    def with_objects(self, objects: dict[str, object], pickled: dict[str, bytes]) -> FileLayout:
        """Return a layout of the same tensors with values after them, which are pickled here, and `pickled` ones.

        Raises ConfigError for what cannot be pickled.
        """
        contents = {}
        for name, value in objects.items():
            try:
                contents[name] = archived(value)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                raise ConfigError(f"zs.save: {name} can not be saved: {error}") from error
        end, entries = self.nbytes, []
        for name, content in (contents | pickled).items():
            entries.append((name, end, content))
            end = -(-(end + len(content)) // ALIGN) * ALIGN
        return dataclasses.replace(self, nbytes=end, objects=entries)

    def segments(self) -> Iterator[tuple[int, bytes | Blob]]:
        """Yield (offset, bytes to write there, or the blob whose data begins there), in the order of the file."""
        end, between = 0, b""  # what stands between the data of two blobs is one segment: there may be many small ones
        for blob in self.blobs:
            yield end, between.ljust(blob.offset - end, b"\0") + blob.prefix
            yield blob.data, blob
            end, between = blob.offset + blob.nbytes - len(blob.suffix), blob.suffix
        yield end, between
        for _, offset, value in self.objects:
            yield offset, value
        yield self.nbytes, b""


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


def staging(tiers: Tiers, ledger: Ledger) -> BufferPool:
    """Return the pool of staging buffers of a model's saves and loads, still empty."""
    return BufferPool(ledger, 0, BUFFER_NBYTES, tiers.host_buffer, Tier.HOST)


class FileWriter:
    """Writer of one file: call `fill` once, or several times for parts, and then `finish`. After an error, call `abandon`.

    Threads: one at a time; `stop` in any.
    """

    def __init__(self, path: Path, layout: FileLayout, engine: Engine, pool: BufferPool, *, eager: bool = True) -> None:
        """Make the file at full size. Raises OffloadIOError (ENOSPC, ...).

        eager: write while `fill` copies. If False, write in `finish` or when buffers run out, so as not to slow the copying.
        """
        self.layout, self.engine, self.pool, self.eager = layout, engine, pool, eager
        self.file = open_file(path, layout.nbytes, create=True, reserve=True)
        self.digests: list[str] = []
        self.error: Exception | None = None  # first error; nothing more is written after it
        self._segments, self._blobs = layout.segments(), 0
        self._buffer: Tensor | None = None  # the buffer that is being filled
        self._memory, self._limit = memoryview(b""), 0  # its bytes; how many of them may be filled
        self._base = self._end = 0  # [base, end) of the file is in it
        self._reads: list = []  # reads into it that are in progress
        self._full: deque = deque()  # (buffer, offset, nbytes): to be written
        self._writes: deque = deque()  # (handle, buffer): in progress
        self._writing = eager

    @torch.no_grad()
    def fill(self, contents: Contents, blobs: int | None = None) -> None:
        """Copy tensors into buffers until the first `blobs` blobs are copied, or (None) everything is.

        Returns early if writing has failed.
        """
        try:
            while self.error is None and (blobs is None or self._blobs < blobs):
                segment = next(self._segments, None)
                if segment is None:
                    break
                self._put(*segment, contents)
                self._blobs += isinstance(segment[1], Blob)
        finally:
            self._settle()
        if blobs is None:
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
        if self.error is None and len(self.digests) != digest_count(self.layout.nbytes):
            count = f"{len(self.digests)} of {digest_count(self.layout.nbytes)}"
            self.error = CheckpointError(f"{self.file.path}: only {count} MiB were written; save again.")
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Make the writer fail, because the save has: `fill` returns soon, and `finish` raises."""
        self.error = self.error or OffloadIOError(self.file.path, 0, EIO, "writing (stopped, as the save has failed)")

    def abandon(self) -> None:
        """Stop writing, return all buffers to the pool, and close the file."""
        self.stop()
        self._emit()
        self._drain()
        self.file.close()

    # -- copying -------------------------------------------------------------------------------------------------------

    def _put(self, offset: int, segment: bytes | Blob, contents: Contents) -> None:
        """Append a segment, with zeros in the gap before it, unless writing has failed."""
        if isinstance(segment, bytes):
            value = bytes(offset - self._end) + segment if offset > self._end else segment
            while value and (room := self._room()):
                part, value, begin = value[:room], value[room:], self._limit - room
                self._memory[begin : begin + len(part)] = part
                self._end += len(part)
            return
        place, source = contents.places[segment.place], contents.sources[segment.place]
        at, size = contents.begins[segment.place] + segment.first, place.dtype.itemsize
        stop = at + segment.box.numel
        while at < stop and (room := self._room()):
            count = min(room // size, stop - at)
            assert self._buffer is not None
            begin = self._limit - room
            self._reads.append(source.read(at, self._buffer[begin : begin + count * size].view(place.dtype)))
            at, self._end = at + count, self._end + count * size

    def _room(self) -> int:
        """Return the bytes that the buffer can still take; if none, go on to the next one. 0 if writing has failed."""
        if self._buffer is None or self._end - self._base == self._limit:
            self._emit()
            self._buffer, self._base = self.buffer(), self._end
            if self._buffer is None:
                return 0
            self._memory = bytes_of(self._buffer)
            self._limit = min(FIRST_NBYTES, BUFFER_NBYTES) if self.eager and self._base == 0 else BUFFER_NBYTES
        return self._limit - (self._end - self._base)

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
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._full.append((buffer, self._base, self._end - self._base))
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
        while self._writes and (self._writes[0][0] is None or self._writes[0][0].done()):
            self._retire()
        while self._writing and self._full and len(self._writes) <= ROTATING // 2:
            buffer, offset, nbytes = self._full.popleft()
            handle = None
            try:
                if self.error is None:
                    handle = self.engine.write(self.file, offset, buffer[:nbytes])
                    self.digests += digests_of(bytes_of(buffer)[:nbytes])
            except Exception as error:
                self.error = self.error or error
            self._writes.append((handle, buffer))  # even after an error: a write in progress still reads from the buffer

    def _drain(self) -> None:
        self._writing = True
        while self._full or self._writes:
            self._advance()
            self._retire()

    def _retire(self) -> None:
        """Wait for the first write, and return its buffer to the pool."""
        if not self._writes:
            return
        handle, buffer = self._writes.popleft()
        try:
            if handle is not None:
                handle.wait()
        except Exception as error:
            self.error = self.error or error
        self.pool.give(buffer)
