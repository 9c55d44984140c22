"""The command line of `zeroshard bench`.

    zeroshard bench                              everything but sequences, some 10 minutes on 2 cores
    zeroshard bench --quick                      zeroshard 2, 3, DDP and FSDP2, below 90 seconds
    zeroshard bench --only zs3,ddp --rounds 10   two contenders, more rounds
    zeroshard bench --sections tiers,hostadam,disk --path /mnt/nvme     offload to the host and to that disk
    zeroshard bench --sections checkpoints --path /mnt/nvme             saving and loading
    zeroshard bench --sections parallel          8 ranks: pipeline, data and tensor parallelism
    zeroshard bench --sections sequences         sequences over 4 and 8 ranks; an hour (--lengths 1024,4096: 10 minutes)
    zeroshard bench --sections host              the host's work without communication

Writes results.json, results.md (the tables in Markdown), plots and one log per rank below --out. The exit code is 1 if losses
disagree or a contender that was started failed. A missed goal is reported; it is no error.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from pathlib import Path

from zeroshard.cli.arguments import Parser, UsageError
from zeroshard.cli.sheets import drawn, say, show

from . import pictures, report
from .plan import CONTENDERS, LENGTHS, PRECISIONS, TIER_CONTENDERS, TIERS_ROUNDS, ModelShape, Rounds, Workload, select
from .report import NOT_ASKED, SECTIONS, Results

ROUNDS, QUICK_ROUNDS = 6, 3
USUAL_SECTIONS = tuple(name for name in SECTIONS if name != "sequences")  # which takes an hour
QUICK_SECTIONS = ("cpu", "host", "gpu")


def main(argv: list[str] | None = None) -> int:
    """Run `zeroshard bench` with arguments (None: sys.argv); return its exit code. Raises UsageError for wrong arguments."""
    given = _parser().parse(sys.argv[1:] if argv is None else argv)
    usual_sections, rounds = (QUICK_SECTIONS, QUICK_ROUNDS) if given.quick else (USUAL_SECTIONS, ROUNDS)
    sections = usual_sections if given.sections is None else given.sections
    out = given.out or Path("runs") / time.strftime("bench-%Y%m%d-%H%M%S")
    try:
        for names, known, flag in ((given.precisions, PRECISIONS, "--precisions"), (sections, SECTIONS, "--sections")):
            if unknown := set(names) - set(known):
                raise ValueError(f"expected {flag} among {', '.join(known)}, got {', '.join(sorted(unknown))}")
        if not 0 <= given.largest_seconds < math.inf:
            raise ValueError(f"expected --largest-seconds of at least 0, got {given.largest_seconds}")
        shape = ModelShape(**{f.name: getattr(given, f.name) for f in dataclasses.fields(ModelShape)})
        workload = Workload(shape, given.micro_batch, given.ranks, given.seed, pin_cores=given.pin_cores)
        usual = Rounds(given.warmup, rounds if given.rounds is None else given.rounds, given.steps)
        select(given.only, given.precisions)  # raises where a name is unknown
    except ValueError as error:
        raise UsageError(f"{error}; see zeroshard bench --help") from None
    from .sections import Unmeasured, measure, swap_folder  # with torch, which --help and a mistake in the call do not wait for

    out.mkdir(parents=True, exist_ok=True)
    with swap_folder(given.path, out) as path:
        results = Results(dataclasses.replace(workload, swap_path=path), usual, skipped={"gpu": NOT_ASKED})
        for section in (name for name in SECTIONS if name in sections):
            say(f"{section}: {SECTIONS[section]}")
            try:
                results.found[section] = measure(section, given, results.workload, usual, out)
            except Unmeasured as error:
                results.skipped[section] = str(error)
    for sheet in results.sheets():
        show(sheet)
    report.write(results, out)
    written, ranks = [out / "results.json", out / "results.md"], f"{workload.ranks} ranks on CPU, same model, seeds and batches"
    for section, name, title in (
        ("cpu", "plot.png", ranks),
        ("tiers", "plot_tiers.png", f"{ranks}: states on the host and on disk"),
        ("parallel", "plot_parallel.png", "8 ranks on CPU over a mesh: pipeline 2, data 2, tensor 2"),
        ("gpu", "plot_gpu.png", "One GPU, bf16"),
    ):
        drawn(out / name, pictures.draw, results.found.get(section, []), title, out / name)
        written += [out / name] if (out / name).exists() else []
    print("written: " + ", ".join(map(str, written)))
    return int(any(measured.broken for measured in results.tables))


def _parser() -> Parser:
    parser = Parser(
        prog="zeroshard bench",
        description="Measure zeroshard beside its peers, interleaved in one run.",
        epilog=f"contenders: {', '.join(c.name for c in CONTENDERS)}; with offload: "
        + ", ".join(c.name for c in TIER_CONTENDERS if c.offload),
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a short list of contenders and few rounds, below 90 s")
    add("--only", type=_names, default=(), metavar="NAMES", help="contenders, separated by commas; none: all")
    add("--precisions", type=_names, default=",".join(PRECISIONS), metavar="LIST", help="precisions of the contenders")
    sections = "; ".join(f"{name}: {what}" for name, what in SECTIONS.items())
    add("--sections", type=_names, metavar="LIST", help=f"what to measure (default: all but sequences). {sections}")
    add("--rounds", type=int, help=f"rounds (default: {ROUNDS}, {QUICK_ROUNDS} with --quick; {TIERS_ROUNDS} of the tiers)")
    add("--steps", type=int, default=2, help="steps of a turn")
    add("--warmup", type=int, default=3, help="steps before measuring")
    add("--ranks", type=int, default=2, help="processes of each contender")
    add("--micro-batch", type=int, default=2, help="sequences of one forward pass of a rank, one in a step")
    for field in dataclasses.fields(ModelShape):
        add("--" + field.name.replace("_", "-"), type=int, default=field.default, help=f"{field.name} of the model")
    add("--seed", type=int, default=1234, help="seed of weights and batches")
    add("--lengths", type=_counts, default=LENGTHS, metavar="LIST", help="tokens of the section sequences")
    add("--pin-cores", action="store_true", help="bind rank r to core r")
    add("--path", metavar="DIR", help="folder on a local disk, for offload and checkpoints (default: --out)")
    add("--largest-seconds", type=float, default=120.0, metavar="S", help="GPU: seconds to search each largest model; 0: none")
    add("--out", type=Path, help="folder of the results (default: runs/bench-<time>)")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in _names(text))
