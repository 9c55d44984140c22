"""The results of a run as tables on the terminal, as results.md for documents, and as results.json for programs.

SECTIONS says of each section how to show what it measured, and which goals it has; the columns of races, and their goals
(GOALS), are here. The other sections have theirs in their files (host_overhead.py, cpu_adam.py, codecs.py, state_formats.py,
disk.py, checkpoints.py, network.py).

results.json (schema 2): `machine`, `versions`, `workload`, `rounds`; `contenders`, one entry per contender with
`status` ("ran", "skipped: why", "failed: why"), seconds per step, ratios, processor time, memory in bytes,
losses; `core_share`, the part of a core that a rank got (near 1 on a quiet machine); `tiers`, the same as `contenders`
with bytes moved, disk speeds and bounds by round; `host_work`; `hostadam`, `codecs`, `states`, `disk`, `checkpoints`,
`network`: the results of these sections; `parallel`: as `contenders`, on a mesh of ranks; `gpu`: contenders and the largest models, or the
reason why there are none; `goals`. A value that was not measured is null.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

from zeroshard.utils.sheets import BAD, GOOD, PLAIN, WARNING, Note, Sheet

from . import checkpoints, codecs, cpu_adam, disk, gpu, network, parallel, state_formats, statistics
from .overlap import Overlap
from .plan import ModelShape, Rounds, Workload
from .race import Outcome
from .statistics import DISK_BOUND_FACTOR, DISK_MEMORY_FACTOR, disk_ratio, formula_difference, memory_ratio, time_ratio
from .tables import GB, MIB, Column, Goal, goals_sheet, sheet_of

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
# race -> goals: (text, largest value, function that measures it, its arguments after the race's outcomes).
GOALS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "race": (
        ("stage 1 / DDP, step time", 0.95, time_ratio, "zs1", "ddp"),
        ("stage 2 / DDP, step time", 0.95, time_ratio, "zs2", "ddp"),
        ("stage 3 / DDP, step time", 1.00, time_ratio, "zs3", "ddp"),
        ("stage 3 / FSDP2, step time", 0.70, time_ratio, "zs3", "fsdp2"),
        ("stage 3 / DeepSpeed 3, step time", 0.45, time_ratio, "zs3", "ds3"),
        ("stage 3 with int8 states / with fp32 states, step time", 1.05, time_ratio, "zs3-int8", "zs3"),
        ("stage 3 by zeroshard.deepspeed / by zs.shard, step time", 1.05, time_ratio, "engine3", "zs3"),
        ("stage 3 by zeroshard.deepspeed / DeepSpeed 3, step time", 0.50, time_ratio, "engine3", "ds3"),
        ("stage 3 bf16 / FSDP2 bf16, step time", 0.75, time_ratio, "zs3-bf16", "fsdp2-bf16"),
        ("stage 3 / FSDP2, peak resident memory", 0.80, memory_ratio, "zs3", "fsdp2"),
        ("stage 3 / DeepSpeed 3, peak resident memory", 1.00, memory_ratio, "zs3", "ds3"),
        ("model states at rest, difference from the formula", 0.01, formula_difference),
    ),
    "tiers": (
        (f"{_ON_HOST} / DeepSpeed 3 offload, step time", 0.6, time_ratio, "zs3-host", "ds3-offload"),
        (f"{_ON_HOST} / FSDP2 offload, step time", 0.6, time_ratio, "zs3-host", "fsdp2-offload"),
        (f"stage 3, optimizer on disk / {_BOUND}, step time", 1.0, disk_ratio, "zs3-disk", "zs3"),
    ),
    "parallel": (
        ("stage 1 / FSDP2, with tp and pp, step time", 0.8, time_ratio, "zs1", "fsdp2"),
        ("stage 1 / FSDP2, with tp and pp, resident memory of all ranks", 0.9, memory_ratio, "zs1", "fsdp2", "peak_pss_sum"),
        ("stage 2 / FSDP2, with tp and pp, step time", 0.8, time_ratio, "zs2", "fsdp2"),
        ("stage 2 / FSDP2, with tp and pp, resident memory of all ranks", 0.9, memory_ratio, "zs2", "fsdp2", "peak_pss_sum"),
    ),
}


def goals_of(race: str, outcomes: list[Outcome]) -> list[Goal]:
    """Return the goals of one race of GOALS with their measured values; none if it did not run."""
    rows = GOALS[race] if outcomes else ()
    return [Goal(text, measure(outcomes, *given), limit, race) for text, limit, measure, *given in rows]


@dataclass(frozen=True)
class Results:
    """All measurements of one run. found: what each section measured; skipped: reason by section why there is nothing."""

    workload: Workload
    rounds: Rounds
    tiers_rounds: Rounds | None = None
    found: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def races(self) -> list[list[Outcome]]:
        """The outcomes of each race. Losses are compared within a race."""
        races = [self.found.get(section, []) for section in ("cpu", "tiers", "parallel")]
        return [*races, self.found["gpu"].outcomes] if "gpu" in self.found else races

    @property
    def goals(self) -> list[Goal]:
        """The goals of the sections that ran."""
        return [goal for name, section in SECTIONS.items() if self.found.get(name) for goal in section.goals(self.found[name])]

    def sheets(self) -> Iterator[Sheet]:
        """Yield all tables, in the order in which the sections ran."""
        for name, section in SECTIONS.items():
            if self.found.get(name):
                yield from section.sheets(self, self.found[name])
            elif self.skipped.get(name, NOT_ASKED) != NOT_ASKED:
                yield Sheet(name, notes=[(f"{name}: not measured: {self.skipped[name]}", WARNING)])
        if self.goals:
            yield goals_sheet(self.goals, self._trust())

    def _trust(self) -> list[Note]:
        """Return a warning if this run cannot be compared with the goals: another model, or a busy machine."""
        outcomes = [*self.found.get("cpu", []), *self.found.get("tiers", [])]
        if outcomes and (self.workload.shape, self.workload.ranks) != (ModelShape(), 2):
            return [("The goals are set for the default model on 2 ranks; this run had others.", WARNING)]
        share = statistics.core_share(outcomes, self.workload.ranks)
        if share is None or share >= statistics.BUSY_CORE_SHARE:
            return []
        return [(f"The machine was busy: a rank got {share:.0%} of a core at most. Do not trust step times; run again.", WARNING)]


@dataclass(frozen=True)
class Section:
    """A section of a run. what: its measurement, for --help. sheets, goals: of what it has measured."""

    what: str
    sheets: Callable[[Results, Any], Iterable[Sheet]]
    goals: Callable[[Any], Iterable[Goal]] = lambda found: ()


# --------------------------------------------------------------------------------------------------------- tables


def race_sheet(name: str, workload: Workload, outcomes: list[Outcome], *, tiers: bool = False) -> Sheet:
    """Return the table of one race: step time and memory; with `tiers` also bytes moved and the bound that they set."""
    shape, numel, step = workload.shape, max((o.numel for o in outcomes), default=0), statistics.step_spread
    ranks = " x ".join(map(str, workload.mesh or (workload.ranks,)))
    title = (
        f"{name}: GPT of {numel / 1e6:.1f}M parameters (dim {shape.dim}, {shape.layers} layers), {ranks} "
        f"rank{'s' * (workload.ranks > 1)} on {workload.device}, {workload.sequences} x {shape.seq_len} tokens a "
        f"{'place of data parallelism' if workload.mesh else 'rank'}, fused AdamW"
    )
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
        columns += [Column(heading, partial(_to_peer, outcomes, peer), ".2f") for heading, peer in PEERS.items()]
    columns.append(Column("cpu s", lambda o: median(o.cpu_s), ".2f"))
    peaks = {"GPU": "cuda_peak"} if workload.device == "cuda" else {"RSS": "peak_rss", "PSS": "peak_pss"}
    columns += [Column(heading, attrgetter(peak), ".0f", 1 / MIB) for heading, peak in peaks.items()]
    columns.append(Column("states", lambda o: sum(o.at_rest["measured"].values()) if o.at_rest else None, ".1f", 1 / MIB))
    columns += [Column("PSS, all", attrgetter("peak_pss_sum"), ".0f", 1 / MIB)] if workload.mesh else []
    columns.append(Column("loss", lambda o: o.losses[-1], ".5f"))

    ran = list(statistics.by_name(outcomes).values())
    notes = [(TIER_LEGEND if tiers else RACE_LEGEND, PLAIN)]
    for outcome in (o for o in ran if tiers and o.disk):
        speeds = (f"{phase} {median(getattr(d, phase) for d in outcome.disk) / GB:.2f}" for phase in ("write", "read", "both"))
        notes.append((f"disk in the rounds of {outcome.contender.label}, all ranks at once, GB/s: {', '.join(speeds)}", PLAIN))
    notes += [(f"{o.contender.label} {o.status}", WARNING) for o in outcomes if not o.ran]
    notes += [(MESH_LEGEND, PLAIN)] if workload.mesh else []
    return sheet_of(title, columns, ran, notes + _loss_notes(outcomes))


def _to_peer(outcomes: list[Outcome], peer: str, outcome: Outcome) -> float | None:
    """Return an outcome's step time over that of a peer in the same precision without offload."""
    return time_ratio(outcomes, outcome.contender.name, "-".join(filter(None, (peer, outcome.contender.suffix))))


