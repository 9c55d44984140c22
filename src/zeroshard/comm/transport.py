"""Transports: how ranks on one host pass short messages and open each other's memory.

`ThreadTransport`: ranks are threads of one process (tests, and a world of one). `ProcessTransport`: ranks are
processes; messages go through UNIX sockets, memory is a memfd that the peer maps. Both are Linux's plainest tools:
a dead peer closes its sockets, and memory vanishes with its last user, so nothing leaks and no peer hangs.

A message is a small tuple, delivered in order per pair. `("lost", reason)` arrives when a peer is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import pickle
import select
import socket
import struct
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque

import torch
from torch import Tensor

from ..errors import ZeroshardError

_HEADER = struct.Struct("<I")
_PAGE_NBYTES = 4096


class Transport(ABC):
    """Messages and memory between `world_size` ranks of one host."""

    rank: int
    world_size: int

    @abstractmethod
    def send(self, peer: int, message: tuple) -> None:
        """Queue a message for a peer; never blocks, never raises for a peer that is gone."""

    @abstractmethod
    def receive(self, timeout_s: float) -> tuple[int, tuple] | None:
        """The next (peer, message), or None after `timeout_s` (0: do not wait)."""

    @abstractmethod
    def export(self, nbytes: int) -> tuple[Tensor, object]:
        """New zeroed memory (nbytes,) uint8 and a handle by which peers can open it."""

    @abstractmethod
    def open(self, handle: object) -> Tensor:
        """A peer's memory (nbytes,) uint8, shared."""

    def forget(self, handle: object) -> None:
        """All peers have opened it: the handle may go (the memory stays)."""

    def close(self) -> None:
        """Leave the group."""


class ThreadWorld:
    """What the threads of one world share: a queue per rank and the table of exported memory."""

    def __init__(self, world_size: int, device: torch.device | None = None) -> None:
        self.world_size = world_size
        self.device = device or torch.device("cpu")
        self.queues: list[deque] = [deque() for _ in range(world_size)]
        self.signals = [threading.Condition() for _ in range(world_size)]
        self.memory: dict[tuple, Tensor] = {}
        self.serial = itertools.count()


class ThreadTransport(Transport):
    """Ranks as threads; memory is shared by nature."""

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

    def export(self, nbytes: int) -> tuple[Tensor, object]:
        tensor = torch.zeros(nbytes + _PAGE_NBYTES, dtype=torch.uint8, device=self.world.device)
        begin = -tensor.data_ptr() % _PAGE_NBYTES  # as a mapping would be: files are read straight into it
        tensor = tensor[begin : begin + nbytes]
        key = (self.rank, next(self.world.serial))
        self.world.memory[key] = tensor
        return tensor, key

    def open(self, handle: object) -> Tensor:
        return self.world.memory[handle]  # type: ignore[index]

    def forget(self, handle: object) -> None:
        self.world.memory.pop(handle, None)  # type: ignore[arg-type]

    def close(self) -> None:
        for peer in range(self.world_size):
            if peer != self.rank:
                self.send(peer, ("lost", "it closed its models and left"))


def _map(descriptor: int, nbytes: int) -> Tensor:
    memory = mmap.mmap(descriptor, nbytes)
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive


class ProcessTransport(Transport):
    """Ranks as processes of one Linux host (same PID namespace, same user)."""

    def __init__(self, rank: int, world_size: int, token: str, timeout_s: float = 60.0) -> None:
        """Connect to every peer. token: unique per group, the same on all its ranks."""
        self.rank, self.world_size = rank, world_size
        self._forked = False
        self._in: dict[int, bytearray] = {}
        self._out: dict[int, bytearray] = {}
        self._peers: dict[int, socket.socket] = {}
        self._ready: deque[tuple[int, tuple]] = deque()
        self._connect(token, timeout_s)
        self._poll = select.poll()
        self._of_fd = {sock.fileno(): peer for peer, sock in self._peers.items()}
        for sock in self._peers.values():
            sock.setblocking(False)
            self._poll.register(sock.fileno(), select.POLLIN)
        _transports.add(self)

    def _connect(self, token: str, timeout_s: float) -> None:
        """Each rank listens; it calls the lower ranks and is called by the higher."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self._address(token, self.rank))
        listener.listen(self.world_size)
        listener.settimeout(timeout_s)
        deadline = time.monotonic() + timeout_s
        try:
            for peer in range(self.rank):
                self._peers[peer] = self._call(self._address(token, peer), deadline)
            for _ in range(self.rank + 1, self.world_size):
                sock, _ = listener.accept()
                sock.settimeout(timeout_s)
                (peer,) = struct.unpack("<I", sock.recv(4, socket.MSG_WAITALL))
                self._peers[peer] = sock
        finally:
            listener.close()
        for peer in self._peers:
            self._in[peer], self._out[peer] = bytearray(), bytearray()

    @staticmethod
    def _address(token: str, rank: int) -> str:
        return f"\0zeroshard-{token}-{rank}"  # abstract namespace: no file to leave behind

    def _call(self, address: str, deadline: float) -> socket.socket:
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(address)
                sock.sendall(struct.pack("<I", self.rank))
                return sock
            except (ConnectionRefusedError, FileNotFoundError):
                sock.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def send(self, peer: int, message: tuple) -> None:
        self._check_forked()
        if peer not in self._peers:
            return
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._out[peer] += _HEADER.pack(len(data)) + data
        self._flush(peer)

    def _flush(self, peer: int) -> None:
        """Write what the socket takes now; the rest goes when it can (see `receive`)."""
        out, sock = self._out[peer], self._peers[peer]
        try:
            while out:
                del out[: sock.send(out)]
            self._poll.modify(sock.fileno(), select.POLLIN)
        except BlockingIOError:
            self._poll.modify(sock.fileno(), select.POLLIN | select.POLLOUT)
        except OSError:
            while peer in self._peers:  # it is gone, but may have said why
                self._read(peer, last=True)

    def receive(self, timeout_s: float) -> tuple[int, tuple] | None:
        self._check_forked()
        if not self._ready and self._peers:
            for descriptor, event in self._poll.poll(timeout_s * 1000):
                peer = self._of_fd[descriptor]
                if event & select.POLLOUT:
                    self._flush(peer)
                if event & (select.POLLIN | select.POLLHUP | select.POLLERR) and peer in self._peers:
                    self._read(peer)
        elif not self._ready and timeout_s:
            time.sleep(min(timeout_s, 0.05))
        return self._ready.popleft() if self._ready else None

    def _read(self, peer: int, last: bool = False) -> None:
        """Take what has come; lose the peer if it is gone (last: or if nothing has come)."""
        try:
            data = self._peers[peer].recv(1 << 16)
        except BlockingIOError:
            if not last:
                return
            data = b""
        except OSError:
            data = b""
        if not data:
            self._lose(peer)
            return
        buffer = self._in[peer]
        buffer += data
        while len(buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(buffer)
            if len(buffer) < _HEADER.size + length:
                break
            message = pickle.loads(memoryview(buffer)[_HEADER.size : _HEADER.size + length])
            self._ready.append((peer, message))
            del buffer[: _HEADER.size + length]

    def _lose(self, peer: int) -> None:
        sock = self._peers.pop(peer)
        self._poll.unregister(sock.fileno())
        sock.close()
        self._ready.append((peer, ("lost", "its process exited or was killed")))

    def export(self, nbytes: int) -> tuple[Tensor, object]:
        descriptor = os.memfd_create("zeroshard", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, max(nbytes, 1))
        return _map(descriptor, nbytes), (os.getpid(), descriptor, nbytes)

    def open(self, handle: object) -> Tensor:
        pid, descriptor, nbytes = handle  # type: ignore[misc]
        mine = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
        try:
            return _map(mine, nbytes)
        finally:
            os.close(mine)

    def forget(self, handle: object) -> None:
        os.close(handle[1])  # type: ignore[index]

    def close(self) -> None:
        deadline = time.monotonic() + 1.0
        while any(self._out[peer] for peer in self._peers) and time.monotonic() < deadline:
            self.receive(0.01)
        for sock in self._peers.values():
            with contextlib.suppress(OSError):  # the peer may be gone
                sock.shutdown(socket.SHUT_RDWR)  # closing is not enough where something else holds the socket, too
            sock.close()
        self._peers.clear()

    def _check_forked(self) -> None:
        if self._forked and self.world_size > 1:
            raise ZeroshardError(
                f"process {os.getpid()} was forked from rank {self.rank} and is not a rank: what takes several ranks (forward, backward, "
                "step, gathers, saves) is for the process that called zs.shard. Give a child the tensors that it needs."
            )

    def leave_to_parent(self) -> None:
        """In a child that was forked: the group stays the parent's, which nobody else may speak for or keep looking alive."""
        self._forked = True
        for sock in self._peers.values():
            sock.close()
        self._peers, self._ready = {}, deque()


_transports: weakref.WeakSet[ProcessTransport] = weakref.WeakSet()


def _after_fork() -> None:
    for transport in list(_transports):
        transport.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
