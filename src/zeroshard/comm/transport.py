"""Transports: ranks on one host send each other short messages and map each other's memory.

`ThreadTransport`: ranks are threads of one process (tests, and a world of one). `ProcessTransport`: ranks are
processes; messages go through UNIX sockets, memory is a memfd that the peer maps. The kernel closes a dead process's
sockets, and frees a memfd with its last user, so no peer hangs and nothing leaks.

A message is a tuple of plain values (`codec`). Messages of a pair of ranks arrive in order, even if the sender then waits for
something else. A large bytes object, as a message's last value, goes through memory (`ProcessTransport`). `("lost", reason)`
arrives when a peer is gone. In `rendezvous.py` processes find each other, and keep others out.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import select
import socket
import struct
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable
from errno import errorcode

import torch
from torch import Tensor

from ..engine.comm import GONE, Progress, decode, encode
from ..errors import MalformedMessage, ZeroshardError, io_remedy
from .rendezvous import Address, Door

_HEADER = struct.Struct("<I?")  # length in bytes; whether a file descriptor is sent with the message
_LARGE_NBYTES = 1 << 17  # a last value of this length goes through memory; a socket holds 200 kB, and is faster for less
_ANCILLARY_NBYTES = socket.CMSG_SPACE(struct.calcsize("i"))
_PART_NBYTES = 1 << 30  # read or written by one system call: Linux moves at most 2 GiB
_PAGE_NBYTES = 4096  # of mappings, which `ThreadTransport` imitates

Handle = tuple[int, ...]  # by which peers open memory: (rank, serial number) of threads, (pid, descriptor, bytes) of processes


class Transport(ABC):
    """Message passing and shared memory between `world_size` ranks of one host."""

    rank: int
    world_size: int
    closed: bool = False  # this rank has left the group

    @abstractmethod
    def send(self, peer: int, message: tuple) -> None:
        """Queue a message for a peer; never blocks, never raises for a peer that is gone."""

    def tell(self, message: tuple) -> None:
        """Send a message to every peer."""
        for peer in range(self.world_size):
            if peer != self.rank:
                self.send(peer, message)

    def unsent(self) -> Collection[int]:
        """Return the peers for which messages are still queued here."""
        return ()

    @abstractmethod
    def receive(self, timeout_s: float) -> tuple[int, tuple] | None:
        """Return the next (peer, message), or None after `timeout_s` (0: do not wait)."""

    @abstractmethod
    def export(self, nbytes: int) -> tuple[Tensor, Handle]:
        """Allocate zeroed memory: (nbytes,) uint8, and a handle by which peers can open it."""

    @abstractmethod
    def open(self, handle: Handle) -> Tensor:
        """Map a peer's memory: (nbytes,) uint8, shared with that peer."""

    def forget(self, handle: Handle) -> None:
        """Release a handle that all peers have opened; the memory stays."""

    def close(self) -> None:
        """Leave the group."""


class ThreadWorld:
    """State shared by the threads of one world: a message queue per rank, and the table of exported memory."""

    def __init__(self, world_size: int, device: torch.device | None = None) -> None:
        self.world_size = world_size
        self.device = device or torch.device("cpu")
        self.queues: list[deque] = [deque() for _ in range(world_size)]
        self.signals = [threading.Condition() for _ in range(world_size)]
        self.memory: dict[Handle, Tensor] = {}
        self.boards: dict[int, Progress] = {}  # rank -> its notes, for `ThreadDesk`
        self.serial = itertools.count()


class ThreadTransport(Transport):
    """Transport between ranks that are threads of one process, which share all memory."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.world, self.rank, self.world_size = world, rank, world.world_size

    def send(self, peer: int, message: tuple) -> None:
        with self.world.signals[peer]:
            self.world.queues[peer].append((self.rank, message))
            self.world.signals[peer].notify()

    def receive(self, timeout_s: float) -> tuple[int, tuple] | None:
        queue = self.world.queues[self.rank]
        if not queue and timeout_s > 0:
            with self.world.signals[self.rank]:
                self.world.signals[self.rank].wait_for(lambda: queue, timeout_s)
        return queue.popleft() if queue else None

    def export(self, nbytes: int) -> tuple[Tensor, Handle]:
        tensor = torch.zeros(nbytes + _PAGE_NBYTES, dtype=torch.uint8, device=self.world.device)
        begin = -tensor.data_ptr() % _PAGE_NBYTES  # page-aligned, as a mapping is: direct I/O reads into it
        tensor = tensor[begin : begin + nbytes]
        key = (self.rank, next(self.world.serial))
        self.world.memory[key] = tensor
        return tensor, key

    def open(self, handle: Handle) -> Tensor:
        return self.world.memory[handle]

    def forget(self, handle: Handle) -> None:
        self.world.memory.pop(handle, None)


def _map(descriptor: int, nbytes: int) -> Tensor:
    memory = mmap.mmap(descriptor, nbytes)
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive


def _read_whole(descriptor: int, nbytes: int) -> bytes:
    """Return the content of a peer's memory, and close its last descriptor, which frees the memory."""
    try:
        if type(nbytes) is not int or os.fstat(descriptor).st_size != nbytes:
            sent = os.fstat(descriptor).st_size
            raise MalformedMessage(
                f"a rank of this host announced {nbytes} bytes and sent {sent}. Run the same version of zeroshard on every rank."
            )
        starts = range(0, nbytes, _PART_NBYTES)
        parts = [os.pread(descriptor, min(_PART_NBYTES, nbytes - start), start) for start in starts]
        return parts[0] if len(parts) == 1 else b"".join(parts)
    finally:
        os.close(descriptor)


