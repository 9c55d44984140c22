"""The command line of `zeroshard bench`.

    zeroshard bench                              everything, some 10 minutes on 2 cores
    zeroshard bench --quick                      zeroshard 2, 3, DDP and FSDP2, below 90 seconds
    zeroshard bench --only zs3,ddp --rounds 10   two contenders, more rounds
    zeroshard bench --sections tiers,hostadam,disk --path /mnt/nvme     offload to the host and to that disk
    zeroshard bench --sections checkpoints --path /mnt/nvme             saving and loading
    zeroshard bench --sections host              the micro-benchmarks only

Writes results.json, results.md (the tables in Markdown), plots and one log per rank below --out. Fails (exit code 1) if losses disagree or a
contender that was started failed; a missed goal is reported, not an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..cli.arguments import Parser, UsageError
from .plan import CONTENDERS, PRECISIONS, TIER_CONTENDERS, Contender, ModelShape, Rounds, Workload, select

if TYPE_CHECKING:
    from .report import Results

TABLE_COLUMNS = 125
ROUNDS, QUICK_ROUNDS, TIERS_ROUNDS = 6, 3, 4
SECTIONS = {
    "cpu": "step time and memory on CPU ranks",
    "tiers": "the same with states on the host and on disk",
    "host": "micro-benchmarks of the host's work",
    "hostadam": "the host's Adam beside memory copies and peers",
    "disk": "the file engine beside dd and fio",
    "checkpoints": "saving and loading beside DCP with FSDP2 and DeepSpeed",
    "gpu": "one GPU: each tier, and the largest models",
}
QUICK_SECTIONS = ("cpu", "host", "gpu")


@dataclass(frozen=True)
class Plan:
    """One run: what is measured, how often, and by whom."""

    workload: Workload
    rounds: Rounds
    tiers_rounds: Rounds
    contenders: list[Contender]
    tier_contenders: list[Contender]
    sections: tuple[str, ...]
    quick: bool
    largest_s: float


def main(argv: list[str] | None = None) -> int:
    """Parse, run, print, write; returns the exit code. Raises UsageError for a mistake in the call."""
    arguments = _parser().parse(sys.argv[1:] if argv is None else argv)
    try:
        plan = _plan(arguments)
    except ValueError as error:
        raise UsageError(f"{error}; see zeroshard bench --help") from None
    import matplotlib  # noqa: F401  # now, and not at the end, where it is drawn with
    from rich.console import Console

    console = Console()
    if not console.is_terminal:  # a log file: do not fold tables at 80 columns
        console = Console(width=TABLE_COLUMNS)
    out: Path = getattr(arguments, "out", Path("runs") / time.strftime("bench-%Y%m%d-%H%M%S"))
    out.mkdir(parents=True, exist_ok=True)
    with swap_folder(getattr(arguments, "path", None), out) as path:
        results = _measure(dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, swap_path=path)), out, console)
    return _finish(results, out, console)


def _parser() -> Parser:
    parser = Parser(
        prog="zeroshard bench",
        description="Measure zeroshard beside its peers, interleaved in one run.",
        epilog=f"contenders: {', '.join(c.name for c in CONTENDERS)}; with offload: "
        + ", ".join(c.name for c in TIER_CONTENDERS if c.offload),
    )
    add, unset = parser.add_argument, argparse.SUPPRESS
    add("--quick", action="store_true", help="a short list of contenders and few rounds, below 90 s")
    add("--only", type=_names, default=(), metavar="NAMES", help="contenders, separated by commas; none: all")
    add("--precision", type=_names, default=",".join(PRECISIONS), metavar="LIST", help="of the contenders")
    sections = "; ".join(f"{name}: {what}" for name, what in SECTIONS.items())
    add("--sections", type=_names, default=unset, metavar="LIST", help=f"what to measure (default: all). {sections}")
    rounds = f"rounds (default: {ROUNDS}, {QUICK_ROUNDS} with --quick; {TIERS_ROUNDS} of the tiers)"
    add("--rounds", type=int, default=unset, help=rounds)
    add("--steps", type=int, default=2, help="steps of a turn")
    add("--warmup", type=int, default=3, help="steps before measuring")
    add("--ranks", type=int, default=2, help="processes of each contender")
    add("--sequences", type=int, default=2, help="sequences per rank and step")
    for field in dataclasses.fields(ModelShape):
        add("--" + field.name.replace("_", "-"), type=int, default=field.default, help="of the model")
    add("--seed", type=int, default=1234, help="of weights and batches")
    add("--pin-cores", action="store_true", help="bind rank r to core r")
    add("--path", default=unset, metavar="FOLDER", help="on a local disk, for what is offloaded to it (default: --out)")
    add("--largest-seconds", type=float, default=120.0, metavar="S", help="GPU: of the search for each largest model; 0: none")
    add("--out", type=Path, default=unset, help="folder of the results (default: runs/bench-<time>)")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _plan(arguments: argparse.Namespace) -> Plan:
    shape = ModelShape(**{f.name: getattr(arguments, f.name) for f in dataclasses.fields(ModelShape)})
    workload = Workload(
        shape=shape,
        sequences=arguments.sequences,
        ranks=arguments.ranks,
        seed=arguments.seed,
        pin_cores=arguments.pin_cores,
    )
    sections = getattr(arguments, "sections", QUICK_SECTIONS if arguments.quick else tuple(SECTIONS))
    lists = ((arguments.precision, PRECISIONS, "--precision"), (sections, SECTIONS, "--sections"))
    for given, known, flag in lists:
        if unknown := set(given) - set(known):
            raise ValueError(f"expected {flag} among {', '.join(known)}, got {', '.join(sorted(unknown))}")
    if not 0 <= arguments.largest_seconds < math.inf:
        raise ValueError(f"expected --largest-seconds of at least 0, got {arguments.largest_seconds}")
    rounds = Rounds(
        warmup=arguments.warmup,
        rounds=getattr(arguments, "rounds", QUICK_ROUNDS if arguments.quick else ROUNDS),
        steps=arguments.steps,
    )
    count = getattr(arguments, "rounds", TIERS_ROUNDS)
    tiers_rounds = dataclasses.replace(rounds, rounds=count, memory_steps=1, lead_in=1)
    tiers = select(arguments.only, arguments.precision, among=TIER_CONTENDERS)
    return Plan(
        workload=workload,
        rounds=rounds,
        tiers_rounds=tiers_rounds,
        contenders=select(arguments.only, arguments.precision, arguments.quick),
        tier_contenders=tiers if any(c.offload for c in tiers) else [],
        sections=sections,
        quick=arguments.quick,
        largest_s=arguments.largest_seconds,
    )


@contextmanager
def swap_folder(given: str | None, out: Path) -> Iterator[str | None]:
    """A new folder for everything that this run offloads to disk, removed at the end; None where that is no disk.

    Raises UsageError if a folder was named and cannot be used.
    """
    from ..errors import SwapError
    from ..io.swap_folder import SwapFolder

    try:
        SwapFolder(given or out, rank=0, needed_nbytes=0).close()
    except SwapError as error:
        if given:
            raise UsageError(f"--path: {str(error).removeprefix('rank 0: ')}") from None
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="zeroshard-bench-", dir=given or out, ignore_cleanup_errors=True) as folder:
        yield folder


def _measure(plan: Plan, out: Path, console) -> Results:
    from . import host_overhead, programs
    from .race import race
    from .report import Results

    say = lambda text: console.print(text, style="dim", markup=False, highlight=False)  # noqa: E731
    outcomes, tiers, host = [], [], None
    if "cpu" in plan.sections:
        # One heat per precision: the sleeping teams of both would need twice the memory.
        for precision in PRECISIONS:
            heat = [c for c in plan.contenders if c.precision == precision]
            if heat:
                say(f"{precision}: {len(heat)} contenders, {plan.rounds.rounds} rounds of {plan.rounds.steps} steps")
                outcomes += race(heat, plan.workload, plan.rounds, out / "logs", say)
    if "tiers" in plan.sections and not plan.tier_contenders:
        say("tiers: none of the chosen contenders offloads anything")
    elif "tiers" in plan.sections:
        say(f"tiers: {len(plan.tier_contenders)} contenders, {plan.tiers_rounds.rounds} rounds of {plan.rounds.steps} steps")
        tiers = race(plan.tier_contenders, plan.workload, plan.tiers_rounds, out / "logs-tiers", say)
    if "host" in plan.sections:
        say("micro-benchmarks without communication")
        host = host_overhead.measure(repeats=20 if plan.quick else 60)
    measured = programs.measure(plan.sections, plan.workload.swap_path, out / "logs", say)
    kepts = []
    if "checkpoints" in plan.sections and plan.workload.swap_path is None:
        say("checkpoints: no folder on a local disk; name one with --path")
    elif "checkpoints" in plan.sections:
        from . import checkpoints

        kepts = checkpoints.run(plan.workload.swap_path, log_dir=out / "logs-checkpoints", say=say)
    gpu = _measure_gpu(plan, out, say)
    return Results(
        plan.workload, plan.rounds, outcomes, host, **gpu, tiers=tiers, tiers_rounds=plan.tiers_rounds, programs=measured,
        checkpoints=kepts,
    )  # fmt: skip


def _measure_gpu(plan: Plan, out: Path, say: Callable[[str], None]) -> dict[str, object]:
    """Fields of Results."""
    from .report import NOT_ASKED

    nothing = {"gpu_workload": None, "gpu_outcomes": []}
    if "gpu" not in plan.sections:
        return nothing | {"gpu_skipped": NOT_ASKED}
    import torch

    if not torch.cuda.is_available():
        return nothing | {"gpu_skipped": "no CUDA device"}
    from . import gpu

    seed, path = plan.workload.seed, plan.workload.swap_path
    workload, outcomes = gpu.measure_speed(plan.rounds, seed, path, out / "logs-gpu", say)
    largest = {}
    if plan.largest_s and not plan.quick:
        say("GPU: the largest model of each")
        largest = gpu.measure_largest(seed, path, out / "logs-largest", say, plan.largest_s)
    return {"gpu_workload": workload, "gpu_outcomes": outcomes, "gpu_skipped": None, "gpu_largest": largest}


def _finish(results: Results, out: Path, console) -> int:
    """Print, write, draw; returns the exit code."""
    from . import plot, report

    report.print_results(results, console)
    report.write_json(results, out / "results.json")
    report.write_markdown(results, out / "results.md")
    ranks = f"{results.workload.ranks} ranks on CPU, same model, seeds and batches"
    pictures = (
        (results.outcomes, ranks, out / "plot.png"),
        (results.tiers, f"{ranks}: states on the host and on disk", out / "plot_tiers.png"),
        (results.gpu_outcomes, "One GPU, bf16", out / "plot_gpu.png"),
    )
    drawn = [path for outcomes, title, path in pictures if plot.draw(outcomes, title, path)]
    written = [out / "results.json", out / "results.md", *drawn]
    console.print("written: " + ", ".join(map(str, written)), markup=False)
    return _exit_code(results)


def _exit_code(results: Results) -> int:
    """1 where the numbers cannot be trusted: a contender failed, or computed something else."""
    from . import statistics

    failed = any(o.failed for race in results.races for o in race)
    disagree = any(statistics.losses_agree(race) is False for race in results.races)
    return int(failed or disagree)
