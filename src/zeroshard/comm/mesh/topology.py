"""The topology of a model: its Comms for control messages, shards, values and gradients, made from the options and ranks.

plain               comm                                    comm
groups (MiCS)       ReplicatedComm(inside, across)          + CompressedReductions in both hops
nodes (hpZ, hosts)  HierarchicalComm(inside, between)       + CompressedReductions in both hops
qwZ                 CompressedGathers over the Comm of the shards
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...config import Config, Placement
from ...errors import ConfigError
from ...memory.ledger import Ledger
from ...utils.compression import Compression
from ..base import Comm, Reserved
from ..codecs import TopK, codec_of
from ..codecs.base import Codec
from ..fake import FakeComm, Imagination, imagination
from .compressed import CompressedGathers, CompressedReductions, Errors
from .hierarchical import HierarchicalComm
from .low_rank import LowRankReductions
from .replicated import ReplicatedComm

Parts = list[list[int]]


@dataclass
class Topology:
    """The Comms of one model.

    control: all data-parallel ranks, which agree on what comes next. shards: the ranks over which a buffer is sharded. values,
    gradients: the Comms that gather and reduce; plain_gradients: that of gradients exempt from compression. weights, sent:
    compression of gathers and of reductions. notes: sentences for a report. peers, world: see comm/mesh/axes.py; without model axes
    they are `control`. places, stages: ranks in `world` of each place (the data-parallel ones) and of each pipeline stage.
    """

    control: Comm
    shards: Comm
    values: Comm
    gradients: Comm
    plain_gradients: Comm
    weights: Compression | None = None
    sent: Compression | None = None
    errors: Errors = field(default_factory=Errors)
    notes: list[str] = field(default_factory=list)
    peers: Comm = field(kw_only=True)
    world: Comm = field(kw_only=True)
    places: Parts = field(default_factory=list)
    stages: Parts = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = self.places or [list(range(self.world.world_size))]
        self.stages = self.stages or [list(range(self.world.world_size))]

    @classmethod
    def flat(
        cls,
        comm: Comm,
        peers: Comm | None = None,
        world: Comm | None = None,
        places: Parts | None = None,
        stages: Parts | None = None,
    ) -> Topology:
        """Return a topology of one hop without compression."""
        return cls(
            comm, comm, comm, comm, comm, peers=peers or comm, world=world or comm, places=places or [], stages=stages or []
        )  # fmt: skip

    @property
    def place(self) -> list[int]:
        """The data-parallel ranks of this rank's place, as ranks of `world`."""
        return next(ranks for ranks in self.places if self.world.rank in ranks)

    @property
    def stage(self) -> int:
        """Number of this rank's pipeline stage."""
        return next(number for number, ranks in enumerate(self.stages) if self.world.rank in ranks)

    @property
    def mesh(self) -> dict[str, Any] | None:
        """The ranks of each place and stage, in plain values; None where all ranks hold the same of the model."""
        return {"places": self.places, "stages": self.stages} if len(self.places) > 1 else None

    def open(self) -> None:
        """Allocate the buffers that were reserved (collective)."""
        for comm in self._all():
            comm.open()

    def forget(self) -> None:
        """Drop what reductions have kept, because other values have been loaded (see `Comm.forget`)."""
        self.gradients.forget()

    def release(self) -> None:
        """Free the buffers that `open` has allocated, because the model is closed."""
        for comm in self._all():
            comm.release()

    def _all(self) -> Iterable[Comm]:
        # Comms whose `open` reserves more in others come first
        return dict.fromkeys((self.gradients, self.plain_gradients, self.values, self.shards))

    def packs(self, name: str, dim: int) -> tuple[bool, bool]:
        """Return whether values, and whether gradients, of a parameter may be compressed."""
        values, gradients = (each is not None and not each.spares(name, dim) for each in (self.weights, self.sent))
        return values, gradients

    def values_of(self, packed: bool, numel: int) -> Comm:
        """Return the Comm that gathers a group's values. packed: its parameters may be compressed (all of them, or none)."""
        return self.values if packed and self.weights is not None and numel >= self.weights.min_numel else self.shards

    def gradients_of(self, packed: bool, numel: int) -> Comm:
        """Return the Comm that reduces a group's gradients. packed: as in `values_of`."""
        return self.gradients if packed and self.sent is not None and numel >= self.sent.min_numel else self.plain_gradients


