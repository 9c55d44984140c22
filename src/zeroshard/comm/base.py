"""The communicator interface (`Comm`): the collectives that the sharding layer calls on a group of ranks.

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
CHUNK_NUMEL = 1 << 17  # number of elements summed at a time: three fp32 chunks stay in a core's L2 cache


@dataclass
class Region:
    """A flat tensor and the shards of all ranks, as far as this rank can read them.

    tensor: (world * shard_numel,) or (shard_numel,); shards[r]: (shard_numel,) of rank r, or None where this rank can
    not read it; wholes[r]: the whole tensor of rank r (whole regions that peers can read). common: `tensor` is the same
    memory on all ranks.
    """

    tensor: Tensor
    shards: list[Tensor | None] = field(default_factory=list)
    wholes: list[Tensor | None] = field(default_factory=list)
    common: bool = False
    number: int = 0  # equal on every rank; for a staging buffer, its index in a pool of equal buffers
    siblings: Callable[[int], Region] | None = None  # number -> that buffer of the pool: a peer may be using another one


class Sent(NamedTuple):
    """Number of bytes that a rank sends: `inside` to ranks of its own node, `between` to ranks of other nodes."""

    inside: int = 0
    between: int = 0


Outcome = tuple[float | None, tuple[int, ...]]  # a reduction's `Work.square_sum` and `Work.culprits`
Reserved = tuple[int, torch.dtype]  # number of elements of a shard (or of a slice), and their dtype
Combine = Callable[[list[Tensor]], Outcome | None]
Missing = Callable[[], list[int] | None]


class Work:
    """A collective that has been started. `wait` until its result may be read, `drain` until its source may be overwritten.

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

    def missing(self) -> list[int] | None:
        """Return the ranks for which `wait` still waits, as the transport numbers them; None where they are not known."""
        return None


