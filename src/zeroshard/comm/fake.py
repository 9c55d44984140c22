"""FakeComm: the communicator of one rank in a world of any size whose other ranks do not exist. For planning and counting.

The real runtime runs over it, usually on fake tensors: every gather, reduction and exchange is counted and takes its
buffers, but nothing moves. `exchange` answers as if all peers had sent the same as this rank. A `Watcher` gets a call for
each operation that starts or is waited for: the planner makes a trace of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..config import Tier
from ..engine.comm import (
    GPU_CHUNK_NUMEL,
    Collective,
    Combine,
    DirectComm,
    Region,
    Sent,
    Streams,
    T,
    collectives_of,
    piece_numel,
    sum_dtype,
)

Ticket = tuple[int, ...]  # numbers of tasks in a trace


class Watcher(Streams):
    """Streams of an imagined rank, which are told what it starts and waits for (its `Ticket`s). This base class records nothing."""

    def sent(self, label: str, sent: Sent, peers: int, distinct: bool = False) -> Ticket:
        """Note that a collective of `peers` ranks starts, for which this rank sends `sent`; distinct: other bytes to each peer."""
        return ()

    def agreed(self, label: str, nbytes: int, peers: int, hops: int) -> None:
        """Note a collective of a control message, for which the host waits: bytes received, and hops that follow one another."""

    def moved(self, source: Tier, target: Tier, nbytes: int) -> Ticket:
        """Note that a copy of `nbytes` between tiers starts."""
        return ()

    def run_beside(self, work: Callable[[], T]) -> tuple[T, Ticket]:
        return work(), ()  # not None: a collective has to be waited for

    def copy(self, target: Tensor, source: Tensor, *, up: bool) -> Ticket:
        assert target.nbytes == source.nbytes  # a copy between tiers does not convert dtypes
        return self.moved(*((Tier.HOST, Tier.DEVICE) if up else (Tier.DEVICE, Tier.HOST)), target.nbytes)

    def square_sums(self, tensors: Sequence[Tensor]) -> float:
        return float(len(tensors))  # fake tensors hold no numbers; finite, so that no step is skipped


@dataclass(frozen=True)
class Imagination:
    """Properties of the imagined ranks. node_size: ranks on a node (None: all); shares_memory: they read each other's memory, as
    SharedComm's do. separate: the device has a memory of its own, and its streams are ordered while the host goes on.
    """

    node_size: int | None = None
    separate: bool = False
    shares_memory: bool = False
    watcher: Watcher = field(default_factory=Watcher)

    def __post_init__(self) -> None:
        self.watcher.separate_host = self.separate


imagination: ContextVar[Imagination] = ContextVar("imagination", default=Imagination())  # noqa: B039  # it is frozen


class _Watched(Collective):
    """A collective of imagined ranks. `drained` is True at once or, where the host does not wait (`ordered`), after `wait`."""

    def __init__(self, watcher: Watcher, ticket: Ticket, sent: Sent, ordered: bool) -> None:
        self.watcher, self.ticket, self.sent, self._drained = watcher, ticket, sent, not ordered

    def wait(self) -> None:
        self._drained = True
        self.watcher.join(self.ticket)

    def drained(self) -> bool:
        return self._drained


class FakeComm(DirectComm):
    """Communicator of rank `rank` among `world_size` ranks, the others imagined. node_size: ranks on a node; None: all."""

    imagined = alone = True  # no peer could differ from this rank

    def __init__(self, rank: int, world_size: int, device: torch.device | str = "cpu", *, node_size: int | None = None) -> None:
        self.rank, self.world_size, self.device = rank, world_size, torch.device(device)
        self.kind = imagination.get()
        self.ranks = list(range(world_size))
        self.nodes = [rank // (node_size or self.kind.node_size or world_size) for rank in self.ranks]
        self.streams = self.watcher = self.kind.watcher
        self.ordered = self.kind.separate
        self.waits_on_host = not self.kind.separate
        self.shares_memory = self.copies = self.kind.shares_memory
        self.peers_lag = self.shares_memory  # real peers that copy from this rank's buffers are a little behind it
        self.adds = 0 if self.copies else 1 if self.ordered else 2

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Region | None:
        if not self.shares_memory:
            return None
        region = self.allocate(numel, dtype, whole=True)
        return Region(region.tensor, list(region.tensor.view(self.world_size, -1).unbind(0)), common=True)

    def gather(self, full: Tensor, source: Region, label: str, tag: int | None = None) -> Collective:
        return self._start(label, full.nbytes // self.world_size)

    def collect(self, source: Region, combine: Combine, *, tag: int, label: str) -> Collective:
        return self._collect(source, label, source.tensor.nbytes * (self.world_size > 1))

    def reduce(self, source: Region, out: Tensor, *, scale: float, accumulate: bool, tag: int, label: str) -> Collective:
        rows, dtype = source.tensor.view(self.world_size, -1), sum_dtype(source.tensor)
        numel = min(piece_numel(rows), rows.shape[1])
        held = rows[:, :numel].nbytes * (1 if numel == rows.shape[1] else 2)  # in pieces, what is sent is a copy
        held = held * (self.world_size > 1) + min(numel, GPU_CHUNK_NUMEL) * dtype.itemsize * (out.dtype != dtype or accumulate)
        return self._collect(source, label, held)

    def _collect(self, source: Region, label: str, held_nbytes: int) -> Collective:
        """held_nbytes: what DistComm takes on a GPU until the collective is over, in the order of its stream."""
        if self.ordered:
            torch.empty(held_nbytes, dtype=torch.uint8, device=source.tensor.device)
        work = self._start(label, source.tensor.nbytes // self.world_size, distinct=True)
        work.square_sum = 1.0  # see `Watcher.square_sums`
        return work

    def reduce_scatter(self, out: Tensor, whole: Tensor, then: Callable[[], None], number: int, label: str) -> Collective:
        return self._summed(then, label, self.adds * out.nbytes)

    def all_reduce(self, tensor: Tensor, then: Callable[[], None], number: int, label: str) -> Collective:
        return self._summed(then, label, 2 * tensor.nbytes // self.world_size)

    def _summed(self, then: Callable[[], None], label: str, nbytes: int) -> Collective:
        then()
        work = self._start(label, nbytes)
        work.square_sum = 1.0
        return work

    def all_to_all(
        self, output: Tensor, input: Tensor, label: str = "all-to-all", output_counts: Sequence[int] | None = None,
        input_counts: Sequence[int] | None = None,
    ) -> Collective:  # fmt: skip
        """Start to send the parts of `input`; all but this rank's own count, as if those that are not empty were equal."""
        if output.numel() == input.numel():
            output.view(-1).copy_(input.view(-1))  # as if all peers had sent the same as this rank
        among = [rank for rank in range(self.world_size) if input_counts is None or input_counts[rank]]
        return self._start(label, input.nbytes // max(1, len(among)), True, among)

    def _start(self, label: str, nbytes: int, distinct: bool = False, among: Sequence[int] | None = None) -> Collective:
        """Start to send `nbytes` to each of these ranks but this one. None: all."""
        among = range(self.world_size) if among is None else among
        near = [self.nodes[rank] == self.nodes[self.rank] for rank in among if rank != self.rank]
        sent = Sent(sum(near) * nbytes, (len(near) - sum(near)) * nbytes)
        return _Watched(self.watcher, self.watcher.sent(label, sent, len(among), distinct), sent, self.ordered)

    def exchange(self, payload: bytes, label: str) -> list[bytes]:
        if self.world_size > 1 and not self.shares_memory:  # else messages go through memory
            for nbytes, hops in collectives_of(8 + len(label.encode()) + len(payload), self.world_size):
                self.watcher.agreed(label, nbytes, self.world_size, hops)
        return [payload] * self.world_size
