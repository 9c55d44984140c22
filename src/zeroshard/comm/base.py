"""The Comm interface: what the sharding layer asks of a group of ranks.

Words: a *region* is a flat tensor with a memory of its own; where ranks share a host, peers can read it. A
*whole* region has world_size shards, of which the rank's own is authoritative; a *shard* region is one shard.
A *fence* separates the times at which shards are written from those at which peers read them.

    gather   shards of every rank -> one whole tensor             (sharded -> replicated)
    collect  my slice of every rank's whole tensor, in rank order (all-to-all: what a reduction begins with)
    reduce   whole tensors of every rank -> the sum of my shard   (partial -> sharded)
    exchange a few bytes of every rank -> every rank, on the host (control: norms, flags, fingerprints)

Reductions sum in fp32 in rank order, whatever was sent: the result does not depend on timing or backend.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import left_loop
from ..memory.ledger import making
from .failure import Failure
from .flight_recorder import Progress
from .streams import Streams

_PAUSE_S = 5e-5
CHUNK_NUMEL = 1 << 17  # elements summed at a time: three fp32 chunks stay in a core's L2 cache


@dataclass
class Region:
    """A flat tensor and the shards of all ranks as far as this rank can read them.

    tensor: (world * shard_numel,) or (shard_numel,); shards[r]: (shard_numel,) of rank r, or None where it is
    out of reach; wholes[r]: the whole tensor of rank r (whole regions that peers can read). common: all ranks see one
    memory.
    """

    tensor: Tensor
    shards: list[Tensor | None] = field(default_factory=list)
    wholes: list[Tensor | None] = field(default_factory=list)
    common: bool = False
    number: int = 0  # of this region, the same on every rank (staging: which of several alike ones this is), and
    siblings: Callable[[int], Region] | None = None  # the others: peers may be using another one of them


class Sent(NamedTuple):
    """Bytes that a rank sends, to ranks of its own node and to those of others."""

    inside: int = 0
    between: int = 0


Outcome = tuple[float | None, tuple[int, ...]]  # of a reduction: `square_sum` and `culprits` of its work
Reserved = tuple[int, torch.dtype]  # elements of each shard, of each slice
Combine = Callable[[list[Tensor]], Outcome | None]


class Work:
    """Something under way. `wait` until its result may be read, `drain` until its source may be overwritten.

    square_sum: of a reduction's result, where it was found on the way (the chunks were in cache), else None.
    culprits: numbers in the world of ranks whose part was not finite, where square_sum is not and they were looked for.
    sent: bytes that this rank sends for it.
    """

    square_sum: float | None = None
    culprits: tuple[int, ...] = ()
    sent: Sent = Sent()

    def take(self, outcome: Outcome | None) -> None:
        """What its end has brought."""
        if outcome is not None:
            self.square_sum, self.culprits = outcome

    def wait(self) -> None:
        """Return when the result is in place (GPU: when the current stream is ordered after it)."""

    def ready(self) -> bool:
        """True when `wait` would return at once."""
        return True

    def drain(self) -> None:
        """Return when no rank reads the source any more."""
        self.wait()

    def drained(self) -> bool:
        """True when `drain` would return at once."""
        return True


class Hops(Work):
    """A second collective that begins when a first is over.

    Where the host waits for collectives, the second begins when this rank next waits for anything, or polls, and finds the first
    over: `Pending` holds it until then. Else both are put in line on the side stream.
    """

    def __init__(self, comm: Comm, first: Work, go_on: Callable[[], Work], sent: Sent, label: str) -> None:
        """sent: of both."""
        self.comm, self.first, self._go_on, self.sent, self.label = comm, first, go_on, sent, label
        self.second: Work | None = None  # until it has begun
        self._begun = self._over = False
        self._ticket: Any = None
        if comm.waits_on_host:
            comm.pending.items.append(self)
        else:
            _, self._ticket = comm.streams.run_beside(self._finish)

    def begin(self) -> None:
        """Wait for the first, begin the second."""
        if not self._begun:
            self._begun = True
            self.first.wait()
            self.second = self._go_on()

    def _finish(self) -> None:
        self.begin()
        assert self.second is not None
        self.second.wait()
        self.take((self.second.square_sum, self.first.culprits))  # the second knows who passed it on
        self._over = True

    def ready(self) -> bool:
        if not self.comm.waits_on_host:
            return self._ticket is None
        self.comm.pending.advance()
        return self._over or (self.second is not None and self.second.ready())

    def wait(self) -> None:
        if not self.comm.waits_on_host:
            self.comm.streams.join(self._ticket) if self._ticket is not None else None
            self._ticket = None
        elif not self._over:
            self.comm.wait_until(self.ready, self.label)
            self._finish()

    def drain(self) -> None:
        self.wait()
        assert self.second is not None
        self.first.drain()
        self.second.drain()

    def drained(self) -> bool:
        if not self.comm.waits_on_host:
            return self._ticket is None
        return self.second is not None and self.ready() and self.first.drained() and self.second.drained()


class Pending:
    """Hops of which the second collective has not begun. Whoever waits for anything goes on with them: peers may wait for those."""

    def __init__(self) -> None:
        self.items: list[Hops] = []
        self._busy = False

    def advance(self) -> None:
        """Begin the second collectives whose first are over."""
        if self._busy or not self.items:
            return
        self._busy = True
        try:
            for hops in [hops for hops in self.items if hops.first.ready()]:
                if hops in self.items:  # it may have begun in a wait of another
                    self.items.remove(hops)
                    hops.begin()
        finally:
            self._busy = False

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait: a second collective that waits in its beginning, for a buffer, keeps no other from beginning."""
        busy, self._busy = self._busy, False
        try:
            yield
        finally:
            self._busy = busy


