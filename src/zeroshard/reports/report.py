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

from dataclasses import asdict, dataclass

import torch
from torch import nn

from ..config import PRECISIONS, Placement, Tier
from ..engine import ledger
from ..engine.ledger import GRADIENTS, OPTIMIZER, PARAMETERS, Traffic
from ..engine.runtime import runtime_of
from ..utils.state_format import StateFormat
from .snapshot import Link, Snapshot, snapshot_of

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
        for kind, axis in ledger.OF_ACTIVATIONS.items():
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
    snapshot = snapshot_of(runtime_of(model))
    device = snapshot.held[Tier.DEVICE]
    elsewhere = {tier.value: {name: nbytes for name, nbytes in held.items() if nbytes}
                 for tier, held in snapshot.held.items() if tier is not Tier.DEVICE and any(held.values())}  # fmt: skip
    states = {name: sum(held.get(name, 0) for held in snapshot.held.values()) for name in (*STATES, ledger.MASTERS)}
    states[OPTIMIZER] += states.pop(ledger.MASTERS)
    # of model states alone, as the formula
    zero = [entry for kind, entry in snapshot.traffic.items() if kind not in ledger.OF_ACTIVATIONS]
    return Report(
        snapshot.config.stage, snapshot.world_size, snapshot.rank, sum(group.numel for group in snapshot.groups),
        snapshot.config.precision, at_rest=states, formula=_formula(snapshot, sharded=True), ddp=_formula(snapshot, sharded=False),
        peak={name: snapshot.peak.get(name, 0) for name in (ledger.GATHERED, ledger.STAGING, ledger.PARTIAL)}, elsewhere=elsewhere,
        moved={_arrow(link): nbytes for link, nbytes in snapshot.moved.items()}, theory_moved_per_step=_moved_per_step(snapshot),
        communication=snapshot.traffic, steps=snapshot.steps,
        theory_nbytes_per_step=sum(sum(group.sent) for group in snapshot.groups),
        measured_nbytes_per_step=sum(entry.nbytes for entry in zero) // max(snapshot.steps, 1),
        theory_between_nbytes_per_step=sum(group.sent.between for group in snapshot.groups),
        measured_between_nbytes_per_step=sum(entry.between for entry in zero) // max(snapshot.steps, 1),
        secondary=device.get(ledger.SECONDARY, 0), lost=device.get(ledger.RESIDUALS, 0),
        compression_errors=snapshot.compression_errors, units=len(snapshot.units), numbers=_numbers(snapshot),
        states=_resting_states(snapshot), deviations=snapshot.notes,
    )  # fmt: skip


def _arrow(link: Link) -> str:
    return " -> ".join(tier.value for tier in link)


def _numbers(snapshot: Snapshot) -> str:
    """Describe the dtypes of parameters (precision="fp32" keeps a model's own), the most frequent first, and of cast inputs."""
    numels: dict[str, int] = {}
    for group in snapshot.groups:
        numels[_short(group.dtype)] = numels.get(_short(group.dtype), 0) + group.numel
    names = " and ".join(sorted(numels, key=lambda name: -numels[name]))
    given = " as the model was given" if snapshot.config.precision == "fp32" and names != "fp32" else ""
    low = any(group.gradient is not None and not group.master_nbytes and group.dtype.itemsize < 4 for group in snapshot.groups)
    cast = f", floating-point inputs cast to {_short(snapshot.input_dtype)}" if snapshot.input_dtype is not None else ""
    return f"{names}{given}{', without fp32 masters' if low and snapshot.has_optimizer else ''}{cast}"


def _resting_states(snapshot: Snapshot) -> str:
    """Describe the formats of optimizer states, with the parameters that are exempt, and of masters; "" for those of torch."""
    if not snapshot.has_optimizer:
        return ""
    given = snapshot.config.optimizer_states
    forms = {"": given} if isinstance(given, StateFormat) else dict(given or {})
    formats = [f"{name} {form.format}".strip() for name, form in forms.items() if form.format != "fp32"]
    told = []
    if formats:
        members = [(group, numel) for group in snapshot.groups for numel in group.stepped_params]
        exempt = [(group, numel) for group, numel in members if not group.coded]
        dtypes = " and ".join(dict.fromkeys(_short(group.stepped) for group, _ in exempt))
        numel = sum(numel for _, numel in exempt)
        keep = f" ({len(exempt)} of {len(members)} parameters, {numel:,} elements, keep {dtypes})" if exempt else ""
        told.append(f"optimizer states {', '.join(formats)}{keep}")
    if any(0 < group.master_nbytes < group.stepped.itemsize for group in snapshot.groups):
        told.append("masters split: bf16 parameter + 16 bits")
    return "; ".join(told)


def _short(dtype: torch.dtype) -> str:
    return {known: name for name, known in PRECISIONS.items()}.get(dtype, str(dtype).removeprefix("torch."))


def _formula(snapshot: Snapshot, sharded: bool) -> dict[str, int]:
    """Return bytes by model state, by the stage's formula (sharded=False: with everything replicated)."""
    row, totals = snapshot.config.row, dict.fromkeys(STATES, 0)

    def held(placement: Placement, nbytes: int) -> int:
        return -(-nbytes // group.ranks) if sharded and placement is Placement.SHARDED else nbytes

    for group in snapshot.groups:
        values = row.parameter if group.sharded else Placement.REPLICATED
        totals[PARAMETERS] += held(values, group.numel * group.dtype.itemsize)
        if group.gradient is None:  # masters of what is frozen: under FSDP2's door
            totals[OPTIMIZER] += held(row.optimizer, int(group.numel * group.master_nbytes))
        else:
            totals[GRADIENTS] += held(row.gradient, group.numel * group.gradient.itemsize)
            totals[OPTIMIZER] += held(row.optimizer, int(group.numel * (group.master_nbytes + group.states_nbytes)))
    return totals


def _moved_per_step(snapshot: Snapshot) -> dict[str, int]:
    """Return the bytes that one rank moves between tiers in a step of one backward, by link, by formula."""
    totals: dict[str, int] = {}
    for group in snapshot.groups:
        for moved in (group.moved_by_pass, group.moved_by_step):
            for link, nbytes in moved.items():
                totals[_arrow(link)] = totals.get(_arrow(link), 0) + round(-(-group.numel // group.ranks) * nbytes)
    return totals
