"""What a plan says, as tables of text: for a terminal and for a page. Bytes of one rank."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..config import Tier
from ..simulator.trace import Resource, Task
from .plan import PHASES, Plan
from .request import Request, Verdict, gb

UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
LINKS = {
    Resource.INSIDE: "inside nodes", Resource.BETWEEN: "between nodes", Resource.DOWN: "device -> host", Resource.UP: "host -> device",
    Resource.READ: "disk -> host", Resource.WRITE: "host -> disk",
}  # fmt: skip
_MOST = 8  # rows of activations


@dataclass(frozen=True)
class Table:
    """Cells are text; header: of each column."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def scale_of(nbytes: float) -> tuple[int, str]:
    """(bytes, name) of the unit in which this has two digits before the point, or more."""
    return next((unit for unit in UNITS if nbytes >= 10 * unit[0]), UNITS[-1] if nbytes < 10 * UNITS[1][0] else UNITS[1])


def memory(plan: Plan, request: Request) -> Table:
    """A row per tier and category, a column per phase; each phase at its fullest moment, of each tier by itself."""
    peak = max(plan.peak(tier) for tier in Tier)
    unit, name = scale_of(peak)
    phases = sorted(plan.phases, key=lambda phase: PHASES.index(phase.name))

    def cells(amounts: list[int]) -> list[str]:
        return [f"{n / unit:,.2f}" if n else "" for n in amounts]

    rows: list[tuple[str, ...]] = []
    hardware = request.hardware
    for tier in Tier:
        amounts: dict[str, list[int]] = {}
        for place, phase in enumerate(phases):
            for category, nbytes in phase.held.get(tier, {}).items():
                amounts.setdefault(category, [0] * len(phases))[place] = nbytes
        if not amounts:
            continue
        where = tier.value if plan.separate or tier is not Tier.DEVICE else "memory"
        rows += [(f"{where}: {each}", *cells(found)) for each, found in sorted(amounts.items(), key=lambda item: -max(item[1]))]
        rows.append((f"{where}: total", *cells([phase.nbytes(tier) for phase in phases])))
        if tier is Tier.DEVICE:
            rows.append((f"{where}: the device's overhead", *cells([hardware.overhead_nbytes] * len(phases))))
            rows.append((f"{where}: there is", *cells([hardware.device.memory_nbytes] * len(phases))))
        else:
            there = hardware.host_memory_nbytes if tier is Tier.HOST else hardware.disk_nbytes
            rows.append(
                (f"{where}: there is, a rank of {request.ranks_of_node}", *cells([there // request.ranks_of_node] * len(phases)))
            )
    return Table(f"Memory of rank {plan.rank} of {plan.ranks:,}, {name}", ("", *(phase.name for phase in phases)), tuple(rows))


def communication(plan: Plan) -> Table:
    """What the rank sends, copies, reads and writes in a step: by axis and kind."""
    found: dict[tuple[str, str], dict[Resource, float]] = {}
    counts: dict[tuple[str, str], int] = {}
    for task in plan.trace.tasks:
        moved = {resource: amount for resource, amount in task.nbytes.items() if resource in LINKS and amount}
        if not moved:
            continue
        sends = any(resource in (Resource.INSIDE, Resource.BETWEEN) for resource in moved)
        key = (task.axis if sends else "", _kind(task) if sends else next(LINKS[resource] for resource in moved))
        counts[key] = counts.get(key, 0) + 1
        total = found.setdefault(key, {})
        for resource, amount in moved.items():
            total[resource] = total.get(resource, 0.0) + amount
    rows = [_moved(axis, kind, counts[axis, kind], moved) for (axis, kind), moved in found.items()]
    for axis, nbytes in plan.sent.items():
        if nbytes and sum(key[0] == axis for key in found) > 1:
            rows.append((axis, "all", "", f"{nbytes / 1e9:,.3f}", ""))
    return Table(
        "Sent, copied, read and written in a step, GB", ("axis", "kind", "times", "bytes", "of them between nodes"), tuple(rows)
    )


def _kind(task: Task) -> str:
    """ "gather" of "gather blocks.3", "all_reduce" of "tp all_reduce"."""
    words = task.name.split()
    return words[1] if words[0] == task.axis and len(words) > 1 else words[0]


def _moved(axis: str, kind: str, times: int, moved: dict[Resource, float]) -> tuple[str, ...]:
    between = moved.get(Resource.BETWEEN, 0.0)
    return axis, kind, f"{times:,}", f"{sum(moved.values()) / 1e9:,.3f}", f"{between / 1e9:,.3f}" if between else ""


def activations(plan: Plan) -> Table:
    """What a micro-batch keeps for backward: units whose names differ in numbers alone are one row."""
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
    return Table(f"Kept for backward, of a micro-batch, {name}", ("unit", "of them", "the largest", "together"), tuple(rows))


def headline(request: Request, verdict: Verdict) -> str:
    """All that matters on one line."""
    plan, config = verdict.plan, request.config
    axes = ", ".join(f"{axis}={size}" for axis, size in request.axes.items() if size > 1)
    mesh = f" ({axes})" if request.ranks > request.axes["dp"] else ""
    batch = f"{request.micro_batches} x {request.rows} x {request.seq:,} tokens"
    return (
        f"{plan.model} ({count(plan.num_parameters)} parameters) on {request.ranks:,} {request.hardware.name}{mesh}, stage "
        f"{config.stage}, {config.precision}, {batch} a rank: {verdict}; sends {gb(sum(plan.sent.values()))} GB a step"
    )


def count(number: int) -> str:
    """As sizes of models are written: 3.83M, 70.6B, 1.01T."""
    unit, name = next((unit for unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")) if number >= unit[0]), (1, ""))
    return f"{number / unit:.3g}{name}"
