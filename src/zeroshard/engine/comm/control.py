"""The control messages of a group (`Control`), on the host: by them ranks agree, wait for one another and learn of failures.

A *fence* separates writes of shards from reads by peers that share memory: write, fence_read, gather, fence_write, write.
"""

from __future__ import annotations

import contextlib
import functools
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...errors import CollectiveMismatch, left_loop
from ...utils.work import pause
from .desk import Desk, Failure
from .progress import Progress
from .streams import Streams

if TYPE_CHECKING:
    from .base import Hops

Missing = Callable[[], list[int] | None]


class Sent(NamedTuple):
    """Number of bytes that a rank sends: `inside` to ranks of its own node, `between` to ranks of other nodes."""

    inside: int = 0
    between: int = 0


class HopQueue:
    """The `Hops` whose second collective has not begun. Every wait of this rank calls `advance`, as peers may wait for them."""

    def __init__(self) -> None:
        self.items: list[Hops] = []
        self._busy = False

    def advance(self) -> None:
        """Begin the second collective of all hops whose first is over; of one `queue`, none begins before an earlier one."""
        if self._busy or not self.items:  # busy: a `begin` below has called a collective, which polls
            return
        self._busy = True
        try:
            for hops in self._ready():
                if hops in self.items:  # else it was begun during a wait in the `begin` of another one
                    self.items.remove(hops)
                    hops.begin()
        finally:
            self._busy = False

    def _ready(self) -> list[Hops]:
        found: list[Hops] = []
        behind: set[int] = set()  # queues in which an earlier one is not over
        for hops in self.items:
            over = hops.first.done()
            if over and id(hops.queue) not in behind:
                found.append(hops)
            elif hops.queue is not None:
                behind.add(id(hops.queue))
        return found

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of a wait: `advance` works in it, even if the wait is itself inside `advance` (a hop waits for a buffer)."""
        busy, self._busy = self._busy, False
        try:
            yield
        finally:
            self._busy = busy


class Group:
    """A group of ranks as one of them sees it: its rank, the device of its tensors, and properties of its collectives.

    ordered: collectives are matched by the order in which ranks start them (NCCL); the runtime then starts reductions in an
    order that all ranks have agreed on.
    """

    rank: int
    world_size: int
    ranks: list[int]  # world rank of each rank of this group, as errors and reports name them
    nodes: list[int]  # node number of each rank. Links inside a node are fast, links between nodes are slower
    device: torch.device
    ordered: bool = False
    # slices sent for each peer in `DirectComm.reduce_scatter`: 2 if done by an all-reduce (gloo), else 1; 0: there are no sums
    adds: int = 0
    shares_memory: bool = False  # peers read this rank's regions, so `allocate` is collective
    copies: bool = False  # this rank gathers resting shards by copying them: no peer has to take part
    drains_all: bool = True  # once a reduction has drained here, the results of all ranks are in place
    replicas: int = 1  # number of groups of ranks that hold the same shards: reductions sum over all of them
    replica: int = 0  # index of this rank's group among the replicas
    waits_on_host: bool = True  # False: `wait` only orders streams, and the host goes on (NCCL)
    imagined: bool = False  # the peers do not exist (planning)
    peers_lag: bool = False  # in plans a StagingPool takes the buffer given back last for one that peers still read
    streams: Streams = Streams()

    def sent(self, nbytes: int) -> Sent:
        """Return the bytes that this rank sends if each of its peers gets `nbytes`."""
        nodes = self.nodes
        near = nodes.count(nodes[self.rank])
        return Sent((near - 1) * nbytes, (self.world_size - near) * nbytes)


class Control(Group, ABC):
    """Control messages of a group of ranks.

    Threads: one at a time: the rank's own thread; autograd's during a backward, while the rank's own waits; or that of
    checkpoint/heartbeat.py, while the rank's own writes files. `exchange` refuses a second one (`ThreadsMet`). Other threads may
    only read `progress`.
    """

    desk: Desk = Desk()  # where peers ask for this rank's state
    _serial = 0

    @property
    def alone(self) -> bool:
        """True if no other rank can differ from this one: in a world of one, and among imagined ranks, which do as this one."""
        return self.world_size == 1

    @property
    def failure(self) -> Exception | None:
        """The error that all ranks raise because one of them failed (see `abort`), or None."""
        return None

    @functools.cached_property
    def pending(self) -> HopQueue:
        """The hops not yet continued, shared by a group and its subgroups: a wait in any of them continues all."""
        return HopQueue()

    @functools.cached_property
    def progress(self) -> Progress:
        """This rank's notes of its step and collectives; peers that have waited too long ask for them."""
        return Progress(self.ranks[self.rank])

    def new_serial(self) -> int:
        """Return the next number for a model sharded over this group: the same on every rank."""
        self._serial += 1
        return self._serial

    @abstractmethod
    def exchange(self, payload: bytes, label: str) -> list[bytes]:
        """Return every rank's payload, in rank order (collective). Blocks, and serves as a barrier."""

    def compare(self, payload: bytes, label: str, numbers: Sequence[float] = ()) -> tuple[list[float], list[bytes] | None]:
        """Return the sums of `numbers` over ranks, and every rank's payload, or None if all ranks have sent the same (collective).

        The sums are the same on every rank; up to process_group.MANY ranks they are added in rank order.
        """
        form = struct.Struct(f"<{len(numbers)}d")
        parts = self.exchange(form.pack(*numbers) + payload, label)
        sums = [sum(column) for column in zip(*map(form.unpack_from, parts), strict=True)]
        told = [part[form.size :] for part in parts]
        return sums, None if all(part == payload for part in told) else told

    def fence_write(self, synchronised: bool = False) -> None:
        """Return when no peer reads this rank's shards (collective). synchronised: a barrier has just passed, so do not wait."""

    def fence_read(self) -> None:
        """Return when all ranks have written their shards, so that peers' shards may be read (collective)."""

    def announce(self, waiting_for: str | None) -> None:
        """Send the peers a note that this rank waits for a resource which they may have to free (None: its wait is over)."""

    def peers_wait(self) -> bool:
        """Return True if a peer may be waiting for this rank, so that this rank's own wait might never end."""
        return True

    def wait_until(self, done: Callable[[], bool], label: str, missing: Missing | None = None) -> None:
        """Return when `done()`; meanwhile continue all work that peers may wait for. missing: as `Collective.missing`."""
        begin = time.monotonic()
        with self.pending.waiting():
            while not done():
                self.poll()
                pause(begin)

    def poll(self) -> None:
        """Let work under way progress, without blocking."""
        self.pending.advance()

    def abort(self, reason: str, error: Exception | None = None) -> None:
        """Send word to the peers that this rank failed, so that none waits for it. error: raised there instead of PeerFailed."""
        self.fail(Failure(self.ranks[self.rank], reason, error))

    def fail(self, failure: Failure) -> None:
        """Send the peers a failure, of this rank or of a peer, that ends the work of the group; others may not know of it yet."""

    def leave(self) -> None:
        """Send the messages that are still queued, and leave the group for good, since this rank ends."""


