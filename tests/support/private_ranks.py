"""Ranks as threads that can not read each other's memory: a Comm that delivers copies, in any order."""

import math
import threading
import time
from collections import defaultdict

import torch

from zeroshard.engine.comm.base import Collective, DirectComm, Region, parts_of
from zeroshard.engine.comm.control import Sent, operation

PATIENCE_S = 10


class PostOffice:
    """Letters by (what, from, to); `collect` waits for one."""

    def __init__(self) -> None:
        self.letters: dict[tuple, object] = {}
        self.changed = threading.Condition()

    def post(self, key: tuple, letter: object) -> None:
        with self.changed:
            assert key not in self.letters, f"sent twice: {key}"
            self.letters[key] = letter
            self.changed.notify_all()

    def collect(self, key: tuple) -> object:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.letters, PATIENCE_S), f"never sent: {key}"
            return self.letters.pop(key)


class Delivery(Collective):
    """Receives when waited for; checks that the source was left alone meanwhile.

    streamed: as on a GPU, where draining orders the stream and the host goes on: it never waits for a peer.
    """

    def __init__(self, source: torch.Tensor, finish, arrived, streamed: bool) -> None:
        """finish: receive and use; arrived() tells whether that would not block."""
        self.source, self.before, self.finish, self.streamed = source, source.clone(), finish, streamed
        self.arrived = arrived

    def wait(self) -> None:
        if self.finish is not None:
            same = self.before is None or torch.equal(_bits(self.source), _bits(self.before))
            assert same, "a source was overwritten too early"
            finish, self.finish = self.finish, None
            self.take(finish())

    def done(self) -> bool:
        return self.finish is None or self.arrived()

    def drain(self) -> None:
        if self.streamed:
            self.before = None  # whatever is written from now on is written after the send
        else:
            self.wait()

    def drained(self) -> bool:
        if self.finish is not None and self.arrived():
            self.wait()
        return self.finish is None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """To compare: NaN equals itself."""
    return tensor.view(torch.uint8)


class PrivateComm(DirectComm):
    """One rank of `world_size` threads that see only each other's letters."""

    def __init__(self, office: PostOffice, rank: int, world_size: int, ordered: bool) -> None:
        self.office, self.rank, self.world_size, self.ordered = office, rank, world_size, ordered
        self.device = torch.device("cpu")
        self.waits_on_host = not ordered
        self._turn: dict[object, int] = defaultdict(int)
        self.ranks, self.nodes = list(range(world_size)), [0] * world_size

    def subgroup(self, parts, apart=False) -> "PrivateComm":
        mine = list(next(part for part in parts if self.rank in part))
        group = PrivateComm(self.office, mine.index(self.rank), len(mine), self.ordered)
        group.pending, group._turn = self.pending, self._turn
        group.ranks, group.nodes = [self.ranks[rank] for rank in mine], [self.nodes[rank] for rank in mine]
        return group

    def _number(self, kind: object) -> tuple:
        """Which collective this is: the n-th of its kind or (ordered) the n-th of all."""
        stream = "all" if self.ordered else kind
        self._turn[(*self.ranks, stream)] += 1
        return (stream, self._turn[(*self.ranks, stream)])

    def _send(self, number: tuple, label: str, parts: list) -> None:
        for peer in range(self.world_size):
            if peer != self.rank:
                self.office.post(self._address(number, self.rank, peer), (label, parts[peer]))

    def _arrived(self, number: tuple) -> bool:
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        return all(self._address(number, peer, self.rank) in self.office.letters for peer in peers)

    def _address(self, number: tuple, sender: int, receiver: int) -> tuple:
        return tuple(self.ranks), number, sender, receiver

    def _receive(self, number: tuple, label: str, mine: object) -> list:
        parts = []
        for peer in range(self.world_size):
            name, part = (label, mine) if peer == self.rank else self.office.collect(self._address(number, peer, self.rank))
            assert operation(name) == operation(label), f"collective {number}: {label} on rank {self.rank}, {name} on rank {peer}"
            parts.append(part)
        return parts

    def gather(self, full: torch.Tensor, source: Region, label: str, tag: int | None = None) -> Collective:
        mine, rows = source.shards[self.rank], full.view(self.world_size, -1)
        own = mine.clone()  # as it is now, like what is sent
        number = self._number(("gather", source.number if tag is None else tag))
        self._send(number, label, [mine.clone()] * self.world_size)
        for peer, row in enumerate(rows):
            if peer != self.rank:
                row.fill_(math.nan if row.is_floating_point() else 255)

        def finish() -> None:
            for row, part in zip(rows, self._receive(number, label, own), strict=True):
                row.copy_(part)

        work = Delivery(mine, finish, lambda: self._arrived(number), self.ordered)
        work.sent = self.sent(mine.nbytes)
        return work

    def collect(self, source: Region, combine, *, tag, label) -> Collective:
        rows, number = source.tensor.view(self.world_size, -1), self._number(("reduce", tag))
        self._send(number, label, [row.clone() for row in rows])
        own = rows[self.rank].clone()
        work = Delivery(
            source.tensor, lambda: combine(self._receive(number, label, own)), lambda: self._arrived(number), self.ordered
        )
        work.sent = self.sent(own.nbytes)
        return work

    def all_to_all(self, output, input, label="all-to-all", output_counts=None, input_counts=None) -> Collective:
        given, taken = (parts_of(t, c, self.world_size) for t, c in ((input, input_counts), (output, output_counts)))
        number = self._number(("all-to-all",))
        self._send(number, label, [part.clone() for part in given])
        own = given[self.rank].clone()

        def finish() -> None:
            for part, came in zip(taken, self._receive(number, label, own), strict=True):
                part.copy_(came)

        work = Delivery(input, finish, lambda: self._arrived(number), self.ordered)
        work.sent = Sent(sum(part.nbytes for peer, part in enumerate(given) if peer != self.rank))
        return work

    def exchange(self, payload: bytes, label: str) -> list[bytes]:
        key = (*self.ranks, "exchange")
        self._turn[key] += 1
        number = ("exchange", self._turn[key])
        self._send(number, label, [payload] * self.world_size)
        deadline = time.monotonic() + PATIENCE_S
        self.wait_until(lambda: self._arrived(number) or time.monotonic() > deadline, label)
        return self._receive(number, label, payload)
