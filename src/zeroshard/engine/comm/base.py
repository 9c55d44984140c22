"""The communicator interface (`Comm`): the collectives that the sharding layer calls on a group of ranks.

Words: a *region* is a flat tensor with memory of its own; where ranks share a host, peers can read it. A *whole* region has
world_size slices: of parameters, rank r keeps slice r up to date; of gradients, rank r sums slice r. A *shard* region has one.

    gather      shards of every rank -> one whole tensor             (all-gather: sharded -> replicated)
    collect     my slice of every rank's whole tensor, in rank order (all-to-all: the first half of a reduction)
    reduce      whole tensors of every rank -> the sum of my shard   (reduce-scatter: partial -> sharded)
    all_to_all  part r of my tensor -> rank r                        (activations, among the ranks of a DirectComm)

Two ranks with the whole tensors [1 2 3 | 4 5 6] and [10 20 30 | 40 50 60]: rank 0 collects [1 2 3] and [10 20 30]. Reduced with
scale 1/2, rank 0 has [5.5 11 16.5] and rank 1 [22 27.5 33]; a gather of these gives [5.5 11 16.5 22 27.5 33] to both.

Reductions sum in fp32 in rank order, in whatever dtype values were sent: the result does not depend on timing or backend (but for
packing/backend_sums.py, where the backend adds). Comms that call other Comms (packing/: two hops, replicas, compression) have these
collectives; a `DirectComm`, which sends to its ranks itself, also has their control messages (`Control`).
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...utils.work import Work
from ..ledger import making
from .control import Control, Group, Sent
from .sums import nonfinite_ranks, sum_in_rank_order


@dataclass
class Region:
    """A flat tensor and the shards of all ranks, as far as this rank can read them.

    tensor: (world * shard_numel,) or (shard_numel,); shards[r]: (shard_numel,) of rank r, or None where this rank can
    not read it; wholes[r]: the whole tensor of rank r, or None as well; no entries where `tensor` is one shard, or no peer can
    read it. common: `tensor` is the same memory on all ranks.
    """

    tensor: Tensor
    shards: list[Tensor | None] = field(default_factory=list)
    wholes: list[Tensor | None] = field(default_factory=list)
    common: bool = False
    number: int = 0  # of parameters: equal on every rank; of a staging buffer: its index in the pool, which each rank chooses
    siblings: Callable[[int], Region] | None = None  # number -> the pool's buffer of that number, if a peer has named another one


class Hop(NamedTuple):
    """One of the collectives that make a gather or a reduction. sent: by this rank. peers: number of ranks that meet in it."""

    sent: Sent
    peers: int


Outcome = tuple[float | None, tuple[int, ...]]  # a reduction's `Collective.square_sum` and `Collective.culprits`
Reserved = tuple[int, torch.dtype]  # number of elements of a shard (or of a slice), and their dtype
Combine = Callable[[list[Tensor]], Outcome | None]
Direct = TypeVar("Direct", bound="DirectComm")


class Collective(Work):
    """A collective that has been started. `wait` until its result may be read (on a GPU by the
    current stream: the host goes on), `drain` until its source may be overwritten.

    square_sum: sum of squares of a reduction's result, where it was computed along with it (chunks were in cache), else None.
    culprits: world ranks whose contribution was not finite; looked for only where the result is not finite.
    sent: bytes that this rank sends for the collective.
    """

    square_sum: float | None = None
    culprits: tuple[int, ...] = ()
    sent: Sent = Sent()

    def take(self, outcome: Outcome | None) -> None:
        """Record the outcome of the finished collective."""
        if outcome is not None:
            self.square_sum, self.culprits = outcome

    def drain(self) -> None:
        """Return when no rank reads the source any more."""
        self.wait()

    def drained(self) -> bool:
        """True when `drain` would return at once."""
        return True

    def missing(self) -> list[int] | None:
        """Return the ranks for which `wait` still waits, as indices in the Hub's transport (comm/hub.py); None if not known."""
        return None


