"""The host's Adam step beside memory copies, DeepSpeed's compiled CPUAdam and torch's own AdamW.

    python -m zeroshard.bench.cpu_adam                       64M parameters, 1 thread and as many as there are cores
    python -m zeroshard.bench.cpu_adam --chunks              zeroshard over chunk lengths as well
    python -m zeroshard.bench.cpu_adam --huge-pages          all tensors in 2 MiB pages

The *job* is that of ZeRO-Offload: bf16 gradients to bf16 parameters, with fp32 masters and two fp32 states. Bytes that
it has to move per parameter: read gradient 2 + master 4 + states 8, write master 4 + states 8 + parameter 2 = 28.
A memory copy of a working set as large (16 bytes a parameter: 8 to 8) moves 16: its speed is bytes read + bytes
written per second, as STREAM counts them. Contenders take turns in each round; times are medians over rounds, ratios
medians of the ratios within a round. Values are not compared here (tests/optim/test_cpu_kernels.py does that).

Each library has the memory that it works on when it offloads: zeroshard and the memory copy that of its host tier (mapped
in huge pages), the peers torch's.

DeepSpeed's kernel takes parameters and gradients of one type: for the job it needs an fp32 copy of the gradients (made
while they arrive from the device) and a cast of the masters (deepspeed/runtime/zero/stage_1_and_2.py does both, over
whole tensors). Beside that are its kernel alone, fed fp32 gradients that somebody else has cast, zeroshard's kernel
in the same place, and its bf16 mode, which has no masters: 22 bytes, other results.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..cli.arguments import Parser, UsageError
from ..io.aligned import empty_aligned
from ..optim import cpu_kernels
from .statistics import BUSY_CORE_SHARE

OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
OURS, COPY, DEEPSPEED, FOREACH, FUSED = "zeroshard", "memory copy", "deepspeed", "torch foreach", "torch fused"
CHUNK_EXPONENTS = range(14, 21)
GOALS = (  # name of the peer, what is compared, at least
    (COPY, "bytes/s of the update over bytes/s of a memory copy", 0.9),
    (DEEPSPEED, "speed over DeepSpeed's CPUAdam, same job", 1.0),
    (FOREACH, "speed over torch's AdamW(foreach=True), same job", 4.0),
)


class Memory:
    """The tensors that contenders share, touched before anything is timed; 36 bytes a parameter."""

    def __init__(self, numel: int, huge_pages: bool) -> None:
        self.numel, self._huge_pages = numel, huge_pages
        self.grad = self._new(numel, torch.bfloat16).normal_(std=1e-3)
        self.out = self._new(numel, torch.bfloat16).zero_()
        self.master = self._new(numel).normal_()
        self.exp_avg, self.exp_avg_sq = self._new(numel).zero_(), self._new(numel).zero_()
        self.grad32 = self._new(numel).copy_(self.grad)  # for contenders that step whole tensors
        self.source, self.target = self._new(2 * numel).zero_(), self._new(2 * numel).zero_()

    def _new(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        if not self._huge_pages:
            return torch.empty(numel, dtype=dtype)
        return empty_aligned(numel * dtype.itemsize).view(dtype)

    def state(self, step: Any) -> dict[str, Any]:
        return {"step": step, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


@dataclass(frozen=True)
class Contender:
    """bytes_per_parameter: what its passes read and write in memory; None where intermediate passes are not known."""

    name: str
    bytes_per_parameter: int | None
    what: str
    step: Callable[[], object]


def _zeroshard(memory: Memory, threads: int, team: cpu_kernels.Team, chunks: bool) -> list[Contender]:
    """Torch has `threads` threads when a contender steps; a team's use one each."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], **OPTIONS)
    options = optimizer.param_groups[0]
    kernel = cpu_kernels.kernel_for(optimizer, options)
    assert kernel is not None
    state = memory.state(torch.zeros(()))

    def job(chunk: int | None = None, team: cpu_kernels.Team | None = team) -> None:
        cpu_kernels.step_stretch(
            kernel, memory.master, memory.grad, state, options, out=memory.out, team=team, chunk=chunk
        )

    def alone() -> None:
        cpu_kernels.step_stretch(kernel, memory.master, memory.grad32, state, options, team=team)

    found = [
        Contender(OURS, 28, "the job, in chunks", job),
        Contender(f"{OURS} kernel", 28, "fp32 gradients given, no bf16 parameters", alone),
    ]
    if threads > 1:
        joint = partial(job, None, None)
        found.append(Contender(f"{OURS} joint", 28, "torch's threads on one chunk at a time", joint))
    for exponent in CHUNK_EXPONENTS if chunks else ():
        found.append(Contender(f"{OURS} 2^{exponent}", 28, "chunks of so many parameters", partial(job, 1 << exponent)))
    return found


