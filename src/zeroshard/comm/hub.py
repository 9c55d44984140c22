"""The hub of a rank: sends and receives control messages between the ranks of one host, and runs every wait for peers.

Messages come through a `Transport`; all groups of ranks that share it (`SharedComm`, and its subgroups) have one hub, so
that a wait in one group also serves the others.

A wait never hangs: it ends when a peer fails (its traceback is raised here), leaves, or is in another collective. If all
ranks for which this one waits are waiting, too, a StallError names the circle.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Any

from ..errors import LEFT, StallError
from ..utils.one_thread import Turn, one_thread
from .base import Collective, Outcome
from .control import HopQueue, misuse
from .failure import GONE, Failure
from .flight_recorder import Progress, describe, places_of
from .status_server import Desk, ThreadDesk
from .transport import ThreadTransport, Transport

NOTE_AFTER_S = 0.05  # a wait longer than this is announced to the peers
_PAUSE_S = 1e-4  # between two polls of a wait while `Hops` are pending
CIRCLE_AFTER_S = 5.0  # a circle of waiting ranks that lasts this long is a deadlock


class Meeting(Collective):
    """A collective in which each rank reads sources that its peers have just written.

    When all sources are ready, `compute` reads them, and `wait` returns; it is drained when all ranks have read.
    """

    def __init__(
        self, hub: Hub, key: Hashable, peers: Collection[int], label: str, compute: Callable[[dict[int, int]], Outcome | None]
    ) -> None:
        """compute: is called, when all sources are ready, with peer -> number of the region that the peer uses."""
        self.hub, self.key, self.peers, self.label, self.compute = hub, key, peers, label, compute
        self.finished = False
        self.over = False  # drained, and the hub has dropped its bookkeeping

    def wait(self) -> None:
        if not self.finished:
            self.hub.wait_for(lambda: self.finished, lambda: self._without(self.hub.arrived[self.key]), self.label)

    def done(self) -> bool:
        return self.finished

    def missing(self) -> list[int] | None:
        return [] if self.finished else self._without(self.hub.arrived[self.key])

    def drained(self) -> bool:
        return self.over or (self.finished and len(self.hub.read[self.key]) == len(self.peers))

    def drain(self) -> None:
        if self.over:
            return
        if not self.drained():
            self.hub.wait_for(self.drained, lambda: self._without(self.hub.read[self.key]), self.label)
        self.over = True
        self.hub.arrived.pop(self.key, None)
        self.hub.read.pop(self.key, None)

    def _without(self, present: Collection[int]) -> list[int]:
        return [peer for peer in self.peers if peer not in present]


@dataclass
class Fence:
    """State of the fences of ranks that read each other's shards.

    writing: shards may be written now, and may be read after the next exchange of `members`.
    """

    members: tuple[int, ...]
    writing: bool = True


class Hub:
    """Handles the messages of one rank; has its open meetings, and the waits of its peers. Peers are indices in the transport.

    Threads: one at a time; two in `exchange` are refused (`ThreadsMet`). `desk` answers from `progress` in a thread of its own.
    """

    def __init__(self, transport: Transport, progress: Progress, ranks: list[int], stall_timeout_s: float) -> None:
        """ranks: world rank of each peer, for errors."""
        self.transport, self.progress, self.ranks, self.stall_timeout_s = transport, progress, ranks, stall_timeout_s
        self.rank, self.turn = transport.rank, Turn(f"the communicator of rank {ranks[transport.rank]}")
        self.others = [peer for peer in range(transport.world_size) if peer != self.rank]
        self.arrived: dict[Hashable, dict[int, int]] = defaultdict(dict)  # meeting -> peers whose source is ready -> its region
        self.read: dict[Hashable, set[int]] = defaultdict(set)  # meeting -> peers that have read all sources
        self.payloads: dict[int, deque] = {peer: deque() for peer in range(transport.world_size)}
        self.fences: dict[tuple[int, ...], Fence] = {}  # members -> their fence
        self.failed: Failure | None = None  # the first failure that this rank has learned of
        self.failure: Exception | None = None
        self.pending = HopQueue()
        self._open: dict[Hashable, Meeting] = {}  # meetings that this rank has joined, and whose sources it has not read yet
        self._turn: dict[Hashable, int] = defaultdict(int)  # tag -> number of its meetings so far
        self._lost: dict[int, str] = {}
        # waiting peer -> (time of its note, its label, ranks it misses)
        self._notes: dict[int, tuple[float, str, list[int]]] = {}
        self._closed = False
        # the desk where peers ask for this rank's state; it names ranks as `ranks` does. For processes, `backend_select` replaces it
        self.desk = Desk() if not isinstance(transport, ThreadTransport) else ThreadDesk(transport.world.boards, progress)
        self.shares_desk = False  # the desk is a DistComm's, which closes it

    def meet(
        self, tag: tuple, number: int, peers: Collection[int], label: str, compute: Callable[[dict[int, int]], Outcome | None]
    ) -> Meeting:
        """Start a meeting: send `peers` (this rank is one) that region `number` is ready; `compute` runs when all regions are."""
        key = (*tag, self._turn[tag])
        self._turn[tag] += 1
        work = Meeting(self, key, peers, label, compute)
        self._open[key] = work
        self.arrived[key][self.rank] = number
        self.tell(("ready", key, number), peers)
        self.poll()
        return work

    @one_thread
    def exchange(self, payload: object, peers: Collection[int], label: str) -> dict[int, tuple[str, Any]]:
        """Return peer -> (its label, its payload) for each of `peers` (this rank among them). Blocks, and serves as a barrier."""
        self.progress.note(label)
        self.tell(("exchange", label, payload), peers)
        others = [peer for peer in peers if peer != self.rank]
        self.wait_for(
            lambda: all(self.payloads[peer] for peer in others),
            lambda: [peer for peer in others if not self.payloads[peer]],
            label,
        )
        return {peer: (label, payload) if peer == self.rank else self.payloads[peer].popleft() for peer in peers}

    def tell(self, message: tuple, peers: Collection[int] | None = None) -> None:
        """Send a message to some peers, or to all."""
        if peers is None or len(peers) > len(self.others):
            self.transport.tell(message)
        else:
            for peer in peers:
                if peer != self.rank:
                    self.transport.send(peer, message)

    # -- progress and liveness -------------------------------------------------------------------------------

    def peers_wait(self) -> bool:
        """Return True if a peer has announced a wait (see `Control.peers_wait`). Raises where a peer is gone."""
        self.check_peers(self.others, "a staging buffer")
        return bool(self._notes)

    def poll(self) -> None:
        """Process the messages that have come, and compute the meetings whose sources are ready."""
        while (item := self.transport.receive(0)) is not None:
            self._take(*item)
        self._go_on()

    def _go_on(self) -> None:
        for key in [key for key, work in self._open.items() if len(self.arrived[key]) == len(work.peers)]:
            work = self._open.pop(key)
            work.take(work.compute(self.arrived[key]))
            work.finished = True
            self.read[key].add(self.rank)
            self.tell(("read", key), work.peers)
        self.pending.advance()

    def _take(self, peer: int, message: tuple) -> None:
        kind = message[0]
        if kind == "waiting":
            self._notes[peer] = (time.monotonic(), message[1], message[2])
            return
        if kind == "awake":  # only this ends a note: other messages ("read") come from ranks that still wait
            self._notes.pop(peer, None)
        elif kind == "ready":
            self.arrived[message[1]][peer] = message[2]
        elif kind == "read":
            self.read[message[1]].add(peer)
        elif kind == "exchange":
            self.payloads[peer].append(message[1:])
        elif kind == "failed":
            self.failed = self.failed or Failure(*message[1:])
            self.failure = self.failure or self.failed.error
        elif kind == "lost":
            self._lost.setdefault(peer, message[1])  # a peer's own goodbye comes first, then the closed socket's GONE

    def wait_for(self, done: Callable[[], bool], missing: Callable[[], list[int]], label: str) -> None:
        """Receive messages until `done()`; raise when a rank in `missing()` can not come any more."""
        begin, noted = time.monotonic(), False
        with self.pending.waiting():
            self.progress.wait(label, missing)
            self._go_on()
            while not done():
                # pending hops are polled, as no message tells that their first collective is over
                patience = _PAUSE_S if self.pending.items else 0.2 if noted else NOTE_AFTER_S
                item = self.transport.receive(patience)
                if item is not None:
                    self._take(*item)
                if item is not None or self.pending.items:
                    self._go_on()
                if item is not None:
                    continue
                waited = time.monotonic() - begin
                self.check_peers(missing(), label)
                if waited >= NOTE_AFTER_S and not noted:
                    self.tell(("waiting", label, missing()))
                    noted = True
                if waited > CIRCLE_AFTER_S:
                    self._check_circle(missing(), label, waited)
            self.progress.awake()
            if noted:
                self.tell(("awake",))

    def check_gone(self, label: str) -> None:
        """Raise where any rank has failed, or the connection to one has closed without a goodbye."""
        self.check_peers([peer for peer, reason in self._lost.items() if reason == GONE], label)

    def check_peers(self, missing: list[int], label: str) -> None:
        """Raise where any rank has failed, or where a rank in `missing` is gone."""
        if self.failed is None and any(peer in self._lost for peer in missing):
            first = next((peer for peer, reason in self._lost.items() if reason == GONE), None)  # the cause, if others have left
            peer = first if first is not None else next(peer for peer in missing if peer in self._lost)
            reason = self._lost[peer] if peer != first else self.desk.how_it_ended(self.ranks[peer])
            self.fail(Failure(self.ranks[peer], reason))
        if self.failed is None and self.desk.told is not None:
            # a rank of another host has failed: send that to the ranks of this host, which may wait only for this rank
            self.fail(self.desk.told)
        if self.failed is not None:
            raise self.failed.raised(self.progress.place(label))

    def _check_circle(self, missing: list[int], label: str, waited: float) -> None:
        """Raise StallError if every rank that this one needs, directly or not, waits itself (or is busy beyond the timeout)."""
        now, seen, queue = time.monotonic(), {self.rank}, list(missing)
        while queue:
            peer = queue.pop()
            if peer in seen:
                continue
            seen.add(peer)
            note = self._notes.get(peer)
            if note is None or now - note[0] < CIRCLE_AFTER_S / 2:  # it is busy, or has only just begun to wait
                if waited < self.stall_timeout_s:
                    return
                break  # this peer is busy beyond the timeout: report that, too
            queue += note[2]
        answers = self.desk.ask([self.ranks[peer] for peer in self.others])
        reports = answers | {self.ranks[self.rank]: self.progress.report()}
        self.poll()
        if self.failed is not None:  # a peer has found the same circle, and has raised
            raise self.failed.raised(self.progress.place(label))
        places = {self.ranks.index(rank): place for rank, place in places_of(reports).items()}
        places |= {peer: note[1] for peer, note in self._notes.items()} | {self.rank: label}
        hint = f"Did all ranks run the same modules and calls?{misuse(places, self.transport.world_size)}"
        text = describe(waited, reports, hint)
        error = StallError(text)
        self.fail(Failure(self.ranks[self.rank], text, error))
        raise error

    def fail(self, failure: Failure) -> None:
        """Send the peers the failure for which the group can not go on (see `Control.fail`)."""
        if not self._closed:
            self.tell(("failed", failure.rank, failure.reason, failure.error))
        if failure.error is not None or failure.rank != self.ranks[self.rank]:
            self.failed = self.failed or failure  # all ranks raise it, so this rank must not wait for any of them
            self.failure = self.failure or failure.error

    def close(self) -> None:
        """Send the peers word that this rank leaves, and close the transport."""
        if not self._closed:
            self._closed = True
            if not self.shares_desk:
                self.desk.close()
            self.tell(("lost", LEFT))  # an error only on ranks that still wait for this one
            self.transport.close()
