"""The command line of `zeroshard bench`.

    zeroshard bench                              all contenders, some 6 minutes on 2 cores
    zeroshard bench --quick                      zeroshard 2, 3, DDP and FSDP2, below 90 seconds
    zeroshard bench --only zs3,ddp --rounds 10   two contenders, more rounds
    zeroshard bench --sections host              the micro-benchmarks only

Writes results.json, plot.png and one log per rank below --out. Fails (exit code 1) if losses disagree or a
contender that was started failed; a missed goal is reported, not an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

from zeroshard.bench.plan import CONTENDERS, PRECISIONS, Contender, ModelShape, Rounds, Workload, select
from zeroshard.cli.arguments import Parser, UsageError

TABLE_COLUMNS = 110
ROUNDS, QUICK_ROUNDS = 6, 3
SECTIONS = ("cpu", "host", "gpu")

# One GPU: some 320M parameters, so that model states (16 bytes a parameter) outweigh activations.
GPU_SHAPE = ModelShape(vocab_size=32768, seq_len=1024, dim=1024, layers=20, heads=16)
GPU_CONTENDERS = tuple(Contender(kind, stage, "bf16") for kind, stage in (("local", None), ("fsdp2", None), ("zs", 3)))


def main(argv: list[str] | None = None) -> int:
    """Parse, run, print, write; returns the exit code. Raises UsageError for a mistake in the call."""
    arguments = _parser().parse(sys.argv[1:] if argv is None else argv)
    try:
        workload, rounds, contenders = _plan(arguments)
    except ValueError as error:
        raise UsageError(f"{error}; see zeroshard bench --help") from None
    try:
        import matplotlib  # noqa: F401
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise UsageError(
            f"bench: expected the library {error.name!r}; install it with: pip install 'zeroshard[bench]'"
        ) from None
    console = Console()
    if not console.is_terminal:  # a log file: do not fold tables at 80 columns
        console = Console(width=TABLE_COLUMNS)
    return _run(arguments, workload, rounds, contenders, console)


def _parser() -> Parser:
    parser = Parser(
        prog="zeroshard bench",
        description="Measure zeroshard beside its peers, interleaved in one run.",
        epilog=f"contenders: {', '.join(c.name for c in CONTENDERS)}",
    )
    add, unset = parser.add_argument, argparse.SUPPRESS
    add("--quick", action="store_true", help="a short list of contenders and few rounds, below 90 s")
    add("--only", type=_names, default=(), metavar="NAMES", help="contenders, separated by commas; none: all")
    add("--precision", type=_names, default=",".join(PRECISIONS), metavar="LIST", help="of the contenders")
    add("--sections", type=_names, default=",".join(SECTIONS), metavar="LIST", help="what to measure")
    add("--rounds", type=int, default=unset, help=f"rounds (default: {ROUNDS}, {QUICK_ROUNDS} with --quick)")
    add("--steps", type=int, default=2, help="steps of a turn")
    add("--warmup", type=int, default=3, help="steps before measuring")
    add("--ranks", type=int, default=2, help="processes of each contender")
    add("--sequences", type=int, default=2, help="sequences per rank and step")
    for field in dataclasses.fields(ModelShape):
        add("--" + field.name.replace("_", "-"), type=int, default=field.default, help="of the model")
    add("--seed", type=int, default=1234, help="of weights and batches")
    add("--pin-cores", action="store_true", help="bind rank r to core r")
    add("--out", type=Path, default=unset, help="folder of the results (default: runs/bench-<time>)")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _plan(arguments: argparse.Namespace) -> tuple[Workload, Rounds, list[Contender]]:
    shape = ModelShape(**{f.name: getattr(arguments, f.name) for f in dataclasses.fields(ModelShape)})
    workload = Workload(
        shape=shape,
        sequences=arguments.sequences,
        ranks=arguments.ranks,
        seed=arguments.seed,
        pin_cores=arguments.pin_cores,
    )
    count = getattr(arguments, "rounds", QUICK_ROUNDS if arguments.quick else ROUNDS)
    rounds = Rounds(warmup=arguments.warmup, rounds=count, steps=arguments.steps)
    lists = ((arguments.precision, PRECISIONS, "--precision"), (arguments.sections, SECTIONS, "--sections"))
    for given, known, flag in lists:
        if unknown := set(given) - set(known):
            raise ValueError(f"expected {flag} among {', '.join(known)}, got {', '.join(sorted(unknown))}")
    return workload, rounds, select(arguments.only, arguments.precision, arguments.quick)


def _run(arguments, workload: Workload, rounds: Rounds, contenders: list[Contender], console) -> int:
    from zeroshard.bench import hostwork, plot, report
    from zeroshard.bench.race import race

    out: Path = getattr(arguments, "out", Path("runs") / time.strftime("bench-%Y%m%d-%H%M%S"))
    out.mkdir(parents=True, exist_ok=True)
    say = lambda text: console.print(text, style="dim", markup=False, highlight=False)  # noqa: E731
    outcomes, host = [], None
    if "cpu" in arguments.sections:
        # One heat per precision: the sleeping teams of both would need twice the memory.
        for precision in PRECISIONS:
            heat = [c for c in contenders if c.precision == precision]
            if heat:
                say(f"{precision}: {len(heat)} contenders, {rounds.rounds} rounds of {rounds.steps} steps")
                outcomes += race(heat, workload, rounds, out / "logs", say)
    if "host" in arguments.sections:
        say("micro-benchmarks without communication")
        host = hostwork.measure(repeats=20 if arguments.quick else 60)
    gpu_workload, gpu_outcomes, gpu_skipped = _run_gpu(arguments, rounds, out, say)
    results = report.Results(workload, rounds, outcomes, host, gpu_workload, gpu_outcomes, gpu_skipped)
    report.print_results(results, console)
    report.write_json(results, out / "results.json")
    drawn = plot.draw(outcomes, f"{workload.ranks} ranks on CPU, same model, seeds and batches", out / "plot.png")
    if gpu_outcomes:
        plot.draw(gpu_outcomes, "One GPU, bf16", out / "plot_gpu.png")
    console.print(f"written: {out / 'results.json'}" + (f", {out / 'plot.png'}" if drawn else ""), markup=False)
    return _exit_code(results)


def _run_gpu(arguments, rounds: Rounds, out: Path, say) -> tuple[Workload | None, list, str | None]:
    """One rank on one GPU; returns (workload, outcomes, why skipped)."""
    from zeroshard.bench.race import race

    if "gpu" not in arguments.sections:
        return None, [], "not asked for"
    import torch

    if not torch.cuda.is_available():
        return None, [], "no CUDA device"
    workload = Workload(shape=GPU_SHAPE, sequences=4, ranks=1, seed=arguments.seed, device="cuda")
    more_steps = dataclasses.replace(rounds, steps=max(rounds.steps, 10))
    say("GPU, bf16: plain PyTorch, FSDP2 and zeroshard on one rank")
    return workload, race(list(GPU_CONTENDERS), workload, more_steps, out / "logs-gpu", say), None


def _exit_code(results) -> int:
    """1 where the numbers cannot be trusted: a contender failed, or computed something else."""
    from zeroshard.bench import figures

    groups = (results.outcomes, results.gpu_outcomes)
    failed = any(o.failed for group in groups for o in group)
    disagree = any(figures.losses_agree(group) is False for group in groups)
    return int(failed or disagree)