class Hops(Collective):
    """A collective of two hops: the second collective begins when the first is over.

    Where the host waits for collectives (gloo, shared memory), `HopQueue` keeps the object until a wait or poll of this rank finds
    the first collective over. Otherwise (NCCL) both are enqueued on the side stream at once.
    """

    def __init__(
        self, control: Control, first: Collective, go_on: Callable[[], Collective], sent: Sent, label: str, queue: Comm | None = None
    ) -> None:  # fmt: skip
        """go_on: starts the second collective. sent: bytes that this rank sends for both. queue: the Comm of the second, if that is a
        reduction which is matched by order (`Comm.queue`)."""
        self.control, self.first, self._go_on, self.sent, self.label = control, first, go_on, sent, label
        self.queue = queue
        self.second: Collective | None = None  # None: not begun yet
        self._begun = self._over = False
        self._ticket: Any = None
        if control.waits_on_host:
            control.pending.items.append(self)
        else:
            _, self._ticket = control.streams.run_beside(self._finish)

    def begin(self) -> None:
        """Wait for the first collective and start the second."""
        if not self._begun:
            self._begun = True
            self.first.wait()
            self.second = self._go_on()

    def _finish(self) -> None:
        self.begin()
        assert self.second is not None
        self.second.wait()
        # the culprits are those of the first hop: in the second, a value that is not finite comes from a rank that passes on a sum
        self.take((self.second.square_sum, self.first.culprits))
        self._over = True

    def done(self) -> bool:
        if not self.control.waits_on_host:
            return self._ticket is None  # True once `wait` has ordered a stream after both; nothing else is known on the host
        self.control.pending.advance()
        return self._over or (self.second is not None and self.second.done())

    def wait(self) -> None:
        if not self.control.waits_on_host:
            self.control.streams.join(self._ticket) if self._ticket is not None else None
            self._ticket = None
        elif not self._over:
            self.control.wait_until(self.done, self.label, self.missing)
            self._finish()

    def missing(self) -> list[int] | None:
        """Return the ranks of the hop that runs; ranks of the other hop may have left, since nothing is missing there."""
        return (self.first if self.second is None else self.second).missing()

    def drain(self) -> None:
        self.wait()
        assert self.second is not None
        self.first.drain()
        self.second.drain()

    def drained(self) -> bool:
        if not self.control.waits_on_host:
            return self._ticket is None
        return self.second is not None and self.done() and self.first.drained() and self.second.drained()


