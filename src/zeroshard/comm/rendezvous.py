"""The rendezvous of ranks on one host: they connect to each other, and keep other processes out.

Any process of the host sees an abstract UNIX socket (/proc/net/unix) and may connect to it. So a peer must run as this
rank's user and prove that it knows a secret, which ranks have exchanged over the process group; the secret itself is never
sent over the socket. Both ends prove it, since another process may listen at the address that the caller connects to. A
rank disconnects all other callers, and goes on waiting for the real peer.

    caller (the higher rank)                         door (the lower rank)
    its rank, number c          -------------->
                                <--------------      number d, HMAC(secret, "door", both ranks, c, d)
    HMAC(secret, "caller", ...) -------------->
                                <--------------      welcome

Addresses are chosen by the kernel (no process can take them first) and exchanged over the process group.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from ..errors import PeerFailed, StallError

_RANK, _PEER = struct.Struct("<I"), struct.Struct("3i")
_NUMBER_NBYTES = _PROOF_NBYTES = 32  # random numbers that make each proof valid once; HMAC-SHA256
_WELCOME = b"!"
_PATIENCE_S = 5.0  # time that a caller has for its proof; a slow peer that is disconnected connects again
_MOST_CALLERS = 64  # callers at a time that have not proved yet who they are; then the oldest is disconnected
_PAUSE_S = 0.005  # between two attempts to connect


class Door:
    """The listening socket of one rank, open until all peers have connected."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(b"")  # abstract namespace: no file to leave behind
        self._socket.listen(128)
        self._socket.setblocking(False)
        self.address: bytes = self._socket.getsockname()

    def connect(self, rank: int, addresses: list[bytes], secret: bytes, timeout_s: float) -> dict[int, socket.socket]:
        """Return a connection to every other rank, and close the door. This rank calls lower ranks; higher ones call it."""
        deadline = time.monotonic() + timeout_s
        peers: dict[int, socket.socket] = {}
        try:
            for peer in range(rank):
                peers[peer] = _call(rank, peer, addresses[peer], secret, deadline)
            self._answer(rank, range(rank + 1, len(addresses)), secret, deadline, peers)
        except BaseException:
            for sock in peers.values():
                sock.close()
            raise
        finally:
            self.close()
        return peers

    def _answer(
        self, rank: int, expected: Collection[int], secret: bytes, deadline: float, peers: dict[int, socket.socket]
    ) -> None:
        """Accept the connections of the expected ranks, into `peers`."""
        callers: dict[int, _Caller] = {}  # by descriptor, the oldest first
        try:
            while missing := [peer for peer in expected if peer not in peers]:
                if time.monotonic() > deadline:
                    raise StallError(
                        f"rank {rank}: ranks {missing} have not connected within stall_timeout_s. Do all ranks call zs.shard() (or "
                        "zs.init), and are their processes alive?"
                    )
                for fd in self._ready(callers, min(0.5, deadline - time.monotonic())):
                    caller = callers.get(fd)
                    if caller is None:
                        self._let_in(callers, rank, secret, missing)
                    elif caller.over():
                        del callers[fd]
                        if caller.peer is not None and caller.peer not in peers:
                            peers[caller.peer] = caller.sock
                        else:
                            caller.sock.close()
                _show_out(callers, [fd for fd, caller in callers.items() if caller.until < time.monotonic()])
        finally:
            _show_out(callers, list(callers))

    def _ready(self, callers: dict[int, _Caller], timeout_s: float) -> list[int]:
        poll = select.poll()
        for fd in (self._socket.fileno(), *callers):
            poll.register(fd, select.POLLIN)
        return [fd for fd, _ in poll.poll(max(timeout_s, 0) * 1000)]

    def _let_in(self, callers: dict[int, _Caller], rank: int, secret: bytes, missing: list[int]) -> None:
        with suppress(BlockingIOError, ConnectionError):
            sock, _ = self._socket.accept()
            if _user(sock) != os.geteuid():
                sock.close()
                return
            _show_out(callers, list(callers)[: max(0, len(callers) - _MOST_CALLERS + 1)])
            sock.setblocking(False)
            callers[sock.fileno()] = _Caller(sock, rank, secret, missing)

    def close(self) -> None:
        """Close the listening socket: nobody can connect any more."""
        self._socket.close()