def _copy(memory: Memory) -> list[Contender]:
    return [Contender(COPY, 16, "copy_ within a working set as large", lambda: memory.target.copy_(memory.source))]


def _whole(memory: Memory, name: str, bytes_per_parameter: int | None, optimizer: Any) -> list[Contender]:
    """An optimizer that steps the whole fp32 master: the job with casts around it."""

    def job() -> None:
        memory.grad32.copy_(memory.grad)
        optimizer.step()
        memory.out.copy_(memory.master)

    return [Contender(name, bytes_per_parameter, "the job: cast, step, cast over whole tensors", job)]


def _torch(memory: Memory, name: str, **variant: bool) -> list[Contender]:
    param = nn.Parameter(memory.master)
    param.grad = memory.grad32
    optimizer = torch.optim.AdamW([param], **OPTIONS, **variant)
    optimizer.state[param] = memory.state(torch.zeros(()))
    return _whole(memory, name, 40 if "fused" in variant else None, optimizer)


def _deepspeed(memory: Memory) -> list[Contender]:
    """Raises where the package is missing or its extension does not build."""
    with contextlib.redirect_stdout(sys.stderr):  # it greets, and its compiler reports
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        param, small = nn.Parameter(memory.master), nn.Parameter(memory.out)
        optimizer, light = (DeepSpeedCPUAdam([p], **OPTIONS) for p in (param, small))
    param.grad, small.grad = memory.grad32, memory.grad
    optimizer.state[param], light.state[small] = memory.state(0), memory.state(0)
    return [
        *_whole(memory, DEEPSPEED, 40, optimizer),
        Contender(f"{DEEPSPEED} kernel", 28, "fp32 gradients given, no bf16 parameters", optimizer.step),
        Contender(f"{DEEPSPEED} bf16", 22, "bf16 parameters without masters: not the job", light.step),
    ]


def _peers(memory: Memory, deepspeed: bool) -> tuple[list[Contender], list[dict]]:
    """Those that can run, and rows that say why the others cannot."""
    found, skipped = [], []
    if deepspeed:
        try:
            found += _deepspeed(memory)
        except Exception as error:  # no package, no compiler, no ninja: each with an error of its own
            skipped = [{"name": DEEPSPEED, "skipped": f"{type(error).__name__}: {error}".splitlines()[0]}]
    found += _torch(memory, FUSED, fused=True) + _torch(memory, FOREACH, foreach=True)
    return found, skipped


@torch.no_grad()
def measure(
    numel: int = 1 << 26,
    rounds: int = 7,
    *,
    threads: int = 1,
    deepspeed: bool = True,
    chunks: bool = False,
    huge_pages: bool = False,
) -> list[dict[str, Any]]:
    """One row per contender.

    Keys: name, what, threads, core_share (of its threads' cores, while it stepped), ms, bytes_per_parameter, gb_s (1e9
    bytes a second), g_parameters_s, and ratio: its time over zeroshard's for the job. The memory copy updates no
    parameters: g_parameters_s and ratio are None. A contender that cannot run has name and skipped.
    """
    with closing(cpu_kernels.Team(threads)) as team, cpu_kernels.stepping_threads(threads):
        memory = Memory(numel, huge_pages=True)
        peers, skipped = _peers(Memory(numel, huge_pages=False) if not huge_pages else memory, deepspeed)
        contenders = _zeroshard(memory, threads, team, chunks) + _copy(memory) + peers
        samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
        for number in range(rounds + 1):  # the first warms up
            # who follows whom changes: a large cache holds what the last one left
            for contender in random.Random(number).sample(contenders, len(contenders)):
                start = time.perf_counter(), time.process_time()
                contender.step()
                sample = Sample(time.perf_counter() - start[0], time.process_time() - start[1])
                if number:
                    samples[contender.name].append(sample)
    return [_row(c, samples[c.name], samples[OURS], numel, threads) for c in contenders] + skipped