def needed(values: Iterable[tuple[Comm, Reserved]], slices: Iterable[tuple[Comm, Reserved]]) -> int:
    """Return the bytes of the buffers of all Comms on this rank: see `Comm.needed`. Each pair is a group's Comm and shard."""
    found: dict[Comm, tuple[list[Reserved], list[Reserved]]] = {}
    for number, groups in enumerate((values, slices)):
        for comm, shard in groups:
            found.setdefault(comm, ([], []))[number].append(shard)
    return sum(comm.needed(*each) for comm, each in found.items())


def check(config: Config, comm: Comm, nodes: Parts | None = None) -> None:
    """Raise ConfigError for groups or nodes that do not divide the ranks. nodes: the groups along a mesh's inner axis."""
    for name in ("shard_size", "zero_hpz_partition_size"):
        size = getattr(config, name)
        if size is None or size == 1:
            continue
        if nodes is not None and name == "shard_size":
            raise ConfigError(
                f"shard_size={size} with a mesh: the mesh's inner axis has {len(nodes[0])} ranks. Give one of them."
            )
        if comm.world_size % size:
            fits = [n for n in range(1, comm.world_size + 1) if comm.world_size % n == 0]
            nearest = min(fits, key=lambda n: abs(n - size))
            raise ConfigError(f"{name}={size} does not divide the {comm.world_size} ranks: {nearest} does.")
    if nodes is not None and config.zero_hpz_partition_size > 1:
        raise ConfigError(
            f"zero_hpz_partition_size={config.zero_hpz_partition_size} with a mesh of two axes: with replicate_optimizer=False "
            "the mesh's inner axis keeps secondary shards. Give one of them."
        )
    if not config.replicate_optimizer and nodes is None and config.shard_size is None:
        raise ConfigError("replicate_optimizer=False needs groups of ranks: shard_size=..., or a mesh of two axes.")
    if config.hierarchical and nodes is None and config.zero_hpz_partition_size == 1 and _hosts(comm) is None:
        raise ConfigError(
            "hierarchical=True: the ranks are on one host, or unequally many on some: say how many make a node, "
            "zero_hpz_partition_size=..., or give a mesh."
        )


def open_topology(
    config: Config, topology: Topology, ledger: Ledger, warm: Callable[[int], bool], mesh: Parts | None = None
) -> Topology:
    """Return the Comms of a model, made from a topology of one hop (collective).

    mesh: the ranks of each group of a two-axis mesh. warm: returns True once the given number of steps is over.
    """
    comm = topology.control
    size = config.shard_size or (len(mesh[0]) if mesh is not None else None)
    groups, nodes = None, None
    if size is not None and config.replicate_optimizer:
        groups = mesh or _even(comm.world_size, size)
    elif size is not None:
        nodes = mesh or _even(comm.world_size, size)
    elif config.zero_hpz_partition_size > 1:
        nodes = _even(comm.world_size, config.zero_hpz_partition_size)
    elif config.hierarchical is not False:
        nodes = _hosts(comm)  # two hops help NCCL as well: it gathers in rings, but an all-to-all sends from each rank to each
        if nodes is None and 1 < len(set(comm.nodes)) < comm.world_size:
            topology.notes.append("nodes of unequally many ranks: everything goes in one hop, to each rank by itself")
    if groups is not None and len(groups) > 1:
        _replicate(topology, config, ledger, warm, groups)
    elif nodes is not None and 1 < len(nodes) < comm.world_size:
        keep = size is not None or config.zero_hpz_partition_size > 1
        _in_two_hops(topology, config, ledger, warm, nodes, keep and config.row.parameter is Placement.SHARDED)
    elif _packs_by_hop(config):
        topology.gradients = _reduced(topology, comm, config, ledger, warm)
    if config.zero_quantized_gradients is not None and not _packs_by_hop(config):
        _factorize(topology, config, ledger, warm)
    _pack_weights(topology, config, ledger, warm)
    return topology


def imagined_topology(
    config: Config, ranks: int, node_size: int, separate: bool, copies: bool, mesh: Parts | None = None
) -> Topology:
    """Return the Comms that a model would have: they tell what they would hold and send (not collective). See Imagination."""
    token = imagination.set(Imagination(node_size, separate, copies))
    try:
        return open_topology(config, Topology.flat(FakeComm(0, ranks)), Ledger(), lambda steps: True, mesh)
    finally:
        imagination.reset(token)


def _even(world_size: int, size: int) -> Parts:
    return [list(range(first, first + size)) for first in range(0, world_size, size)]