def operation(label: str) -> str:
    """Return the part of a label on which ranks must agree: the label without the bracketed remark at its end."""
    return label.split(" [")[0]


def mismatch(labels: Mapping[int, str], ranks: Sequence[int]) -> CollectiveMismatch | None:
    """Return the error for an exchange in which ranks are in different operations; None if all are in the same.

    labels: rank -> the label of its exchange. ranks: world rank of each.
    """
    if len(set(map(operation, labels.values()))) == 1:
        return None
    places = "; ".join(f"rank {ranks[rank]}: {at}" for rank, at in labels.items())
    return CollectiveMismatch(
        f"ranks entered different operations ({places}). Every rank must run the same sequence of zeroshard calls (steps, "
        f"evaluations, saves).{misuse(labels, len(labels))}"
    )


def misuse(places: Mapping[int, str | None], world_size: int) -> str:
    """Return a hint at calls that only some ranks have made, to append to an error; "" where there is none.

    ' zs.save() is collective: ...' if some ranks are in a collective function of this library and the others are elsewhere;
    ' Rank 0 left ...' if some are in the training loop and the others are not.
    places: rank -> the label at which it waits; None, or no entry: it is somewhere else.
    """
    hint, everyone = "", set(range(world_size))
    verbs = {rank: label.split(":")[0] for rank, label in places.items() if label is not None and label.startswith("zs.")}
    if verbs:
        verb = next(iter(verbs.values()))
        entered = sorted(rank for rank, name in verbs.items() if name == verb)
        if missing := sorted(everyone - set(entered)):
            hint = f" {verb}() is collective, that is, every rank must call it: entered by ranks {entered}, missing {missing}."
    inside = {rank: label for rank, label in places.items() if label is not None and left_loop([rank], label, "")}
    if inside:
        ranks = sorted(inside)
        others = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"
        alone = next(((rank, label) for rank, label in sorted(places.items()) if label is not None and rank not in inside), None)
        if alone is not None and not verbs:
            hint += f" Has rank {alone[0]} alone made the call that waits at '{operation(alone[1])}'? Make it on all ranks. Or:"
        hint += left_loop(sorted(everyone - set(ranks)), inside[ranks[0]], others)
    return hint