@dataclass(frozen=True)
class Sample:
    """One step: wall time, and processor time of all threads."""

    wall_s: float
    cpu_s: float


def _row(contender: Contender, samples: list[Sample], ours: list[Sample], numel: int, threads: int) -> dict[str, Any]:
    median_s, nbytes = statistics.median(s.wall_s for s in samples), contender.bytes_per_parameter
    updates = contender.name != COPY
    return {
        "name": contender.name,
        "what": contender.what,
        "threads": threads,
        "core_share": statistics.median(s.cpu_s / (threads * s.wall_s) for s in samples),
        "ms": 1e3 * median_s,
        "bytes_per_parameter": nbytes,
        "gb_s": None if nbytes is None else nbytes * numel / median_s / 1e9,
        "g_parameters_s": numel / median_s / 1e9 if updates else None,
        "ratio": statistics.median(a.wall_s / b.wall_s for a, b in zip(samples, ours, strict=True))
        if updates
        else None,
    }


def goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """text, value (None: not measured), limit and verdict of each goal, from the rows of one `measure`."""
    by_name = {row["name"]: row for row in rows if "ms" in row}
    found = []
    for peer, text, limit in GOALS:
        row, value = by_name.get(peer), None
        if row is not None:
            value = by_name[OURS]["gb_s"] / row["gb_s"] if peer == COPY else row["ratio"]
        verdict = "not measured" if value is None else "met" if value >= limit else "missed"
        found.append({"text": text, "value": value, "limit": limit, "verdict": verdict})
    return found


def print_rows(rows: list[dict[str, Any]], console: Any) -> None:
    """A table of the rows, and the goals."""
    from rich import box
    from rich.table import Table

    threads = rows[0]["threads"]
    table = Table(title=f"Host Adam, {threads} thread{'s' * (threads > 1)}", box=box.SIMPLE, title_justify="left")
    for column in ("", "ms", "bytes/param", "GB/s", "Gparam/s", "x time of ours"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    table.add_column("does")
    for row in rows:
        if "skipped" in row:
            table.add_row(row["name"], *[""] * 5, f"skipped: {row['skipped']}")
            continue
        shown = ((row["ms"], ".1f"), (row["bytes_per_parameter"], "d"), (row["gb_s"], ".1f"))
        shown += ((row["g_parameters_s"], ".3f"), (row["ratio"], ".2f"))
        table.add_row(row["name"], *("-" if v is None else format(v, form) for v, form in shown), row["what"])
    console.print(table)
    share = max(row["core_share"] for row in rows if "ms" in row)
    if share < BUSY_CORE_SHARE:
        console.print(f"The machine was busy (this process got {share:.0%} of its cores): not to be trusted.")
    for goal in goals(rows):
        value = "" if goal["value"] is None else f"{goal['value']:.2f}, "
        console.print(f"{goal['text']}: {value}goal at least {goal['limit']}: {goal['verdict']}")


def main(argv: list[str] | None = None) -> int:
    """The command line; see the head of this file."""
    parser = Parser(prog="python -m zeroshard.bench.cpu_adam", description="Measure the host's Adam step.")
    add = parser.add_argument
    add("--millions", type=int, default=64, help="parameters, in units of 2^20")
    add("--rounds", type=int, default=7, help="timed steps of each contender")
    add("--threads", type=int, nargs="+", default=None, help="thread counts; default: 1 and the number of cores")
    add("--chunks", action="store_true", help="zeroshard over chunk lengths as well")
    add("--huge-pages", action="store_true", help="the peers' tensors in 2 MiB pages, too")
    add("--no-deepspeed", action="store_true", help="leave DeepSpeed out (its extension takes a minute to build once)")
    try:
        given = parser.parse(sys.argv[1:] if argv is None else argv)
        if min(given.millions, given.rounds, *(given.threads or [1])) < 1:
            raise UsageError("expected --millions, --rounds and --threads of at least 1")
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 130)
    for threads in given.threads or sorted({1, cpu_kernels.host_threads(1)}):
        how = {"deepspeed": not given.no_deepspeed, "chunks": given.chunks, "huge_pages": given.huge_pages}
        print_rows(measure(given.millions << 20, given.rounds, threads=threads, **how), console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
