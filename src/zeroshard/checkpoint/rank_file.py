"""One rank's data file: laid out once, filled from wherever tensors rest, written in bulk.

    contents --fill--> buffers --digest, write--> file          buffers of BUFFER_NBYTES go round

The caller fills buffers, and a thread digests and writes them (direct I/O, memory/io/async_file.py). With few buffers a save overlaps
copying and writing; with enough for everything in memory, the filled buffers are a snapshot. Tensors on disk are filled first,
so that they never take more than the few buffers; then tensors that users may write at any time; last the guarded ones (see
Contents), which can be filled while training goes on.

Checksums: XXH3-64 of every block of DIGEST_NBYTES of the file (the last block: of what is left).
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pickle
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from errno import EIO
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from ..config import Tier
from ..errors import CheckpointError, ConfigError, OffloadIOError
from ..memory.io.aligned import bytes_of
from ..memory.io.async_file import Engine, open_file
from ..memory.ledger import STAGING, Ledger
from ..tensor.chunks import Box
from .dcp import ALIGN, frame
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
    glue: (offset, bytes) that stand between the data of one blob and the next, before the first and after the last.
    """

    places: list[Place]
    order: list[int]
    blobs: list[Blob]
    glue: list[tuple[int, bytes]]
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
        return cls(contents.places, order, blobs, _glue(blobs, contents.places), end, at_once)

    def with_objects(self, objects: dict[str, Any]) -> FileLayout:
        """Return a layout of the same tensors with pickled values after them. Raises ConfigError for what cannot be pickled."""
        end, entries = self.nbytes, []
        for name, value in objects.items():
            out = io.BytesIO()
            try:
                torch.save(value, out)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                raise ConfigError(f"zs.save: {name} can not be saved: {error}") from error
            entries.append((name, end, out.getvalue()))
            end = -(-(end + len(out.getvalue())) // ALIGN) * ALIGN
        return dataclasses.replace(self, nbytes=end, objects=entries)

    def segments(self) -> Iterator[tuple[int, bytes | Blob]]:
        """Yield (offset, bytes to write there, or the blob whose data begins there), in the order of the file."""
        for glue, blob in zip(self.glue, self.blobs, strict=False):
            yield glue
            yield blob.data, blob
        yield self.glue[-1]
        for _, offset, value in self.objects:
            yield offset, value
        yield self.nbytes, b""


def _glue(blobs: list[Blob], places: list[Place]) -> list[tuple[int, bytes]]:
    found, at, pending = [], 0, b""
    for blob in blobs:
        found.append((at, pending + bytes(blob.offset - at - len(pending)) + blob.prefix))
        at, pending = blob.data + blob.box.numel * places[blob.place].dtype.itemsize, blob.suffix
    return [*found, (at, pending)]


def digest_count(nbytes: int) -> int:
    """Return the number of checksums of a file."""
    return -(-nbytes // DIGEST_NBYTES)


def memory_nbytes(layout: FileLayout, contents: Contents) -> int:
    """Return the bytes of tensors that do not rest on disk: the size of a snapshot."""
    return sum(
        blob.box.numel * layout.places[blob.place].dtype.itemsize
        for blob in layout.blobs
        if contents.sources[blob.place].tier is not Tier.DISK
    )


class Ring:
    """Staging buffers that circulate between the filler and the writer of a file, and are kept for the next file.

    Threads: `take`, `give`, `borrow` in any; `grow` and `release` in the rank's main thread, while no save is in progress.
    """

    def __init__(self, make: Callable[[int], Tensor], ledger: Ledger | None = None) -> None:
        self.make, self.ledger, self.count = make, ledger or Ledger(), 0
        self._free: queue.LifoQueue = queue.LifoQueue()  # LIFO: a buffer whose pages exist is used before an untouched one

    def grow(self, count: int) -> None:
        """Allocate buffers until there are at least `count`."""
        for _ in range(self.count, count):
            self._free.put(self.make(BUFFER_NBYTES))
            self.ledger.enter(STAGING, BUFFER_NBYTES, Tier.HOST)
            self.count += 1  # counted one by one, since allocating the next may fail

    def release(self, keep: int = 0) -> None:
        """Free the memory of buffers that nobody uses now, down to `keep` buffers."""
        with contextlib.suppress(queue.Empty):
            while self.count > keep:
                self._free.get_nowait()
                self.ledger.strike(STAGING, BUFFER_NBYTES, Tier.HOST)
                self.count -= 1

    def borrow(self) -> Tensor | None:
        """Return a free buffer for another use, or None. The caller gives it back with `give`."""
        with contextlib.suppress(queue.Empty):
            return self._free.get_nowait()
        return None

    def take(self, go_on: Callable[[], bool]) -> Tensor | None:
        """Wait for a free buffer and return it. While there is none, `go_on` is called; None is returned once it is False."""
        while True:
            try:
                return self._free.get_nowait()
            except queue.Empty:
                if not go_on():
                    return None
            try:
                return self._free.get(timeout=0.2)
            except queue.Empty:
                pass

    def give(self, buffer: Tensor) -> None:
        """Return a buffer to the ring."""
        self._free.put(buffer)

    @property
    def nbytes(self) -> int:
        return self.count * BUFFER_NBYTES

    @property
    def free(self) -> int:
        """Number of buffers that nobody uses."""
        return self._free.qsize()


class FileWriter:
    """Writer of one file: call `fill` once, or several times for parts (one thread at a time), and then `finish`.

    Threads: the caller's, and `_serve`'s, which takes full buffers from a queue; either sets `error` once. `stop` in any.
    """

    def __init__(self, path: Path, layout: FileLayout, engine: Engine, ring: Ring, *, eager: bool = True) -> None:
        """Make the file at full size. Raises OffloadIOError (ENOSPC, ...), RuntimeError (no more threads).

        eager: write while `fill` copies. If False, write when `fill` has ended or runs out of buffers, so as not to slow it.
        """
        self.layout, self.engine, self.ring, self.eager = layout, engine, ring, eager
        self.file = open_file(path, layout.nbytes, create=True, reserve=True)
        self.digests: list[str] = []
        self.error: Exception | None = None  # first error; nothing more is written after it
        self._filling, self._segments, self._blobs = _Filling(self), layout.segments(), 0
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._may_write = threading.Event()
        self._ahead = threading.Semaphore(ROTATING)  # buffers copied ahead of the disk: more would take cores from writing
        if eager:
            self._may_write.set()
        self._thread = threading.Thread(target=self._serve, name="zeroshard-checkpoint", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self.file.close()
            raise

    @torch.no_grad()
    def fill(self, contents: Contents, blobs: int | None = None) -> None:
        """Copy tensors into buffers until the first `blobs` blobs are copied, or (None) everything is.

        Returns early if the writer has failed.
        """
        try:
            while blobs is None or self._blobs < blobs:
                segment = next(self._segments, None)
                if segment is None or not self._filling.put(*segment, contents):
                    break
                self._blobs += isinstance(segment[1], Blob)
            self._filling.settle()
        except BaseException:
            self._filling.emit()  # the buffer returns to the ring even if a state could not be read
            raise
        if blobs is None:
            self._filling.emit()
            self._queue.put(None)
            self._may_write.set()

    def buffer(self) -> Tensor | None:
        """Wait for the next buffer to fill and return it; None if the writer has failed."""
        while self.eager and not self._ahead.acquire(timeout=0.2):
            if not self.go_on():
                return None
        return self.ring.take(self.go_on)

    def go_on(self) -> bool:
        """Let the writer write, so that a buffer becomes free. Return False if it has failed."""
        self._may_write.set()
        return self.error is None

    def finish(self) -> None:
        """Wait until the file is written and synced. Raises OffloadIOError, or whatever else ended the writer."""
        self._thread.join()
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
        """Stop writing, wait for the thread, and close the file."""
        self.stop()
        self._queue.put(None)
        self._may_write.set()
        self._thread.join()
        self._filling.give_up()
        self.file.close()

    def _serve(self) -> None:
        """Digest and write queued buffers. All of them return to the ring even after an error, since `fill` may wait for one."""
        self._may_write.wait()
        under_way: deque = deque()
        while (task := self._queue.get()) is not None:
            buffer, offset, nbytes = task
            handle = None
            try:
                if self.error is None:
                    handle = self.engine.write(self.file, offset, buffer[:nbytes])
                    self._digest(bytes_of(buffer)[:nbytes])
            except Exception as error:
                self.error = self.error or error
            under_way.append((handle, buffer))  # even after an error: a write in progress still reads from the buffer
            while under_way and (len(under_way) > ROTATING // 2 or under_way[0][0] is None or under_way[0][0].done()):
                self._retire(under_way)
        while under_way:
            self._retire(under_way)

    def _digest(self, memory: memoryview) -> None:
        for begin in range(0, len(memory), DIGEST_NBYTES):
            self.digests.append(xxhash.xxh3_64_hexdigest(memory[begin : begin + DIGEST_NBYTES]))

    def _retire(self, under_way: deque) -> None:
        handle, buffer = under_way.popleft()
        try:
            if handle is not None:
                handle.wait()
        except Exception as error:
            self.error = self.error or error
        self.ring.give(buffer)
        self._ahead.release()


class _Filling:
    """State of `fill`: the current buffer, and which bytes of the file it covers."""

    def __init__(self, writer: FileWriter) -> None:
        self.writer, self.base, self.end = writer, 0, 0  # [base, end) of the file is in the buffer
        self.buffer: Tensor | None = None
        self.memory, self.room = memoryview(b""), 0  # the buffer's bytes; how many of them may be filled
        self.pending: list = []

    def put(self, offset: int, segment: bytes | Blob, contents: Contents) -> bool:
        """Append a segment, with zeros in the gap before it. Return False if the writer has failed."""
        if isinstance(segment, bytes):
            return self._put_bytes(bytes(offset - self.end) + segment if offset > self.end else segment)
        place = contents.places[segment.place]
        source, begin = contents.sources[segment.place], contents.begins[segment.place] + segment.first
        size, done = place.dtype.itemsize, 0
        while done < segment.box.numel:
            if not self._room():
                return False
            at = self.end - self.base
            count = min((self.room - at) // size, segment.box.numel - done)
            assert self.buffer is not None
            target = self.buffer[at : at + count * size].view(place.dtype)
            self.pending.append(source.read(begin + done, target))
            done += count
            self.end += count * size
        return True

    def _put_bytes(self, value: bytes) -> bool:
        while value:
            if not self._room():
                return False
            at = self.end - self.base
            part = value[: self.room - at]
            self.memory[at : at + len(part)] = part
            self.end += len(part)
            value = value[len(part) :]
        return True

    def _room(self) -> bool:
        """Make sure that the current buffer has space, taking the next one if needed. Return False if the writer has failed."""
        if self.buffer is not None and self.end - self.base < self.room:
            return True
        self.emit()
        self.buffer = self.writer.buffer()
        if self.buffer is None or self.writer.error is not None:
            return False
        self.memory, self.base = bytes_of(self.buffer), self.end
        self.room = min(FIRST_NBYTES, BUFFER_NBYTES) if self.writer.eager and self.base == 0 else BUFFER_NBYTES
        return True

    def settle(self) -> None:
        """Wait until all reads into the buffer are done. Their sources may change afterwards."""
        pending, self.pending = self.pending, []
        failed: Exception | None = None
        for read in pending:  # all of them, even after an error: the buffer is used again, and no read may still write into it
            try:
                read.wait()
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def give_up(self) -> None:
        """Return the current buffer to the ring without writing its content."""
        with contextlib.suppress(Exception):
            self.settle()
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            self.writer.ring.give(buffer)

    def emit(self) -> None:
        """Wait for pending reads, and hand the current buffer to the writer's thread."""
        try:
            self.settle()
        finally:
            buffer, self.buffer = self.buffer, None
            if buffer is not None:
                self.writer._queue.put((buffer, self.base, self.end - self.base))