class Hops(Work):
    """A collective of two hops: the second collective begins when the first is over.

    Where the host waits for collectives (gloo, shared memory), `Pending` keeps the hops until this rank next waits for anything,
    or polls, and finds the first over. Otherwise (NCCL) both are enqueued on the side stream at once.
    """

    def __init__(self, comm: Comm, first: Work, go_on: Callable[[], Work], sent: Sent, label: str) -> None:
        """go_on: starts the second collective. sent: bytes that this rank sends for both."""
        self.comm, self.first, self._go_on, self.sent, self.label = comm, first, go_on, sent, label
        self.second: Work | None = None  # None: not begun yet
        self._begun = self._over = False
        self._ticket: Any = None
        if comm.waits_on_host:
            comm.pending.items.append(self)
        else:
            _, self._ticket = comm.streams.run_beside(self._finish)

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
        self.take((self.second.square_sum, self.first.culprits))  # the second would name the rank that passed a value on
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
            self.comm.wait_until(self.ready, self.label, self.missing)
            self._finish()

    def missing(self) -> list[int] | None:
        """Return the ranks of the hop under way: those of the other hop may have left, having all that they need."""
        return (self.first if self.second is None else self.second).missing()

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
    """The `Hops` whose second collective has not begun. Every wait of this rank calls `advance`: peers may wait for those."""

    def __init__(self) -> None:
        self.items: list[Hops] = []
        self._busy = False

    def advance(self) -> None:
        """Begin the second collective of all hops whose first is over."""
        if self._busy or not self.items:
            return
        self._busy = True
        try:
            for hops in [hops for hops in self.items if hops.first.ready()]:
                if hops in self.items:  # another one's `begin` may have waited, and begun this one meanwhile
                    self.items.remove(hops)
                    hops.begin()
        finally:
            self._busy = False

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of a wait, in which `advance` runs even where the wait is inside `advance` (a hop waits for a buffer)."""
        busy, self._busy = self._busy, False
        try:
            yield
        finally:
            self._busy = busy


class Comm(ABC):
    """A group of ranks with asynchronous collectives on flat tensors.

    Threads: one at a time: the rank's own, autograd's during a backward that the rank's own waits for, or that of
    checkpoint/heartbeat.py while the rank's own writes files. `exchange` refuses a second one (`ThreadsMet`). Only `progress`
    may be read by others.

    ordered: True where collectives are matched by the order in which ranks start them (NCCL); the runtime then starts
    reductions in an order that all ranks have agreed on. device: where tensors live.
    """

    rank: int
    world_size: int
    device: torch.device
    ordered: bool = False
    shares_memory: bool = False  # peers read this rank's regions, so `allocate` is collective
    copies: bool = False  # this rank gathers resting shards by copying them: no peer has to take part
    drains_all: bool = True  # when a reduction has drained, every rank that may read its result has it
    replicas: int = 1  # number of groups of ranks that hold the same shards: reductions sum over all of them
    replica: int = 0  # index of this rank's group among the replicas
    local: Comm | None = None  # communicator of this host's ranks, where they have a faster one (shared memory)
    packs: bool = False  # reductions send gradients as fewer bytes (a codec) at present
    waits_on_host: bool = True  # False: waiting orders streams and the host goes on (NCCL)
    imagined: bool = False  # the peers do not exist (planning)
    streams: Streams = Streams()
    _serial = 0

    @property
    def failure(self) -> Exception | None:
        """The error that all ranks raise because one of them failed (see `abort`), or None."""
        return None

    @functools.cached_property
    def pending(self) -> Pending:
        """The hops not yet continued, shared by a group and its subgroups: a wait in any of them continues all."""
        return Pending()

    @functools.cached_property
    def progress(self) -> Progress:
        """This rank's notes of its step and collectives, from which it answers peers that have waited too long."""
        return Progress(self.ranks[self.rank])

    @property
    def ranks(self) -> list[int]:
        """World rank of each rank of this group, as errors and reports name them."""
        return list(range(self.world_size))

    @property
    def nodes(self) -> list[int]:
        """Node number of each rank of this group. Links inside a node are fast, links between nodes are slower."""
        return [0] * self.world_size

    def sent(self, nbytes: int) -> Sent:
        """Return the bytes that this rank sends if each of its peers gets `nbytes`."""
        nodes = self.nodes
        near = nodes.count(nodes[self.rank])
        return Sent((near - 1) * nbytes, (self.world_size - near) * nbytes)

    def subgroup(self, parts: Sequence[Sequence[int]], apart: bool = False) -> Comm:
        """Return a Comm of the ranks of that list in `parts` which contains this rank (collective). The lists are disjoint.

        apart: no rank outside the subgroup reads or writes its shards, so that the subgroup has fences of its own.
        """
        raise NotImplementedError(f"{type(self).__name__} has no subgroups")

    def place(self, label: str) -> str:
        """Return `label` with this rank's step appended, for errors."""
        return label if label.endswith("]") else f"{label} [step {self.progress.step}]"

    def volume(self, kind: str, numel: int, dtype: torch.dtype) -> Sent:
        """Return the bytes that this rank sends. kind: "gather", "gather again" (no write since) or "reduce" of such shards."""
        return self.sent(numel * dtype.itemsize)

    def reduction_volume(self, tag: int, numel: int, dtype: torch.dtype) -> Sent:
        """Return `volume("reduce", ...)` for the tensors reduced under `tag`, whose parameters may be known (see `expect`)."""
        return self.volume("reduce", numel, dtype)

    def reserve(self, number: int, numel: int, dtype: torch.dtype) -> None:
        """Announce gathers, from region `number` (0: one without a number), of shards of `numel` elements (collective)."""

    def reserve_slices(self, numel: int, dtype: torch.dtype) -> None:
        """Announce reductions of `world_size` slices of `numel` elements each. Call for each, before the first reduction."""

    def expect(self, tag: int, slots: Sequence[tuple[int, Sequence[int]]], numel: int) -> None:
        """Announce reductions of `numel` elements under `tag`. slots: (offset, shape) of each parameter among them."""

    def needed(self, values: Sequence[Reserved], slices: Sequence[Reserved]) -> int:
        """Return the bytes that buffers take on this rank, in use, after `reserve(values)` and `reserve_slices(slices)`."""
        return 0

    def open(self) -> None:
        """Allocate the buffers that were reserved (collective; before the first gather or reduction)."""

    def release(self) -> None:
        """Free what `open` has allocated, because its model is closed."""

    def forget(self) -> None:
        """Drop what is kept from earlier reductions (a codec's residuals, say), because other values have been loaded."""

    def outdate(self, number: int) -> None:
        """Invalidate what is kept of region `number`, whose shards are about to be written."""

    def holds(self, number: int) -> bool:
        """Return True where the next gather from region `number` reads secondary shards that an earlier gather has left."""
        return False

    def new_serial(self) -> int:
        """Return the next number for a model sharded over this group: the same on every rank."""
        self._serial += 1
        return self._serial

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

    @abstractmethod
    def gather(self, full: Tensor, source: Region, label: str, tag: int | None = None) -> Work:
        """Start an all-gather that fills `full` (world * shard_numel,) with the shards of all ranks.

        tag: None where the shards are at rest and fences keep writers and readers apart. Where a shard has just been written
        (staged from another tier), the number under which all ranks meet for this gather; its `Work` must then be
        drained before the shard is overwritten.
        """

    @abstractmethod
    def collect(self, source: Region, combine: Combine, *, tag: int, label: str) -> Work:
        """Start an all-to-all, and call combine(parts) once when it is over. parts: this rank's slice of each rank's `source`.

        source: (world_size * n,) on every rank; parts[r]: (n,) from rank r, valid until `combine` returns. The returned Work's
        `wait` returns after this rank's `combine`, its `drain` when all ranks have combined theirs.
        """

    def reduce(self, source: Region, out: Tensor, *, scale: float, accumulate: bool, tag: int, label: str) -> Work:
        """Start a reduce-scatter: out (shard_numel,) = [out +] scale * sum over ranks of this rank's slice (fp32)."""

        def combine(parts: list[Tensor]) -> Outcome:
            total = sum_in_rank_order(parts, out, scale=scale, accumulate=accumulate)
            rounded = out.dtype.itemsize < 4 and out.device.type == "cpu"  # the first of two hops: `total` is None
            if torch.isfinite(out).all() if rounded else total is None or math.isfinite(total):
                return total, ()
            return total, tuple(self.ranks[rank] for rank in nonfinite_ranks(parts, out))

        return self.collect(source, combine, tag=tag, label=label)

    @abstractmethod
    def exchange(self, payload: bytes, label: str) -> list[bytes]:
        """Return every rank's payload, in rank order (collective). Blocks, and serves as a barrier."""

    def square_sums(self, tensors: Sequence[Tensor]) -> float:
        """Return the sum of all squares of 1-D tensors, on the host: the only values that the core reads back from the device.

        On the CPU it computes the same dot products in the same order as `sum_in_rank_order`, so that a norm has the same bits
        whichever of the two computed it.
        """
        if all(tensor.device.type == "cpu" for tensor in tensors):
            return sum(square_sum(tensor) for tensor in tensors)
        norms = [torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors]
        return float(torch.stack(norms).double().square().sum())

    def fence_write(self, synchronised: bool = False) -> None:
        """Return when no peer reads this rank's shards (collective). synchronised: a barrier has just passed, so do not wait."""

    def fence_read(self) -> None:
        """Return when all ranks have written their shards, so that peers' shards may be read (collective)."""

    def announce(self, waiting_for: str | None) -> None:
        """Tell the peers that this rank waits for something that they may have to free (None: it waits no longer)."""

    def peers_wait(self) -> bool:
        """Return True if a peer may be waiting for this rank, so that this rank's own wait might never end."""
        return True

    def wait_until(self, done: Callable[[], bool], label: str, missing: Missing | None = None) -> None:
        """Return when `done()`; meanwhile continue all work that peers may wait for. missing: as `Work.missing`."""
        with self.pending.waiting():
            while not done():
                self.poll()
                time.sleep(_PAUSE_S)

    def join(self, local: Any) -> None:
        """Let every wait here also serve `local`, the communicator of this host's ranks, and every wait there serve this one."""

    def poll(self) -> None:
        """Let work under way progress, without blocking."""

    def abort(self, reason: str, error: Exception | None = None) -> None:
        """Tell the peers that this rank failed, so that none waits for it. error: what they shall raise instead of PeerFailed."""
        self.fail(Failure(self.ranks[self.rank], reason, error))

    def fail(self, failure: Failure) -> None:
        """Tell the peers why the group can not go on: this rank's failure, or a peer's that they may not know of yet."""

    def answer_for(self, owner: object) -> Callable[[], Any]:
        """Answer peers that ask what this rank does, until `owner` is collected or the returned function is called."""
        return lambda: None

    def leave(self) -> None:
        """Send what is still queued for the peers, and leave: this process ends."""

    def close(self) -> None:
        """Release the connections; the group can not be used afterwards."""