class Comm(ABC):
    """A group of ranks with asynchronous collectives on flat tensors.

    Threads: one at a time, the rank's own, autograd's in a backward for which that waits, or that of checkpoint/heartbeat.py while the
    rank's own is with files; `exchange` refuses a second (`ThreadsMet`). Only `progress` may be read by others.

    ordered: True where collectives are matched by the order in which ranks start them (NCCL); then the runtime
    starts reductions in one agreed order. device: where tensors live.
    """

    rank: int
    world_size: int
    device: torch.device
    ordered: bool = False
    shares_memory: bool = False  # peers read regions: allocation is collective
    copies: bool = False  # a gather of what rests is a copy by this rank alone: no peer has to take part
    drains_all: bool = True  # a reduction that has drained has its result on every rank that may read it
    replicas: int = 1  # groups of ranks that hold the same shards: reductions sum over all of them
    replica: int = 0  # which of them this one is
    local: Comm | None = None  # of the ranks of this host, if they have a better way among them
    packs: bool = False  # what is reduced travels as fewer bytes now
    waits_on_host: bool = True  # False: waiting orders streams and the host goes on (NCCL)
    imagined: bool = False  # the peers do not exist (planning)
    streams: Streams = Streams()
    _serial = 0

    @property
    def failure(self) -> Exception | None:
        """Of one rank, that all ranks raise: see `abort`."""
        return None

    @functools.cached_property
    def pending(self) -> Pending:
        """Of all Comms that wait together: a group and its subgroups."""
        return Pending()

    @functools.cached_property
    def progress(self) -> Progress:
        """What this rank has done, for who asks when it waits too long."""
        return Progress(self.ranks[self.rank])

    @property
    def ranks(self) -> list[int]:
        """The number in the world of each of its ranks: what errors and reports name."""
        return list(range(self.world_size))

    @property
    def nodes(self) -> list[int]:
        """Of each of its ranks, on which node it is: links inside of a node are fast, those between are not."""
        return [0] * self.world_size

    def sent(self, nbytes: int) -> Sent:
        """What this rank sends if each of its peers gets `nbytes`."""
        nodes = self.nodes
        near = nodes.count(nodes[self.rank])
        return Sent((near - 1) * nbytes, (self.world_size - near) * nbytes)

    def subgroup(self, parts: Sequence[Sequence[int]], apart: bool = False) -> Comm:
        """A Comm of some of its ranks: of the one of `parts`, disjoint lists of ranks, in which this rank is (collective).

        apart: what its ranks write and read concerns no others: its fences are theirs alone.
        """
        raise NotImplementedError(f"{type(self).__name__} has no subgroups")

    def place(self, label: str) -> str:
        """A label with the step in which this rank is, for errors."""
        return label if label.endswith("]") else f"{label} [step {self.progress.step}]"

    def volume(self, kind: str, numel: int, dtype: torch.dtype) -> Sent:
        """What this rank sends in a "gather", a "gather again" (of shards not written since) or a "reduce" of shards of `numel` elements."""
        return self.sent(numel * dtype.itemsize)

    def reduction_volume(self, tag: int, numel: int, dtype: torch.dtype) -> Sent:
        """`volume` of a "reduce" under this tag, of which more may be known: see `expect`."""
        return self.volume("reduce", numel, dtype)

    def reserve(self, number: int, numel: int, dtype: torch.dtype) -> None:
        """Shards of so many elements are going to be gathered from region `number`; 0: from one without a number (collective)."""

    def reserve_slices(self, numel: int, dtype: torch.dtype) -> None:
        """Tensors of `world_size` slices of so many elements are going to be reduced; called for each, before the first."""

    def expect(self, tag: int, slots: Sequence[tuple[int, Sequence[int]]], numel: int) -> None:
        """Under a tag tensors of `numel` elements are going to be reduced: (offset, shape) of each parameter in them."""

    def needed(self, values: Sequence[Reserved], slices: Sequence[Reserved]) -> int:
        """Bytes of this rank that `open`, and use, will take where these are reserved by `reserve` and `reserve_slices`."""
        return 0

    def open(self) -> None:
        """Make what was reserved (collective, before the first gather or reduction)."""

    def release(self) -> None:
        """Give up what `open` made: its model is closed."""

    def forget(self) -> None:
        """Other values have been loaded: what was kept of gradients so far is of no use."""

    def outdate(self, number: int) -> None:
        """The shards of region `number` are about to be written."""

    def holds(self, number: int) -> bool:
        """True where the next gather from region `number` is served from what an earlier one has left."""
        return False

    def new_serial(self) -> int:
        """Numbers the models sharded over this group: the same on every rank."""
        self._serial += 1
        return self._serial

    def allocate(self, numel: int, dtype: torch.dtype, *, whole: bool) -> Region:
        """A zero-filled region of `numel` elements (collective: every rank, in the same order)."""
        with making():
            tensor = torch.zeros(numel, dtype=dtype, device=self.device)
        return self.private(tensor, whole=whole)

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Region | None:
        """One memory that all ranks see as the same whole region, or None where there is no such thing."""
        return None

    def private(self, tensor: Tensor, *, whole: bool) -> Region:
        """A region over a tensor that peers cannot read."""
        shards: list[Tensor | None] = [None] * self.world_size
        shards[self.rank] = tensor.view(self.world_size, -1)[self.rank] if whole else tensor
        return Region(tensor, shards)

    @abstractmethod
    def gather(self, full: Tensor, source: Region, label: str, tag: int | None = None) -> Work:
        """Fill `full` (world * shard_numel,) with the shards of all ranks.

        tag: None where shards rest and fences keep writers and readers apart. Where a shard has just been written
        (staged from another tier), the number under which all ranks meet for this gather; its `Work` must then be
        drained before the shard is overwritten.
        """

    @abstractmethod
    def collect(self, source: Region, combine: Combine, *, tag: int, label: str) -> Work:
        """Call combine(parts) once, when they are there: this rank's slice of each rank's `source`, in rank order.

        source: (world_size * n,) on every rank; parts[r]: (n,), of rank r, to be read until `combine` returns. `wait` returns
        after it, `drain` when all ranks have combined theirs.
        """

    def reduce(self, source: Region, out: Tensor, *, scale: float, accumulate: bool, tag: int, label: str) -> Work:
        """out (shard_numel,) = [out +] scale * sum over ranks of source's shard of this rank, in fp32."""

        def combine(parts: list[Tensor]) -> Outcome:
            total = sum_in_rank_order(parts, out, scale=scale, accumulate=accumulate)
            rounded = out.dtype.itemsize < 4 and out.device.type == "cpu"  # on its way to a second hop: no square sum
            if torch.isfinite(out).all() if rounded else total is None or math.isfinite(total):
                return total, ()
            return total, tuple(self.ranks[rank] for rank in nonfinite_ranks(parts, out))

        return self.collect(source, combine, tag=tag, label=label)

    @abstractmethod
    def exchange(self, payload: bytes, label: str) -> list[bytes]:
        """Every rank's payload, in rank order. Blocks; also a barrier."""

    def square_sums(self, tensors: Sequence[Tensor]) -> float:
        """The sum of all squares of 1-D tensors, on the host: the only way in which the core reads what it computed.

        On the CPU the same dot products in the same order as `sum_in_rank_order`, so it does not matter which of the
        two found a norm.
        """
        if all(tensor.device.type == "cpu" for tensor in tensors):
            return sum(square_sum(tensor) for tensor in tensors)
        norms = [torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors]
        return float(torch.stack(norms).double().square().sum())

    def fence_write(self, synchronised: bool = False) -> None:
        """Before this rank writes its shards: no peer still reads them. synchronised: a barrier has just passed."""

    def fence_read(self) -> None:
        """Before this rank reads peers' shards: all have been written."""

    def announce(self, waiting_for: str | None) -> None:
        """Tell the peers that this rank waits for something that they may have to free (None: no longer)."""

    def peers_wait(self) -> bool:
        """True if a peer may be waiting for this rank, so that waiting for it could go on for ever."""
        return True

    def wait_until(self, done: Callable[[], bool], label: str) -> None:
        """Return when `done`; go on with all that peers may wait for."""
        with self.pending.waiting():
            while not done():
                self.poll()
                time.sleep(_PAUSE_S)

    def join(self, local: Any) -> None:
        """From now on who waits here goes on with what ranks of the same host wait for in `local`, and the other way round."""

    def poll(self) -> None:
        """Let work under way progress, without blocking."""

    def abort(self, reason: str, error: Exception | None = None) -> None:
        """Tell the peers that this rank failed, so that none waits for it. error: what they shall raise, if not PeerFailed."""
        self.fail(Failure(self.ranks[self.rank], reason, error))

    def fail(self, failure: Failure) -> None:
        """Tell the peers why the group can not go on: this rank's failure, or one of which they may not know yet."""

    def answer_for(self, owner: object) -> Callable[[], Any]:
        """Tell peers who ask what this rank does, for as long as `owner` lives and what is returned has not been called."""
        return lambda: None

    def leave(self) -> None:
        """The process ends: nothing of what peers were sent is lost."""

    def close(self) -> None:
        """Release the connections; the group can not be used afterwards."""


