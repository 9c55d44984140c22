"""The report: measured bytes per rank by category and bytes sent, and the closed formulas of the stage.

Formulas (ZeRO, arXiv 1910.02054, sections 5 and 7; N ranks, Psi parameters, p bytes per parameter, g bytes per gradient):

    parameters        p Psi, sharded p Psi / N
    gradients         g Psi, sharded g Psi / N
    optimizer states  K Psi, sharded K Psi / N        K: bytes of masters (fp32: 4; split: 2), if there are any, and of moments, of
                                                      each ParamGroup by itself: matrices may rest in 8 bits beside fp32 norms
    sent per step     stage 0: (p + g) Psi (N-1)/N; stages 1, 2: 2 p Psi (N-1)/N; stage 3: 3 p Psi (N-1)/N
                      with two hops, groups or quantization: docs/learn/network.md
    moved per step    between tiers, of every state that rests on another tier, for Psi / N elements: parameters 2 p for
                      gathers, and p when the step writes them; gradients g out and in; states and masters K in and out
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from ...comm.base import Comm
from ...comm.control import Sent
from ...config import PRECISIONS, Placement, Tier
from ...memory.ledger import (
    GATHERED,
    GRADIENTS,
    MASTERS,
    OF_ACTIVATIONS,
    OPTIMIZER,
    PARAMETERS,
    PARTIAL,
    RESIDUALS,
    SECONDARY,
    STAGING,
    Traffic,
)  # fmt: skip
from ...offload.storage import SplitRest
from ...optim.segments import state_tensors
from ...utils.state_format import StateFormat
from ...zero.runtime import Runtime, runtime_of
from ...zero.unit import ParamGroup

STATES = (PARAMETERS, GRADIENTS, OPTIMIZER)


@dataclass(frozen=True)
class Report:
    """The memory that this rank holds and the bytes that it has sent; `print` shows them as a table (see docs/start/report.md).

    Attributes:
        at_rest: held now, by model state.
        formula: what the stage should leave on a rank, by model state.
        ddp: what plain data parallelism keeps on a rank, by model state.
        peak: the most that the device has held so far, by category.
        elsewhere: what of `at_rest`, and of staging, is on the host or on disk.
        moved: copied between tiers so far, by link, without what was read ahead for the next step.
        theory_moved_per_step: what one backward and step move, by link and by formula.
        communication: number and bytes of the collectives so far, by kind.
        theory_nbytes_per_step: what this rank sends in a step, by formula.
        measured_nbytes_per_step: what this rank has sent in a step, activations along sp apart.
        theory_between_nbytes_per_step: the part of it that goes to other nodes, by formula.
        measured_between_nbytes_per_step: the part of it that went to other nodes.
        secondary: secondary shards (hpZ).
        lost: what packing gradients has lost and error feedback keeps.
        compression_errors: relative error of what was packed, by unit, when it was last measured.
        numbers: the dtypes of the parameters, and the one to which the model's floating-point inputs are cast.
        states: how optimizer states and masters rest, where this is not as the optimizer has them.
        deviations: sentences on options that have no effect in this run.
    """

    stage: int
    world_size: int
    rank: int
    num_parameters: int
    precision: str
    at_rest: dict[str, int]
    formula: dict[str, int]
    ddp: dict[str, int]
    peak: dict[str, int]
    elsewhere: dict[str, dict[str, int]]
    moved: dict[str, int]
    theory_moved_per_step: dict[str, int]
    communication: dict[str, Traffic]
    steps: int
    theory_nbytes_per_step: int
    measured_nbytes_per_step: int
    theory_between_nbytes_per_step: int
    measured_between_nbytes_per_step: int
    secondary: int
    lost: int
    compression_errors: dict[str, float]
    units: int
    numbers: str
    states: str
    deviations: tuple[str, ...]

    def to_dict(self) -> dict:
        """Return the fields in types that JSON has."""
        return asdict(self)

    def __str__(self) -> str:
        head = (
            f"stage {self.stage}, rank {self.rank} of {self.world_size}, {self.numbers}, "
            f"{self.num_parameters:,} parameters in {self.units} units, {self.steps} steps"
        )
        lines = [
            head,
            *[self.states] * bool(self.states),
            f"{'bytes per rank':<20}{'measured':>16}{'formula':>16}{'plain DDP':>16}",
        ]
        lines += [f"{name:<20}{self.at_rest[name]:>16,}{self.formula[name]:>16,}{self.ddp[name]:>16,}" for name in STATES]
        totals = [sum(part.values()) for part in (self.at_rest, self.formula, self.ddp)]
        lines.append(f"{'total':<20}{totals[0]:>16,}{totals[1]:>16,}{totals[2]:>16,}")
        lines += [f"peak {name}: {nbytes:,}" for name, nbytes in self.peak.items() if nbytes]
        for tier, held in self.elsewhere.items():
            lines.append(f"on {tier}: " + ", ".join(f"{name} {nbytes:,}" for name, nbytes in held.items()))
        for link, nbytes in self.moved.items():
            theory = self.theory_moved_per_step.get(link, 0)
            lines.append(f"moved {link} per step: {nbytes // max(self.steps, 1):,} bytes (theory {theory:,})")
        for kind, t in self.communication.items():
            lines.append(f"{kind}: {t.count} times in {len(t.units)} units, {t.nbytes:,} bytes sent")
        lines.append(f"sent per step: {self.measured_nbytes_per_step:,} bytes (theory {self.theory_nbytes_per_step:,})")
        if self.theory_between_nbytes_per_step:
            measured, theory = self.measured_between_nbytes_per_step, self.theory_between_nbytes_per_step
            lines.append(f"of them between nodes: {measured:,} bytes (theory {theory:,})")
        for kind, axis in OF_ACTIVATIONS.items():
            if kind in self.communication:
                nbytes = self.communication[kind].nbytes // max(self.steps, 1)
                lines.append(f"sent along {axis} per step: {nbytes:,} bytes of activations")
        held = {"secondary shards": self.secondary, "kept for error feedback": self.lost}
        lines += [f"{name}: {nbytes:,} bytes" for name, nbytes in held.items() if nbytes]
        worst = sorted(self.compression_errors.items(), key=lambda item: -item[1])[:3]
        lines += [f"changed by packing: {error:.2%} of {unit}" for unit, error in worst]
        lines += [f"note: {message}" for message in self.deviations]
        return "\n".join(lines)


def report(model: nn.Module) -> Report:
    """Return the report of a sharded model on this rank (not collective)."""
    runtime = runtime_of(model)
    ledger, world = runtime.tiers.ledger, runtime.comm.world_size
    elsewhere = {tier.value: {name: nbytes for name, nbytes in held.items() if nbytes} for tier, held in ledger.elsewhere.items()}
    states = {name: ledger.now[name] + sum(held.get(name, 0) for held in elsewhere.values())
              for name in (PARAMETERS, GRADIENTS, OPTIMIZER, MASTERS)}  # fmt: skip
    states[OPTIMIZER] += states.pop(MASTERS)
    zero = [entry for kind, entry in ledger.traffic.items() if kind not in OF_ACTIVATIONS]  # of model states, as the formula
    sent, between = (sum(getattr(entry, name) for entry in zero) for name in ("nbytes", "between"))
    theory, steps = theory_sent_per_step(runtime), max(runtime.progress.steps, 1)
    return Report(
        stage=runtime.config.stage,
        world_size=world,
        rank=runtime.comm.rank,
        num_parameters=sum(group.layout.true_numel for group in runtime.groups),
        precision=runtime.config.precision,
        at_rest=states,
        formula=_formula(runtime, sharded=True),
        ddp=_formula(runtime, sharded=False),
        peak={name: ledger.peak[name] for name in (GATHERED, STAGING, PARTIAL)},
        elsewhere={tier: held for tier, held in elsewhere.items() if held},
        moved={f"{source.value} -> {target.value}": nbytes for (source, target), nbytes in ledger.used().items()},
        theory_moved_per_step=theory_moved_per_step(runtime),
        communication={kind: replace(t, units=dict(t.units)) for kind, t in ledger.traffic.items()},
        steps=runtime.progress.steps,
        theory_nbytes_per_step=sum(theory),
        measured_nbytes_per_step=sent // steps,
        theory_between_nbytes_per_step=theory.between,
        measured_between_nbytes_per_step=between // steps,
        secondary=ledger.now[SECONDARY],
        lost=ledger.now[RESIDUALS],
        compression_errors=dict(runtime.topology.errors.found),
        units=len(runtime.units),
        numbers=_numbers(runtime),
        states=_resting_states(runtime),
        deviations=tuple(runtime.schedule.notes),
    )


def _numbers(runtime: Runtime) -> str:
    """Describe the dtypes of parameters (precision="fp32" keeps a model's own), the most frequent first, and of cast inputs."""
    numels: dict[str, int] = {}
    for group in runtime.groups:
        name = _short(group.values.dtype)
        numels[name] = numels.get(name, 0) + group.layout.true_numel
    names = " and ".join(sorted(numels, key=lambda name: -numels[name]))
    given = " as the model was given" if runtime.config.precision == "fp32" and names != "fp32" else ""
    low = any(g.trainable and g.masters.rest is None and g.values.dtype.itemsize < 4 for g in runtime.groups)
    cast = f", floating-point inputs cast to {_short(runtime.input_dtype)}" if runtime.input_dtype is not None else ""
    return f"{names}{given}{', without fp32 masters' if low and runtime.optimizer is not None else ''}{cast}"


def _resting_states(runtime: Runtime) -> str:
    """Describe the formats of optimizer states, with the parameters that are exempt, and of masters; "" for those of torch."""
    if runtime.optimizer is None:
        return ""
    given, stepped = runtime.config.optimizer_states, runtime.optimizer.core.group_of
    forms = {"": given} if isinstance(given, StateFormat) else dict(given or {})
    formats = [f"{name} {form.format}".strip() for name, form in forms.items() if form.format != "fp32"]
    told = []
    if formats:
        members = [(group, slot.numel) for group in runtime.groups if group.trainable
                   for param, slot in zip(group.params, group.layout.slots, strict=True) if id(param) in stepped]  # fmt: skip
        exempt = [(group, numel) for group, numel in members if not group.plan.coded]
        dtypes = " and ".join(dict.fromkeys(_short(group.masters.stepped.dtype) for group, _ in exempt))
        numel = sum(numel for _, numel in exempt)
        keep = f" ({len(exempt)} of {len(members)} parameters, {numel:,} elements, keep {dtypes})" if exempt else ""
        told.append(f"optimizer states {', '.join(formats)}{keep}")
    if any(group.masters.split for group in runtime.groups):
        told.append("masters split: bf16 parameter + 16 bits")
    return "; ".join(told)


def _short(dtype: torch.dtype) -> str:
    return {known: name for name, known in PRECISIONS.items()}.get(dtype, str(dtype).removeprefix("torch."))


def _formula(runtime: Runtime, sharded: bool) -> dict[str, int]:
    """Return bytes by model state, by the stage's formula (sharded=False: with everything replicated)."""
    row = runtime.config.row

    def held(placement: Placement, nbytes: int) -> int:
        return -(-nbytes // group.comm.world_size) if sharded and placement is Placement.SHARDED else nbytes

    plain = 0.0  # bytes per element of states that the inner optimizer keeps itself, from those that exist
    if runtime.optimizer is not None:
        for tensor, entries in list(runtime.optimizer.core.inner.state.items())[:1]:
            plain = float(sum(column.itemsize for column in state_tensors({tensor: entries})))
    totals = dict.fromkeys(STATES, 0)
    for group in runtime.groups:
        numel = group.layout.true_numel
        totals[PARAMETERS] += held(
            row.parameter if group.values.sharded else Placement.REPLICATED, numel * group.values.full.itemsize
        )
        if group.grads is not None:
            totals[GRADIENTS] += held(row.gradient, numel * group.grads.dtype.itemsize)
            master = group.masters.rest.nbytes_of(1) if group.masters.rest is not None else 0
            moments = _column_itemsize(group) if group.columns or group.plan.coded else plain
            totals[OPTIMIZER] += held(row.optimizer, int(numel * (master + moments)))
    return totals


def _column_itemsize(group: ParamGroup) -> float:
    """Return the bytes per element of a group's columns at rest: 0 before its first step."""
    return sum(column.nbytes / column.numel for column in group.columns.values())


def theory_sent_per_step(runtime: Runtime) -> Sent:
    """Return the bytes that one rank sends in a step of one backward, by formula (frozen parameters: gathers only)."""
    row = runtime.config.row
    sends: list[tuple[Comm, str, int, torch.dtype, int]] = []  # of each collective: kind, elements, dtype, tag
    for group in runtime.groups:
        numel, values, grads = group.layout.true_numel, group.values, group.grads
        if values.sharded:
            sends += [(values.comm, kind, numel, values.dtype, 0) for kind in ("gather", "gather again")]
        elif row.optimizer is Placement.SHARDED and grads is not None:
            sends.append((values.comm, "gather", numel, values.dtype, 0))
        if grads is not None:
            sends.append((grads.comm, "reduce", numel, grads.send_dtype, grads.tag))
            if row.gradient is Placement.REPLICATED:
                sends.append((grads.comm, "gather", numel, grads.dtype, 0))
    volumes = [comm.volume(kind, -(-numel // comm.world_size), dtype, tag) for comm, kind, numel, dtype, tag in sends]
    return Sent(sum(each.inside for each in volumes), sum(each.between for each in volumes))


Link = tuple[Tier, Tier]  # from, to


def theory_moved_per_step(runtime: Runtime) -> dict[str, int]:
    """Return the bytes that one rank moves between tiers in a step of one backward, by link, by formula."""
    totals: dict[str, int] = {}
    for group in runtime.groups:
        numel = -(-group.layout.true_numel // group.comm.world_size)
        for moved in (pass_itemsizes(runtime, group), step_itemsizes(runtime, group)):
            for (source, target), itemsize in moved.items():
                link = f"{source.value} -> {target.value}"
                totals[link] = totals.get(link, 0) + round(numel * itemsize)
    return totals


def pass_itemsizes(runtime: Runtime, group: ParamGroup) -> dict[Link, float]:
    """Return the bytes per element of the shard that one forward and backward move, by link."""
    moved: dict[Link, float] = {}
    if group.values.staged:
        _move(moved, runtime, group.values.tier, Tier.DEVICE, 2 * group.values.dtype.itemsize)
    if group.grads is not None and group.grads.departure is not None:
        tier, departure = group.grads.rest.tier, group.grads.departure
        if runtime.tiers.separate:
            _move(moved, runtime, Tier.DEVICE, Tier.HOST, departure.dtype.itemsize)
        _move(moved, runtime, Tier.HOST, tier, group.grads.dtype.itemsize)
    return moved


def step_itemsizes(runtime: Runtime, group: ParamGroup) -> dict[Link, float]:
    """Return the bytes per element of the shard that optimizer.step() moves, by link."""
    moved: dict[Link, float] = {}
    if group.grads is None or runtime.optimizer is None:
        return moved
    values, gradient, masters = group.values.rest, group.grads.rest, group.masters
    here = Tier.DEVICE if group.offload.tier is Tier.DEVICE else Tier.HOST  # the tier that steps it
    states = _column_itemsize(group) or sum(
        column.nbytes(column.elements, masters.stepped.dtype) / column.elements for column in group.plan.columns
    )  # before the first step: those that it will make
    if group.offload.tier is Tier.DISK:
        _move(moved, runtime, Tier.DISK, here, states)
        _move(moved, runtime, here, Tier.DISK, states)
    _move(moved, runtime, gradient.tier, here, gradient.dtype.itemsize)
    for stepped in (masters.rest.high, masters.rest.low) if isinstance(masters.rest, SplitRest) else (masters.stepped,):
        _move(moved, runtime, stepped.tier, here, stepped.dtype.itemsize)
        _move(moved, runtime, here, stepped.tier, stepped.dtype.itemsize)
    if masters.stepped is not values and not masters.split:
        _move(moved, runtime, here, values.tier, values.dtype.itemsize)
    return moved


def _move(moved: dict[Link, float], runtime: Runtime, source: Tier, target: Tier, itemsize: float) -> None:
    """Count a transfer on each link between two tiers. On a CPU, where device and host are one memory, they have no link."""
    path = [Tier.DEVICE, Tier.HOST, Tier.DISK]
    begin, end = path.index(source), path.index(target)
    step = 1 if begin < end else -1
    for hop in range(begin, end, step):
        link = (path[hop], path[hop + step])
        if runtime.tiers.separate or Tier.DISK in link:
            moved[link] = moved.get(link, 0) + itemsize
