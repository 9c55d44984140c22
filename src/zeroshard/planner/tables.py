"""The text of a plan: a page with the verdict first (`page`), and tables with all numbers. Bytes are those of one rank."""

from __future__ import annotations

import re

from ..config import Tier
from ..utils.axes import SP, cuts_model
from ..utils.sheets import Sheet
from .plan import PHASES, Plan
from .request import Request, Verdict, gb, gib, judge
from .simulator.hardware import NAMES, Hardware
from .simulator.trace import Resource

UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
LINKS = {
    Resource.INSIDE: "inside nodes", Resource.BETWEEN: "between nodes", Resource.DOWN: "device -> host", Resource.UP: "host -> device",
    Resource.READ: "disk -> host", Resource.WRITE: "host -> disk",
}  # fmt: skip
_MOST = 8  # rows of activations
_PAGE = 5  # categories of a tier that a page shows by name; `page` sums the others up


def scale_of(nbytes: float) -> tuple[int, str]:
    """Return (bytes, name) of the largest unit in which `nbytes` is 10 or more; KiB for less."""
    return next((unit for unit in UNITS if nbytes >= 10 * unit[0]), UNITS[-1])


def memory(plan: Plan, most: int | None = None) -> Sheet:
    """Return a row per tier and category, a column per phase: bytes at the phase's fullest moment, found for each tier by itself.

    most: number of categories of a tier with rows of their own, the largest; the others are one row.
    """
    peak = max(plan.peak(tier) for tier in Tier)
    unit, name = scale_of(peak)
    phases = sorted(plan.phases, key=lambda phase: PHASES.index(phase.name))

    def cells(amounts: list[int]) -> list[str]:
        return [f"{n / unit:,.2f}" if n else "" for n in amounts]

    rows: list[tuple[str, ...]] = []
    hardware, ranks = plan.hardware, min(plan.ranks, plan.trace.node_size)
    for tier in Tier:
        amounts: dict[str, list[int]] = {}
        for place, phase in enumerate(phases):
            for category, nbytes in phase.held.get(tier, {}).items():
                amounts.setdefault(category, [0] * len(phases))[place] = nbytes
        if not amounts:
            continue
        where = tier.value if plan.separate or tier is not Tier.DEVICE else "memory"
        named = sorted(amounts.items(), key=lambda item: -max(item[1]))
        if most is not None and len(named) > most + 1:
            others = [sum(column) for column in zip(*(found for _, found in named[most:]), strict=True)]
            named = [*named[:most], ("others", others)]
        rows += [(f"{where}: {each}", *cells(found)) for each, found in named]
        rows.append((f"{where}: total", *cells([phase.nbytes(tier) for phase in phases])))
        if hardware is None:
            continue
        if tier is Tier.DEVICE:
            rows.append((f"{where}: the device's overhead", *cells([hardware.overhead_nbytes] * len(phases))))
            rows.append((f"{where}: capacity", *cells([hardware.capacity(tier)] * len(phases))))
        else:
            rows.append((f"{where}: capacity, 1 of {ranks} ranks", *cells([hardware.capacity(tier) // ranks] * len(phases))))
    header = ("", *(phase.name for phase in phases))
    return Sheet(f"Memory of rank {plan.rank} of {plan.ranks:,}, {name}", header, rows, numbers=True)


def communication(plan: Plan) -> Sheet:
    """Return the GB that the rank sends, copies, reads and writes in a step, a row per axis and kind."""
    found: dict[tuple[str, str], dict[Resource, float]] = {}
    counts: dict[tuple[str, str], int] = {}
    for task in plan.trace.tasks:
        moved = {resource: amount for resource, amount in task.nbytes.items() if resource in LINKS and amount}
        if not moved:
            continue
        sends = any(resource in (Resource.INSIDE, Resource.BETWEEN) for resource in moved)
        if sends:  # kind: "gather" of a task "gather blocks.3", "all_reduce" of "tp all_reduce"
            words = task.name.split()
            key = task.axis, words[1] if words[0] == task.axis and len(words) > 1 else words[0]
        else:
            key = "", LINKS[next(iter(moved))]
        counts[key] = counts.get(key, 0) + 1
        total = found.setdefault(key, {})
        for resource, amount in moved.items():
            total[resource] = total.get(resource, 0.0) + amount
    rows = []
    for (axis, kind), total in found.items():
        nbytes, between = sum(total.values()), total.get(Resource.BETWEEN, 0.0)
        said = f"{between / 1e9:,.3f}" if between else ""
        rows.append((axis, kind, f"{counts[axis, kind]:,}", f"{nbytes / 1e9:,.3f}", said))
    for axis, nbytes in plan.sent.items():
        if nbytes and sum(key[0] == axis for key in found) > 1:
            rows.append((axis, "all", "", f"{nbytes / 1e9:,.3f}", ""))
    header = ("axis", "kind", "times", "bytes", "of them between nodes")
    return Sheet("Sent, copied, read and written in a step, GB", header, rows, numbers=True)


def activations(plan: Plan) -> Sheet:
    """Return the bytes that a micro-batch keeps for backward; units whose names differ only in numbers are one row."""
    alike: dict[str, list[int]] = {}
    for unit, nbytes in plan.activations.items():
        if nbytes > 0:
            alike.setdefault(re.sub(r"\d+", "*", unit) or "inputs", []).append(nbytes)
    found = sorted(alike.items(), key=lambda item: -sum(item[1]))
    scale, name = scale_of(sum(map(sum, alike.values())))
    rows = [
        (each, f"{len(sizes):,}", f"{max(sizes) / scale:,.2f}", f"{sum(sizes) / scale:,.2f}") for each, sizes in found[:_MOST]
    ]
    rows.append(("all", f"{sum(map(len, alike.values())):,}", "", f"{sum(map(sum, alike.values())) / scale:,.2f}"))
    return Sheet(f"Kept for backward by a micro-batch, {name}", ("unit", "count", "largest", "total"), rows, numbers=True)


def headline(request: Request, verdict: Verdict) -> str:
    """Return one line: model, ranks, options, the verdict and the bytes sent."""
    return f"{run_of(verdict.plan)}: {verdict}; sends {gb(sum(verdict.plan.sent.values()))} GB a step"


def run_of(plan: Plan) -> str:
    """Describe what was planned: model, ranks, stage, precision and batch."""
    axes = ", ".join(f"{axis}={size}" for axis, size in plan.axes.items() if size > 1)
    mesh = f" ({axes})" if cuts_model(plan.axes) or SP in plan.axes else ""
    shape = (
        f"{plan.batch[0]} x {plan.batch[1]:,} tokens"
        if plan.batch is not None
        else f"{plan.tokens // plan.micro_batches:,} samples"
    )
    where = "ranks" if plan.hardware is None else plan.hardware.name
    return (
        f"{plan.model} ({count(plan.num_parameters)} parameters) on {plan.ranks:,} {where}{mesh}, stage {plan.config.stage}, "
        f"{plan.config.precision}, {plan.micro_batches} x {shape} {'shared along sp' if SP in plan.axes else 'a rank'}"
    )


def page(plan: Plan, verdict: Verdict | None = None) -> str:
    """Return the verdict, what was planned, and about 20 lines of numbers. verdict: None: that on this rank alone."""
    found = verdict or (judge([plan], plan.hardware) if plan.hardware is not None else None)
    if found is not None:
        first = f"{found}{_unit_of(plan, found.phase)}"
    else:  # no hardware was given: say which of the known has as much memory as it needs
        phase = max(plan.phases, key=lambda each: each.nbytes(Tier.DEVICE))
        known = [each for each in map(Hardware.named, NAMES) if each.separate == plan.separate]
        fits = [each.name for each in known if judge([plan], each).fits]
        short = [each.name for each in known if each.name not in fits]
        said = [f"fits {', '.join(fits)}"] * bool(fits) + [f"does not fit {', '.join(short)}"] * bool(short)
        needs = f"needs {gib(phase.nbytes(Tier.DEVICE))} GiB of a device, fullest in {phase.name}{_unit_of(plan, phase.name)}"
        first = f"{needs}; {'; '.join(said)} (no hardware was given: zs.plan(..., hardware={NAMES[0]!r}))"
    sent = [f"{axis} {gb(nbytes)}" for axis, nbytes in plan.sent.items() if nbytes]
    moved = {
        way: plan.trace.total(resource) for resource, way in LINKS.items() if resource not in (Resource.INSIDE, Resource.BETWEEN)
    }
    copied = [f"{way} {gb(nbytes)}" for way, nbytes in moved.items() if nbytes]
    kept = activations(plan)
    scale = kept.title.rpartition(" ")[2]
    largest = ", ".join(f"{unit} {together} {scale}" for unit, _, _, together in kept.rows[:3] if unit != "all")
    lines = [
        first,
        run_of(plan),
        "",
        str(memory(plan, _PAGE)),
        "",
        f"Sends in a step, GB: {', '.join(sent) or 'nothing'}" + f"; copies: {', '.join(copied)}" * bool(copied),
        f"Kept for backward by a micro-batch: {largest or 'nothing'}",
    ]
    return "\n".join(lines)


def _unit_of(plan: Plan, phase: str) -> str:
    """Return ", at blocks.3": the unit of the model during whose visit the device was fullest in this phase."""
    visits = [each for each in plan.moments if each.phase == phase]
    fullest = max(visits, key=lambda each: sum(each.held.values()), default=None)
    return f", at {fullest.unit}" if fullest is not None and fullest.unit else ""


def count(number: int) -> str:
    """Return a number as sizes of models are written: 3.83M, 70.6B, 1.01T."""
    unit, name = next((unit for unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")) if number >= unit[0]), (1, ""))
    return f"{number / unit:.3g}{name}"
