"""The command line of `zeroshard bench`.

    zeroshard bench                              everything, some 10 minutes on 2 cores
    zeroshard bench --quick                      zeroshard 2, 3, DDP and FSDP2, below 90 seconds
    zeroshard bench --only zs3,ddp --rounds 10   two contenders, more rounds
    zeroshard bench --sections tiers,hostadam,disk --path /mnt/nvme     offload to the host and to that disk
    zeroshard bench --sections checkpoints --path /mnt/nvme             saving and loading
    zeroshard bench --sections network --bandwidths 100M,1G             a slow link between nodes
    zeroshard bench --sections parallel          8 ranks: pipeline, data and tensor parallelism
    zeroshard bench --sections host              the micro-benchmarks only

Writes results.json, results.md (the tables in Markdown), plots and one log per rank below --out. The exit code is 1 if losses
disagree or a contender that was started failed. A missed goal is reported; it is no error.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from zeroshard.cli.arguments import Parser, UsageError
from zeroshard.cli.sheets import drawn, say, show
from zeroshard.errors import SwapError
from zeroshard.memory.io.swap_folder import SwapFolder

from . import (
    checkpoints,
    codecs,
    cpu_adam,
    disk,
    gpu,
    host_overhead,
    network,
    parallel,
    pictures,
    report,
    state_formats,
    statistics,
)
from .micro_benchmark import Unmeasured, apart
from .plan import CONTENDERS, MESH_CONTENDERS, PRECISIONS, TIER_CONTENDERS, Contender, ModelShape, Rounds, Workload, select
from .race import race
from .report import NOT_ASKED, SECTIONS, Results

ROUNDS, QUICK_ROUNDS, TIERS_ROUNDS = 6, 3, 4
QUICK_SECTIONS = ("cpu", "host", "gpu")


@dataclass(frozen=True)
class Plan:
    """The settings of one run: the sections, workload, rounds and contenders, and the folder of the results."""

    workload: Workload
    rounds: Rounds
    tiers_rounds: Rounds
    contenders: list[Contender]
    tier_contenders: list[Contender]
    mesh_contenders: list[Contender]
    sections: tuple[str, ...]
    quick: bool
    largest_s: float
    bandwidths: tuple[float, ...]
    out: Path


def main(argv: list[str] | None = None) -> int:
    """Run `zeroshard bench` with arguments (None: sys.argv); return its exit code. Raises UsageError for wrong arguments."""
    given = _parser().parse(sys.argv[1:] if argv is None else argv)
    try:
        plan = _plan(given)
    except ValueError as error:
        raise UsageError(f"{error}; see zeroshard bench --help") from None
    plan.out.mkdir(parents=True, exist_ok=True)
    with swap_folder(given.path, plan.out) as path:
        results = _measure(dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, swap_path=path)))
    return _finish(results, plan.out)


def _parser() -> Parser:
    parser = Parser(
        prog="zeroshard bench",
        renamed={"--precision": "--precisions", "--sequences": "--micro-batch", "--calibrate": "the command zeroshard calibrate"},
        description="Measure zeroshard beside its peers, interleaved in one run.",
        epilog=f"contenders: {', '.join(c.name for c in CONTENDERS)}; with offload: "
        + ", ".join(c.name for c in TIER_CONTENDERS if c.offload),
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a short list of contenders and few rounds, below 90 s")
    add("--only", type=_names, default=(), metavar="NAMES", help="contenders, separated by commas; none: all")
    add("--precisions", type=_names, default=",".join(PRECISIONS), metavar="LIST", help="precisions of the contenders")
    sections = "; ".join(f"{name}: {section.what}" for name, section in SECTIONS.items())
    add("--sections", type=_names, metavar="LIST", help=f"what to measure (default: all). {sections}")
    add("--rounds", type=int, help=f"rounds (default: {ROUNDS}, {QUICK_ROUNDS} with --quick; {TIERS_ROUNDS} of the tiers)")
    add("--steps", type=int, default=2, help="steps of a turn")
    add("--warmup", type=int, default=3, help="steps before measuring")
    add("--ranks", type=int, default=2, help="processes of each contender")
    add("--micro-batch", type=int, default=2, help="sequences of one forward pass of a rank, one in a step")
    for field in dataclasses.fields(ModelShape):
        add("--" + field.name.replace("_", "-"), type=int, default=field.default, help=f"{field.name} of the model")
    add("--seed", type=int, default=1234, help="seed of weights and batches")
    add("--pin-cores", action="store_true", help="bind rank r to core r")
    add("--path", metavar="DIR", help="folder on a local disk, for offload and checkpoints (default: --out)")
    add("--largest-seconds", type=float, default=120.0, metavar="S", help="GPU: seconds to search each largest model; 0: none")
    usual = (network.GOAL_BANDWIDTH,)
    add("--bandwidths", type=network.bandwidths_of, default=usual, metavar="LIST", help="network: bits a second (default: 200M)")
    add("--out", type=Path, help="folder of the results (default: runs/bench-<time>)")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _plan(arguments: argparse.Namespace) -> Plan:
    shape = ModelShape(**{f.name: getattr(arguments, f.name) for f in dataclasses.fields(ModelShape)})
    same = {name: getattr(arguments, name) for name in ("ranks", "seed", "pin_cores")} | {"sequences": arguments.micro_batch}
    usual_sections, usual_rounds = (QUICK_SECTIONS, QUICK_ROUNDS) if arguments.quick else (tuple(SECTIONS), ROUNDS)
    sections = usual_sections if arguments.sections is None else arguments.sections
    lists = ((arguments.precisions, PRECISIONS, "--precisions"), (sections, SECTIONS, "--sections"))
    for given, known, flag in lists:
        if unknown := set(given) - set(known):
            raise ValueError(f"expected {flag} among {', '.join(known)}, got {', '.join(sorted(unknown))}")
    if not 0 <= arguments.largest_seconds < math.inf:
        raise ValueError(f"expected --largest-seconds of at least 0, got {arguments.largest_seconds}")
    counts = [usual if arguments.rounds is None else arguments.rounds for usual in (usual_rounds, TIERS_ROUNDS)]
    rounds = Rounds(warmup=arguments.warmup, rounds=counts[0], steps=arguments.steps)
    tiers = select(arguments.only, arguments.precisions, among=TIER_CONTENDERS)
    return Plan(
        workload=Workload(shape=shape, **same),
        rounds=rounds,
        tiers_rounds=dataclasses.replace(rounds, rounds=counts[1], memory_steps=1, lead_in=1),
        contenders=select(arguments.only, arguments.precisions, arguments.quick),
        tier_contenders=tiers if any(c.offload for c in tiers) else [],
        mesh_contenders=select(arguments.only, arguments.precisions, among=MESH_CONTENDERS),
        sections=sections,
        quick=arguments.quick,
        largest_s=arguments.largest_seconds,
        bandwidths=arguments.bandwidths,
        out=arguments.out or Path("runs") / time.strftime("bench-%Y%m%d-%H%M%S"),
    )


@contextmanager
def swap_folder(given: str | None, out: Path) -> Iterator[str | None]:
    """Make a folder for all that this run offloads to disk, below `given` or else `out`, and remove it at the end.

    Yields its path; None where `out` is on no disk that can be used. Raises UsageError where `given` cannot be used.
    """
    try:
        SwapFolder(given or out, rank=0, needed_nbytes=0).close()
    except SwapError as error:
        if given:
            raise UsageError(f"--path: {str(error).removeprefix('rank 0: ')}") from None
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="zeroshard-bench-", dir=given or out, ignore_cleanup_errors=True) as folder:
        yield folder


def _measure(plan: Plan) -> Results:
    """Run the sections of a plan, each in turn."""
    results = Results(plan.workload, plan.rounds, plan.tiers_rounds, skipped={"gpu": NOT_ASKED})
    for section in (name for name in SECTIONS if name in plan.sections):
        try:
            results.found[section] = _run(section, plan)
        except Unmeasured as error:
            results.skipped[section] = str(error)
    return results


def _run(section: str, plan: Plan) -> object:
    """Return what one section measured. Raises Unmeasured where the machine cannot run it."""
    path, logs, tiers_rounds = plan.workload.swap_path, plan.out / "logs", plan.tiers_rounds
    if section in ("disk", "checkpoints") and path is None:
        raise Unmeasured("no folder on a local disk; name one with --path")
    if section == "cpu":
        outcomes = []
        for precision in PRECISIONS:  # one race each: the sleeping teams of both would need twice the memory
            heat = [c for c in plan.contenders if c.precision == precision]
            if heat:
                say(f"{precision}: {len(heat)} contenders, {plan.rounds.rounds} rounds of {plan.rounds.steps} steps")
                outcomes += race(heat, plan.workload, plan.rounds, logs)
        return outcomes
    if section == "tiers":
        if not plan.tier_contenders:
            say("tiers: none of the chosen contenders offloads anything")
            return []
        say(f"tiers: {len(plan.tier_contenders)} contenders, {tiers_rounds.rounds} rounds of {plan.rounds.steps} steps")
        return race(plan.tier_contenders, plan.workload, tiers_rounds, plan.out / "logs-tiers")
    if section == "host":
        say("micro-benchmarks without communication")
        return host_overhead.measure(20 if plan.quick else 60, logs / "host.log")
    if section == "hostadam":
        say("host Adam beside memory copies, DeepSpeed's CPUAdam and torch's AdamW")
        return apart(cpu_adam.measure_section, log_file=logs / "hostadam.log")
    if section == "codecs":
        say("quantization beside memory copies and whole-tensor arithmetic")
        return apart(codecs.measure, log_file=logs / "codecs.log")
    if section == "states":
        say("optimizer states in 16, 8 and 4 bits beside torchao and bitsandbytes")
        return apart(state_formats.measure_section, log_file=logs / "states.log")
    if section == "disk":
        say("file engine beside dd and fio")
        return apart(disk.run, path, log_file=logs / "disk.log")
    if section == "checkpoints":
        return checkpoints.run(str(path), plan.out / "logs-checkpoints")
    if section == "network":
        say(f"two nodes and a link of {', '.join(f'{bandwidth / 1e6:.0f}' for bandwidth in plan.bandwidths)} Mbit/s")
        return network.run(plan.bandwidths)
    if section == "parallel":
        rounds = dataclasses.replace(plan.rounds, rounds=tiers_rounds.rounds)
        what = f"{len(plan.mesh_contenders)} contenders, {rounds.rounds} rounds of {rounds.steps} steps"
        say(f"a mesh of {parallel.WORKLOAD.ranks} ranks: {what}")
        return race(plan.mesh_contenders, parallel.WORKLOAD, rounds, plan.out / "logs-parallel")
    if not torch.cuda.is_available():
        raise Unmeasured("no CUDA device")
    return gpu.measure(plan.rounds, plan.workload.seed, path, plan.out, 0.0 if plan.quick else plan.largest_s)


def _finish(results: Results, out: Path) -> int:
    """Print the tables, write the files of results, draw the plots; return the exit code."""
    for sheet in results.sheets():
        show(sheet)
    report.write_json(results, out / "results.json")
    report.write_markdown(results, out / "results.md")
    ranks = f"{results.workload.ranks} ranks on CPU, same model, seeds and batches"
    titles = {
        "plot.png": ranks,
        "plot_tiers.png": f"{ranks}: states on the host and on disk",
        "plot_parallel.png": "8 ranks on CPU over a mesh: pipeline 2, data 2, tensor 2",
        "plot_gpu.png": "One GPU, bf16",
    }
    written = [out / "results.json", out / "results.md"]
    for (name, title), outcomes in zip(titles.items(), results.races, strict=False):  # the last may be missing
        drawn(out / name, pictures.draw, outcomes, title, out / name)
        written += [out / name] if (out / name).exists() else []
    print("written: " + ", ".join(map(str, written)))
    failed = (statistics.losses_agree(race) is False or any(o.failed for o in race) for race in results.races)
    return int(any(failed))
