"""Two "nodes" on one machine, joined by a proxy on loopback with a chosen bandwidth; this needs no privilege.

    with Nodes(rate_bits_per_s=200e6) as nodes:      each rank: nodes.enter(node), then
                                                     dist.init_process_group("gloo", init_method=nodes.init_method)

    rank of node 1 --connects--> port of the proxy (a door) --connects--> port of a rank of node 0
                                  for each direction a token bucket and a counter

Gloo joins ranks in pairs: each publishes its address and port in the group's store; of two, the one with the higher address
connects (compared by IP address first), the other waits. The store `_Readdressed` shows a rank the true addresses of ranks
of its own node. It shows node 1 the ranks of node 0 at 0.0.0.0 (the lowest address, which is loopback) and the port of a
door; it shows node 0 the ranks of node 1 at 255.255.255.255, the highest, so that it waits. This replaces nothing in torch.
Connections to the store and to status servers bypass the proxy: steps send no data over them.

The proxy is a thread of the process that opened the nodes. It takes an eighth of a core at 200 Mbit/s, and uses the whole
bandwidth, where TCP over a shaped link reaches 92% of it: steps are up to a tenth shorter (docs/log.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

_BURST_S, _LEAST_BURST_NBYTES = 0.004, 1 << 18
_SCHEME = "zeroshard-proxied"
_CHUNK_NBYTES = 1 << 16  # sent for one connection at a time, so that all connections get their share
_MARK = b"zeroshard node "  # followed by the node's number; put into bytes of a published address that IPv4 does not use
_LENGTH, _IPV4 = struct.Struct("@Q"), struct.Struct("@H2s4s")  # size_t; start of sockaddr_in: family, port, address
_STORAGE_NBYTES = 128  # struct sockaddr_storage
_LOWEST, _HIGHEST = bytes(4), b"\xff" * 4
_entered: list[Nodes] = []  # the nodes of which the calling process is a rank


class NodesUnavailable(RuntimeError):
    """Raised if the process cannot use such nodes; the message says why, in one line."""


class Nodes:
    """Two nodes and the proxy between them, which exist while the context is open. It can be pickled and sent to ranks."""

    init_method = f"{_SCHEME}://"

    def __init__(self, rate_bits_per_s: float) -> None:
        self.rate_bits_per_s = rate_bits_per_s
        self.node: int | None = None  # the calling process's node, after `enter`
        self._proxy: _Proxy | None = None
        self._path = ""

    def __enter__(self) -> Nodes:
        self._folder = tempfile.TemporaryDirectory(prefix="zeroshard-nodes-")  # only this user can read it
        self._path = os.path.join(self._folder.name, "proxy")
        self._proxy = _Proxy(self._path, self.rate_bits_per_s)
        return self

    def __exit__(self, *_: object) -> None:
        if self._proxy is not None:
            self._proxy.close()
        self._folder.cleanup()

    def __getstate__(self) -> dict[str, Any]:
        return {"rate_bits_per_s": self.rate_bits_per_s, "node": None, "_proxy": None, "_path": self._path}

    def shape(self, rate_bits_per_s: float) -> None:
        """Give the link this bandwidth, in bits a second, in each direction."""
        self.rate_bits_per_s = rate_bits_per_s
        self._ask(f"shape {rate_bits_per_s}")

    def enter(self, node: int) -> None:
        """Make the calling process a rank of a node. Call it before init_process_group."""
        self.node = node
        os.environ |= {"ZEROSHARD_NODE": str(node), "GLOO_SOCKET_IFNAME": "lo"}
        _entered[:] = [self]

    def sent_nbytes(self) -> int:
        """Return the bytes that the calling process's node has sent through the proxy so far."""
        if self.node is None:
            raise NodesUnavailable("this process has not entered a node: call enter() first")
        found = int(self._ask(f"sent {self.node}"))
        if not found:
            raise NodesUnavailable("nothing was sent through the proxy: this torch publishes gloo's addresses in another form")
        return found

    def door(self, address: str, port: int) -> int:
        """Return a port of loopback through which node 1 reaches this address and port of node 0."""
        return int(self._ask(f"door {address} {port}"))

    def _ask(self, request: str) -> str:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(self._path)
            sock.sendall(request.encode() + b"\n")
            return sock.makefile().readline()


# ------------------------------------------------------------------------------------------------- what gloo publishes


