"""The snapshot of one rank: what it holds, has sent and has moved, and what the formulas of its stage need. Data alone.

    engine_of(model).snapshot()     --->  Snapshot  --->  zs.report, zs.forecast, plans: they read nothing else of the engine

A snapshot is of the moment at which it was taken; reading it waits for nothing and changes nothing. To take one may take over an
optimizer that was made since zs.shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from ..config import Config, Placement, Tier
from ..engine.comm.base import Comm
from ..engine.comm.control import Sent
from ..engine.flat_layout import round_up
from ..engine.ledger import Traffic
from ..engine.optimizer import OptimizerCore
from ..engine.runs import state_tensors
from ..engine.runtime import Runtime
from ..engine.unit import ParamGroup

Link = tuple[Tier, Tier]  # from, to
_PATH = [Tier.DEVICE, Tier.HOST, Tier.DISK]


@dataclass(frozen=True)
class GroupSnapshot:
    """Parameters of one unit that share a flat buffer.

    Attributes:
        numel: elements of this rank's part of the parameters (tp, experts, tiles). aligned_numel: with the padding after each. shard_numel: of a rank's shard, padded.
        ranks: number of ranks over which it is sharded and reduced.
        dtype: of the values. sharded: each rank keeps a shard of the values at rest, not all of them.
        gradient: dtype in which the gradient rests, on `gradient_tier`; None: the parameters are frozen.
        stepped: dtype of the values that the optimizer steps. stepped_params: elements of each parameter that it steps.
        states_tier: the tier of masters and optimizer states.
        master_nbytes: bytes at rest of an element's master; 0: it has none; fewer than `stepped`
            has: it is split, and the values are its upper half.
        states_nbytes: those of its optimizer states, as if all its parameters were stepped; 0 before the first step, and of frozen
            ones. coded: they rest encoded.
        sent: bytes that this rank sends in a step of one backward, by formula.
        moved_by_pass: bytes that a forward and a backward move between tiers, by link, for each element of the shard.
        moved_by_step: the same of optimizer.step(), before the first one with the states that it will make; {} of frozen ones.
    """

    numel: int
    aligned_numel: int
    shard_numel: int
    ranks: int
    dtype: torch.dtype
    sharded: bool
    gradient: torch.dtype | None
    gradient_tier: Tier
    stepped: torch.dtype
    stepped_params: tuple[int, ...]
    states_tier: Tier
    master_nbytes: int
    states_nbytes: float
    coded: bool
    sent: Sent
    moved_by_pass: dict[Link, float]
    moved_by_step: dict[Link, float]


@dataclass(frozen=True)
class Snapshot:
    """One rank of a sharded model.

    Attributes:
        separate: the device has a memory of its own, apart from the host's.
        input_dtype: the dtype to which floating-point inputs of the model are cast; None: they are not.
        has_optimizer: an optimizer steps the parameters. steps: its steps so far.
        units: (name, groups), in the order of forward.
        host_runs: the ranges that the host steps one after another: (group, elements).
        held: bytes now by tier and category of engine/ledger.py. peak: the most so far on the device, by category.
        moved: bytes moved between tiers so far, by link, without those read ahead for a later step.
        traffic: the collectives so far, by kind. sent_by_axis: the bytes that this rank has sent in them, by axis of the mesh.
        compression_errors: relative error of what was packed, by unit, when it was last measured.
        notes: sentences on what the program should know of its steps.
    """

    rank: int
    world_size: int
    config: Config
    separate: bool
    input_dtype: torch.dtype | None
    has_optimizer: bool
    steps: int
    units: tuple[tuple[str, tuple[GroupSnapshot, ...]], ...]
    host_runs: tuple[tuple[GroupSnapshot, int], ...]
    held: dict[Tier, dict[str, int]]
    peak: dict[str, int]
    moved: dict[Link, int]
    traffic: dict[str, Traffic]
    sent_by_axis: dict[str, int]
    compression_errors: dict[str, float]
    notes: tuple[str, ...]

    @property
    def groups(self) -> tuple[GroupSnapshot, ...]:
        """The groups of all units."""
        return tuple(group for _, groups in self.units for group in groups)


def snapshot_of(runtime: Runtime) -> Snapshot:
    """Return a snapshot of this rank (not collective). Raise ConfigError for an optimizer made since zs.shard that is refused."""
    ledger = runtime.tiers.ledger
    held = {tier: dict(now) for tier, now in ((Tier.DEVICE, ledger.now), *ledger.elsewhere.items())}
    cores: list[OptimizerCore] = [each.core for each in runtime.optimizers]  # those made since zs.shard are taken over here
    plain = dict[int, float]()  # id of a parameter -> bytes for an element of states that its inner optimizer keeps itself
    for core in cores:
        kept = 0.0  # from those that exist
        for tensor, entries in list(core.inner.state.items())[:1]:
            kept = float(sum(column.itemsize for column in state_tensors({tensor: entries})))
        plain |= dict.fromkeys(core.group_of, kept)
    runs = [run for core in cores for run in core.all_runs if run.offloaded and run.numel]
    found = {id(group): _group(group, runtime, plain if cores else None) for group in runtime.groups}
    return Snapshot(
        runtime.comm.rank, runtime.comm.world_size, runtime.config, runtime.tiers.separate, runtime.input_dtype, bool(cores),
        steps=runtime.progress.steps,
        units=tuple((unit.name, tuple(found[id(group)] for group in unit.groups)) for unit in runtime.units),
        host_runs=tuple((found[id(run.group)], run.numel) for run in runs),
        held=held, peak=dict(ledger.peak), moved=ledger.used(),
        traffic={kind: replace(entry, units=dict(entry.units)) for kind, entry in ledger.traffic.items()},
        sent_by_axis=dict(ledger.sent_by_axis()),
        compression_errors=dict(runtime.topology.errors.found), notes=tuple(runtime.schedule.notes),
    )  # fmt: skip


def _group(group: ParamGroup, runtime: Runtime, plain: dict[int, float] | None) -> GroupSnapshot:
    """Return the snapshot of a group. plain: id of a parameter that is stepped -> bytes for an element of states that its inner
    optimizer keeps itself; None if the model has no optimizer."""
    layout, values, grads, masters = group.layout, group.values, group.grads, group.masters
    separate, steps = runtime.tiers.separate, grads is not None and plain is not None
    stepped = plain if plain is not None and steps else {}
    each = [(s.numel, stepped[id(p)]) for p, s in zip(group.params, layout.slots, strict=True) if id(p) in stepped]
    numel = sum(count for count, _ in each)
    kept = sum(count * nbytes for count, nbytes in each) / numel if numel else max((plain or {}).values(), default=0.0)
    columns = sum(column.nbytes / column.numel for column in group.columns.values())  # 0 before the first step
    return GroupSnapshot(
        numel=layout.true_numel, aligned_numel=sum(round_up(slot.numel, layout.alignment) for slot in layout.slots),
        shard_numel=layout.shard_numel, ranks=group.comm.world_size, dtype=values.dtype, sharded=not values.replicated,
        gradient=None if grads is None else grads.dtype, gradient_tier=Tier.DEVICE if grads is None else grads.rest.tier,
        stepped=masters.stepped.dtype,
        stepped_params=tuple(count for count, _ in each),
        states_tier=group.offload.tier, coded=group.plan.coded,
        master_nbytes=0 if masters.rest is None else masters.rest.nbytes_of(1),
        states_nbytes=0.0 if grads is None else columns if group.columns or group.plan.coded else kept,
        sent=_sent(group, runtime.config),
        moved_by_pass=_by_link(_moves_of_pass(group, separate), separate),
        moved_by_step=_by_link(_moves_of_step(group, columns) if steps else (), separate),
    )  # fmt: skip


def _sent(group: ParamGroup, config: Config) -> Sent:
    """Return the bytes that one rank sends for a group in a step of one backward (frozen parameters: gathers only)."""
    numel, values, grads, row = group.layout.true_numel, group.values, group.grads, config.row
    sends: list[tuple[Comm, str, torch.dtype, int]] = []  # of each collective: kind, dtype, tag
    if not values.replicated:
        sends += [(values.comm, kind, values.dtype, 0) for kind in ("gather", "gather again")]
    elif row.optimizer is Placement.SHARDED and grads is not None:
        sends.append((values.comm, "gather", values.dtype, 0))
    if grads is not None:
        sends.append((grads.comm, "reduce", grads.send_dtype, grads.tag))
        if row.gradient is Placement.REPLICATED:
            sends.append((grads.comm, "gather", grads.dtype, 0))
    volumes = [comm.volume(kind, -(-numel // comm.world_size), dtype, tag) for comm, kind, dtype, tag in sends]
    return Sent(sum(each.inside for each in volumes), sum(each.between for each in volumes))


Move = tuple[Tier, Tier, float]  # from, to, bytes for an element of the shard


def _moves_of_pass(group: ParamGroup, separate: bool) -> Iterator[Move]:
    """Yield what one forward and backward move between tiers."""
    values, grads = group.values, group.grads
    if values.staged:
        yield values.tier, Tier.DEVICE, 2 * values.dtype.itemsize
    if grads is not None and grads.departure is not None:
        if separate:
            yield Tier.DEVICE, Tier.HOST, grads.departure.dtype.itemsize
        yield Tier.HOST, grads.rest.tier, grads.dtype.itemsize


def _moves_of_step(group: ParamGroup, columns: float) -> Iterator[Move]:
    """Yield what optimizer.step() moves between tiers. columns: bytes for an element of the optimizer states that exist."""
    values, gradient, masters, tier = group.values.rest, group.gradients.rest, group.masters, group.offload.tier
    here = Tier.DEVICE if tier is Tier.DEVICE else Tier.HOST  # the tier that steps it
    states = columns or sum(
        column.nbytes(column.elements, masters.stepped.dtype) / column.elements for column in group.plan.columns
    )
    yield tier, here, states
    yield here, tier, states
    yield gradient.tier, here, gradient.dtype.itemsize
    for stepped in masters.halves or (masters.stepped,):
        yield stepped.tier, here, stepped.dtype.itemsize
        yield here, stepped.tier, stepped.dtype.itemsize
    if masters.stepped is not values and not masters.split:
        yield here, values.tier, values.dtype.itemsize


def _by_link(moves: Iterable[Move], separate: bool) -> dict[Link, float]:
    """Return the bytes on each link between two tiers. On a CPU, where device and host are one memory, they have no link."""
    moved: dict[Link, float] = {}
    for source, target, nbytes in moves:
        begin, end = _PATH.index(source), _PATH.index(target)
        step = 1 if begin < end else -1
        for hop in range(begin, end, step):
            link = (_PATH[hop], _PATH[hop + step])
            if separate or Tier.DISK in link:
                moved[link] = moved.get(link, 0) + nbytes
    return moved