def _loss_notes(outcomes: list[Outcome]) -> list[Note]:
    compared = statistics.compared_losses(outcomes)
    if not compared:
        return [("losses: fewer than two contenders, nothing to compare", PLAIN)]
    if statistics.losses_agree(outcomes):
        steps, worst = min(len(o.losses) for o in outcomes if o.ran), max(d for *_, d in compared)
        return [(f"losses: all contenders agree over {steps} steps (to {worst:.0e})", GOOD)]
    return [
        (f"losses of {o.contender.label} differ from {reference.contender.label}'s by {d:.1e}", BAD)
        for o, reference, d in compared
        if d > statistics.loss_tolerance(o.contender)
    ]


def gpu_sheets(found: gpu.Measured) -> Iterator[Sheet]:
    """Yield the tables of the GPU: the race, arithmetic and overlap of each contender, and the largest models."""
    yield race_sheet("GPU", found.workload, found.outcomes)
    flops = gpu.step_flops(found.workload)

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
    ran = statistics.by_name(found.outcomes).values()
    yield sheet_of("GPU: arithmetic and overlap", columns, ran, [(OVERLAP_LEGEND, PLAIN)])
    if found.largest:
        shape, labels = gpu.WIDE_SHAPE, {c.name: c.label for c in gpu.CONTENDERS}
        found_columns = (
            Column("", lambda item: labels[item[0]]),
            Column("G parameters", lambda item: item[1].numel, ".2f", 1e-9),
            Column("layers", lambda item: item[1].fits, "d"),
            Column("found", lambda item: gpu.describe(item[1])),
        )
        title = f"GPU: largest model trained (dim {shape.dim}, {shape.seq_len} tokens, checkpointed blocks, 2 steps)"
        yield sheet_of(title, found_columns, found.largest.items())


