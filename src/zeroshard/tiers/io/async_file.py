"""Asynchronous direct file I/O: reads and writes between tensor memory and files, in bulk and without copies.

    Engine.write(file, offset, tensor) -> Handle        tensor memory -> the file, by direct I/O (O_DIRECT)
    Engine.read(file, offset, tensor)  -> Handle        and back; `Handle.wait()` returns when it is done, or raises

Words: a *request* is one call of read or write; it is cut into *pieces* at multiples of `block_nbytes` of the file,
which threads take in order of arrival, reads first. Offsets are bytes. A *block* of ALIGN bytes is the unit of direct I/O:

    request   ......xxxxxxxxxxxxxxxxxxxxxxxxx....      offset, offset + nbytes
    blocks    |       |       |       |       |
              edge     middle          edge            middle: whole blocks. edge: part of a block

The middle is moved directly between device and tensor where the tensor's address and the offset are congruent modulo
ALIGN, else through a bounce buffer of the thread. An edge is written by a read-modify-write of its block under a lock.

There is no second, buffered descriptor for the edges: direct and buffered writes to neighbouring blocks are only as
coherent as the page cache's invalidation, which the kernel documents as best effort (a page that cannot be invalidated is
logged as "possible data corruption"). With edges under a lock nothing passes through the page cache, and the result is
right: (1) a block of the middle belongs to one request, so no other request's bytes are in it; (2) two requests that share
a block both have an edge there, and each replaces its own bytes only, one after the other; (3) a reader of an edge may see
a neighbour's bytes before or after their write, but never its own bytes changed, since the write puts the same ones there.

Invariants: requests whose bytes overlap while they run have no order (wait in between); one process writes a file; a
request holds its tensors until it is done; an error is raised by every `wait` of its request and by no other. A write is
done when the device has accepted it; to survive a power failure it takes `File.sync`.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from errno import EACCES, EAGAIN, EBADMSG, EINTR, EINVAL, EIO, ENODATA, EROFS
from queue import SimpleQueue

from torch import Tensor

from ...errors import OffloadIOError, ZeroshardError
from ...utils.aligned import ALIGN, bytes_of, empty_aligned, round_down, round_up
from ...utils.work import Work
from .filesystems import MEMORY_FILESYSTEMS, filesystem_of

_AGAIN_S = 10.0  # time for which a call that returns EAGAIN is repeated
_BOUNCE_NBYTES = 1 << 20  # bounce buffer of each thread, where it needs one
_IDLE_LIMIT = 4  # a transfer fails after this number of calls in a row that complete no further block


# ------------------------------------------------------------------------------------------------------------- files


class File:
    """One open file; made by `open_file`.

    While it is open the file on disk may be longer than `end`, by less than ALIGN; `close` cuts it to that size.
    """

    path: str
    nbytes: int  # number of bytes that requests may address
    direct: bool  # whether the descriptor has O_DIRECT

    def __init__(self, path: str, nbytes: int, fd: int, direct: bool, end: int) -> None:
        self.path, self.nbytes, self.direct, self.fd = path, nbytes, direct, fd
        self.end = end  # size of the file on disk after `close`
        status = os.fstat(fd)
        self.key = (status.st_dev, status.st_ino)  # equal for two Files of one path
        self.checksums = Checksums()
        self._state = {"longer": 0}  # id of the process that made the file longer than `end`; 0: none. Shared with the finalizer
        self._users, self._closing = 0, False
        self._shut = weakref.finalize(self, _shut, fd, end, self._state)
        self._shut.atexit = False  # at exit a thread may still be in a call with this descriptor

    def hold(self) -> None:
        """Count a request that begins to use the descriptor. Raises ValueError where the file is closed."""
        with _locks.files:
            if self._closing:
                raise ValueError(f"expected an open file, got {self.path}, which is closed; open it again")
            self._users += 1

    def release(self) -> None:
        """Count a request as ended; the inverse of `hold`."""
        with _locks.files:
            self._users -= 1
            last = self._closing and self._users == 0
        if last:
            self._shut()

    def grow(self, end: int) -> None:
        """Note that a whole last block is written, so that the file on disk may now end at `end`."""
        if end > self.end:
            self._state["longer"] = os.getpid()

    def sync(self) -> None:
        """Write everything written so far, and the file's size, to the device for good (fsync). No write may be running."""
        try:
            _cut(self.fd, self.end, self._state)
            os.fsync(self.fd)
        except OSError as error:
            raise OffloadIOError(self.path, 0, error.errno or EIO, "fsync") from None

    def close(self) -> None:
        """Close the file once the requests that use it have ended; only then can its descriptor's number be used again."""
        with _locks.files:
            self._closing = True
            last = self._users == 0
        if last:
            self._shut()

    def __repr__(self) -> str:
        return f"File({self.path!r}, {self.nbytes} bytes, {'direct' if self.direct else 'buffered'})"