def _hosts(comm: Comm) -> Parts | None:
    """Return the ranks of each node, where there are several nodes with equally many ranks, at least two; else None."""
    found: dict[int, list[int]] = {}
    for rank, node in enumerate(comm.nodes):
        found.setdefault(node, []).append(rank)
    sizes = {len(ranks) for ranks in found.values()}
    return list(found.values()) if len(found) > 1 and len(sizes) == 1 and sizes != {1} else None


def _halves(comm: Comm, parts: Parts) -> tuple[Comm, Comm]:
    """Return the Comm of this rank's part, and the Comm of the ranks with the same index in every part."""
    if parts == _hosts(comm) and comm.local is not None:
        inner = comm.local
        comm.join(inner)
    else:
        inner = comm.subgroup(parts)
    return inner, comm.subgroup([list(ranks) for ranks in zip(*parts, strict=True)])


def _replicate(topology: Topology, config: Config, ledger: Ledger, warm: Callable[[int], bool], groups: Parts) -> None:
    inner, outer = _halves(topology.control, groups)
    shards = ReplicatedComm(inner, outer, ledger)
    topology.shards = topology.values = topology.plain_gradients = topology.gradients = shards
    if _packs_by_hop(config):
        inside, across = (_reduced(topology, comm, config, ledger, warm) for comm in (inner, outer))
        topology.gradients = ReplicatedComm(inside, across, ledger)


def _in_two_hops(
    topology: Topology, config: Config, ledger: Ledger, warm: Callable[[int], bool], nodes: Parts, keep: bool
) -> None:
    world = topology.control
    inner, outer = _halves(world, nodes)
    comm = HierarchicalComm(world, inner, outer, nodes, ledger, keep=keep)
    topology.shards = topology.values = topology.plain_gradients = topology.gradients = comm
    if keep and world.copies:
        topology.notes.append("ranks read each other's memory: a secondary shard saves nothing here")
    if _packs_by_hop(config):
        inside, across = (_reduced(topology, part, config, ledger, warm) for part in (inner, outer))
        topology.gradients = HierarchicalComm(world, inside, across, nodes, ledger, sums=torch.float32)


def _codec(compression: Compression) -> Codec:
    if compression.codec == "top_k":
        return TopK(compression.ratio)
    return codec_of(compression.codec, compression.block)


def _skips(topology: Topology, comm: Comm, compression: Compression, what: str) -> bool:
    """Return True where compression is of no use, because the ranks read each other's memory; note it for the report."""
    if not comm.copies or compression.force:
        return False
    note = f"{what} travel plain between ranks that read each other's memory: packing would cost time and save none (force=True does it)"
    if note not in topology.notes:
        topology.notes.append(note)
    return True


def _reduced(topology: Topology, comm: Comm, config: Config, ledger: Ledger, warm: Callable[[int], bool]) -> Comm:
    """Return a Comm whose reductions are compressed; `comm` itself where that saves nothing."""
    compression = config.zero_quantized_gradients
    assert compression is not None
    if comm.world_size == 1 or _skips(topology, comm, compression, "gradients"):
        return comm
    topology.sent = compression
    active = functools.partial(warm, compression.warmup_steps)
    feedback = compression.error_feedback or compression.codec == "top_k"  # top-k stalls without it
    return CompressedReductions(comm, _codec(compression), ledger, active, topology.errors, feedback=feedback)


def _packs_by_hop(config: Config) -> bool:
    return config.zero_quantized_gradients is not None and config.zero_quantized_gradients.codec != "low_rank"


def _factorize(topology: Topology, config: Config, ledger: Ledger, warm: Callable[[int], bool]) -> None:
    compression = config.zero_quantized_gradients
    assert compression is not None
    comm = topology.plain_gradients
    if comm.world_size * comm.replicas > 1 and not _skips(topology, topology.control, compression, "gradients"):
        topology.sent = compression
        topology.gradients = LowRankReductions(comm, compression.rank, ledger, functools.partial(warm, compression.warmup_steps))


def _pack_weights(topology: Topology, config: Config, ledger: Ledger, warm: Callable[[int], bool]) -> None:
    compression = config.zero_quantized_weights
    if compression is None or topology.shards.world_size == 1:
        return
    reads = topology.shards if topology.shards.copies else topology.control  # a gather in two hops is more than a copy
    if _skips(topology, reads, compression, "parameters"):
        return
    topology.weights = compression
    active = functools.partial(warm, compression.warmup_steps)
    topology.values = CompressedGathers(topology.shards, _codec(compression), ledger, active, topology.errors)
