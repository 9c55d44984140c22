"""The Comms of a model, for control messages, shards, values and gradients. `open_topology` makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..utils.compression import Compression
from .comm.base import Comm, DirectComm, Reserved

Parts = list[list[int]]

_ERROR_EVERY = 64  # steps between two measurements of a unit's packing error


class Errors:
    """The relative error of packing, by unit, measured every `_ERROR_EVERY` steps."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self._step: dict[str, int] = {}

    def note(self, label: str, step: int, measure: Callable[[], float]) -> None:
        """Record the error that `measure` returns, if the last measurement is `_ERROR_EVERY` steps old."""
        if label not in self._step or step >= self._step[label] + _ERROR_EVERY:
            self._step[label] = step
            self.found[label] = measure()


@dataclass(frozen=True)
class Topology:
    """The Comms of one model, by what they are for. Without model axes, hops, replicas and compression all are one Comm.

    control: all data-parallel ranks, which agree on the next operation. peers: the ranks of this pipeline stage, which compute
    norms of tensors together. world: all ranks of the mesh, which step together. shards: ranks over which a buffer is sharded;
    does not compress. values, gradients: the Comms that all-gather and reduce-scatter; weights, sent: their compression, or None.
    places: the ranks, in `world`, of each place: data-parallel ranks, with the same part of the model. stages: those of each
    pipeline stage. summed: as GradientBuffer's. notes: sentences for a report. divided: the Topology of parameters that an axis
    of data parallelism cuts (experts): its `control` is the ranks with the same experts, its `cut` the names of these axes.
    """

    control: DirectComm
    peers: DirectComm
    world: DirectComm
    places: Parts
    stages: Parts
    shards: Comm
    values: Comm
    gradients: Comm
    weights: Compression | None = None
    sent: Compression | None = None
    errors: Errors = field(default_factory=Errors)
    notes: list[str] = field(default_factory=list)
    summed: float = 1
    divided: Topology | None = None
    cut: frozenset[str] = frozenset()

    @classmethod
    def flat(
        cls, comm: DirectComm, peers: DirectComm | None = None, world: DirectComm | None = None, places: Parts | None = None,
        stages: Parts | None = None, summed: float = 1,
    ) -> Topology:  # fmt: skip
        """Return a topology of one hop without compression."""
        world = world or comm
        everyone = [list(range(world.world_size))]
        return cls(comm, peers or comm, world, places or everyone, stages or everyone, comm, comm, comm, summed=summed)

    def of(self, axes: Iterable[str]) -> Topology:
        """Return the topology of parameters that `axes` cut: this one, or `divided` if one of them is of data parallelism."""
        return self if self.divided is None or self.divided.cut.isdisjoint(axes) else self.divided

    @property
    def place(self) -> list[int]:
        """The data-parallel ranks of this rank's place, as ranks of `world`."""
        return next(ranks for ranks in self.places if self.world.rank in ranks)

    @property
    def stage(self) -> int:
        """Number of this rank's pipeline stage."""
        return next(number for number, ranks in enumerate(self.stages) if self.world.rank in ranks)

    @property
    def leads(self) -> bool:
        """True on the first rank of this rank's stage, which writes or says what is said once for the stage's model."""
        return self.world.rank == self.stages[self.stage][0]

    @property
    def mesh(self) -> dict[str, Parts] | None:
        """The ranks of each place and stage, in plain values; None where no model axis cuts the model."""
        return {"places": self.places, "stages": self.stages} if len(self.places) > 1 else None

    def open(self) -> None:
        """Allocate the buffers that were reserved (collective)."""
        # gradients first: `open` of LowRankReductions still reserves buffers in the Comm beneath
        for comm in dict.fromkeys((self.gradients, self.values, self.shards)):
            comm.open()
        if self.divided is not None:
            self.divided.open()

    def forget(self) -> None:
        """Drop the state that reductions keep (residuals), because other values have been loaded (see `Comm.forget`)."""
        self.gradients.forget()
        if self.divided is not None:
            self.divided.forget()

    def release(self) -> None:
        """Free the buffers that `open` has allocated, because the model is closed."""
        for comm in dict.fromkeys((self.gradients, self.values, self.shards)):
            comm.release()
        if self.divided is not None:
            self.divided.release()

    def packs(self, name: str, dim: int) -> tuple[bool, bool]:
        """Return whether values, and whether gradients, of a parameter may be compressed."""
        values, gradients = (each is not None and not each.spares(name, dim) for each in (self.weights, self.sent))
        return values, gradients

    def values_of(self, packed: bool, numel: int) -> Comm:
        """Return the Comm that gathers a group's values. packed: its parameters may be compressed (all of them, or none)."""
        return self.values if packed and self.weights is not None and numel >= self.weights.min_numel else self.shards

    def gradients_of(self, packed: bool, numel: int) -> Comm:
        """Return the Comm that reduces a group's gradients. packed: as in `values_of`."""
        return self.gradients if packed and self.sent is not None and numel >= self.sent.min_numel else self.shards


def needed(values: Iterable[tuple[Comm, Reserved]], slices: Iterable[tuple[Comm, Reserved]]) -> int:
    """Return the bytes of the buffers of all Comms on this rank: see `Comm.needed`. Each pair is a group's Comm and shard."""
    found: dict[Comm, tuple[list[Reserved], list[Reserved]]] = {}
    for number, groups in enumerate((values, slices)):
        for comm, shard in groups:
            found.setdefault(comm, ([], []))[number].append(shard)
    return sum(comm.needed(*each) for comm, each in found.items())
