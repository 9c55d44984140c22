"""What a run prints at its beginning and its end: who runs, how good it got, memory, communication, a sample."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

import zeroshard as zs

from ..data.text import Corpus
from ..measure.forecast import Forecast
from ..memory.ledger import MASTERS, OPTIMIZER, STAGING
from ..models import GPT
from .artefacts import RunFolder
from .options import TrainOptions
from .ranks import Ranks
from .sheets import megabytes
from .trainer import StepResult

STAGES = {
    0: "stage 0: nothing sharded (plain data parallelism)",
    1: "stage 1: optimizer states sharded",
    2: "stage 2: optimizer states and gradients sharded",
    3: "stage 3: optimizer states, gradients and parameters sharded",
}


@dataclass(frozen=True)
class Outcome:
    """What a run came to, beside the report of the sharding."""

    scores: Mapping  # bits per byte of the held-out text: before_training, compressors, after_training
    last: StepResult
    step_traffic: Mapping[str, tuple[int, int]]  # kind -> calls, bytes that a rank sends in one training step
    step_moved: Mapping[str, int]  # link between tiers -> bytes that a rank moves in one training step
    forecast: Forecast | None  # of a step, where states or activations are offloaded
    median_seconds: float  # of a step
    activations: zs.ActivationReport | None  # where they are checkpointed
    options: TrainOptions
    sample: str

    def facts(self, report: zs.Report) -> dict[str, Any]:
        """For report.json."""
        return {
            "held_out_bits_per_byte": self.scores,
            "last_step": asdict(self.last),
            "training_step_traffic": self.step_traffic,  # without evaluations, which gather as well
            "training_step_moved": self.step_moved,
            "activations": self.activations.to_dict() if self.activations is not None else None,
            "forecast": asdict(self.forecast) if self.forecast is not None else None,
            "median_step_seconds": self.median_seconds,
            "communication": {kind: (traffic.count, traffic.nbytes) for kind, traffic in report.communication.items()},
        }


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", expand=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def opening(console: Console, options: TrainOptions, ranks: Ranks, corpus: Corpus) -> None:
    """Say what is about to run."""
    config = options.model_config()
    with torch.device("meta"):  # a rank may have a part of it
        numel = sum(parameter.numel() for parameter in GPT(config).parameters())
    ngrams = f"{config.ngram_rows} rows a table of n-grams, " if config.ngram_rows else ""
    mesh = f" ({options.axes})" if options.mesh is not None else ""
    kind = options.preset if options.case_study is not None else "GPT"
    lines = [
        f"[bold]{STAGES[options.stage]}[/bold]",
        f"{ranks.world_size} rank{'s' * (ranks.world_size > 1)}{mesh} on {ranks.device.type}, {options.precision}",
        f"{kind} of {numel:,} parameters: {config.layers} layers, dim {config.dim}, {config.heads} heads, "
        f"{ngrams}{config.seq_len} bytes of context",
        f"{corpus.name}: {corpus.train.numel():,} bytes of {len(corpus.train_files)} files to train on, "
        f"{min(options.eval_bytes, corpus.held_out.numel()):,} bytes held out",
    ]
    if options.offloads:
        away = options.sharding()
        lines.append(
            f"optimizer states on {away.offload_optimizer.tier.value}, gradients on {away.offload_gradient.tier.value}, "
            f"parameters on {away.offload_param.tier.value}"
        )
    console.print(Panel("\n".join(lines), title="zeroshard train", title_align="left", expand=False), highlight=False)


def closing(console: Console, folder: RunFolder, report: zs.Report, outcome: Outcome) -> None:
    """Print the results."""
    last, options = outcome.last, outcome.options
    tokens = last.step * options.batch * options.seq
    console.print(
        f"\n{last.step:,} steps and {tokens:,} bytes of text in {last.seconds:.0f} s: "
        f"{tokens / last.seconds:,.0f} bytes per second\n",
        highlight=False,
    )
    if outcome.forecast is not None:
        console.print(
            f"one step: predicted {outcome.forecast.step_seconds:.3g} s, measured {outcome.median_seconds:.3g} s (median)\n",
            highlight=False,
        )
    tables = (
        quality(outcome.scores), memory(report), tiers(report, outcome.activations), communication(report, outcome),
        moves(report, outcome),
    )  # fmt: skip
    for table in tables:
        if table is not None:
            console.print(table, highlight=False)
            console.print()
    if outcome.sample:
        console.print(Panel(Text(outcome.sample), title="a sample of the model", title_align="left", expand=False))
    console.print(files(folder), highlight=False)


def quality(scores: Mapping) -> Table:
    """Held-out bits per byte beside those of compressors."""
    table = _table("Held-out text", "predicted by", "bits per byte")
    table.add_row("nothing", "8.000")
    table.add_row("the model before training", f"{scores['before_training']:.3f}")
    for name, bits in scores["compressors"].items():
        table.add_row(name, f"{bits:.3f}")
    table.add_row("[bold]the model after training", f"[bold]{scores['after_training']:.3f}")
    table.caption = "Compressors start from nothing; the model has read the training text."
    table.caption_justify = "left"
    return table


def memory(report: zs.Report) -> Table:
    """Bytes per rank by category: measured, by the formula, and what DDP would keep."""
    table = _table(
        f"Memory of model states per rank, stage {report.stage}", "bytes", "measured", "formula", "plain DDP", "of DDP"
    )
    rows = [(name, report.at_rest[name], report.formula.get(name, 0), report.ddp.get(name, 0)) for name in report.at_rest]
    total: Any = ("total", *(sum(column) for column in zip(*(row[1:] for row in rows), strict=True)))
    for name, measured, formula, ddp in [*rows, total]:
        share = f"{measured / ddp:.0%}" if ddp else ""
        table.add_row(name, megabytes(measured), megabytes(formula), megabytes(ddp), share, end_section=name == rows[-1][0])
    for name, nbytes in report.peak.items():
        if nbytes:
            table.add_row(f"at peak: {name}", megabytes(nbytes), "", "", "")
    return table


def tiers(report: zs.Report, activations: zs.ActivationReport | None) -> Table | None:
    """Where model states, buffers and activation checkpoints rest. None if everything is on the device."""
    host, disk = (report.elsewhere.get(tier, {}) for tier in ("host", "disk"))
    table = _table("Where they rest, per rank", "bytes", "device", "host", "disk")
    for name, total in report.at_rest.items():
        parts = (name, MASTERS) if name == OPTIMIZER else (name,)
        away = [sum(held.get(part, 0) for part in parts) for held in (host, disk)]
        table.add_row(name, *(megabytes(nbytes) if nbytes else "" for nbytes in (total - sum(away), *away)))
    if host.get(STAGING):
        table.add_row("buffers", "", megabytes(host[STAGING]), "")
    peaks = activations.peak if activations is not None else {}
    if any(peaks.values()):
        table.add_row("activation checkpoints, at peak", *(megabytes(n) if n else "" for n in peaks.values()))
    return table if any((host, disk, peaks)) else None


def communication(report: zs.Report, outcome: Outcome) -> Table:
    """What a rank sends in one training step, beside theory, and in the whole run with its evaluations."""
    passes = outcome.options.accumulate
    table = _table("Communication of a rank", "sent", "collectives", "bytes")
    for kind, (count, nbytes) in outcome.step_traffic.items():
        table.add_row(f"one step: {kind}", f"{count:,}", megabytes(nbytes))
    measured = sum(nbytes for _, nbytes in outcome.step_traffic.values())
    table.add_row("[bold]one step, measured", "", f"[bold]{megabytes(measured)}", end_section=True)
    table.add_row("one step, theory", "", megabytes(report.theory_nbytes_per_step))
    totals = report.communication.values()
    table.add_row("all steps and evaluations", f"{sum(t.count for t in totals):,}", megabytes(sum(t.nbytes for t in totals)))
    if passes > 1:
        table.caption = f"Theory is for one backward pass; a step of this run had {passes}."
        table.caption_justify = "left"
    return table


def moves(report: zs.Report, outcome: Outcome) -> Table | None:
    """What a rank moves between tiers in one training step, beside theory. None where nothing is moved."""
    if not outcome.step_moved and not report.theory_moved_per_step:
        return None
    table = _table("Moved between tiers, one step", "link", "measured", "theory")
    for link in sorted({*outcome.step_moved, *report.theory_moved_per_step}):
        theory = report.theory_moved_per_step.get(link, 0)
        table.add_row(link, megabytes(outcome.step_moved.get(link, 0)), megabytes(theory))
    if outcome.options.accumulate > 1:
        table.caption = f"Theory is for one backward pass; a step of this run had {outcome.options.accumulate}."
        table.caption_justify = "left"
    return table


def files(folder: RunFolder) -> Group:
    """The files of the run with their lengths."""
    lines = [Text(f"Results in {folder.path}/", style="bold")]
    lines += [Text(f"  {path.name:20}{path.stat().st_size:>12,} bytes") for path in sorted(folder.path.iterdir())]
    return Group(*lines)
