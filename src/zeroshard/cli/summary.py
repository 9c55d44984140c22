"""The text that a run prints at its start and its end: ranks, model and data; quality, memory, communication, a sample."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

import zeroshard as zs

from ..data.text import Corpus
from ..planner.measure.forecast import Forecast
from ..planner.models import GPT
from ..seam import MASTERS, OF_ACTIVATIONS, OPTIMIZER, STAGING
from ..utils.sheets import PLAIN, Sheet
from .artefacts import RunFolder
from .options import TrainOptions
from .ranks import Ranks
from .sheets import megabytes, say, show
from .trainer import StepResult

STAGES = {
    0: "stage 0: nothing sharded (plain data parallelism)",
    1: "stage 1: optimizer states sharded",
    2: "stage 2: optimizer states and gradients sharded",
    3: "stage 3: optimizer states, gradients and parameters sharded",
}


@dataclass(frozen=True)
class Outcome:
    """The results of a run, in addition to the report of `zs.report`."""

    scores: Mapping  # bits per byte of the held-out text: before_training, compressors, after_training
    last: StepResult
    step_traffic: Mapping[str, tuple[int, int]]  # kind -> calls, bytes that a rank sends in one training step
    step_moved: Mapping[str, int]  # link between tiers -> bytes that a rank moves in one training step
    forecast: Forecast | None  # of a step; None unless states or activations are offloaded
    median_seconds: float  # of a step
    activations: zs.ActivationReport | None  # None unless they are checkpointed
    options: TrainOptions
    sample: str
    uneven: Mapping[str, float]  # module of divided experts -> rows of its busiest rank / mean over ranks

    def facts(self, report: zs.Report) -> dict[str, Any]:
        """Return the entries for report.json."""
        return {
            "held_out_bits_per_byte": self.scores,
            "last_step": asdict(self.last),
            "training_step_traffic": self.step_traffic,  # without evaluations, which gather as well
            "training_step_moved": self.step_moved,
            "activations": self.activations.to_dict() if self.activations is not None else None,
            "forecast": asdict(self.forecast) if self.forecast is not None else None,
            "median_step_seconds": self.median_seconds,
            "expert_imbalance": dict(self.uneven),
            "communication": {kind: (traffic.count, traffic.nbytes) for kind, traffic in report.communication.items()},
        }


def opening(options: TrainOptions, ranks: Ranks, corpus: Corpus) -> None:
    """Print the ranks, the model and the data of a run that is about to start."""
    config = options.model_config()
    with torch.device("meta"):  # count on a new model, since a rank may have only a part
        numel = sum(parameter.numel() for parameter in GPT(config).parameters())
    ngrams = f"hashed n-grams in tables of {config.ngram_rows} rows, " if config.ngram_rows else ""
    mesh = f" ({options.axes})" if options.mesh is not None else ""
    kind = options.preset if options.case_study is not None else "GPT"
    lines = [
        STAGES[options.stage],
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
    show(Sheet("zeroshard train", rows=[[line] for line in lines]))


def closing(folder: RunFolder, report: zs.Report, outcome: Outcome) -> None:
    """Print the results; with `--quiet` only one line."""
    last, options = outcome.last, outcome.options
    tokens = last.step * options.global_batch * options.seq
    say(
        f"\n{last.step:,} steps and {tokens:,} bytes of text in {last.seconds:.0f} s: "
        f"{tokens / last.seconds:,.0f} bytes per second\n"
    )
    if outcome.forecast is not None:
        say(f"one step: predicted {outcome.forecast.step_seconds:.3g} s, measured {outcome.median_seconds:.3g} s (median)\n")
    sheets = (quality(outcome.scores), memory(report), tiers(report, outcome.activations), *communication(report, outcome))
    for sheet in sheets:
        if sheet is not None:
            show(sheet)
            say()
    if outcome.sample:
        show(Sheet("a sample of the model", rows=[[line] for line in outcome.sample.splitlines()]))
    bits = f"{outcome.scores['after_training']:.3f} bits per byte of the whole held-out text"
    missed = " steps"
    if last.step < options.steps and options.time_limit is not None:
        needed = math.ceil(options.steps * last.seconds / last.step)
        missed = (
            f" of {options.steps:,} steps (the others were lost to --time-limit {options.time_limit:g}: all take {needed:,} s)"
        )
    print(f"{bits} after {last.step:,}{missed}; results in {folder.path}/")
    for path in sorted(folder.path.iterdir()):
        say(f"  {path.name:20}{path.stat().st_size:>12,} bytes")


def quality(scores: Mapping) -> Sheet:
    """Return a table of held-out bits per byte beside those of compressors."""
    rows = [("nothing", "8.000"), ("the model before training", f"{scores['before_training']:.3f}")]
    rows += [(name, f"{bits:.3f}") for name, bits in scores["compressors"].items()]
    rows.append(("the model after training", f"{scores['after_training']:.3f}"))
    caption = "Compressors start from nothing; the model has read the training text."
    return Sheet("Held-out text", ("predicted by", "bits per byte"), rows, numbers=True, total=1, notes=[(caption, PLAIN)])


def memory(report: zs.Report) -> Sheet:
    """Return a table of bytes per rank by category: measured, by the formula, and those that DDP would keep."""
    rows = [(name, report.at_rest[name], report.formula.get(name, 0), report.ddp.get(name, 0)) for name in report.at_rest]
    total: Any = ("total", *(sum(column) for column in zip(*(row[1:] for row in rows), strict=True)))
    cells = []
    for name, measured, formula, ddp in [*rows, total]:
        share = f"{measured / ddp:.0%}" if ddp else ""
        cells.append((name, megabytes(measured), megabytes(formula), megabytes(ddp), share))
    peaks = [(f"at peak: {name}", megabytes(nbytes), "", "", "") for name, nbytes in report.peak.items() if nbytes]
    title = f"Memory of model states per rank, stage {report.stage}"
    header = ("bytes", "measured", "formula", "plain DDP", "of DDP")
    return Sheet(title, header, [*cells, *peaks], numbers=True, total=1 + len(peaks))


def tiers(report: zs.Report, activations: zs.ActivationReport | None) -> Sheet | None:
    """Return a table of model states, buffers and activation checkpoints by tier; None if all are on the device."""
    host, disk = (report.elsewhere.get(tier, {}) for tier in ("host", "disk"))
    rows = []
    for name, total in report.at_rest.items():
        parts = (name, MASTERS) if name == OPTIMIZER else (name,)
        away = [sum(held.get(part, 0) for part in parts) for held in (host, disk)]
        rows.append((name, *(megabytes(nbytes) if nbytes else "" for nbytes in (total - sum(away), *away))))
    if host.get(STAGING):
        rows.append(("buffers", "", megabytes(host[STAGING]), ""))
    peaks = activations.peak if activations is not None else {}
    if any(peaks.values()):
        rows.append(("activation checkpoints, at peak", *(megabytes(n) if n else "" for n in peaks.values())))
    if not any((host, disk, peaks)):
        return None
    return Sheet("Where they rest, per rank", ("bytes", "device", "host", "disk"), rows, numbers=True)


def communication(report: zs.Report, outcome: Outcome) -> list[Sheet]:
    """Return the table of what a rank sends in one training step, beside theory, and in the whole run with its evaluations.

    Where something moves between tiers, a table of that follows.
    """
    passes = outcome.options.accumulate
    notes = [(f"Theory is for one backward pass; a step of this run had {passes}.", PLAIN)] if passes > 1 else []
    rows = [(f"one step: {kind}", f"{count:,}", megabytes(nbytes)) for kind, (count, nbytes) in outcome.step_traffic.items()]
    measured = sum(nbytes for kind, (_, nbytes) in outcome.step_traffic.items() if kind not in OF_ACTIVATIONS)
    if outcome.uneven:
        mean = statistics.fmean(outcome.uneven.values())
        notes.append((f"Experts: their busiest rank has computed {mean:.3f} times the mean of tokens.", PLAIN))
    totals = report.communication.values()
    rows += [
        ("one step, measured" + ", without exchange" * bool(outcome.uneven), "", megabytes(measured)),
        ("one step, theory", "", megabytes(report.theory_nbytes_per_step)),
        ("all steps and evaluations", f"{sum(t.count for t in totals):,}", megabytes(sum(t.nbytes for t in totals))),
    ]
    header = ("sent", "collectives", "bytes")
    sheets = [Sheet("Communication of a rank", header, rows, numbers=True, total=2, notes=notes)]
    moved, theory = outcome.step_moved, report.theory_moved_per_step
    if links := sorted({*moved, *theory}):
        rows = [(link, megabytes(moved.get(link, 0)), megabytes(theory.get(link, 0))) for link in links]
        header, title = ("link", "measured", "theory"), "Moved between tiers, one step"
        sheets.append(Sheet(title, header, rows, numbers=True, notes=notes))
    return sheets
