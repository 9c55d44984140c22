"""The hub of a rank: sends and receives control messages between the ranks of one host, and runs every wait for peers.

Messages come through a `Transport`; all groups of ranks that share it (a `SharedComm`, and its subgroups) share the state of
the hub, so that a wait in one group also serves the others.

A wait never hangs: it ends when a peer fails (its traceback is raised here), leaves, or is in another collective. If all
ranks for which this one waits are waiting, too, a StallError names the circle.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Sequence

from ..diagnostics import ThreadDesk, describe, places_of
from ..engine.comm import GONE, Collective, Desk, DirectComm, Failure, HopQueue, Missing, Outcome, Progress, mismatch, misuse
from ..errors import LEFT, StallError
from ..utils.one_thread import Turn
from .transport import ThreadTransport, Transport

NOTE_AFTER_S = 0.05  # a wait longer than this is announced to the peers
_PAUSE_S = 1e-4  # between two polls of a wait while `Hops` are pending
CIRCLE_AFTER_S = 5.0  # a circle of waiting ranks that lasts this long is a deadlock


class Meeting(Collective):
    """A collective in which each rank reads sources that its peers have just written.

    When all sources are ready, `compute` reads them, and `wait` returns; it is drained when all ranks have read.
    """

    def __init__(self, hub: Hub, key: Hashable, label: str, compute: Callable[[dict[int, int]], Outcome | None]) -> None:
        """compute: is called, when all sources are ready, with peer -> number of the region that the peer uses."""
        self.hub, self.key, self.peers, self.label, self.compute = hub, key, hub.members, label, compute
        self.finished = False
        self.over = False  # drained, and the hub has dropped its bookkeeping

    def wait(self) -> None:
        if not self.finished:
            self.hub.wait_until(self.done, self.label, self.missing)

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
            self.hub.wait_until(self.drained, self.label, lambda: self._without(self.hub.read[self.key]))
        self.over = True
        self.hub.arrived.pop(self.key, None)
        self.hub.read.pop(self.key, None)

    def _without(self, present: Collection[int]) -> list[int]:
        return [peer for peer in self.peers if peer not in present]


class Hub(DirectComm):
    """Base class of a Comm whose ranks send each other messages. Has the open meetings of this rank, and the waits of its peers.

    A subgroup is a copy that shares every object of this state. Peers and `members` are indices in the transport.

    Threads: one at a time; two in an exchange are refused (`ThreadsMet`). `desk` answers from `progress` in a thread of its own.
    """

    def __init__(self, transport: Transport, numbers: list[int], stall_timeout_s: float) -> None:
        """numbers: world rank of each rank of the transport, for errors."""
        self.transport, self.numbers, self.stall_timeout_s = transport, numbers, stall_timeout_s
        self.members = tuple(range(transport.world_size))  # the ranks of this group
        self.progress, self.pending = Progress(numbers[transport.rank]), HopQueue()
        self.turn = Turn(f"the communicator of rank {numbers[transport.rank]}")
        self.others = [peer for peer in range(transport.world_size) if peer != transport.rank]
        self.arrived: dict[Hashable, dict[int, int]] = defaultdict(dict)  # meeting -> peers whose source is ready -> its region
        self.read: dict[Hashable, set[int]] = defaultdict(set)  # meeting -> peers that have read all sources
        self._payloads: dict[int, deque] = {peer: deque() for peer in range(transport.world_size)}
        self._failures: list[Failure] = []  # those that this rank has learned of; the first one is the cause of the others
        self._open: dict[Hashable, Meeting] = {}  # meetings that this rank has joined, and whose sources it has not read yet
        self._meetings: dict[Hashable, int] = defaultdict(int)  # tag -> number of its meetings so far
        self._lost: dict[int, str] = {}
        # waiting peer -> (time of its note, its label, ranks it misses)
        self._notes: dict[int, tuple[float, str, list[int]]] = {}
        # the desk where peers ask for this rank's state; it names ranks as `numbers` does. For processes, `backend_select` replaces it
        self.desk = Desk() if not isinstance(transport, ThreadTransport) else ThreadDesk(transport.world.boards, self.progress)
        self.shares_desk = False  # the desk is a DistComm's, which may go on

    def meet(self, kind: str, tag: int, number: int, label: str, compute: Callable[[dict[int, int]], Outcome | None]) -> Meeting:
        """Start a meeting: send the members that this rank's region `number` is ready; `compute` runs when all regions are."""
        # the members keep subgroups apart that use the same tag
        name = (kind, tag, *(self.members if self.world_size < self.transport.world_size else ()))
        key = (*name, self._meetings[name])
        self._meetings[name] += 1
        work = Meeting(self, key, label, compute)
        self._open[key] = work
        self.arrived[key][self.transport.rank] = number
        self.tell(("ready", key, number), self.members)
        self.poll()
        return work

    def exchange(self, payload: bytes, label: str) -> list[bytes]:
        return self._meet_all(payload, self.members, label)

    def _meet_all(self, payload: object, members: Sequence[int], label: str) -> list:
        """Return the payload of each of `members` (this rank among them). Blocks, and serves as a barrier."""
        others = [peer for peer in members if peer != self.transport.rank]
        with self.turn:
            self.progress.note(label)
            self.tell(("exchange", label, payload), members)
            self.wait_until(
                lambda: all(self._payloads[peer] for peer in others),
                label,
                lambda: [peer for peer in others if not self._payloads[peer]],
            )
            told = [(label, payload) if peer == self.transport.rank else self._payloads[peer].popleft() for peer in members]
        error = mismatch({rank: each[0] for rank, each in enumerate(told)}, [self.numbers[member] for member in members])
        if error is not None:
            self._check_peers([], label)  # if a rank failed and then made another call, raise its error instead
            raise error
        unsent = self.transport.unsent
        if unsent():  # a peer can not end its exchange before it has read this rank's payload
            self.wait_until(lambda: not unsent(), label, lambda: list(unsent()))
        return [each[1] for each in told]

    def tell(self, message: tuple, peers: Collection[int] | None = None) -> None:
        """Send a message to some peers, or to all."""
        if peers is None or len(peers) > len(self.others):
            self.transport.tell(message)
        else:
            for peer in peers:
                if peer != self.transport.rank:
                    self.transport.send(peer, message)

    # -- progress and liveness -------------------------------------------------------------------------------

    @property
    def failure(self) -> Exception | None:
        return next((failure.error for failure in self._failures if failure.error is not None), None)

    def announce(self, waiting_for: str | None) -> None:
        self.tell(("awake",) if waiting_for is None else ("waiting", waiting_for, self.others))

    def peers_wait(self) -> bool:
        """Return True if a peer has announced a wait (see `Control.peers_wait`). Raises where a peer is gone."""
        self._check_peers(self.others, "a staging buffer")
        return bool(self._notes)

    def serve(self) -> None:
        """Process the messages that have come; raise where a rank has failed, or its connection closed without a goodbye."""
        self.poll()
        self._check_peers([peer for peer, reason in self._lost.items() if reason == GONE], "ranks of other hosts")

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
            self.read[key].add(self.transport.rank)
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
            self._payloads[peer].append(message[1:])
        elif kind == "failed":
            if not self._failures:
                self._failures.append(Failure(*message[1:]))
        elif kind == "lost":
            self._lost.setdefault(peer, message[1])  # a peer's own goodbye comes first, then the closed socket's GONE

    def wait_until(self, done: Callable[[], bool], label: str, missing: Missing | None = None) -> None:
        """Receive messages until `done()`; raise when a rank in `missing()`, all others if not known, can not come any more."""

        def awaited() -> list[int]:
            known = missing() if missing is not None else None
            return self.others if known is None else known

        begin, noted = time.monotonic(), False
        with self.pending.waiting():
            self.progress.wait(label, awaited)
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
                self._check_peers(awaited(), label)
                if waited >= NOTE_AFTER_S and not noted:
                    self.tell(("waiting", label, awaited()))
                    noted = True
                if waited > CIRCLE_AFTER_S:
                    self._check_circle(awaited(), label, waited)
            self.progress.awake()
            if noted:
                self.tell(("awake",))

    def _check_peers(self, missing: list[int], label: str) -> None:
        """Raise where any rank has failed, or where a rank in `missing` is gone."""
        if not self._failures and any(peer in self._lost for peer in missing):
            first = next((peer for peer, reason in self._lost.items() if reason == GONE), None)  # the cause, if others have left
            peer = first if first is not None else next(peer for peer in missing if peer in self._lost)
            reason = self._lost[peer] if peer != first else self.desk.how_it_ended(self.numbers[peer])
            self.fail(Failure(self.numbers[peer], reason))
        if not self._failures and self.desk.told is not None:
            # a rank of another host has failed: send that to the ranks of this host, which may wait only for this rank
            self.fail(self.desk.told)
        if self._failures:
            raise self._failures[0].raised(self.progress.place(label))

    def _check_circle(self, missing: list[int], label: str, waited: float) -> None:
        """Raise StallError if every rank that this one needs, directly or not, waits itself (or is busy beyond the timeout)."""
        now, seen, queue = time.monotonic(), {self.transport.rank}, list(missing)
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
        answers = self.desk.ask([self.numbers[peer] for peer in self.others])
        reports = answers | {self.progress.rank: self.progress.report()}
        self.poll()
        if self._failures:  # a peer has found the same circle, and has raised
            raise self._failures[0].raised(self.progress.place(label))
        places = {self.numbers.index(rank): place for rank, place in places_of(reports).items()}
        places |= {peer: note[1] for peer, note in self._notes.items()} | {self.transport.rank: label}
        hint = misuse(places, self.transport.world_size)
        text = describe(waited, reports, hint)
        error = StallError(text)
        self.fail(Failure(self.progress.rank, text, error))
        raise error

    def fail(self, failure: Failure) -> None:
        if not self.transport.closed:
            self.tell(("failed", failure.rank, failure.reason, failure.error))
        if failure.error is not None or failure.rank != self.progress.rank:
            self._failures.append(failure)  # all ranks raise the first one, so this rank must not wait for any of them

    def leave(self) -> None:
        """Send the peers word that this rank leaves, and close the transport."""
        if not self.transport.closed:
            self.transport.closed = True
            if not self.shares_desk:
                self.desk.close()
            self.tell(("lost", LEFT))  # an error only on ranks that still wait for this one
            self.transport.close()