def operation(label: str) -> str:
    """What ranks must agree on: a label without the remark in brackets at its end, which reports show."""
    return label.split(" [")[0]


def misuse(places: Mapping[int, str | None], world_size: int) -> str:
    """' zs.save() is collective: ...' where some ranks stand in a verb of this library and the others elsewhere; ' Rank 0 left ...'
    where some are in the training loop and the others are not; else ''.

    places: rank -> the label at which it waits; None, or not there: it is somewhere else.
    """
    return _missing_in_verb(places, world_size) + _missing_in_loop(places, world_size)


def _missing_in_loop(places: Mapping[int, str | None], world_size: int) -> str:
    inside = {rank: label for rank, label in places.items() if label is not None and left_loop([rank], label, "")}
    if not inside:
        return ""
    ranks = sorted(inside)
    others = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"
    return left_loop(sorted(set(range(world_size)) - set(ranks)), inside[ranks[0]], others)


def _missing_in_verb(places: Mapping[int, str | None], world_size: int) -> str:
    verbs = {rank: label.split(":")[0] for rank, label in places.items() if label is not None and label.startswith("zs.")}
    if not verbs:
        return ""
    verb = next(iter(verbs.values()))
    entered = sorted(rank for rank, name in verbs.items() if name == verb)
    missing = sorted(set(range(world_size)) - set(entered))
    if not missing:
        return ""
    return f" {verb}() is collective, that is, every rank must call it: entered by ranks {entered}, missing {missing}."


