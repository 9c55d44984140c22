"""FakeComm: one rank of a world of any size, with nobody there. For planning and for counting.

The real runtime runs over it, usually on fake tensors: every gather, reduction and exchange is counted and takes its
buffers, but nothing moves. Peers are taken to agree with this rank in all control messages. A `Watcher` is told what is
started and where it is waited for: the planner makes a trace of it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..config import Tier
from .base import Combine, Comm, Region, Sent, Work
from .streams import Streams

Ticket = tuple[int, ...]  # tasks of a trace


class Watcher:
    """Is told what an imagined rank starts and waits for. This one keeps nothing."""

    def sent(self, label: str, sent: Sent, peers: int, distinct: bool = False) -> Ticket:
        """A collective of so many ranks is started, for which this one sends so much; distinct: other bytes to each of them."""
        return ()

    def moved(self, source: Tier, target: Tier, nbytes: int) -> Ticket:
        """Bytes are started on their way between tiers."""
        return ()

    def waited(self, ticket: Ticket) -> None:
        """What the rank does next follows what was started."""

    def packed(self, nbytes: int) -> None:
        """A kernel of the device packs or unpacks what travels, and reads and writes so many bytes for it."""

    def beside(self, work: Callable[[], Any]) -> tuple[Any, Ticket]:
        """Work that is put in line on a stream of its own: its result, and what to wait for."""
        return work(), ()

    @contextlib.contextmanager
    def stepping(self, numel: int, nbytes: int) -> Iterator[None]:
        """The host's cores step so many parameters, for which they read and write so many bytes."""
        yield


@dataclass(frozen=True)
class Imagination:
    """What kind of ranks are imagined: node_size of them on a node (None: all). separate: the device has a memory of its own, and
    its streams are ordered while the host goes on. shares_memory: ranks of a node see each other's, as SharedComm's do."""

    node_size: int | None = None
    separate: bool = False
    shares_memory: bool = False
    watcher: Watcher = field(default_factory=Watcher)


imagination: ContextVar[Imagination] = ContextVar("imagination", default=Imagination())  # noqa: B039  # it is frozen


class _Watched(Work):
    """Over when somebody waits for it; where the host does not wait (`ordered`), that is all that can be known of it."""

    def __init__(self, watcher: Watcher, ticket: Ticket, sent: Sent, ordered: bool) -> None:
        self.watcher, self.ticket, self.sent, self._drained = watcher, ticket, sent, not ordered

    def wait(self) -> None:
        self._drained = True
        self.watcher.waited(self.ticket)

    def drained(self) -> bool:
        return self._drained


class ImaginedStreams(Streams):
    """Of a device that is not there. Copies take no time but that which a trace gives them."""

    def __init__(self, imagined: Imagination) -> None:
        self.separate_host, self.watcher = imagined.separate, imagined.watcher

    def run_beside(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        return self.watcher.beside(work)

    def copy(self, target: Tensor, source: Tensor, *, up: bool) -> Any:
        assert target.nbytes == source.nbytes  # what travels is not converted on the way
        return self.watcher.moved(*((Tier.HOST, Tier.DEVICE) if up else (Tier.DEVICE, Tier.HOST)), target.nbytes)

    def packed(self, nbytes: int) -> None:
        self.watcher.packed(nbytes)

    def join(self, ticket: Any) -> None:
        self.watcher.waited(ticket or ())

    def stepping(self, numel: int, nbytes: int) -> contextlib.AbstractContextManager[None]:
        return self.watcher.stepping(numel, nbytes)


class FakeComm(Comm):
    """Rank `rank` of `world_size` ranks; the others are imagined. node_size: ranks a node; None: all are on one."""

    imagined = True

    def __init__(self, rank: int, world_size: int, device: torch.device | str = "cpu", *, node_size: int | None = None) -> None:
        self.rank, self.world_size, self.device = rank, world_size, torch.device(device)
        self._ranks = list(range(world_size))
        self.kind = imagination.get()
        self._node_size = node_size or self.kind.node_size or world_size
        self.streams, self.watcher = ImaginedStreams(self.kind), self.kind.watcher
        self.ordered = self.kind.separate
        self.waits_on_host = not self.kind.separate
        self.shares_memory = self.copies = self.kind.shares_memory

    @property
    def ranks(self) -> list[int]:
        return self._ranks

    @property
    def nodes(self) -> list[int]:
        return [rank // self._node_size for rank in self._ranks]

    def subgroup(self, parts: Sequence[Sequence[int]], apart: bool = False) -> FakeComm:
        mine = next(part for part in parts if self.rank in part)
        assert self.pending is not None  # made now, and shared
        group = copy.copy(self)
        group.rank, group.world_size = list(mine).index(self.rank), len(mine)
        group._ranks = [self._ranks[rank] for rank in mine]
        return group

    def poll(self) -> None:
        self.pending.advance()

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Region | None:
        if not self.shares_memory:
            return None
        region = self.allocate(numel, dtype, whole=True)
        return Region(region.tensor, list(region.tensor.view(self.world_size, -1).unbind(0)), common=True)

    def gather(self, full: Tensor, source: Region, label: str, tag: int | None = None) -> Work:
        return self._start(label, full.nbytes // self.world_size)

    def collect(self, source: Region, combine: Combine, *, tag: int, label: str) -> Work:
        work = self._start(label, source.tensor.nbytes // self.world_size, distinct=True)
        work.square_sum = 1.0  # see `square_sums`
        return work

    def _start(self, label: str, nbytes: int, distinct: bool = False) -> Work:
        sent = self.sent(nbytes)
        return _Watched(self.watcher, self.watcher.sent(label, sent, self.world_size, distinct), sent, self.ordered)

    def exchange(self, payload: bytes, label: str) -> list[bytes]:
        return [payload] * self.world_size

    def square_sums(self, tensors: Sequence[Tensor]) -> float:
        return float(len(tensors))  # fake tensors hold no numbers; finite, so that no step is skipped