class Comm(Group, ABC):
    """Asynchronous collectives on flat tensors, among the ranks of a group.

    A model announces its collectives by `reserve`, `reserve_slices` and `expect`, and calls `open` once, before the first one;
    `release` is the inverse of `open`. Before it writes a region's shards it calls `invalidate`. Threads: as `Control`.
    """

    control: Control  # the control messages and waits of these ranks
    parts: tuple[Comm, ...] = ()  # the Comms that this one calls: open, release, forget and invalidate are passed on to them
    queue: Comm | None = None  # the Comm itself if its reductions are matched by the order in which ranks start them
    packs: bool = False  # whether reductions compress gradients (by a codec) now; some codecs begin after warm-up steps

    # -- memory ----------------------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype, *, whole: bool) -> Region:
        """Allocate a zero-filled region of `numel` elements (collective: every rank, in the same order)."""
        with making():
            tensor = torch.zeros(numel, dtype=dtype, device=self.device)
        return self.private(tensor, whole=whole)

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Region | None:
        """Allocate a whole region whose memory is the same on all ranks (collective); None where ranks can not share memory."""
        return None

    def private(self, tensor: Tensor, *, whole: bool) -> Region:
        """Return a region over a tensor that peers can not read."""
        shards: list[Tensor | None] = [None] * self.world_size
        shards[self.rank] = tensor.view(self.world_size, -1)[self.rank] if whole else tensor
        return Region(tensor, shards)

    def reserve(self, number: int, numel: int, dtype: torch.dtype) -> None:
        """Announce gathers, from region `number` (0: one without a number), of shards of `numel` elements (collective)."""

    def read_precise(self, number: int, precise: Callable[[], Tensor | None]) -> None:
        """Register a function that returns region `number`'s shard of master weights, or None; compressing gathers read it."""

    def reserve_slices(self, numel: int, dtype: torch.dtype) -> None:
        """Announce reductions of `world_size` slices of `numel` elements each. Call for each, before the first reduction."""

    def expect(self, tag: int, slots: Sequence[tuple[int, Sequence[int]]], numel: int) -> None:
        """Announce reductions of `numel` elements under `tag`. slots: (offset, shape) of each parameter among them."""

    def needed(self, values: Sequence[Reserved], slices: Sequence[Reserved]) -> int:
        """Return the bytes that buffers would take on this rank, all in use, if these shards and slices were reserved."""
        return 0

    def open(self) -> None:
        """Allocate the buffers that were reserved (collective; before the first gather or reduction)."""
        for part in self.parts:
            part.open()

    def release(self) -> None:
        """Free what `open` has allocated, because its model is closed."""
        for part in self.parts:
            part.release()

    def forget(self) -> None:
        """Drop state kept from earlier reductions (a codec's residuals), because other values have been loaded."""
        for part in self.parts:
            part.forget()

    def invalidate(self, number: int) -> None:
        """Invalidate copies of region `number` (secondary shards), since its shards are about to be written."""
        for part in self.parts:
            part.invalidate(number)

    def holds(self, number: int) -> bool:
        """Return True if the next gather from region `number` will read secondary shards, which an earlier gather has kept."""
        return any(part.holds(number) for part in self.parts)

    # -- collectives -----------------------------------------------------------------------------------------

    def exchange(self, payload: bytes, label: str) -> list[bytes]:
        """Return every rank's payload, in the order of `ranks` (collective). Blocks, and serves as a barrier."""
        told = dict(zip(self.control.ranks, self.control.exchange(payload, label), strict=True))
        return [told[rank] for rank in self.ranks]

    def hops(self, kind: str, numel: int, dtype: torch.dtype, tag: int = 0) -> list[Hop]:
        """Return what this rank sends, hop after hop, for a collective of shards of `numel` elements.

        kind: "gather", "gather again" (the shards were not written since an earlier gather) or "reduce". tag: the tag of a
        reduction, if its parameters were announced by `expect`.
        """
        return [Hop(self.sent(numel * dtype.itemsize), self.world_size)]

    def volume(self, kind: str, numel: int, dtype: torch.dtype, tag: int = 0) -> Sent:
        """Return the bytes that this rank sends for such a collective, in all hops together."""
        return Sent(*(sum(each) for each in zip(*(hop.sent for hop in self.hops(kind, numel, dtype, tag)), strict=True)))

    @abstractmethod
    def gather(self, full: Tensor, source: Region, label: str, tag: int | None = None) -> Collective:
        """Start an all-gather that fills `full` (world * shard_numel,) with the shards of all ranks.

        tag: None where the shards are at rest and fences keep writers and readers apart. Where a shard has just been written
        (staged from another tier), the number under which all ranks meet for this gather; its `Collective` must then be
        drained before the shard is overwritten.
        """

    @abstractmethod
    def collect(self, source: Region, combine: Combine, *, tag: int, label: str) -> Collective:
        """Start an all-to-all, and call combine(parts) once when it is over. parts: this rank's slice of each rank's `source`.

        source: (world_size * n,) on every rank; parts[r]: (n,) from rank r, valid until `combine` returns. The returned Collective's
        `wait` returns after this rank's `combine`, its `drain` when all ranks have combined theirs.
        """

    def reduce(self, source: Region, out: Tensor, *, scale: float, accumulate: bool, tag: int, label: str) -> Collective:
        """Start a reduce-scatter: out (shard_numel,) = [out +] scale * sum over ranks of this rank's slice (fp32)."""

        def combine(parts: list[Tensor]) -> Outcome:
            total = sum_in_rank_order(parts, out, scale=scale, accumulate=accumulate)
            # `total` is None for an `out` of 16 bits (a first hop's) and on a GPU, where a look at `out` would make the host wait
            rounded = out.dtype.itemsize < 4 and out.device.type == "cpu"
            if torch.isfinite(out).all() if rounded else total is None or math.isfinite(total):  # finite: no rank has to be named
                return total, ()
            return total, tuple(self.ranks[rank] for rank in nonfinite_ranks(parts, out))

        return self.collect(source, combine, tag=tag, label=label)