def _goals_of_each(found: Iterable[Any]) -> list[Goal]:
    return [goal for each in found for goal in each.goals]


SECTIONS = {  # in the order in which they are run
    "cpu": Section(
        "step time and memory on CPU ranks",
        lambda results, found: [race_sheet("Step time and memory", results.workload, found)],
        partial(goals_of, "race"),
    ),
    "tiers": Section(
        "the same with states on the host and on disk",
        lambda results, found: [race_sheet("Tiers", results.workload, found, tiers=True)],
        partial(goals_of, "tiers"),
    ),
    "host": Section("micro-benchmarks of the host's work", lambda _, found: [found.sheet()], lambda found: found.goals),
    "hostadam": Section(
        "the host's Adam beside memory copies and peers",
        lambda _, found: map(cpu_adam.sheet, found.values()),
        lambda found: [goal for rows in found.values() for goal in cpu_adam.goals(rows)],
    ),
    "codecs": Section("quantization on the host beside memory copies", lambda _, found: [codecs.sheet(found)], codecs.goals),
    "states": Section(
        "AdamW's states in 16, 8 and 4 bits beside torchao and bitsandbytes", lambda _, found: [state_formats.sheet(found)]
    ),
    "disk": Section("the file engine beside dd and fio", lambda _, found: [disk.sheet(found)], disk.goals),
    "checkpoints": Section(
        "saving and loading beside DCP with FSDP2 and DeepSpeed", lambda _, found: map(checkpoints.sheet, found), _goals_of_each
    ),
    "network": Section(
        "two nodes of two ranks with a slow link between them", lambda _, found: map(network.sheet, found), _goals_of_each
    ),
    "parallel": Section(
        "8 ranks over a mesh (pp 2, dp 2, tp 2) beside FSDP2 with the same stages and styles",
        lambda _, found: [race_sheet("A mesh, pipeline x data x tensor", parallel.WORKLOAD, found)],
        partial(goals_of, "parallel"),
    ),
    "gpu": Section("one GPU: each tier, and the largest models", lambda _, found: gpu_sheets(found)),
}

