"""The rendezvous of ranks on one host: they connect to each other, and keep other processes out.

Any process of the host sees an abstract UNIX socket (/proc/net/unix) and may connect to it; another one may listen at the
address of a rank that is gone. So each end of a connection asks the kernel for the number and the user of the process at the
other end (SO_PEERCRED): it must be the process that the rank has named over the process group. A rank disconnects all other
callers, and goes on waiting for the real peer.

Addresses are chosen by the kernel (no process can take them first) and exchanged over the process group. Ranks that meet have one
PID namespace (`backend_select._host`); the kernel gives processes of other namespaces other numbers here.
"""

from __future__ import annotations

import os
import socket
import struct
import time

from ..errors import PeerFailed, StallError

_RANK, _PEER = struct.Struct("<I"), struct.Struct("3i")
_PAUSE_S = 0.005  # between two attempts to connect

Address = tuple[bytes, int]  # address of a rank's door, and number of its process


class Door:
    """The listening socket of one rank, open until all peers have connected."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(b"")  # abstract namespace: no file to leave behind
        self._socket.listen(128)
        self.address: Address = (self._socket.getsockname(), os.getpid())

    def connect(self, rank: int, addresses: list[Address], timeout_s: float) -> dict[int, socket.socket]:
        """Return a connection to every other rank, and close the door. This rank calls lower ranks; higher ones call it.

        addresses: of all ranks' doors. Raises PeerFailed for a rank that is gone, StallError after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        peers: dict[int, socket.socket] = {}
        try:
            for peer in range(rank):
                peers[peer] = _call(rank, peer, addresses[peer], deadline)
            while missing := [peer for peer in range(rank + 1, len(addresses)) if peer not in peers]:
                try:
                    caller, sock = self._answer(addresses, deadline)
                except TimeoutError:
                    raise StallError(
                        f"rank {rank}: ranks {missing} have not connected within stall_timeout_s. Do all ranks call zs.shard() (or "
                        "zs.init), and are their processes alive?"
                    ) from None
                if caller in missing:
                    peers[caller] = sock
                else:
                    sock.close()
        except BaseException:
            for sock in peers.values():
                sock.close()
            raise
        finally:
            self.close()
        return peers

    def _answer(self, addresses: list[Address], deadline: float) -> tuple[int | None, socket.socket]:
        """Accept the next connection; return the rank that calls, None for any other process. Raises TimeoutError."""
        self._socket.settimeout(_time_left(deadline))
        sock, _ = self._socket.accept()
        try:
            pid, user = _process_of(sock)
            if user == os.geteuid() and any(pid == number for _, number in addresses):
                sock.settimeout(_time_left(deadline))
                (rank,) = _RANK.unpack(sock.recv(_RANK.size))  # four bytes come at once
                if rank < len(addresses) and addresses[rank][1] == pid:
                    return rank, sock
        except (ConnectionError, struct.error):  # it has disconnected
            pass
        except BaseException:
            sock.close()
            raise
        return None, sock

    def close(self) -> None:
        """Close the listening socket: nobody can connect any more."""
        self._socket.close()


def _call(rank: int, peer: int, address: Address, deadline: float) -> socket.socket:
    """Connect to a lower rank. Raises PeerFailed where it is gone or another process answers, StallError after `deadline`."""
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)  # a full backlog raises BlockingIOError at once
            sock.connect(address[0])
            if _process_of(sock) != (address[1], os.geteuid()):
                why = "another process answers at its address (or this system, as gVisor, does not tell which: use comm='dist')"
                raise PeerFailed(peer, why, "connecting")
            sock.sendall(_RANK.pack(rank))  # into an empty buffer: it does not block
            return sock
        except (BlockingIOError, ConnectionResetError, BrokenPipeError):
            sock.close()  # the peer's backlog is full, or its door closes just now: try again
        except ConnectionRefusedError:
            sock.close()
            raise PeerFailed(peer, "its process ended before this rank could connect to it", "connecting") from None
        except BaseException:
            sock.close()
            raise
        if time.monotonic() > deadline:
            raise StallError(
                f"rank {rank} could not connect to rank {peer} within stall_timeout_s: rank {peer} refused or dropped every attempt, as it "
                "does while many others connect. Raise stall_timeout_s, or use comm='dist'."
            )
        time.sleep(_PAUSE_S)


def _time_left(deadline: float) -> float:
    """Return the seconds until `deadline`. Raises TimeoutError where it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _process_of(sock: socket.socket) -> tuple[int, int]:
    """Return number and effective user of the process at the other end."""
    pid, user, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, user