def sum_in_rank_order(parts: Sequence[Tensor], out: Tensor, *, scale: float, accumulate: bool) -> float | None:
    """out = [out +] scale * (parts[0] + parts[1] + ...), in fp32 (fp64 parts: fp64), in chunks that stay in cache.

    Returns the sum of out's squares where that is free (CPU, out not rounded), else None.
    """
    numel = out.numel()
    on_host = out.device.type == "cpu"
    chunk = min(CHUNK_NUMEL, numel) if on_host else numel
    # a part that lies in `out` itself must be read before it is written: the first two are, the others are not
    aliased = any(part.data_ptr() == out.data_ptr() for part in parts[2:])
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    direct = out.dtype == dtype and not accumulate and not aliased
    scratch = None if direct else torch.empty(chunk, dtype=dtype, device=out.device)
    cast = None if parts[0].dtype == dtype else torch.empty(chunk, dtype=dtype, device=out.device)
    square_sum = 0.0 if on_host and out.dtype == dtype else None
    for begin in range(0, numel, max(chunk, 1)):
        target = out[begin : begin + chunk]
        total = target if scratch is None else scratch[: target.numel()]
        _sum_chunk([part[begin : begin + chunk] for part in parts], total, None if cast is None else cast[: total.numel()])
        if scale != 1.0:
            total.mul_(scale)
        if scratch is not None:
            target.add_(total) if accumulate else target.copy_(total)
        if square_sum is not None:
            square_sum += torch.dot(target, target).item()
    return square_sum


