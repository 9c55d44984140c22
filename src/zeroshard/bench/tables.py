"""The tables of a run, as plain cells: shown on the terminal by rich, written to results.md as Markdown.

A *sheet* is one table with its title and the lines below it. What was not measured is "-", never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table

from . import gpu, statistics
from .host_overhead import HostWork
from .plan import ModelShape, Workload
from .programs import Measured
from .race import Outcome
from .statistics import Goal

MIB, GB = 2**20, 1e9
GOOD, BAD, WARNING, PLAIN = "green", "bold red", "yellow", "dim"  # of notes
WORDS = ("does", "found")  # headings of columns that are text
VERDICTS = {"met": "green", "missed": "red", "not measured": "yellow"}

_LEGEND = (
    "ms: median step. /DDP, /FSDP2, /DS3: median over rounds of the ratio to that peer in the same precision.\n"
    "cpu s: processor time of all ranks per step. RSS, PSS, GPU: peak MiB of the largest rank while stepping.\n"
    "states: MiB of model states at rest, where the library says."
)
_TIER_LEGEND = (
    "moved: MB between host and disk a step, all ranks together. bound: those bytes over the bandwidth that all ranks\n"
    "together had in the same round, in ms. /bound, /zs3: median over rounds of the ratio of step times."
)


@dataclass(frozen=True)
class Sheet:
    """Cells as text; the first column's heading is empty. notes: (line, style of rich)."""

    title: str
    headings: tuple[str, ...] = ()
    rows: list[list[str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)

    def show(self, console: Console) -> None:
        if self.rows:
            table = Table(
                title=self.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
            )
            table.add_column("", no_wrap=True)
            for heading in self.headings:
                table.add_column(heading, justify="left" if heading in WORDS else "right", no_wrap=True)
            for row in self.rows:
                table.add_row(*(f"[{VERDICTS[cell]}]{cell}[/]" if cell in VERDICTS else cell for cell in row))
            console.print(table)
        for text, style in self.notes:
            console.print(text, style=style, markup=False, highlight=False)

    def markdown(self) -> str:
        lines = [f"### {self.title}", ""]
        if self.rows:
            rows = [["", *self.headings], ["---"] * (1 + len(self.headings)), *self.rows]
            lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows] + [""]
        for text, _ in self.notes:
            lines += [text, ""]
        return "\n".join(lines)


def outcomes_sheet(name: str, workload: Workload, outcomes: list[Outcome]) -> Sheet:
    """Step time and memory of one race."""
    on_gpu = workload.device == "cuda"
    peaks = ("GPU",) if on_gpu else ("RSS", "PSS")
    headings = ("ms", "quartiles", "/DDP", "/FSDP2", "/DS3", "cpu s", *peaks, "states", "loss")
    ran = [o for o in outcomes if o.rounds_step_s and o.ran]
    rows = [[o.contender.label, *_cells(o, outcomes, on_gpu)] for o in ran]
    notes = [(_LEGEND, PLAIN), *_not_run(outcomes), *_losses(outcomes)]
    return Sheet(_title(name, workload, outcomes), headings, rows, notes)


def _title(name: str, workload: Workload, outcomes: list[Outcome]) -> str:
    numel, shape = max((o.numel for o in outcomes), default=0), workload.shape
    ranks = f"{workload.ranks} rank{'s' * (workload.ranks > 1)}"
    return (
        f"{name}: GPT of {numel / 1e6:.1f}M parameters (dim {shape.dim}, {shape.layers} layers), {ranks} on "
        f"{workload.device}, {workload.sequences} x {shape.seq_len} tokens a rank, fused AdamW"
    )


def _cells(outcome: Outcome, outcomes: list[Outcome], on_gpu: bool) -> list[str]:
    times = statistics.step_spread(outcome)
    ratios = [number(r, "{:.2f}") for r in ratios_to_peers(outcome, outcomes).values()]
    peaks = [outcome.cuda_peak] if on_gpu else [outcome.peak_rss, outcome.peak_pss]
    states = sum(outcome.at_rest["measured"].values()) if outcome.at_rest else None
    return [
        f"{1e3 * times.median:.0f}",
        f"{1e3 * times.q1:.0f}-{1e3 * times.q3:.0f}",
        *ratios,
        f"{statistics.spread(outcome.cpu_s).median:.2f}",
        *(number(peak and peak / MIB, "{:.0f}") for peak in peaks),
        number(states and states / MIB, "{:.1f}"),
        f"{outcome.losses[-1]:.5f}",
    ]