def _cut(fd: int, end: int, state: dict[str, int]) -> None:
    if state["longer"] == os.getpid():
        os.ftruncate(fd, end)
        state["longer"] = 0


def _shut(fd: int, end: int, state: dict[str, int]) -> None:
    try:
        _cut(fd, end, state)
    finally:
        os.close(fd)


def open_file(path: str | os.PathLike, nbytes: int, *, create: bool = False, reserve: bool = False, direct: bool = True) -> File:
    """Open a file of at least `nbytes` bytes for direct reads and writes.

    Args:
        path: the file.
        nbytes: number of bytes that requests may address.
        create: make it, or empty it if it exists; it has `nbytes` zeros and takes no space before it is written.
        reserve: take the space at once (posix_fallocate), so that a later write cannot fail for lack of it.
        direct: False goes through the page cache, so that other processes may write neighbouring bytes.

    Raises:
        OffloadIOError: it cannot be opened (ENOENT, EACCES, ...), is shorter than `nbytes` (ENODATA), or there is no
            space for it (ENOSPC).
    """
    path = os.fspath(path)
    if nbytes < 0:
        raise ValueError(f"expected nbytes of at least 0, got {nbytes}")
    fd, direct = _open(path, os.O_CREAT | os.O_TRUNC if create else 0, direct)
    try:
        present = os.fstat(fd).st_size
        if create:
            os.ftruncate(fd, round_up(nbytes) if direct else nbytes)
        elif present < nbytes:
            raise OffloadIOError(path, present, ENODATA, f"opening for {nbytes} bytes")
        if reserve and nbytes:
            buffered = os.open(path, os.O_RDWR)  # since the C library may have to write single bytes for it
            try:
                os.posix_fallocate(buffered, 0, round_up(nbytes) if direct and create else nbytes)
            finally:
                os.close(buffered)
        file = File(path, nbytes, fd, direct, nbytes if create else present)
        if create and direct and nbytes % ALIGN:
            file.grow(round_up(nbytes))
        return file
    except BaseException as error:
        os.close(fd)
        if create:
            os.unlink(path)
        if isinstance(error, OSError):
            raise OffloadIOError(path, 0, error.errno or EIO, f"making {nbytes} bytes") from None
        raise