# ---------------------------------------------------------------------------------------------------------- files


def write_markdown(results: Results, path: Path) -> None:
    """Write results.md: all tables in Markdown."""
    machine, load = _machine(), _machine()["load_at_end"]
    versions = ", ".join(f"{name} {version}" for name, version in _versions().items() if version)
    head = f"{machine['system']}, {machine['cores']} cores; {versions}" + (f"; load at the end {load[0]:.1f}" if load else "")
    path.write_text("\n".join([head, "", *(sheet.markdown() for sheet in results.sheets())]))


def write_json(results: Results, path: Path) -> None:
    """Write results.json; the schema is in the module's docstring."""
    found, outcomes, tiers = results.found, results.found.get("cpu", []), results.found.get("tiers", [])
    host = found.get("host")

    def section(name: str, entry: Callable[[Any], object]) -> object:
        """Return the entry of what a section measured; without it, the reason why there is none, or None."""
        return entry(found[name]) if found.get(name) else results.skipped.get(name)

    def race(of: list[Outcome]) -> dict[str, object]:
        return {"contenders": _entries(of), "losses_agree": statistics.losses_agree(of)}

    document = {
        "schema": SCHEMA,
        "machine": _machine(),
        "versions": _versions(),
        "workload": asdict(results.workload),
        "rounds": asdict(results.rounds),
        **race(outcomes),
        "core_share": statistics.core_share([*outcomes, *tiers], results.workload.ranks),
        "tiers": {"rounds": asdict(results.tiers_rounds) if results.tiers_rounds else None, **race(tiers)} if tiers else None,
        "host_work": asdict(host) | {"unit_ms": {n: host.unit_ms(n) for n in host.step_ms if n != "plain"}} if host else None,
        **{name: section(name, lambda rows: rows) for name in ("hostadam", "codecs", "states", "disk")},
        "checkpoints": {kepts.size: asdict(kepts) for kepts in found.get("checkpoints", [])},
        "network": section("network", lambda crossings: [asdict(crossing) for crossing in crossings]),
        "parallel": section("parallel", lambda of: {"workload": asdict(parallel.WORKLOAD), **race(of)}),
        "gpu": section("gpu", _gpu_entry),
        "goals": [asdict(goal) | {"verdict": goal.verdict} for goal in results.goals],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def _entries(outcomes: list[Outcome]) -> dict[str, dict[str, object]]:
    """Return the entries of a race's contenders, by name."""
    entries, differences = {}, {o.contender.name: d for o, _, d in statistics.compared_losses(outcomes)}
    for outcome in outcomes:
        entry = asdict(outcome)
        entry |= {"contender": outcome.contender.name, "label": outcome.contender.label, "status": outcome.status}
        del entry["skipped"], entry["failed"]
        if outcome.ran and outcome.rounds_step_s:
            entry["step_s"] = asdict(statistics.step_spread(outcome))
            entry["step_time_ratio"] = {peer: _to_peer(outcomes, peer, outcome) for peer in PEERS.values()}
            entry["loss_difference"] = differences.get(outcome.contender.name)
            if outcome.disk:
                entry |= {"bound_s": statistics.bounds_s(outcome), "bound_ratio": statistics.bound_ratio(outcome)}
        entries[outcome.contender.name] = entry
    return entries


def _gpu_entry(found: gpu.Measured) -> dict[str, object]:
    return {
        "workload": asdict(found.workload),
        "step_flops": gpu.step_flops(found.workload),
        "contenders": _entries(found.outcomes),
        "largest": {name: asdict(largest) | {"numel": largest.numel} for name, largest in found.largest.items()},
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