class _Parcel:
    """The unsent rest of one message. descriptor: sent with the first byte, then closed in this process."""

    def __init__(self, data: bytes, descriptor: int | None) -> None:
        self.data, self.descriptor = memoryview(data), descriptor

    def send(self, sock: socket.socket) -> bool:
        """Write as much as the socket takes; return True if that was all. Raises BlockingIOError where it takes nothing."""
        if self.descriptor is not None:
            sent = socket.send_fds(sock, [self.data], [self.descriptor])
            self.drop()
        else:
            sent = sock.send(self.data)
        self.data = self.data[sent:]
        return not self.data

    def drop(self) -> None:
        """Close the descriptor, because the message will not be sent (or has been)."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class ProcessTransport(Transport):
    """Transport between processes of one Linux host (same PID namespace, same user).

    A large value is written into a memfd, whose descriptor is sent with the message; the receiver reads it and closes the
    descriptor, which frees the memory. While messages do not fit into a full socket, a thread writes them: the peer gets them
    even if this rank waits for something else.

    Threads: the thread that uses the Comm calls the methods; it and the writer thread take `_writing` for `_out` and the sockets.
    """

    def __init__(self, rank: int, door: Door, addresses: list[Address], timeout_s: float = 60.0) -> None:
        """Connect to every peer. door: this rank's door; addresses: of all doors, by rank."""
        self.rank, self.world_size = rank, len(addresses)
        self._forked = False  # set in a forked child, which is no rank
        self._peers: dict[int, socket.socket] = door.connect(rank, addresses, timeout_s)
        self._in = {peer: bytearray() for peer in self._peers}
        self._descriptors: dict[int, deque[int]] = {peer: deque() for peer in self._peers}  # received with messages in _in
        self._out: dict[int, deque[_Parcel]] = {}  # peer -> messages for which its socket had no room
        self._writing = threading.RLock()  # guards _out and all writing to sockets
        self._writer: threading.Thread | None = None
        self._ready: deque[tuple[int, tuple]] = deque()
        self._poll = select.poll()
        self._of_fd = {sock.fileno(): peer for peer, sock in self._peers.items()}
        for sock in self._peers.values():
            sock.setblocking(False)
            self._poll.register(sock.fileno(), select.POLLIN)
        _transports.add(self)

    # -- sending ---------------------------------------------------------------------------------------------

    def send(self, peer: int, message: tuple) -> None:
        self._send([peer], message)

    def tell(self, message: tuple) -> None:
        self._send(list(self._peers), message)

    def _send(self, peers: Iterable[int], message: tuple) -> None:
        self._check_forked()
        memory = None
        if isinstance(message[-1], bytes) and len(message[-1]) >= _LARGE_NBYTES:
            memory, rest = os.memfd_create("zeroshard-message", os.MFD_CLOEXEC), memoryview(message[-1])
            while rest:
                rest = rest[os.write(memory, rest[:_PART_NBYTES]) :]
            message = (*message[:-1], len(message[-1]))
        data = encode(message)
        data = _HEADER.pack(len(data), memory is not None) + data
        with self._writing:
            for peer in peers:
                try:
                    taken = self._peers[peer].send(data) if memory is None and peer not in self._out else 0  # nearly always all
                except (KeyError, OSError):  # the peer is gone or its socket full: `_flush` finds out which
                    taken = 0
                if taken < len(data) and peer in self._peers:
                    # each parcel closes a descriptor of its own
                    parcel = _Parcel(data[taken:], None if memory is None else os.dup(memory))
                    self._out.setdefault(peer, deque()).append(parcel)
                    self._flush(peer)
        if memory is not None:
            os.close(memory)

    def _flush(self, peer: int) -> None:
        """Write as much as the socket takes now; start the writer thread for the rest."""
        queue = self._out[peer]
        try:
            while queue:
                if queue[0].send(self._peers[peer]):
                    queue.popleft()
        except BlockingIOError:
            if self._writer is None:
                thread = threading.Thread(target=self._write_rest, name="zeroshard-send", daemon=True)
                with contextlib.suppress(RuntimeError):  # no thread can be started: the next `receive` writes the rest
                    thread.start()
                    self._writer = thread
        except OSError:  # the peer is gone, but may have said why: `receive` will read it
            self._forget(peer)
        if not queue:
            self._out.pop(peer, None)

    def _forget(self, peer: int) -> None:
        for parcel in self._out.pop(peer, ()):
            parcel.drop()

    def _write_rest(self) -> None:
        while True:
            with self._writing:
                if not self._out:
                    self._writer = None
                    return
                waiting = select.poll()
                for peer in self._out:
                    waiting.register(self._peers[peer].fileno(), select.POLLOUT)
            waiting.poll(100)  # ms: another thread of this rank may close a socket meanwhile
            self._flush_all()

    def _flush_all(self) -> None:
        with self._writing:
            for peer in list(self._out):
                self._flush(peer)

    def unsent(self) -> Collection[int]:
        return self._out

    # -- receiving -------------------------------------------------------------------------------------------

    def receive(self, timeout_s: float) -> tuple[int, tuple] | None:
        self._check_forked()
        if not self._ready and self._peers:
            poll = self._poll
            if self._out:  # also for room in the sockets that were full
                poll = select.poll()
                for peer, sock in self._peers.items():
                    poll.register(sock.fileno(), select.POLLIN | (select.POLLOUT if peer in self._out else 0))
            for descriptor, event in poll.poll(timeout_s * 1000):
                peer = self._of_fd[descriptor]
                if event & (select.POLLIN | select.POLLHUP | select.POLLERR) and peer in self._peers:
                    self._read(peer)
            if self._out:
                self._flush_all()
        elif not self._ready and timeout_s:
            time.sleep(min(timeout_s, 0.05))  # no peers left: do not spin in the caller's loop
        return self._ready.popleft() if self._ready else None

    def _read(self, peer: int) -> None:
        """Read the messages that a peer has sent; drop the peer if its socket is closed."""
        try:
            data, ancillary, flags, _ = self._peers[peer].recvmsg(1 << 16, _ANCILLARY_NBYTES, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary, flags = b"", [], 0
        self._descriptors[peer].extend(struct.unpack("i", content[:4])[0] for *_, content in ancillary)
        if flags & socket.MSG_CTRUNC:
            raise ZeroshardError(
                f"rank {self.rank} can not open what rank {peer} sends: too many files are open here (ulimit -n)"
            )
        if not data:
            with self._writing:
                self._forget(peer)
                sock = self._peers.pop(peer)
                self._poll.unregister(sock.fileno())
                sock.close()
            self._drop_received(peer)
            self._ready.append((peer, ("lost", GONE)))
            return
        buffer = self._in[peer]
        buffer += data
        while len(buffer) >= _HEADER.size:
            length, large = _HEADER.unpack_from(buffer)
            if len(buffer) < _HEADER.size + length:
                break
            message = decode(bytes(buffer[_HEADER.size : _HEADER.size + length]))
            if large:
                message = (*message[:-1], _read_whole(self._descriptors[peer].popleft(), message[-1]))
            self._ready.append((peer, message))
            del buffer[: _HEADER.size + length]

    def _drop_received(self, peer: int) -> None:
        while self._descriptors[peer]:
            os.close(self._descriptors[peer].popleft())

    # -- memory ----------------------------------------------------------------------------------------------

    def export(self, nbytes: int) -> tuple[Tensor, Handle]:
        descriptor = os.memfd_create("zeroshard", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, max(nbytes, 1))
        except OSError as error:
            os.close(descriptor)
            name = errorcode.get(error.errno or 0, str(error.errno))
            remedy = "or give comm='dist' to zs.shard(), which shares no memory"
            raise ZeroshardError(
                f"{nbytes:,} bytes of memory that the ranks of this host share can not be made: {name} ({error.strerror}); "
                f"to the system they are a file. {io_remedy(error.errno or 0)}, {remedy}"
            ) from None
        return _map(descriptor, nbytes), (os.getpid(), descriptor, nbytes)

    def open(self, handle: Handle) -> Tensor:
        pid, descriptor, nbytes = handle
        mine = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
        try:
            return _map(mine, nbytes)
        finally:
            os.close(mine)

    def forget(self, handle: Handle) -> None:
        os.close(handle[1])

    def close(self) -> None:
        deadline = time.monotonic() + 1.0  # for messages that full sockets have not taken yet
        while self._out and time.monotonic() < deadline:
            self.receive(0.01)
        with self._writing:
            for peer, sock in self._peers.items():
                self._forget(peer)
                self._drop_received(peer)
                with contextlib.suppress(OSError):  # the peer may be gone
                    sock.shutdown(socket.SHUT_RDWR)  # close() alone does not disconnect while another process holds the socket
                sock.close()
            self._peers.clear()

    def _check_forked(self) -> None:
        if self._forked and self.world_size > 1:
            raise ZeroshardError(
                f"process {os.getpid()} was forked from rank {self.rank} and is not a rank: what takes several ranks (forward, backward, "
                "step, gathers, saves) is for the process that called zs.shard. Give a child the tensors that it needs."
            )

    def leave_to_parent(self) -> None:
        """Close the sockets in a forked child: it must not send for the parent, nor keep sockets open when the parent dies."""
        self._forked = True
        self._writing = threading.RLock()  # a thread that the child does not have may hold the old one
        for peer, sock in self._peers.items():
            self._forget(peer)
            self._drop_received(peer)
            sock.close()
        self._peers, self._ready = {}, deque()


_transports: weakref.WeakSet[ProcessTransport] = weakref.WeakSet()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: list(map(ProcessTransport.leave_to_parent, _transports)))
