"""The results of a run as tables on the terminal, as results.md for documents, and as results.json for programs.

The columns of each table and the goals of each section (GOALS) are data here; the sections that are programs of their
own (cpu_adam.py, codecs.py, disk.py, checkpoints.py, network.py) have theirs in their files.

results.json (schema 2): `machine`, `versions`, `workload`, `rounds`; `contenders`, one entry per contender with
`status` ("ran", "skipped: why", "failed: why"), seconds per step, ratios, processor time, memory in bytes,
losses; `core_share`, the part of a core that a rank got (near 1 on a quiet machine); `tiers`, the same as `contenders`
with bytes moved, disk speeds and bounds by round; `host_work`; `hostadam`, `codecs`, `disk`, `checkpoints`, `network`: the
results of these programs; `parallel`: as `contenders`, on a mesh of ranks; `gpu`: contenders and the largest models, or the
reason why there are none; `goals`. A value that was not measured is null.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

from . import checkpoints, codecs, cpu_adam, disk, gpu, network, parallel, statistics
from .checkpoints import Kepts
from .host_overhead import HostWork
from .overlap import Overlap
from .plan import ModelShape, Rounds, Workload
from .race import Outcome
from .statistics import DISK_BOUND_FACTOR, DISK_MEMORY_FACTOR, disk_ratio, formula_difference, memory_ratio, time_ratio
from .tables import BAD, GB, GOOD, MIB, PLAIN, WARNING, Column, Goal, Note, Sheet, goals_sheet

SCHEMA = 2
NOT_ASKED = "not asked for"
PEERS = {"/DDP": "ddp", "/FSDP2": "fsdp2", "/DS3": "ds3"}  # columns of ratios: heading -> peer, in the same precision

RACE_LEGEND = (
    "ms: median step. /DDP, /FSDP2, /DS3: median over rounds of the ratio to that peer in the same precision.\n"
    "cpu s: processor time of all ranks per step. RSS, PSS, GPU: peak MiB of the largest rank while stepping.\n"
    "states: MiB of model states at rest, where the library says."
)
TIER_LEGEND = (
    "moved: MB between host and disk a step, all ranks together. bound: those bytes over the bandwidth that all ranks\n"
    "together had in the same round, in ms. /bound, /zs3: median over rounds of the ratio of step times."
)
MESH_LEGEND = "PSS, all: peak MiB of all ranks at one moment, shared pages once, in processes forked with their imports done."
OVERLAP_LEGEND = "copies: between device and host in 2 steps, by CUDA events; the share of their time inside computation."

_ON_HOST, _BOUND = "stage 3, everything on the host", f"max({DISK_BOUND_FACTOR:g} bound, {DISK_MEMORY_FACTOR:g} in memory)"
# section -> goals: (text, largest value, function that measures it, its arguments after the section's samples).
GOALS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "race": (
        ("stage 1 / DDP, step time", 0.95, time_ratio, "zs1", "ddp"),
        ("stage 2 / DDP, step time", 0.95, time_ratio, "zs2", "ddp"),
        ("stage 3 / DDP, step time", 1.00, time_ratio, "zs3", "ddp"),
        ("stage 3 / FSDP2, step time", 0.70, time_ratio, "zs3", "fsdp2"),
        ("stage 3 / DeepSpeed 3, step time", 0.45, time_ratio, "zs3", "ds3"),
        ("stage 3 by zeroshard.deepspeed / by zs.shard, step time", 1.05, time_ratio, "engine3", "zs3"),
        ("stage 3 by zeroshard.deepspeed / DeepSpeed 3, step time", 0.50, time_ratio, "engine3", "ds3"),
        ("stage 3 bf16 / FSDP2 bf16, step time", 0.75, time_ratio, "zs3-bf16", "fsdp2-bf16"),
        ("stage 3 / FSDP2, peak resident memory", 0.80, memory_ratio, "zs3", "fsdp2"),
        ("stage 3 / DeepSpeed 3, peak resident memory", 1.00, memory_ratio, "zs3", "ds3"),
        ("model states at rest, difference from the formula", 0.01, formula_difference),
    ),
    "host": (
        ("host work per unit and step / FSDP2", 0.25, HostWork.unit_ratio),
        ("optimizer step and clipping / FSDP2", 0.20, HostWork.optimizer_ratio),
    ),
    "tiers": (
        (f"{_ON_HOST} / DeepSpeed 3 offload, step time", 0.6, time_ratio, "zs3-host", "ds3-offload"),
        (f"{_ON_HOST} / FSDP2 offload, step time", 0.6, time_ratio, "zs3-host", "fsdp2-offload"),
        (f"stage 3, optimizer on disk / {_BOUND}, step time", 1.0, disk_ratio, "zs3-disk", "zs3"),
    ),
    "parallel": tuple(
        (f"stage {stage} / FSDP2, with tp and pp, {what}", limit, measure, f"zs{stage}", "fsdp2")
        for stage in (1, 2)
        for what, limit, measure in (
            ("step time", parallel.TIME_GOAL, time_ratio),
            ("resident memory of all ranks", parallel.MEMORY_GOAL, statistics.host_memory_ratio),
        )
    ),
}


def goals_of(section: str, samples: list[Outcome] | HostWork | None) -> list[Goal]:
    """Return the goals of one section of GOALS with their measured values; none if the section did not run."""
    rows = GOALS[section] if samples else ()
    return [Goal(text, measure(samples, *names), limit, section) for text, limit, measure, *names in rows]


@dataclass(frozen=True)
class Results:
    """All measurements of one run. skipped: reason by section why there are none; gpu_skipped: that of the GPU section."""

    workload: Workload
    rounds: Rounds
    outcomes: list[Outcome] = field(default_factory=list)
    host: HostWork | None = None
    gpu_workload: Workload | None = None
    gpu_outcomes: list[Outcome] = field(default_factory=list)
    gpu_skipped: str | None = None
    gpu_largest: dict[str, gpu.Largest] = field(default_factory=dict)
    tiers: list[Outcome] = field(default_factory=list)
    tiers_rounds: Rounds | None = None
    hostadam: dict[int, list[dict[str, Any]]] = field(default_factory=dict)  # rows by number of threads
    disk: dict[str, Any] | None = None  # see disk.run
    skipped: dict[str, str] = field(default_factory=dict)
    checkpoints: list[Kepts] = field(default_factory=list)
    network: list[network.Crossing] = field(default_factory=list)  # one per bandwidth
    codecs: list[dict[str, Any]] = field(default_factory=list)  # see codecs.measure
    parallel: list[Outcome] = field(default_factory=list)

    @property
    def races(self) -> tuple[list[Outcome], ...]:
        """The outcomes of each race. Losses are compared within a race."""
        return self.outcomes, self.tiers, self.parallel, self.gpu_outcomes

    @property
    def goals(self) -> list[Goal]:
        """The goals of the sections that ran."""
        found = goals_of("race", self.outcomes) + goals_of("host", self.host) + goals_of("tiers", self.tiers)
        found += goals_of("parallel", self.parallel)
        found += [goal for rows in self.hostadam.values() for goal in cpu_adam.goals(rows)]
        found += codecs.goals(self.codecs)
        found += disk.goals(self.disk) if self.disk else []
        found += [goal for kepts in self.checkpoints for goal in kepts.goals]
        return found + [goal for crossing in self.network for goal in crossing.goals]

    def sheets(self) -> Iterator[Sheet]:
        """Yield all tables, in the order in which the sections ran."""
        if self.outcomes:
            yield race_sheet("Step time and memory", self.workload, self.outcomes)
        if self.tiers:
            yield race_sheet("Tiers", self.workload, self.tiers, tiers=True)
        if self.host:
            yield host_sheet(self.host)
        yield from map(cpu_adam.sheet, self.hostadam.values())
        if self.codecs:
            yield codecs.sheet(self.codecs)
        if self.disk:
            yield disk.sheet(self.disk)
        for section, why in self.skipped.items():
            yield Sheet(section, notes=[(f"{section}: not measured: {why}", WARNING)])
        yield from map(checkpoints.sheet, self.checkpoints)
        yield from map(network.sheet, self.network)
        if self.parallel:
            yield race_sheet("A mesh, pipeline x data x tensor", parallel.WORKLOAD, self.parallel)
        if self.gpu_skipped and self.gpu_skipped != NOT_ASKED:
            yield Sheet("GPU", notes=[(f"GPU section skipped: {self.gpu_skipped}", PLAIN)])
        elif self.gpu_workload is not None:
            yield from gpu_sheets(self.gpu_workload, self.gpu_outcomes, self.gpu_largest)
        if self.goals:
            yield goals_sheet(self.goals, self._trust())

    def _trust(self) -> list[Note]:
        """Return a warning if this run cannot be compared with the goals: another model, or a busy machine."""
        outcomes = [*self.outcomes, *self.tiers]
        if outcomes and (self.workload.shape, self.workload.ranks) != (ModelShape(), 2):
            return [("The goals are set for the default model on 2 ranks; this run had others.", WARNING)]
        share = statistics.core_share(outcomes, self.workload.ranks)
        if share is None or share >= statistics.BUSY_CORE_SHARE:
            return []
        return [(f"The machine was busy: a rank got {share:.0%} of a core at most. Do not trust step times; run again.", WARNING)]


# --------------------------------------------------------------------------------------------------------- tables


def race_sheet(name: str, workload: Workload, outcomes: list[Outcome], *, tiers: bool = False) -> Sheet:
    """Return the table of one race: step time and memory; with `tiers` also bytes moved and the bound that they set."""
    shape, numel = workload.shape, max((o.numel for o in outcomes), default=0)
    ranks = " x ".join(map(str, workload.mesh or (workload.ranks,)))
    title = (
        f"{name}: GPT of {numel / 1e6:.1f}M parameters (dim {shape.dim}, {shape.layers} layers), {ranks} "
        f"rank{'s' * (workload.ranks > 1)} on {workload.device}, {workload.sequences} x {shape.seq_len} tokens a "
        f"{'place of data parallelism' if workload.mesh else 'rank'}, fused AdamW"
    )
    ran = list(statistics.by_name(outcomes).values())
    notes = [(TIER_LEGEND if tiers else RACE_LEGEND, PLAIN), *(_disk_note(o) for o in ran if tiers and o.disk)]
    notes += [(f"{o.contender.label} {o.status}", WARNING) for o in outcomes if not o.ran]
    columns = _race_columns(outcomes, workload.device == "cuda", tiers)
    if workload.mesh:
        columns[-1:-1] = [Column("PSS, all", lambda o: o.peak_pss_sum, ".0f", 1 / MIB)]
        notes.append((MESH_LEGEND, PLAIN))
    return Sheet.of(title, columns, ran, notes + _loss_notes(outcomes))


def _race_columns(outcomes: list[Outcome], on_gpu: bool, tiers: bool) -> list[Column]:
    step = statistics.step_spread
    columns = [
        Column("", lambda o: o.contender.label),
        Column("ms", lambda o: step(o).median, ".0f", 1e3),
        Column("quartiles", lambda o: f"{1e3 * step(o).q1:.0f}-{1e3 * step(o).q3:.0f}"),
    ]
    if tiers:
        columns += [
            Column("/zs3", lambda o: time_ratio(outcomes, o.contender.name, "zs3"), ".2f"),
            Column("moved", lambda o: median(sum(of.values()) for of in o.moved) if o.disk else None, ".0f", 1e-6),
            Column("bound", lambda o: median(statistics.bounds_s(o)) if o.disk else None, ".0f", 1e3),
            Column("/bound", statistics.bound_ratio, ".2f"),
        ]
    else:
        columns += [Column(peer, _to_peer(outcomes, base), ".2f") for peer, base in PEERS.items()]
    columns.append(Column("cpu s", lambda o: median(o.cpu_s), ".2f"))
    peaks = {"GPU": "cuda_peak"} if on_gpu else {"RSS": "peak_rss", "PSS": "peak_pss"}
    columns += [Column(heading, attrgetter(peak), ".0f", 1 / MIB) for heading, peak in peaks.items()]
    columns.append(Column("states", lambda o: sum(o.at_rest["measured"].values()) if o.at_rest else None, ".1f", 1 / MIB))
    return [*columns, Column("loss", lambda o: o.losses[-1], ".5f")]


def _to_peer(outcomes: list[Outcome], base: str) -> Callable[[Outcome], float | None]:
    """Return a function: outcome -> its step time over that of the peer `base` in the same precision without offload."""

    def ratio(outcome: Outcome) -> float | None:
        return time_ratio(outcomes, outcome.contender.name, "-".join(filter(None, (base, outcome.contender.suffix))))

    return ratio


def _disk_note(outcome: Outcome) -> Note:
    speeds = (f"{phase} {median(getattr(d, phase) for d in outcome.disk) / GB:.2f}" for phase in ("write", "read", "both"))
    return f"disk in the rounds of {outcome.contender.label}, all ranks at once, GB/s: {', '.join(speeds)}", PLAIN


def _loss_notes(outcomes: list[Outcome]) -> list[Note]:
    found = ((o, statistics.loss_difference(o, outcomes)) for o in outcomes)
    differences = [(o, d) for o, d in found if d is not None]
    if not differences:
        return [("losses: fewer than two contenders, nothing to compare", PLAIN)]
    if statistics.losses_agree(outcomes):
        steps, worst = min(len(o.losses) for o in outcomes if o.ran), max(d for _, d in differences)
        return [(f"losses: all contenders agree over {steps} steps (to {worst:.0e})", GOOD)]
    return [
        (f"losses of {o.contender.label} differ from {reference.contender.label}'s by {d:.1e}", BAD)
        for o, d in differences
        if d > statistics.LOSS_TOLERANCE[o.contender.precision] and (reference := statistics.loss_reference(o, outcomes))
    ]


def host_sheet(host: HostWork) -> Sheet:
    """Return the table of the two micro-benchmarks: milliseconds, and their ratio to plain PyTorch."""
    rows: list[tuple[str, str, float | None, float | None]]
    rows = [(f"host work per unit and step, {library}", ".3f", host.unit_ms(library), None) for library in ("fsdp2", "zeroshard")]
    for name, ms in host.optimizer_ms.items():
        rows.append((f"clipping and AdamW step, 300 parameters, {name}", ".2f", ms, ms / host.optimizer_ms["plain"]))
    cells = [[what, "-" if ms is None else format(ms, form), "" if of is None else f"{of:.2f}"] for what, form, ms, of in rows]
    notes = [(f"{name}: not measured: {error}", WARNING) for name, error in host.errors.items()]
    return Sheet("Without communication, world of 2, rank 0 only", ("", "ms", "of plain PyTorch"), cells, notes)


def gpu_sheets(workload: Workload, outcomes: list[Outcome], largest: dict[str, gpu.Largest]) -> Iterator[Sheet]:
    """Yield the tables of the GPU: the race, arithmetic and overlap of each contender, and the largest models."""
    yield race_sheet("GPU", workload, outcomes)
    flops = gpu.step_flops(workload)

    def seen(value: Callable[[Overlap], float | None]) -> Callable[[Outcome], float | None]:
        return lambda outcome: value(outcome.overlap) if outcome.overlap else None

    columns = (
        Column("", lambda o: o.contender.label),
        Column("TFLOPS", lambda o: flops / statistics.step_spread(o).median, ".1f", 1e-12),
        Column("copies ms", seen(lambda overlap: sum(overlap.copies_ms.values())), ".1f"),
        Column("beside computation", seen(lambda overlap: overlap.fraction()), ".0%"),
        Column("up", seen(lambda overlap: overlap.fraction("up")), ".0%"),
        Column("down", seen(lambda overlap: overlap.fraction("down")), ".0%"),
    )
    ran = statistics.by_name(outcomes).values()
    yield Sheet.of("GPU: arithmetic and overlap", columns, ran, [(OVERLAP_LEGEND, PLAIN)])
    if largest:
        shape, labels = gpu.WIDE_SHAPE, {c.name: c.label for c in gpu.CONTENDERS}
        found_columns = (
            Column("", lambda found: labels[found[0]]),
            Column("G parameters", lambda found: found[1].numel, ".2f", 1e-9),
            Column("layers", lambda found: found[1].fits, "d"),
            Column("found", lambda found: gpu.describe(found[1])),
        )
        title = f"GPU: largest model trained (dim {shape.dim}, {shape.seq_len} tokens, checkpointed blocks, 2 steps)"
        yield Sheet.of(title, found_columns, largest.items())


# ---------------------------------------------------------------------------------------------------------- files


def print_results(results: Results, console: Any) -> None:
    """Print all tables."""
    for sheet in results.sheets():
        sheet.show(console)


def write_markdown(results: Results, path: Path) -> None:
    """Write results.md: all tables in Markdown."""
    machine, load = _machine(), _machine()["load_at_end"]
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items() if version)
    head = f"{machine['system']}, {machine['cores']} cores; {versions}" + (f"; load at the end {load[0]:.1f}" if load else "")
    path.write_text("\n".join([head, "", *(sheet.markdown() for sheet in results.sheets())]))


def write_json(results: Results, path: Path) -> None:
    """Write results.json; the schema is in the module's docstring."""
    outcomes, tiers, host = results.outcomes, results.tiers, results.host
    document = {
        "schema": SCHEMA,
        "machine": _machine(),
        "versions": _versions(),
        "workload": asdict(results.workload),
        "rounds": asdict(results.rounds),
        "contenders": _entries(outcomes),
        "core_share": statistics.core_share([*outcomes, *tiers], results.workload.ranks),
        "losses_agree": statistics.losses_agree(outcomes),
        "tiers": {
            "rounds": asdict(results.tiers_rounds) if results.tiers_rounds else None,
            "contenders": _entries(tiers),
            "losses_agree": statistics.losses_agree(tiers),
        } if tiers else None,
        "host_work": asdict(host) | {"unit_ms": {n: host.unit_ms(n) for n in host.step_ms if n != "plain"}} if host else None,
        "hostadam": results.hostadam or results.skipped.get("hostadam"),
        "codecs": results.codecs or results.skipped.get("codecs"),
        "disk": results.disk or results.skipped.get("disk"),
        "checkpoints": {kepts.size: asdict(kepts) for kepts in results.checkpoints},
        "network": [asdict(crossing) for crossing in results.network] or results.skipped.get("network"),
        "parallel": {
            "workload": asdict(parallel.WORKLOAD),
            "contenders": _entries(results.parallel),
            "losses_agree": statistics.losses_agree(results.parallel),
        } if results.parallel else results.skipped.get("parallel"),
        "gpu": results.gpu_skipped or _gpu_entry(results),
        "goals": [asdict(goal) | {"verdict": goal.verdict} for goal in results.goals],
    }  # fmt: skip
    path.write_text(json.dumps(document, indent=1) + "\n")


