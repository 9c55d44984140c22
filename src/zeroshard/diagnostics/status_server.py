"""The desk of a rank: a status server. Peers ask it for the rank's state, and send it their own failures.

In a process it is a daemon thread that sleeps in accept() on a TCP socket: it costs a step nothing, never wakes by itself
(so it is no watchdog), and needs no signal. It ends with the last model (`answer_for`) or the process group. A rank asks its
peers if it waits too long or its connection breaks; a rank that fails sends its failure to their desks. Both ends prove by
HMAC that they know the desk's secret; ranks exchange addresses and secrets over the process group. Only plain data is read
(`codec`).

    asker                                    desk
    number c               -------------->
                           <--------------   number d, HMAC(secret, "desk", c, d)
    HMAC(secret, "peer", c, d), request -->
                           <--------------   answer

The listener dies with its process, so a refused connection shows at once that a rank is gone, without a timeout.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from ..engine.comm.desk import GONE, Answers, Desk, Failure
from ..engine.comm.messages import decode, encode, exchange_values
from ..engine.comm.progress import Progress, Report
from ..errors import MalformedMessage
from ..utils.host import host_identity, node_identity, ranks_here
from .endings import how_it_ended
from .verdict import judge

if TYPE_CHECKING:
    from ..engine.comm.base import DirectComm

T = TypeVar("T")
_NUMBER_NBYTES = _PROOF_NBYTES = 32  # random numbers that make each proof valid once; HMAC-SHA256
_LENGTH = struct.Struct("<I")
_MOST_NBYTES = 1 << 24  # largest request or answer
_PATIENCE_S = 2.0  # timeout of each read and write
_TELLING_S = 10.0  # after this time, a failure is sent to no further peers
_AT_A_TIME = 16  # number of peers asked at a time
SILENT = "does not answer: its process is stopped, or native code holds Python's lock"


class JudgingDesk(Desk):
    """Desk of a process that explains errors of the backend; `open` returns one that peers can ask."""

    def explain(self, comm: DirectComm, label: str, error: RuntimeError) -> Failure | None:
        return judge(comm, label, error)

    def open(self, comm: DirectComm) -> Desk:
        return ProcessDesk.among(comm, on_this_host=False)


class ThreadDesk(Desk):
    """Desk of ranks that are threads of one process: it reads the peers' notes directly."""

    def __init__(self, boards: dict[int, Progress], progress: Progress) -> None:
        self._boards = boards
        boards[progress.rank] = progress

    def ask(self, peers: Collection[int]) -> Answers:
        return {peer: self._boards[peer].report() for peer in peers if peer in self._boards}


class ProcessDesk(JudgingDesk):
    """Desk of one process in a group.

    Threads: only the thread that uses the Comm calls methods. The desk's own thread reads `progress` and sets `told`, once.
    """

    @classmethod
    def among(cls, comm: DirectComm, on_this_host: bool) -> ProcessDesk:
        """Return the desk of this rank in a Comm, with the addresses of the other ranks' desks (collective)."""
        desk = cls(comm.progress, on_this_host)
        desk._addresses = exchange_values(comm, desk.address, "zeroshard: desks")
        return desk

    def __init__(self, progress: Progress, on_this_host: bool) -> None:
        address = "127.0.0.1" if on_this_host else _own_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self._secret = secrets.token_bytes(32)
        self._addresses: list[tuple] = []
        self.address = (*self._listener.getsockname()[:2], self._secret, os.getpid(), host_identity(), node_identity())
        self._progress, self._owners, self._threads = progress, 0, list[_Answering]()
        self._start()
        self._end = weakref.finalize(self, _close, self._listener, self._threads)
        self._end.atexit = False  # the kernel closes the listener with the process: who is refused can then read its status
        _open.add(self)

    def ask(self, peers: Collection[int]) -> Answers:
        if not peers:
            return {}
        with ThreadPoolExecutor(min(_AT_A_TIME, len(peers)), thread_name_prefix="zeroshard-ask") as pool:
            answers = pool.map(lambda peer: self._call(peer, ("ask",), lambda values: Report(*values)), peers)
            return dict(zip(peers, answers, strict=True))

    def tell(self, peers: Collection[int], failure: Failure) -> None:
        deadline = time.monotonic() + _TELLING_S
        for peer in peers:  # one after another: at exit Python can not start threads
            if time.monotonic() < deadline:
                self._call(peer, ("failed", failure.rank, failure.reason, failure.error), str)

    def how_it_ended(self, peer: int) -> str:
        pid, host = self._addresses[peer][3:5]
        return how_it_ended(pid) if host == self.address[4] else GONE

    def nodes(self) -> list[int]:
        found = [each[5] for each in self._addresses]
        numbers = {identity: number for number, identity in enumerate(dict.fromkeys(found))}
        return [numbers[identity] for identity in found]

    def answer_for(self, owner: object) -> Callable[[], object]:
        self._owners += 1
        self._start()
        end = weakref.finalize(owner, self._release)
        end.atexit = False
        return end

    def _release(self) -> None:
        self._owners -= 1
        if self._owners == 0:
            self.rest()

    def _start(self) -> None:
        if not self._threads or not self._threads[0].is_alive():
            # a weak reference, so that a dropped group is collected and its thread ends
            self._threads[:] = [_Answering(self._listener, self._secret, self._progress, weakref.ref(self))]
            self._threads[0].start()

    def rest(self) -> None:
        # the socket stays open: a refused connection would mean that this rank is gone
        for thread in self._threads:
            thread.ended = True
            with contextlib.suppress(OSError):  # wakes accept()
                socket.create_connection(self._listener.getsockname()[:2], _PATIENCE_S).close()
            if thread is not threading.current_thread():
                thread.join(_PATIENCE_S)

    def close(self) -> None:
        self._end()

    def leave_to_parent(self) -> None:
        """Close the listener in a forked child: peers must not find this desk open when the parent is gone."""
        self._end.detach()
        self._listener.close()

    def _call(self, peer: int, request: tuple, read: Callable[[Any], T]) -> T | str:
        address, port, secret = self._addresses[peer][:3]
        try:
            with socket.create_connection((address, port), _PATIENCE_S) as sock:
                mine = secrets.token_bytes(_NUMBER_NBYTES)
                sock.sendall(mine)
                theirs = _receive(sock, _NUMBER_NBYTES)
                if not hmac.compare_digest(_receive(sock, _PROOF_NBYTES), _prove(secret, "desk", mine, theirs)):
                    return GONE  # another process listens at its port now
                data = encode(request)
                sock.sendall(_prove(secret, "peer", mine, theirs) + _LENGTH.pack(len(data)) + data)
                return read(decode(_receive_framed(sock)))
        except (ConnectionError, EOFError):
            return GONE
        except (OSError, MalformedMessage, TypeError):
            return SILENT


