"""The proxy that joins two nodes on one machine: its bandwidth, its counters, its ends.

What ranks do through it is in test_two_nodes.
"""

import asyncio
import pickle
import socket
import threading
import time
from types import SimpleNamespace

import nodes as of_nodes
import pytest
import torch.distributed as dist
from nodes import Nodes, NodesUnavailable, burst_nbytes, marked

RATE, NBYTES = 40e6, 2_000_000  # bits a second


@pytest.fixture
def joined():
    """The nodes, and both ends of a connection through them: of node 1, which called, and of node 0."""
    with Nodes(RATE) as nodes, socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(("127.0.0.1", nodes.door(*listener.getsockname())), 5)
        called, _ = listener.accept()
        called.settimeout(50)
        with caller, called:
            yield nodes, caller, called


def receive(sock: socket.socket, nbytes: int) -> float:
    """Seconds from now until they are here."""
    begin, left = time.monotonic(), nbytes
    while left:
        left -= len(sock.recv(min(left, 1 << 16)))
    return time.monotonic() - begin


def both_ways(caller: socket.socket, called: socket.socket) -> float:
    """Seconds until each end has what the other sends at the same time."""
    begin = time.monotonic()
    work = [threading.Thread(target=sock.sendall, args=(bytes(NBYTES),)) for sock in (caller, called)]
    work += [threading.Thread(target=receive, args=(sock, NBYTES)) for sock in (caller, called)]
    for each in work:
        each.start()
    for each in work:
        each.join()
    return time.monotonic() - begin


def sent_by(nodes: Nodes, node: int) -> int:
    nodes.node = node
    return nodes.sent_nbytes()


def test_each_way_has_the_bandwidth_and_its_own_counter(joined):
    nodes, caller, called = joined
    least = (NBYTES - burst_nbytes(RATE)) * 8 / RATE
    took = [both_ways(caller, called) for _ in range(2)]
    assert least < min(took), (took, least)  # never sooner; how much later is the machine's
    caller.sendall(b"abc")
    receive(called, 3)
    assert (sent_by(nodes, 0), sent_by(nodes, 1)) == (2 * NBYTES, 2 * NBYTES + 3)
    pickle.loads(pickle.dumps(nodes)).shape(100 * RATE)  # by a rank
    assert [way._nbytes_per_s for way in nodes._proxy._ways] == [100 * RATE / 8] * 2
    both_ways(caller, called)
    assert (sent_by(nodes, 0), sent_by(nodes, 1)) == (3 * NBYTES, 3 * NBYTES + 3)


def test_a_way_waits_for_its_own_bytes_alone_and_no_longer_than_they_take(monkeypatch):
    """By a clock that stands still except where the proxy sleeps."""
    now, slept = [100.0], []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(of_nodes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(of_nodes, "asyncio", SimpleNamespace(sleep=sleep))
    there, back = of_nodes._Way(RATE), of_nodes._Way(RATE)
    chunk, burst = 10_000, burst_nbytes(RATE)
    for _ in range(NBYTES // chunk):
        asyncio.run(there.let_through(chunk))
    assert sum(slept) == pytest.approx((NBYTES - burst) * 8 / RATE)
    slept.clear()
    asyncio.run(back.let_through(burst))  # the other way is as free as before
    assert slept == [] and (there.nbytes, back.nbytes) == (NBYTES, burst)
    there.shape(100 * RATE)
    asyncio.run(there.let_through(NBYTES))
    assert sum(slept) == pytest.approx(NBYTES * 8 / (100 * RATE))


def test_what_was_sent_arrives_before_the_end_of_the_connection(joined):
    _, caller, called = joined
    caller.sendall(bytes(1000))
    caller.close()
    receive(called, 1000)
    assert called.recv(1) == b""


def test_a_door_to_a_rank_that_is_gone_closes(joined):
    nodes, _, _ = joined
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gone = listener.getsockname()
    with socket.create_connection(("127.0.0.1", nodes.door(*gone)), 5) as caller:
        assert caller.recv(1) == b""


def test_counters_of_no_traffic_are_an_error(joined):
    nodes, _, _ = joined
    with pytest.raises(NodesUnavailable, match="has not entered a node"):
        nodes.sent_nbytes()
    with pytest.raises(NodesUnavailable, match="nothing was sent through the proxy"):
        sent_by(nodes, 0)


@pytest.mark.parametrize("value", [b"", b"1", b"\xff" * 300, bytes(300), pickle.dumps(list(range(200)))])
def test_other_values_of_the_store_are_left_alone(value):
    store = dist.HashStore()
    store.set("key", marked(value, 1))
    assert store.get("key") == value