class _Caller:
    """A process of this user that has connected. peer: the rank that it has proved to be."""

    def __init__(self, sock: socket.socket, rank: int, secret: bytes, expected: list[int]) -> None:
        self.sock, self.until = sock, time.monotonic() + _PATIENCE_S
        self.peer: int | None = None
        self._rank, self._secret, self._expected = rank, secret, expected
        self._received = b""
        self._needs = _RANK.size + _NUMBER_NBYTES
        self._proof: tuple[int, bytes] | None = None  # the rank that it claims to be, and the proof that it has to send

    def over(self) -> bool:
        """Read the bytes that have come; return True once the caller has proved to be a peer, or has failed to."""
        try:
            part = self.sock.recv(self._needs - len(self._received))
            self._received += part
            if not part:
                return True
            if len(self._received) < self._needs:
                return False
            received, self._received = self._received, b""
            if self._proof is not None:
                peer, proof = self._proof
                if hmac.compare_digest(received, proof):
                    self.sock.sendall(_WELCOME)
                    self.peer = peer
                return True
            return not self._challenge(received)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _challenge(self, received: bytes) -> bool:
        """Send this rank's proof, and ask the caller for its own; return False for a rank that is not expected."""
        (peer,) = _RANK.unpack_from(received)
        if peer not in self._expected:
            return False
        number = secrets.token_bytes(_NUMBER_NBYTES)
        prove = _prover(self._secret, self._rank, peer, received[_RANK.size :], number)
        self._proof, self._needs = (peer, prove("caller")), _PROOF_NBYTES
        self.sock.sendall(number + prove("door"))  # into an empty buffer: it does not block
        return True


def _call(rank: int, peer: int, address: bytes, secret: bytes, deadline: float) -> socket.socket:
    """Connect to a lower rank. Raises PeerFailed where it is gone or another process answers, StallError after `deadline`."""
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _prove(sock, rank, peer, address, secret, deadline)
            return sock
        except (BlockingIOError, ConnectionResetError, BrokenPipeError):
            pass  # the peer's backlog is full, or it disconnected this rank for being slow: try again
        except ConnectionRefusedError:
            raise PeerFailed(peer, "its process ended before this rank could connect to it", "connecting") from None
        except TimeoutError:
            raise StallError(f"rank {rank}: no answer from rank {peer} within stall_timeout_s: is it stopped?") from None
        except BaseException:
            sock.close()
            raise
        sock.close()
        if time.monotonic() > deadline:
            raise StallError(
                f"rank {rank} could not connect to rank {peer} within stall_timeout_s: rank {peer} refused or dropped every attempt, as it "
                "does while many others connect. Raise stall_timeout_s, or use comm='dist'."
            )
        time.sleep(_PAUSE_S)


def _prove(sock: socket.socket, rank: int, peer: int, address: bytes, secret: bytes, deadline: float) -> None:
    """Connect, and let both ends prove which rank they are."""
    stranger = PeerFailed(peer, "another process, which does not know the secret, answers at its address", "connecting")
    sock.settimeout(0)  # a full backlog raises BlockingIOError at once
    sock.connect(address)
    if _user(sock) != os.geteuid():
        raise stranger
    number = secrets.token_bytes(_NUMBER_NBYTES)
    sock.sendall(_RANK.pack(rank) + number)
    answer = _receive(sock, _NUMBER_NBYTES + _PROOF_NBYTES, deadline)
    prove = _prover(secret, peer, rank, number, answer[:_NUMBER_NBYTES])
    if not hmac.compare_digest(answer[_NUMBER_NBYTES:], prove("door")):
        raise stranger
    sock.sendall(prove("caller"))
    _receive(sock, len(_WELCOME), deadline)  # a door disconnects other callers without a word


def _receive(sock: socket.socket, nbytes: int, deadline: float) -> bytes:
    """Receive exactly `nbytes`. Raises ConnectionResetError where the other end closes instead, TimeoutError at the deadline."""
    received = b""
    while len(received) < nbytes:
        sock.settimeout(max(deadline - time.monotonic(), _PAUSE_S))
        part = sock.recv(nbytes - len(received))
        if not part:
            raise ConnectionResetError
        received += part
    return received


def _prover(secret: bytes, door: int, caller: int, number: bytes, other: bytes) -> Callable[[str], bytes]:
    """Return a function from role ("door", "caller") to its proof for this one meeting."""
    meeting = _RANK.pack(door) + _RANK.pack(caller) + number + other
    return lambda role: hmac.digest(secret, b"zeroshard " + role.encode() + b" " + meeting, "sha256")


def _user(sock: socket.socket) -> int:
    """Return the effective user of the process at the other end."""
    _, user, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return user


def _show_out(callers: dict[int, _Caller], fds: list[int]) -> None:
    for fd in fds:
        callers.pop(fd).sock.close()