def parts_of(tensor: Tensor, counts: Sequence[int] | None, ranks: int) -> list[Tensor]:
    """Return the parts of a tensor's elements for `DirectComm.all_to_all`: `counts[r]` for rank r, or equal parts."""
    return list(tensor.view(-1).split(list(counts) if counts is not None else [tensor.numel() // ranks] * ranks))


class DirectComm(Control, Comm):
    """A Comm that sends to its ranks itself, not by other Comms: it has collectives and control messages.

    local: the communicator of this host's ranks, where they have a faster one (shared memory).
    """

    local: DirectComm | None = None
    stall_timeout_s: float = 60.0  # a rank that has waited so long asks its peers where they are

    @property
    def control(self) -> Control:  # type: ignore[override]
        return self

    def subgroup(self: Direct, parts: Sequence[Sequence[int]], apart: bool = False) -> Direct:
        """Return the Comm of the ranks of that list in `parts` which contains this rank (collective). The lists are disjoint.

        It is a copy that shares every object of this one's state. apart: no rank outside the subgroup reads or writes its shards,
        so that the subgroup has fences of its own.
        """
        mine = list(next(part for part in parts if self.rank in part))
        assert self.progress is not None and self.pending is not None  # cached properties: made here, so that both are shared
        group = copy.copy(self)
        group.rank, group.world_size = mine.index(self.rank), len(mine)
        group.ranks, group.nodes = [self.ranks[rank] for rank in mine], [self.nodes[rank] for rank in mine]
        return group

    @abstractmethod
    def all_to_all(
        self, output: Tensor, input: Tensor, label: str = "all-to-all", output_counts: Sequence[int] | None = None,
        input_counts: Sequence[int] | None = None,
    ) -> Collective:  # fmt: skip
        """Start to send part r of `input` to rank r, for every r; part r of `output` is then what rank r sent to this rank.

        output, input: contiguous, of one dtype on this Comm's device; their elements in order are meant, whatever the shapes.
        output_counts, input_counts: number of elements of each part, by rank; None: equal parts. All ranks call this in the same
        order; `input` may be overwritten after `wait`.
        """

    def open_sums(self) -> int:
        """Prepare `reduce_scatter` and `all_reduce` for one model, where `adds` > 0 (collective). Return their `number`."""
        return 0

    def close_sums(self, number: int) -> None:
        """End what `open_sums` has prepared."""

    def drop_sums(self, number: int) -> None:
        """Let the next `open_sums` end what an earlier one has prepared. For finalizers, which run in any thread at any time."""

    def reduce_scatter(self, out: Tensor, whole: Tensor, then: Callable[[], None], number: int, label: str) -> Collective:
        """Start a sum by the backend: out (n,) becomes this rank's slice of the sum of `whole` (world_size * n,); then call `then`.

        out: of the same dtype; it may be this rank's slice of `whole`. number: see `open_sums`; all ranks start the sums of one
        number in the same order.
        """
        raise NotImplementedError

    def all_reduce(self, tensor: Tensor, then: Callable[[], None], number: int, label: str) -> Collective:
        """Start a sum by the backend: `tensor` becomes its sum over ranks; then call `then`. number: as in `reduce_scatter`."""
        raise NotImplementedError

    @property
    def mail_nbytes(self) -> int:
        """Bytes of memory of this rank that peers read in `all_to_all`."""
        return 0

    def join(self, local: DirectComm) -> None:
        """Make every wait in this communicator also progress `local` (of this host's ranks), and the reverse."""

    def serve(self) -> None:
        """Answer peers that may be waiting for this rank, without blocking."""


class Wrapper(Comm):
    """A Comm that calls the collectives of another Comm of the same ranks, unless a subclass overrides them.

    parts: the Comms that it calls; `comm` if none are given.
    """

    def __init__(self, comm: Comm, *parts: Comm) -> None:
        self.comm, self.control, self.parts = comm, comm.control, parts or (comm,)
        for name in Group.__annotations__:  # rank, world_size, device, ...: copied, so that subclasses can change them
            setattr(self, name, getattr(comm, name))

    def allocate(self, numel: int, dtype: torch.dtype, *, whole: bool) -> Region:
        return self.comm.allocate(numel, dtype, whole=whole)

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Region | None:
        return self.comm.allocate_common(numel, dtype)

    def gather(self, full: Tensor, source: Region, label: str, tag: int | None = None) -> Collective:
        return self.comm.gather(full, source, label, tag)

    def collect(self, source: Region, combine: Combine, *, tag: int, label: str) -> Collective:
        return self.comm.collect(source, combine, tag=tag, label=label)