class _Locks:
    """The locks of this module. A forked child makes new ones, as threads that it does not have may hold the old ones."""

    def __init__(self) -> None:
        self.files, self.checksums = threading.Lock(), threading.Lock()
        self._edges = [threading.Lock() for _ in range(64)]  # for all blocks of all files: `edge` picks one by hash

    def edge(self, file: File, start: int) -> threading.Lock:
        """Return the lock of the block at `start`. Blocks may share a lock, so a thread must hold only one at a time."""
        return self._edges[hash((file.key, start // ALIGN)) % len(self._edges)]


_locks = _Locks()
_buffered: set[int] = set()  # filesystems (st_dev) without direct I/O that were reported


def _open(path: str, flags: int, wants_direct: bool) -> tuple[int, bool]:
    """Open a file; return its descriptor, and whether it is a direct one."""
    flags |= os.O_RDWR | getattr(os, "O_CLOEXEC", 0)
    direct = getattr(os, "O_DIRECT", 0) if wants_direct else 0
    if direct and filesystem_of(path) not in MEMORY_FILESYSTEMS:
        try:
            return _open_for_what_is_allowed(path, flags | direct), True
        except OSError as error:
            if error.errno != EINVAL:
                raise OffloadIOError(path, 0, error.errno or EIO, "opening") from None
    try:
        fd = _open_for_what_is_allowed(path, flags)
    except OSError as error:
        raise OffloadIOError(path, 0, error.errno or EIO, "opening") from None
    device = os.fstat(fd).st_dev
    if wants_direct and device not in _buffered:
        _buffered.add(device)
        print(
            f"zeroshard: {os.path.dirname(os.path.abspath(path))}: this filesystem has no direct I/O; "
            "files there go through the page cache, which takes memory and time",
            file=sys.stderr,
        )
    return fd, False


def _open_for_what_is_allowed(path: str, flags: int) -> int:
    """Open a file for reading and writing, or for reading only where the permissions forbid writes."""
    try:
        return os.open(path, flags, 0o600)  # readable and writable by this user alone
    except OSError as error:
        if error.errno not in (EACCES, EROFS) or flags & os.O_CREAT:
            raise
        return os.open(path, (flags & ~os.O_RDWR) | os.O_RDONLY)


class Checksums:
    """crc32 of written extents of one file, by (start, end). A write drops the extents that it overlaps."""

    _CELL_NBYTES = 8 << 20  # extents are indexed by the cells of this size that they touch

    def __init__(self) -> None:
        self._cells: dict[int, dict[tuple[int, int], int]] = {}

    def _touched(self, start: int, end: int) -> range:
        return range(start // self._CELL_NBYTES, (end - 1) // self._CELL_NBYTES + 1)

    def forget(self, start: int, end: int) -> None:
        """Drop every extent that shares a byte with [start, end)."""
        if not self._cells:  # the usual case, without `checksum`: do not take the lock
            return
        with _locks.checksums:
            for number in self._touched(start, end):
                for extent in list(self._cells.get(number, ())):
                    if extent[0] < end and start < extent[1]:
                        for other in self._touched(*extent):
                            self._cells[other].pop(extent, None)

    def record(self, start: int, end: int, checksum: int) -> None:
        """Keep the checksum of the written extent [start, end)."""
        with _locks.checksums:
            for number in self._touched(start, end):
                self._cells.setdefault(number, {})[(start, end)] = checksum

    def expected(self, start: int, end: int) -> int | None:
        """Return the checksum of exactly this extent; None where it was not written as one."""
        return self._cells.get(start // self._CELL_NBYTES, {}).get((start, end))


# ------------------------------------------------------------------------------------------------------------ engine


class Syscalls:
    """The system calls of the engine. Tests replace them to inject faults at a (file, offset)."""

    def preadv(self, file: File, buffers: list[memoryview], offset: int) -> int:
        """Read into the buffers from `offset` on; return the bytes read. Raises OSError."""
        return os.preadv(file.fd, buffers, offset)

    def pwritev(self, file: File, buffers: list[memoryview], offset: int) -> int:
        """Write the buffers at `offset`; return the bytes written. Raises OSError."""
        return os.pwritev(file.fd, buffers, offset)


class Handle(Work):
    """A request that has been started; any thread may wait for it. Callers must wait between requests that overlap."""

    def __init__(self, file: File, offset: int, tensor: Tensor, writes: bool) -> None:
        self._path, self._offset, self._writes = file.path, offset, writes
        self._file, self._tensor = file, tensor  # kept until the request is done
        self._memory, self._address = bytes_of(tensor), tensor.data_ptr()
        self._pieces = 0  # number of pieces not yet done
        self._failure: tuple[int, int, str] | None = None  # offset, errno, what
        self._lock, self._over, self._process = threading.Lock(), threading.Event(), os.getpid()

    def wait(self) -> None:
        """Return when all bytes have been moved; raise OffloadIOError, at every call, if some could not be moved."""
        if not self._over.is_set():
            if self._process != os.getpid():
                raise ZeroshardError(
                    "expected a request of this process, got one that was under way when it was forked; "
                    "wait for requests before the fork"
                )
            self._over.wait()
        if self._failure is not None:
            offset, errno, what = self._failure
            raise OffloadIOError(self._path, offset, errno, what)

    def done(self) -> bool:
        """Return True when `wait` would return or raise at once."""
        return self._over.is_set()

    def _fail(self, offset: int, errno: int, what: str) -> None:
        with self._lock:
            if self._failure is None or offset < self._failure[0]:
                self._failure = (offset, errno, what)

    def _piece_done(self) -> None:
        with self._lock:
            self._pieces -= 1
            if self._pieces:
                return
        # drop the references before the waiting thread goes on: this thread keeps the handle a moment longer
        file, self._file, self._memory, self._tensor = self._file, None, memoryview(b""), None  # type: ignore[assignment]
        try:
            file.release()
        except OSError as error:  # this request was the last user of a closed file, and cutting or closing it failed
            self._fail(file.nbytes, error.errno or EIO, "closing")
        finally:
            del file
            self._over.set()


_Piece = tuple[Handle, int, int, bool]  # bytes [start, end) of the request's file; whether to use checksums


class _Mover:
    """Moves the pieces that one thread takes, and has the thread's bounce buffer."""

    def __init__(self, calls: Syscalls) -> None:
        self.calls = calls
        self._buffer = empty_aligned(ALIGN)

    def bounce(self, nbytes: int) -> memoryview:
        """Return aligned memory of this thread: min(nbytes, _BOUNCE_NBYTES) bytes."""
        if self._buffer.nbytes < min(nbytes, _BOUNCE_NBYTES):
            self._buffer = empty_aligned(_BOUNCE_NBYTES)
        return bytes_of(self._buffer)[:nbytes]

    def read(self, file: File, offset: int, memory: memoryview, address: int) -> None:
        """Fill `memory`, which has address `address`, from the file at `offset`."""
        end = offset + len(memory)
        low, high = round_up(offset), round_down(end)
        if not file.direct:
            self._transfer(file, offset, memory, len(memory), writes=False)
        elif (address - offset) % ALIGN or high <= low:
            self._read_bounced(file, offset, memory)
        else:
            if offset < low:
                self._read_bounced(file, offset, memory[: low - offset])
            self._transfer(file, low, memory[low - offset : high - offset], high - low, writes=False)
            if high < end:
                self._read_bounced(file, high, memory[high - offset :])

    def write(self, file: File, offset: int, memory: memoryview, address: int) -> None:
        """Write `memory`, which has address `address`, to the file at `offset`."""
        if not file.direct:
            self._transfer(file, offset, memory, len(memory), writes=True)
            return
        end = offset + len(memory)
        low, high = round_up(offset), round_down(end)
        if offset < low:
            self._write_edge(file, offset, memory[: low - offset])
        if low < high:
            middle, place = memory[low - offset : high - offset], low
            while (address - offset) % ALIGN and middle:
                bounced = self.bounce(len(middle))
                bounced[:] = middle[: len(bounced)]
                self._transfer(file, place, bounced, len(bounced), writes=True)
                middle, place = middle[len(bounced) :], place + len(bounced)
            self._transfer(file, place, middle, len(middle), writes=True)
        if low <= high < end:
            self._write_edge(file, high, memory[high - offset :])

    def _read_bounced(self, file: File, offset: int, memory: memoryview) -> None:
        while memory:
            start, end = round_down(offset), offset + len(memory)
            blocks = self.bounce(round_up(end) - start)
            stop = min(end, start + len(blocks))
            self._transfer(file, start, blocks, stop - start, writes=False)  # the file may end before its last block does
            memory[: stop - offset] = blocks[offset - start : stop - start]
            offset, memory = stop, memory[stop - offset :]

    def _write_edge(self, file: File, offset: int, memory: memoryview) -> None:
        """Replace some bytes of one block."""
        start = round_down(offset)
        with _locks.edge(file, start):
            block = self.bounce(ALIGN)
            present = min(max(os.fstat(file.fd).st_size - start, 0), ALIGN)  # all bytes of the block that the file has
            self._transfer(file, start, block, present, writes=False)
            block[present:] = bytes(ALIGN - present)
            block[offset - start : offset - start + len(memory)] = memory
            file.grow(start + ALIGN)
            self._transfer(file, start, block, ALIGN, writes=True)

    def _transfer(self, file: File, offset: int, memory: memoryview, needed: int, *, writes: bool) -> None:
        """Move bytes between file and memory until the first `needed` of `memory` are done, or raise OffloadIOError."""
        transfer, what = (self.calls.pwritev, "writing") if writes else (self.calls.preadv, "reading")
        done, idle, patient_until = 0, 0, None
        while done < needed:
            try:
                count = transfer(file, [memory[done:]], offset + done)
            except OSError as error:
                if error.errno == EINTR:  # a signal came
                    continue
                now = time.monotonic()
                patient_until = patient_until or now + _AGAIN_S
                if error.errno == EAGAIN and now < patient_until:
                    time.sleep(1e-3)  # the system is short of resources for the request
                    continue
                raise OffloadIOError(file.path, offset + done, error.errno or EIO, what) from None
            reached = done + count
            if reached < needed and file.direct:
                reached = round_down(reached)  # direct I/O continues at a block boundary: part of a block is moved again
            idle = 0 if reached > done else idle + 1  # a call may move bytes, but complete no further block
            if count == 0 or idle == _IDLE_LIMIT:  # 0: end of the file, or no space
                if writes:
                    raise OffloadIOError(file.path, offset + done, EIO, "writing (the system accepted no byte)")
                raise OffloadIOError(file.path, offset + done, ENODATA, what)
            done = reached


class _Tasks:
    """The queue from which an engine's threads take their work: reads first, each kind in order of arrival.

    A caller needs a read's values soon, but waits for a write only when it needs the memory again. Writes are not delayed for ever if
    memory is bounded, since further reads need the memory that the writes hold. (If reads did not go first, a step's last read
    took 180 ms, not 35.)

    Threads: any may `put` and `get`. A token follows each task into the queue, so a thread that gets one finds a task.
    """

    def __init__(self) -> None:
        self._tokens: SimpleQueue[bool] = SimpleQueue()  # True for each task, False for each thread that is to end
        self._reads: deque[_Piece] = deque()
        self._writes: deque[_Piece] = deque()

    def put(self, piece: _Piece, writes: bool) -> None:
        """Add one task."""
        (self._writes if writes else self._reads).append(piece)
        self._tokens.put(True)

    def end(self, threads: int) -> None:
        """Let so many threads end when all tasks put before this call have been taken."""
        for _ in range(threads):
            self._tokens.put(False)

    def get(self) -> _Piece | None:
        """Return the next task; None: the thread is to end."""
        if not self._tokens.get():
            return None
        try:
            return self._reads.popleft()
        except IndexError:
            return self._writes.popleft()


def _serve(tasks: _Tasks, calls: Syscalls) -> None:
    """Body of an engine's thread: move pieces until it gets None. A reference to the engine here would keep it alive for ever."""
    mover = _Mover(calls)
    while True:
        task = tasks.get()
        if task is None:
            return
        handle, start, end, checksum = task
        try:
            if handle._failure is None:  # after one failed piece the others are not tried
                _move(mover, handle, start, end, checksum)
        except OffloadIOError as failure:
            handle._fail(failure.offset, failure.errno, failure.what)
        except BaseException as error:  # the waiting thread must learn that the bytes are not valid
            handle._fail(start, EIO, f"{'writing' if handle._writes else 'reading'} ({error!r})")
        handle._piece_done()
        del task, handle  # so that this thread keeps no tensor alive while it waits


def _move(mover: _Mover, handle: Handle, start: int, end: int, checksum: bool) -> None:
    """Move bytes [start, end) of the handle's file between file and tensor."""
    file, memory = handle._file, handle._memory[start - handle._offset : end - handle._offset]
    address = handle._address + start - handle._offset
    if handle._writes:
        file.checksums.forget(start, end)
        crc = zlib.crc32(memory) if checksum else 0
        mover.write(file, start, memory, address)
        if checksum:
            file.checksums.record(start, end, crc)
    else:
        mover.read(file, start, memory, address)
        expected = file.checksums.expected(start, end) if checksum else None
        if expected is not None and zlib.crc32(memory) != expected:
            raise OffloadIOError(file.path, start, EBADMSG, f"reading (wrong checksum of {end - start} bytes)")


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """Threads that move the pieces of requests. Any thread may make requests; the first one starts the threads, in its process.

    Args:
        threads: number of transfers at one time.
        block_nbytes: largest transfer; a multiple of ALIGN.
        checksum: keep a crc32 of written bytes, in memory, and compare it when the same extent is read; costs about
            0.6 s of a core for each GB.
        calls: the system calls, or a test's replacement.
    """

    def __init__(
        self, threads: int = 4, block_nbytes: int = 8 << 20, checksum: bool = False, calls: Syscalls | None = None
    ) -> None:
        if threads < 1:
            raise ValueError(f"expected at least one thread, got threads={threads}")
        if block_nbytes < ALIGN or block_nbytes % ALIGN:
            raise ValueError(f"expected block_nbytes as a multiple of {ALIGN}, got {block_nbytes}")
        self.threads, self.block_nbytes, self.checksum = threads, block_nbytes, checksum
        self.calls = calls or Syscalls()
        self._closed = False
        self._forget_threads()
        _engines.add(self)

    def read(self, file: File, offset: int, out: Tensor) -> Handle:
        """Start to read bytes [offset, offset + out.nbytes) of the file into `out` (any dtype, contiguous, CPU)."""
        return self._submit(file, offset, out, False)

    def write(self, file: File, offset: int, source: Tensor) -> Handle:
        """Start to write `source` (as for `read`) to bytes [offset, offset + source.nbytes) of the file."""
        return self._submit(file, offset, source, True)

    def _submit(self, file: File, offset: int, tensor: Tensor, writes: bool) -> Handle:
        end = offset + tensor.nbytes
        if offset < 0 or end > file.nbytes:
            raise ValueError(f"expected bytes within [0, {file.nbytes}) of {file.path}, got [{offset}, {end})")
        handle = Handle(file, offset, tensor, writes)
        if offset == end:
            handle._over.set()
            return handle
        cuts = [offset, *range((offset // self.block_nbytes + 1) * self.block_nbytes, end, self.block_nbytes), end]
        with self._lock:
            if self._closed:
                raise ZeroshardError("expected an open I/O engine, got one that is closed; make a new Engine")
            while len(self._running) < self.threads:
                name = f"zeroshard-io-{len(self._running)}"
                thread = threading.Thread(target=_serve, args=(self._tasks, self.calls), name=name, daemon=True)
                thread.start()
                self._running.append(thread)
            file.hold()
            handle._pieces = len(cuts) - 1
            for start, stop in itertools.pairwise(cuts):
                self._tasks.put((handle, start, stop, self.checksum), writes)
        return handle

    def rest(self) -> None:
        """Finish all requests and end the threads; the next request starts new ones."""
        with self._lock:
            running = self._running
            self._stop()
            self._begin()
        for thread in running:
            thread.join()

    def close(self) -> None:
        """Finish all requests and end the threads for good. Further calls do nothing."""
        with self._lock:
            self._closed = True
        self.rest()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget_threads(self) -> None:
        """Start without threads. In a forked child the parent's do not exist, and its locks may be held."""
        if hasattr(self, "_stop"):
            self._stop.detach()
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        """Make an empty queue for threads that are still to start, so that `_stop` of earlier ones does not end these."""
        self._running, self._tasks = list[threading.Thread](), _Tasks()
        self._stop = weakref.finalize(self, self._tasks.end, self.threads)
        self._stop.atexit = False  # the threads are daemons, for which the interpreter does not wait at exit


def _after_fork() -> None:
    _locks.__init__()  # type: ignore[misc]  # new locks in the same object
    for engine in list(_engines):
        engine._forget_threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