def _entries(outcomes: list[Outcome]) -> dict[str, dict[str, object]]:
    return {o.contender.name: _entry(o, outcomes) for o in outcomes}


def _entry(outcome: Outcome, outcomes: list[Outcome]) -> dict[str, object]:
    entry = asdict(outcome)
    entry |= {"contender": outcome.contender.name, "label": outcome.contender.label, "status": outcome.status}
    del entry["skipped"], entry["failed"]
    if outcome.ran and outcome.rounds_step_s:
        entry["step_s"] = asdict(statistics.step_spread(outcome))
        entry["step_time_ratio"] = {base: _to_peer(outcomes, base)(outcome) for base in PEERS.values()}
        entry["loss_difference"] = statistics.loss_difference(outcome, outcomes)
        if outcome.disk:
            entry |= {"bound_s": statistics.bounds_s(outcome), "bound_ratio": statistics.bound_ratio(outcome)}
    return entry


def _gpu_entry(results: Results) -> dict[str, object] | None:
    if results.gpu_workload is None:
        return None
    return {
        "workload": asdict(results.gpu_workload),
        "step_flops": gpu.step_flops(results.gpu_workload),
        "contenders": _entries(results.gpu_outcomes),
        "largest": {name: asdict(found) | {"numel": found.numel} for name, found in results.gpu_largest.items()},
    }


def _machine() -> dict[str, Any]:
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    return {"system": platform.platform(), "cores": os.cpu_count(), "load_at_end": load}


def _versions() -> dict[str, str | None]:
    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    return {"python": platform.python_version()} | {p: version(p) for p in ("torch", "zeroshard", "deepspeed")}