def nonfinite_ranks(parts: Sequence[Tensor], out: Tensor) -> tuple[int, ...]:
    """Which ranks' parts are not finite, once their sum is known not to be. The part that was summed in place: if no other."""
    in_place = [rank for rank, part in enumerate(parts) if part.data_ptr() == out.data_ptr()]
    found = [rank for rank, part in enumerate(parts) if rank not in in_place and not torch.isfinite(part).all()]
    return tuple(found or in_place)


def square_sum(tensor: Tensor) -> float:
    """Sum of squares of a 1-D CPU tensor: fp32 dot products of chunks, added in fp64."""
    parts = tensor.split(CHUNK_NUMEL)
    if tensor.dtype not in (torch.float32, torch.float64):
        parts = tuple(part.float() for part in parts)
    return sum((torch.dot(part, part).item() for part in parts), 0.0)


def _sum_chunk(parts: list[Tensor], total: Tensor, cast: Tensor | None) -> None:
    """total = parts[0] + parts[1] + ... in fp32; `cast` holds one converted part where they are not fp32."""
    if cast is None and len(parts) > 1:
        torch.add(parts[0], parts[1], out=total)
        rest = parts[2:]
    else:
        total.copy_(parts[0])
        rest = parts[1:]
    for part in rest:
        total.add_(part if cast is None else cast.copy_(part))