def _meet(url: str, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Meet as "env://" does, with a store in which addresses of the other node are those of the proxy."""
    for store, rank, world_size in rendezvous("env://", **options):
        yield _Readdressed(store, _entered[0]), rank, world_size


with contextlib.suppress(RuntimeError):  # the handler is registered already if this module is imported twice
    register_rendezvous_handler(_SCHEME, _meet)


class _Readdressed(dist.Store):
    """A store in which addresses of ranks of the other node are those of the proxy."""

    def __init__(self, store: Any, nodes: Nodes) -> None:
        super().__init__()
        self._store, self._nodes = store, nodes
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))  # C++ keeps using the store, but holds no reference to this object

    def set(self, key: str, value: Any) -> None:  # torch's signature says str, but gloo passes bytes
        self._store.set(key, marked(value, self._nodes.node))

    def get(self, key: str) -> bytes:
        return self._seen(self._store.get(key))

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        self._store.multi_set(keys, [marked(value, self._nodes.node) for value in values])

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return list(map(self._seen, self._store.multi_get(keys)))

    def clone(self) -> dist.Store:
        return _Readdressed(self._store.clone(), self._nodes)

    def _seen(self, value: bytes) -> bytes:
        """Return a value of the store; if it is an address of a rank of the other node, with the proxy's address in it."""
        at = _address_in(value)
        if at is None or not value.startswith(_MARK, at + _IPV4.size + 8):
            return value
        node = value[at + _IPV4.size + 8 + len(_MARK)]
        family, port, address = _IPV4.unpack_from(value, at)
        here = self._nodes.node
        assert here is not None
        if node > here:
            address = _HIGHEST
        elif node < here:
            door = self._nodes.door(socket.inet_ntoa(address), int.from_bytes(port, "big"))
            port, address = door.to_bytes(2, "big"), _LOWEST
        return value[:at] + _IPV4.pack(family, port, address) + value[at + _IPV4.size :]


def _plainly(name: str) -> Any:
    return lambda self, *given, **named: getattr(self._store, name)(*given, **named)


for _name in dir(dist.Store):  # all other methods are those of the wrapped store
    if not _name.startswith("_") and _name not in vars(_Readdressed) and callable(getattr(dist.Store, _name)):
        setattr(_Readdressed, _name, _plainly(_name))


def _address_in(value: bytes) -> int | None:
    """Return the offset of the socket address in a value that gloo published (length, host name, length, address), or None."""
    name_nbytes = _LENGTH.unpack_from(value)[0] if len(value) > _LENGTH.size else 1 << 63
    at = 2 * _LENGTH.size + name_nbytes
    if len(value) < at + _STORAGE_NBYTES or _LENGTH.unpack_from(value, at - _LENGTH.size)[0] < _STORAGE_NBYTES:
        return None
    return at if _IPV4.unpack_from(value, at)[0] == socket.AF_INET else None


def burst_nbytes(rate_bits_per_s: float) -> int:
    """Return the bytes that a node may send at once after a pause."""
    return max(_LEAST_BURST_NBYTES, int(rate_bits_per_s / 8 * _BURST_S))


def marked(value: bytes, node: int | None) -> bytes:
    """Return a value of the store; if it is a rank's address, with the number of its node in it."""
    at = _address_in(value) if isinstance(value, bytes) else None
    if at is None or node is None:
        return value
    note = _MARK + bytes([node])
    at += _IPV4.size + 8  # struct sockaddr_in
    return value[:at] + note + value[at + len(note) :]


# ----------------------------------------------------------------------------------------------------------- the proxy


class _Way:
    """The token bucket and byte counter of one direction of the link."""

    def __init__(self, rate_bits_per_s: float) -> None:
        self.nbytes, self._free_at = 0, 0.0
        self.shape(rate_bits_per_s)

    def shape(self, rate_bits_per_s: float) -> None:
        self._nbytes_per_s = rate_bits_per_s / 8
        self._burst_s = burst_nbytes(rate_bits_per_s) / self._nbytes_per_s

    async def let_through(self, nbytes: int) -> None:
        """Wait until the bucket lets so many bytes through, after those of earlier calls."""
        now = time.monotonic()
        self._free_at = max(self._free_at, now - self._burst_s) + nbytes / self._nbytes_per_s
        self.nbytes += nbytes
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


class _Proxy:
    """The proxy's thread: it serves the doors, and a Unix socket at `path` through which ranks ask for them."""

    def __init__(self, path: str, rate_bits_per_s: float) -> None:
        self._path, self._ways = path, [_Way(rate_bits_per_s) for _ in range(2)]
        self._servers: list[asyncio.Server] = []
        self._open = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="zeroshard-proxy", daemon=True)
        self._thread.start()
        if not self._open.wait(10):
            raise NodesUnavailable("the proxy did not start within 10 s: see what its thread printed")

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._servers.append(await asyncio.start_unix_server(self._answer, self._path))
        self._open.set()
        await self._over.wait()
        for server in self._servers:
            server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        what, *given = (await reader.readline()).decode().split()
        answer = ""
        if what == "sent":
            answer = str(self._ways[int(given[0])].nbytes)
        elif what == "shape":
            for way in self._ways:
                way.shape(float(given[0]))
        else:  # a door: a new port that forwards connections to this address and port of node 0
            come_in = functools.partial(self._come_in, given[0], int(given[1]))
            server = await asyncio.start_server(come_in, "127.0.0.1", 0, limit=_CHUNK_NBYTES)
            self._servers.append(server)
            answer = str(server.sockets[0].getsockname()[1])
        writer.write(f"{answer}\n".encode())
        writer.close()

    async def _come_in(self, address: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a connection to an address and port of node 0, in both directions, until one ends."""
        try:
            there, to_there = await asyncio.open_connection(address, port, limit=_CHUNK_NBYTES)
        except OSError:  # the rank has ended
            writer.close()
            return
        lanes = (self._carry(reader, to_there, self._ways[1]), self._carry(there, writer, self._ways[0]))
        tasks = [asyncio.create_task(lane) for lane in lanes]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:  # close both, as gloo does; data written before is still sent
            for task in tasks:
                task.cancel()
            writer.close()
            to_there.close()

    @staticmethod
    async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter, way: _Way) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK_NBYTES):
                await way.let_through(len(data))
                sink.write(data)
                await sink.drain()