def operation(label: str) -> str:
    """Return the part of a label on which ranks must agree: the label without the bracketed remark at its end."""
    return label.split(" [")[0]


def misuse(places: Mapping[int, str | None], world_size: int) -> str:
    """Return a hint at the calls that ranks have not made together, to append to an error; "" where there is none.

    ' zs.save() is collective: ...' where some ranks are in a verb of this library and the others are elsewhere; ' Rank 0
    left ...' where some are in the training loop and the others are not.
    places: rank -> the label at which it waits; None, or no entry: it is somewhere else.
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
    """Compute out = [out +] scale * (parts[0] + parts[1] + ...), in fp32 (fp64 for fp64 parts), in chunks that stay in cache.

    Returns the sum of out's squares where it costs nothing extra (CPU, out not rounded), else None.
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
    """Return the ranks whose parts are not finite, given that their sum is not; the part summed in place only if no other is."""
    in_place = [rank for rank, part in enumerate(parts) if part.data_ptr() == out.data_ptr()]
    found = [rank for rank, part in enumerate(parts) if rank not in in_place and not torch.isfinite(part).all()]
    return tuple(found or in_place)


def square_sum(tensor: Tensor) -> float:
    """Return the sum of squares of a 1-D CPU tensor: fp32 dot products of chunks, added in fp64."""
    parts = tensor.split(CHUNK_NUMEL)
    if tensor.dtype not in (torch.float32, torch.float64):
        parts = tuple(part.float() for part in parts)
    return sum((torch.dot(part, part).item() for part in parts), 0.0)


def _sum_chunk(parts: list[Tensor], total: Tensor, cast: Tensor | None) -> None:
    """Compute total = parts[0] + parts[1] + ... in fp32; `cast` holds one converted part where parts are not fp32."""
    if cast is None and len(parts) > 1:
        torch.add(parts[0], parts[1], out=total)
        rest = parts[2:]
    else:
        total.copy_(parts[0])
        rest = parts[1:]
    for part in rest:
        total.add_(part if cast is None else cast.copy_(part))