def ratios_to_peers(outcome: Outcome, outcomes: list[Outcome]) -> dict[str, float | None]:
    """Step time over that of DDP, FSDP2 and DeepSpeed 3 of the same precision, nothing offloaded."""
    suffix = "" if outcome.contender.precision == "fp32" else f"-{outcome.contender.precision}"
    return {base: statistics.time_ratio(outcomes, outcome.contender.name, base + suffix) for base in ("ddp", "fsdp2", "ds3")}


def _not_run(outcomes: list[Outcome]) -> list[tuple[str, str]]:
    return [(f"{o.contender.label} {status(o)}", WARNING) for o in outcomes if not o.ran]


def status(outcome: Outcome) -> str:
    if outcome.skipped:
        return f"skipped: {outcome.skipped}"
    return f"failed: {outcome.failed}" if outcome.failed else "ran"


def _losses(outcomes: list[Outcome]) -> list[tuple[str, str]]:
    agree, notes = statistics.losses_agree(outcomes), []
    for outcome in outcomes:
        difference = statistics.loss_difference(outcome, outcomes)
        if difference is not None and difference > statistics.LOSS_TOLERANCE[outcome.contender.precision]:
            reference = statistics.loss_reference(outcome, outcomes)
            text = f"losses of {outcome.contender.label} differ from {reference.contender.label}'s by {difference:.1e}"
            notes.append((text, BAD))
    if agree is None:
        notes.append(("losses: fewer than two contenders, nothing to compare", PLAIN))
    elif agree:
        worst = max(d for o in outcomes if (d := statistics.loss_difference(o, outcomes)) is not None)
        steps = min(len(o.losses) for o in outcomes if o.ran)
        notes.append((f"losses: all contenders agree over {steps} steps (to {worst:.0e})", GOOD))
    return notes


def tiers_sheet(workload: Workload, outcomes: list[Outcome]) -> Sheet:
    """The race of the tiers, with what moves and its bound."""
    headings = ("ms", "quartiles", "/zs3", "moved", "bound", "/bound", "cpu s", "RSS", "PSS", "states", "loss")
    rows, notes = [], [(_TIER_LEGEND, PLAIN)]
    for outcome in outcomes:
        if not outcome.rounds_step_s or not outcome.ran:
            continue
        cells = _cells(outcome, outcomes, on_gpu=False)
        moved = statistics.spread([sum(of.values()) for of in outcome.moved]).median if outcome.disk else None
        bound = statistics.spread(statistics.bounds_s(outcome)).median if outcome.disk else None
        tiers = [
            number(statistics.time_ratio(outcomes, outcome.contender.name, "zs3"), "{:.2f}"),
            number(moved and moved / 1e6, "{:.0f}"),
            number(bound and 1e3 * bound, "{:.0f}"),
            number(statistics.bound_ratio(outcome), "{:.2f}"),
        ]
        rows.append([outcome.contender.label, *cells[:2], *tiers, *cells[5:]])
        if outcome.disk:
            speeds = ", ".join(
                f"{phase} {statistics.spread([getattr(d, phase) for d in outcome.disk]).median / GB:.2f}"
                for phase in ("write", "read", "both")
            )
            notes.append((f"disk in the rounds of {outcome.contender.label}, all ranks at once, GB/s: {speeds}", PLAIN))
    notes += [*_not_run(outcomes), *_losses(outcomes)]
    return Sheet(_title("Tiers", workload, outcomes), headings, rows, notes)


def host_sheet(host: HostWork) -> Sheet:
    """The two micro-benchmarks."""
    rows = [
        [f"host work per unit and step, {library}", number(host.unit_ms(library), "{:.3f}"), ""]
        for library in ("fsdp2", "zeroshard")
    ]
    for name, value in host.optimizer_ms.items():
        text = f"clipping and AdamW step, 300 parameters, {name}"
        rows.append([text, f"{value:.2f}", f"{value / host.optimizer_ms['plain']:.2f}"])
    notes = [(f"{name}: not measured: {error}", WARNING) for name, error in host.errors.items()]
    return Sheet("Without communication, world of 2, rank 0 only", ("ms", "of plain PyTorch"), rows, notes)


