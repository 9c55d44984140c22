"""Opens the topology of a model (engine/topology.py): its Comms for control messages, shards, values and gradients, made from the options and ranks.

plain               comm                                    comm
groups (MiCS)       ReplicatedComm(inside, across)          + CompressedReductions in both hops
nodes (hpZ, hosts)  HierarchicalComm(inside, between)       + CompressedReductions in both hops
qwZ                 CompressedGathers over the Comm of the shards
sums="backend"      BackendSums over each Comm that sends to its ranks itself

Experts along an axis that cuts the batch as well have a topology of their own, `Topology.divided`, made in the same way.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..config import Config, Placement
from ..engine import Errors, Ledger, Parts, Topology
from ..engine.comm import Comm, DirectComm
from ..errors import ConfigError
from ..packing import BackendSums, CompressedGathers, CompressedReductions, HierarchicalComm, LowRankReductions, ReplicatedComm
from ..packing.codecs import packing
from ..utils.compression import Compression
from .fake import FakeComm, Imagination, imagination
from .mesh import Divided

_MANY = 64  # ranks of a reduction from which a report names `sums`: each sends a message to each other one for each unit


def check(config: Config, comm: Comm, nodes: Parts | None = None) -> None:
    """Raise ConfigError for groups or nodes that do not divide the ranks. nodes: the groups along a mesh's inner axis."""
    for name in ("shard_size", "zero_hpz_partition_size"):
        size = getattr(config, name)
        if size is None or size == 1:  # 1 groups nothing
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
    parts = [] if nodes is None else [*nodes, *map(list, zip(*nodes, strict=True))]
    if config.sums == "backend" and any(part != sorted(part) for part in [*parts, comm.ranks]):
        raise ConfigError(
            f"sums='backend' adds up in ascending order of ranks, and the mesh has {nodes or comm.ranks}. Give a mesh of ascending "
            "ranks, or sums='ordered'."
        )
    if config.hierarchical and nodes is None and config.zero_hpz_partition_size == 1 and _hosts(comm) is None:
        raise ConfigError(
            "hierarchical=True: the ranks are on one host, or unequally many on some: say how many make a node, "
            "zero_hpz_partition_size=..., or give a mesh."
        )


def settled(config: Config, comm: Comm) -> Config:
    """Return the options that hold where nothing is summed, or by ranks which read each other's memory: in order, at no price."""
    needless = config.sums == "backend" and (comm.copies or comm.world_size == 1)
    return dataclasses.replace(config, sums="ordered") if needless else config


def summing(config: Config, comm: DirectComm) -> Comm:
    """Return the Comm whose reductions are summed as `config.sums` says: by the backend, if `comm` has one (collective)."""
    return BackendSums(comm) if config.sums == "backend" and comm.adds and comm.world_size > 1 else comm


