"""Results as tables for people and as results.json for programs.

results.json (schema 1): `machine`, `versions`, `workload`, `rounds`; `contenders`, one entry per contender with
`status` ("ran", "skipped: why", "failed: why"), seconds per step, ratios, processor time, memory in bytes,
losses; `core_share`, the part of a core that a rank got (near 1 on a quiet machine); `host_work`; `gpu` (the same
as `contenders`, or why there is none); `goals`. What was not measured is null, never a guess.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from zeroshard.bench import figures
from zeroshard.bench.hostwork import HostWork
from zeroshard.bench.plan import ModelShape, Rounds, Workload
from zeroshard.bench.race import Outcome

MIB = 2**20
SCHEMA = 1

_LEGEND = (
    "ms: median step. /DDP, /FSDP2, /DS3: median over rounds of the ratio to that peer in the same precision.\n"
    "cpu s: processor time of all ranks per step. RSS, PSS, GPU: peak MiB of the largest rank while stepping.\n"
    "states: MiB of model states at rest, where the library says."
)


@dataclass(frozen=True)
class Results:
    """Everything that one run measured; `gpu_skipped` says why there are no GPU outcomes."""

    workload: Workload
    rounds: Rounds
    outcomes: list[Outcome]
    host: HostWork | None
    gpu_workload: Workload | None
    gpu_outcomes: list[Outcome]
    gpu_skipped: str | None

    @property
    def goals(self) -> list[figures.Goal]:
        return figures.goals(self.outcomes, self.host)


def print_results(results: Results, console: Console) -> None:
    """All tables, in the order in which the work was done."""
    if results.outcomes:
        _print_outcomes("Step time and memory", results.workload, results.outcomes, console)
        _print_losses(results.outcomes, console)
    if results.host:
        _print_host(results.host, console)
    if results.gpu_skipped:
        console.print(f"GPU section skipped: {results.gpu_skipped}")
    if results.gpu_outcomes:
        _print_outcomes("GPU", results.gpu_workload, results.gpu_outcomes, console)
        _print_losses(results.gpu_outcomes, console)
    if results.outcomes or results.host:
        _print_goals(results, console)


def _print_outcomes(title: str, workload: Workload, outcomes: list[Outcome], console: Console) -> None:
    numel = max((o.numel for o in outcomes), default=0)
    shape = workload.shape
    title += (
        f": GPT of {numel / 1e6:.1f}M parameters (dim {shape.dim}, {shape.layers} layers), {workload.ranks} ranks on "
        f"{workload.device}, {workload.sequences} x {shape.seq_len} tokens a rank, fused AdamW"
    )
    table = _table(title)
    on_gpu = workload.device == "cuda"
    peaks = ("GPU",) if on_gpu else ("RSS", "PSS")
    headings = ("ms", "quartiles", "/DDP", "/FSDP2", "/DS3", "cpu s", *peaks, "states", "loss")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        if not outcome.rounds_step_s or not outcome.ran:
            continue
        table.add_row(outcome.contender.label, *_cells(outcome, outcomes, on_gpu))
    console.print(table)
    console.print(_LEGEND, style="dim", highlight=False)
    for outcome in outcomes:
        if not outcome.ran:
            console.print(f"{outcome.contender.label} {_status(outcome)}", style="yellow", markup=False)


def _cells(outcome: Outcome, outcomes: list[Outcome], on_gpu: bool) -> list[str]:
    times = figures.step_spread(outcome)
    ratios = [_number(r, "{:.2f}") for r in _ratios(outcome, outcomes).values()]
    peaks = [outcome.cuda_peak] if on_gpu else [outcome.peak_rss, outcome.peak_pss]
    states = sum(outcome.at_rest["measured"].values()) if outcome.at_rest else None
    return [
        f"{1e3 * times.median:.0f}",
        f"{1e3 * times.q1:.0f}-{1e3 * times.q3:.0f}",
        *ratios,
        f"{figures.spread(outcome.cpu_s).median:.2f}",
        *(_number(peak and peak / MIB, "{:.0f}") for peak in peaks),
        _number(states and states / MIB, "{:.1f}"),
        f"{outcome.losses[-1]:.5f}",
    ]


def _ratios(outcome: Outcome, outcomes: list[Outcome]) -> dict[str, float | None]:
    """Step time over that of DDP, FSDP2 and DeepSpeed 3 of the same precision."""
    suffix = "" if outcome.contender.precision == "fp32" else f"-{outcome.contender.precision}"
    bases = ("ddp", "fsdp2", "ds3")
    return {base: figures.time_ratio(outcomes, outcome.contender.name, base + suffix) for base in bases}


def _print_losses(outcomes: list[Outcome], console: Console) -> None:
    agree = figures.losses_agree(outcomes)
    for outcome in outcomes:
        difference = figures.loss_difference(outcome, outcomes)
        if difference is not None and difference > figures.LOSS_TOLERANCE[outcome.contender.precision]:
            reference = figures.loss_reference(outcome, outcomes)
            text = f"losses of {outcome.contender.label} differ from {reference.contender.label}'s by {difference:.1e}"
            console.print(text, style="bold red")
    if agree is None:
        console.print("losses: fewer than two contenders, nothing to compare")
    elif agree:
        worst = max(d for o in outcomes if (d := figures.loss_difference(o, outcomes)) is not None)
        steps = min(len(o.losses) for o in outcomes if o.ran)
        console.print(f"losses: all contenders agree over {steps} steps (to {worst:.0e})", style="green")


def _print_host(host: HostWork, console: Console) -> None:
    table = _table("Without communication, world of 2, rank 0 only")
    for heading in ("ms", "of plain PyTorch"):
        table.add_column(heading, justify="right")
    for library in ("fsdp2", "zeroshard"):
        value = host.unit_ms(library)
        table.add_row(f"host work per unit and step, {library}", _number(value, "{:.3f}"), "")
    for name, value in host.optimizer_ms.items():
        text = f"clipping and AdamW step, 300 parameters, {name}"
        table.add_row(text, f"{value:.2f}", f"{value / host.optimizer_ms['plain']:.2f}")
    console.print(table)
    for name, error in host.errors.items():
        console.print(f"{name}: not measured: {error}", style="yellow", markup=False)


def _print_goals(results: Results, console: Console) -> None:
    table = _table("Goals")
    for heading in ("measured", "at most", ""):
        table.add_column(heading, justify="right")
    colours = {"met": "green", "missed": "red", "not measured": "yellow"}
    for goal in results.goals:
        verdict = f"[{colours[goal.verdict]}]{goal.verdict}[/]"
        table.add_row(goal.text, _number(goal.value, "{:.3f}"), f"{goal.limit:.2f}", verdict)
    console.print(table)
    if not results.outcomes:
        return
    share = figures.core_share(results.outcomes, results.workload.ranks)
    if (results.workload.shape, results.workload.ranks) != (ModelShape(), 2):
        console.print("The goals are set for the default model on 2 ranks; this run had others.", style="yellow")
    elif share is not None and share < figures.BUSY_CORE_SHARE:
        text = f"The machine was busy: a rank got {share:.0%} of a core at most. Do not trust step times; run again."
        console.print(text, style="bold yellow")


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    return table


def write_json(results: Results, path: Path) -> None:
    """Write results.json; the schema is in the module's docstring."""
    document = {
        "schema": SCHEMA,
        "machine": _machine(),
        "versions": _versions(),
        "workload": dataclasses.asdict(results.workload),
        "rounds": dataclasses.asdict(results.rounds),
        "contenders": {o.contender.name: _entry(o, results.outcomes) for o in results.outcomes},
        "core_share": figures.core_share(results.outcomes, results.workload.ranks),
        "losses_agree": figures.losses_agree(results.outcomes),
        "host_work": _host_entry(results.host),
        "gpu": results.gpu_skipped
        or {
            "workload": dataclasses.asdict(results.gpu_workload),
            "contenders": {o.contender.name: _entry(o, results.gpu_outcomes) for o in results.gpu_outcomes},
        },
        "goals": [dataclasses.asdict(g) | {"verdict": g.verdict} for g in results.goals],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def _entry(outcome: Outcome, outcomes: list[Outcome]) -> dict[str, object]:
    entry = dataclasses.asdict(outcome)
    entry |= {"contender": outcome.contender.name, "label": outcome.contender.label, "status": _status(outcome)}
    del entry["skipped"], entry["failed"]
    if outcome.ran and outcome.rounds_step_s:
        entry["step_s"] = dataclasses.asdict(figures.step_spread(outcome))
        entry["step_time_ratio"] = _ratios(outcome, outcomes)
        entry["loss_difference"] = figures.loss_difference(outcome, outcomes)
    return entry


def _host_entry(host: HostWork | None) -> dict[str, object] | None:
    if host is None:
        return None
    units = {name: host.unit_ms(name) for name in host.step_ms if name != "plain"}
    return dataclasses.asdict(host) | {"unit_ms": units}


def _machine() -> dict[str, object]:
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    return {"system": platform.platform(), "cores": os.cpu_count(), "load_at_end": load}


def _versions() -> dict[str, str | None]:
    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    return {"python": platform.python_version()} | {p: version(p) for p in ("torch", "zeroshard", "deepspeed")}


def _status(outcome: Outcome) -> str:
    if outcome.skipped:
        return f"skipped: {outcome.skipped}"
    return f"failed: {outcome.failed}" if outcome.failed else "ran"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