def program_sheets(measured: Measured) -> list[Sheet]:
    """Host Adam (one sheet for each number of threads) and the disk."""
    sheets = []
    for threads, rows in measured.hostadam.items():
        cells = [_hostadam_cells(row) for row in rows if "ms" in row]
        notes = [(f"{row['name']}: skipped: {row['skipped']}", WARNING) for row in rows if "skipped" in row]
        share = max(row["core_share"] for row in rows if "ms" in row)
        if share < statistics.BUSY_CORE_SHARE:
            notes.append((f"The machine was busy: this process got {share:.0%} of its cores. Run again.", WARNING))
        title = f"Host Adam, bf16 gradients to bf16 parameters, {threads} thread{'s' * (threads > 1)}"
        sheets.append(Sheet(title, ("ms", "bytes/param", "GB/s", "Gparam/s", "x time of ours", "does"), cells, notes))
    if measured.disk is not None:
        sheets.append(_disk_sheet(measured.disk))
    sheets += [Sheet(name, notes=[(f"{name}: not measured: {why}", WARNING)]) for name, why in measured.skipped.items()]
    return sheets


def _hostadam_cells(row: dict) -> list[str]:
    shown = (("ms", "{:.1f}"), ("bytes_per_parameter", "{:d}"), ("gb_s", "{:.1f}"))
    shown += (("g_parameters_s", "{:.3f}"), ("ratio", "{:.2f}"))
    return [row["name"], *(number(row[key], form) for key, form in shown), row["what"]]


def _disk_sheet(disk: dict) -> Sheet:
    def cell(mode: str, name: str) -> str:
        speeds = disk[mode]["gb_per_s"][name]
        return f"{disk[mode]['median'][name]:.2f} ({min(speeds):.2f}-{max(speeds):.2f})"

    rows = [[name, cell("write", name), cell("read", name)] for name in disk["write"]["median"]]
    how = "direct I/O" if disk["direct"] else "BUFFERED: this filesystem has no direct I/O"
    note = f"median (range) of {disk['rounds']} rounds, GB/s; one file of {disk['nbytes'] / 2**30:g} GiB, {how}"
    return Sheet("File engine, dd and fio", ("write", "read"), rows, [(note, PLAIN)])


def gpu_sheets(workload: Workload, outcomes: list[Outcome], largest: dict[str, gpu.Largest]) -> list[Sheet]:
    """Speed on each tier, and the largest models."""
    speed = outcomes_sheet("GPU", workload, outcomes)
    flops, rows = gpu.step_flops(workload), []
    for outcome in outcomes:
        if not outcome.rounds_step_s or not outcome.ran:
            continue
        overlap, step_s = outcome.overlap, statistics.step_spread(outcome).median
        rows.append(
            [
                outcome.contender.label,
                f"{flops / step_s / 1e12:.1f}",
                number(overlap and sum(overlap.copies_ms.values()), "{:.1f}"),
                number(overlap and overlap.fraction, "{:.0%}"),
                number(overlap and _share(overlap, "up"), "{:.0%}"),
                number(overlap and _share(overlap, "down"), "{:.0%}"),
            ]
        )
    headings = ("TFLOPS", "copies ms", "beside computation", "up", "down")
    note = "copies: between device and host in 2 steps, by CUDA events; the share of their time inside computation."
    sheets = [speed, Sheet("GPU: arithmetic and overlap", headings, rows, [(note, PLAIN)])]
    if largest:
        shape = gpu.WIDE_SHAPE
        title = f"GPU: largest model trained (dim {shape.dim}, {shape.seq_len} tokens, checkpointed blocks, 2 steps)"
        labels = {c.name: c.label for c in gpu.CONTENDERS}
        cells = [
            [labels[name], number(f.numel and f.numel / 1e9, "{:.2f}"), number(f.fits, "{:d}"), gpu.describe(f)]
            for name, f in largest.items()
        ]
        sheets.append(Sheet(title, ("G parameters", "layers", "found"), cells))
    return sheets


def _share(overlap: object, way: str) -> float | None:
    total = overlap.copies_ms[way]  # type: ignore[attr-defined]
    return overlap.inside_ms[way] / total if total else None  # type: ignore[attr-defined]


def goals_sheet(goals: list[Goal], workload: Workload, outcomes: list[Outcome]) -> Sheet:
    """Goals with their verdicts; outcomes: of all races on the CPU."""
    rows = [
        [g.text, number(g.value, "{:.3f}"), f"{'>=' if g.at_least else '<='} {g.limit:.2f}", g.verdict] for g in goals
    ]
    notes = []
    share = statistics.core_share(outcomes, workload.ranks)
    if outcomes and (workload.shape, workload.ranks) != (ModelShape(), 2):
        notes.append(("The goals are set for the default model on 2 ranks; this run had others.", WARNING))
    elif share is not None and share < statistics.BUSY_CORE_SHARE:
        text = f"The machine was busy: a rank got {share:.0%} of a core at most. Do not trust step times; run again."
        notes.append((text, WARNING))
    return Sheet("Goals", ("measured", "goal", ""), rows, notes)


def number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