def open_topology(
    config: Config, flat: Topology, ledger: Ledger, warm: Callable[[int], bool], mesh: Parts | None = None,
    divided: Divided | None = None,
) -> Topology:  # fmt: skip
    """Return the Comms of a model, made from a topology of one hop (collective).

    mesh: the ranks of each group of a two-axis mesh. warm: returns True once the given number of steps is over. divided: the
    ranks that hold the same experts, of which a topology is made in the same way; raise ConfigError as `check` for these.
    """
    comm, notes = flat.control, list(flat.notes)
    if config.sums == "backend":
        sent = str(config.sent_dtype(config.compute_dtype)).removeprefix("torch.")
        notes.append(f"gradients are summed by the backend, in {sent}: their bits depend on it and on the number of ranks")
    packing = _Packing(config, ledger, warm, flat.errors, notes)
    size = config.shard_size or (len(mesh[0]) if mesh is not None else None)
    groups, nodes = None, None
    if size is not None and config.replicate_optimizer:
        groups = mesh or _even(comm.world_size, size)
    elif size is not None:
        nodes = mesh or _even(comm.world_size, size)
    elif config.zero_hpz_partition_size > 1:
        nodes = _even(comm.world_size, config.zero_hpz_partition_size)
    elif config.hierarchical is not False:
        nodes = _hosts(comm)  # two hops help NCCL, too: it gathers in rings, but its all-to-all sends directly between all pairs
        if nodes is None and 1 < len(set(comm.nodes)) < comm.world_size:
            notes.append("nodes have unequally many ranks: data is sent in one hop, to each rank by itself")
    shards: Comm = comm
    gradients: Comm
    if groups is not None and len(groups) > 1:
        inner, outer = (summing(config, half) for half in _halves(comm, groups))
        shards = ReplicatedComm(inner, outer, ledger)
        inside, across = packing.reductions(inner), packing.reductions(outer)
        gradients = shards if (inside, across) == (inner, outer) else ReplicatedComm(inside, across, ledger)
    elif nodes is not None and 1 < len(nodes) < comm.world_size:
        inner, outer = (summing(config, half) for half in _halves(comm, nodes))
        keep = (size is not None or config.zero_hpz_partition_size > 1) and config.row.parameter is Placement.SHARDED
        shards = HierarchicalComm(comm, inner, outer, nodes, ledger, keep=keep)
        if keep and comm.copies:
            notes.append("ranks read each other's memory, so a secondary shard saves nothing here")
        inside, across = packing.reductions(inner), packing.reductions(outer)
        gradients = shards
        if (inside, across) != (inner, outer):
            gradients = HierarchicalComm(comm, inside, across, nodes, ledger, sums=torch.float32)
    else:
        shards = summing(config, comm)
        gradients = packing.reductions(shards)
    gradients = packing.factors(gradients, comm)
    most = max(hop.peers for hop in shards.hops("reduce", 1, torch.float32))
    if comm.ordered and most > _MANY and config.sums == "ordered" and config.zero_quantized_gradients is None:
        notes.append(
            f"gradients are summed in rank order, so that each of {most} ranks sends a message to each other one for each unit: "
            "sums='backend' lets the backend sum"
        )
    values = packing.gathers(shards, comm)
    experts = None
    if divided is not None:
        same = comm.subgroup(divided.groups)
        check(config, same, divided.parts)
        alone = dataclasses.replace(
            flat, control=same, shards=same, values=same, gradients=same, summed=divided.summed, cut=divided.axes
        )
        experts = open_topology(config, alone, ledger, warm, divided.parts)
    return dataclasses.replace(
        flat, divided=experts, shards=shards, values=values, gradients=gradients, notes=notes,
        weights=config.zero_quantized_weights if values is not shards else None,
        sent=config.zero_quantized_gradients if gradients is not shards else None,
    )  # fmt: skip


@dataclass(frozen=True)
class _Packing:
    """Wraps Comms in compressing ones, as the options ask; returns a Comm unchanged where compression saves nothing."""

    config: Config
    ledger: Ledger
    warm: Callable[[int], bool]
    errors: Errors
    notes: list[str]

    def reductions(self, comm: Comm) -> Comm:
        """Return a Comm whose reductions are quantized or sparse: one hop of a reduction, or all of it."""
        compression = self.config.zero_quantized_gradients
        if (
            compression is None
            or compression.codec == "low_rank"
            or comm.world_size == 1
            or self._skips(comm, compression, "gradients")
        ):
            return comm
        active = functools.partial(self.warm, compression.warmup_steps)
        feedback = compression.error_feedback or compression.codec == "top_k"  # top-k stalls without it
        return CompressedReductions(comm, packing(compression), self.ledger, active, self.errors, feedback=feedback)

    def factors(self, comm: Comm, control: Comm) -> Comm:
        """Return a Comm whose reductions send factors of matrices, over all hops at once."""
        compression = self.config.zero_quantized_gradients
        if compression is None or compression.codec != "low_rank" or comm.world_size * comm.replicas == 1:
            return comm
        if self._skips(control, compression, "gradients"):
            return comm
        return LowRankReductions(comm, compression.rank, self.ledger, functools.partial(self.warm, compression.warmup_steps))

    def gathers(self, comm: Comm, control: Comm) -> Comm:
        """Return a Comm whose gathers are quantized."""
        compression = self.config.zero_quantized_weights
        reads = comm if comm.copies else control
        if compression is None or comm.world_size == 1 or self._skips(reads, compression, "parameters"):
            return comm
        active = functools.partial(self.warm, compression.warmup_steps)
        return CompressedGathers(comm, packing(compression), self.ledger, active, self.errors)

    def _skips(self, comm: Comm, compression: Compression, what: str) -> bool:
        """Return True where compression saves nothing, since ranks read each other's memory; add a note to the report."""
        if not comm.copies or compression.force:  # the ranks send messages, or the user wants packing in any case
            return False
        note = f"{what} are sent unquantized between ranks that read each other's memory: packing saves no time (zs.Compression(force=True) packs them)"
        if note not in self.notes:
            self.notes.append(note)
        return True


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


def _halves(comm: DirectComm, parts: Parts) -> tuple[DirectComm, DirectComm]:
    """Return the Comm of this rank's part, and the Comm of the ranks with the same index in every part."""
    if parts == _hosts(comm) and comm.local is not None:
        inner = comm.local
        comm.join(inner)
    else:
        inner = comm.subgroup(parts)
    return inner, comm.subgroup([list(ranks) for ranks in zip(*parts, strict=True)])