class _Answering(threading.Thread):
    """The desk's thread, which serves one peer after another."""

    def __init__(self, listener: socket.socket, secret: bytes, progress: Progress, desk: weakref.ref[Desk]) -> None:
        super().__init__(name="zeroshard-desk", daemon=True)
        self.listener, self.secret, self.progress, self.desk = listener, secret, progress, desk
        self.ended = False

    def run(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return  # closed
            with sock:
                if self.ended:  # `rest` has connected to wake accept()
                    return
                with contextlib.suppress(OSError, EOFError, MalformedMessage, TypeError):  # not a peer, or a peer that is gone
                    self._talk(sock)

    def _talk(self, sock: socket.socket) -> None:
        sock.settimeout(_PATIENCE_S)
        theirs, mine = _receive(sock, _NUMBER_NBYTES), secrets.token_bytes(_NUMBER_NBYTES)
        sock.sendall(mine + _prove(self.secret, "desk", theirs, mine))
        if not hmac.compare_digest(_receive(sock, _PROOF_NBYTES), _prove(self.secret, "peer", theirs, mine)):
            return
        request, desk = decode(_receive_framed(sock)), self.desk()
        if request[0] == "failed" and desk is not None:
            failure = Failure(*request[1:])
            desk.told = desk.told or failure  # the first failure is the cause of later ones
            data = encode("heard")
        else:
            data = encode(tuple(self.progress.report()))
        sock.sendall(_LENGTH.pack(len(data)) + data)


def _prove(secret: bytes, role: str, asker: bytes, desk: bytes) -> bytes:
    return hmac.digest(secret, b"zeroshard " + role.encode() + asker + desk, "sha256")


def _receive(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = sock.recv(nbytes - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _receive_framed(sock: socket.socket) -> bytes:
    (nbytes,) = _LENGTH.unpack(_receive(sock, _LENGTH.size))
    if nbytes > _MOST_NBYTES:
        raise MalformedMessage(f"a message of {nbytes} bytes was announced, more than {_MOST_NBYTES}")
    return _receive(sock, nbytes)


def _close(listener: socket.socket, threads: list[_Answering]) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes accept(), which close() alone does not
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_PATIENCE_S)
    listener.close()


def _own_address() -> str:
    """Return this host's address for other hosts: the address of the interface that leads to the group's master."""
    master = os.environ.get("MASTER_ADDR", "")
    with contextlib.suppress(OSError):
        family, kind, protocol, _, target = socket.getaddrinfo(master or None, 9, type=socket.SOCK_DGRAM)[0]  # any port will do
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(target)  # a datagram socket sends nothing: the kernel only chooses the route
            address = sock.getsockname()[0]
        several = ranks_here(0) < int(os.environ.get("WORLD_SIZE", "0"))  # other hosts can not connect to a loopback address
        if not (several and address.startswith(("127.", "::1"))):
            return address
    return socket.gethostbyname(socket.gethostname())


_open: weakref.WeakSet[ProcessDesk] = weakref.WeakSet()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: list(map(ProcessDesk.leave_to_parent, _open)))
