"""A benchmark of the Adam step on the CPU: zeroshard beside memory copies, DeepSpeed's compiled CPUAdam and torch's AdamW.

    zeroshard bench --sections hostadam                 32M parameters, 1 thread and as many as there are cores

The *job* is that of ZeRO-Offload: bf16 gradients to bf16 parameters, with fp32 masters and two fp32 states. Bytes that
it has to move per parameter: read gradient 2 + master 4 + states 8, write master 4 + states 8 + parameter 2 = 28.
A memory copy of a working set as large (16 bytes a parameter: 8 to 8) moves 16: its speed is bytes read + bytes
written per second, as STREAM counts them. Contenders take turns in each round; times are medians over rounds, ratios
medians of the ratios within a round. Values are not compared here (tests/optim/test_cpu_kernels.py does that).

Each library works on the kind of memory that it uses for offload: zeroshard (and the memory copy) on that of its host tier,
mapped in huge pages; the peers on tensors that torch allocates.

DeepSpeed's kernel takes parameters and gradients of one dtype: for the job it needs an fp32 copy of the gradients (made
while they arrive from the device) and a cast of the masters (deepspeed/runtime/zero/stage_1_and_2.py does both, over
whole tensors). Other rows show its kernel alone, on fp32 gradients that were cast before, zeroshard's kernel on the same
gradients, and DeepSpeed's bf16 mode, which has no masters: 22 bytes a parameter, other results.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.memory.io.aligned import empty_aligned
from zeroshard.optim import cpu_kernels
from zeroshard.utils.sheets import WARNING, Sheet

from .micro_benchmark import median_ratio, one_line, take_turns
from .statistics import BUSY_CORE_SHARE
from .tables import Column, Goal, sheet_of

OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
OURS, COPY, DEEPSPEED, FOREACH, FUSED = "zeroshard", "memory copy", "deepspeed", "torch foreach", "torch fused"
COLUMNS = (
    Column("", itemgetter("name")),
    Column("ms", itemgetter("ms"), ".1f"),
    Column("bytes/param", itemgetter("bytes_per_parameter"), "d"),
    Column("GB/s", itemgetter("gb_s"), ".1f"),
    Column("Gparam/s", itemgetter("g_parameters_s"), ".3f"),
    Column("x time of ours", itemgetter("ratio"), ".2f"),
    Column("does", itemgetter("what")),
)
GOALS = (  # name of the peer, the ratio that is compared, its least value
    (COPY, "bytes/s of the update over bytes/s of a memory copy", 0.9),
    (DEEPSPEED, "speed over DeepSpeed's CPUAdam, same job", 1.0),
    (FOREACH, "speed over torch's AdamW(foreach=True), same job", 4.0),
)


class Memory:
    """The tensors that contenders share, 36 bytes a parameter; they are filled before anything is timed."""

    def __init__(self, numel: int, huge_pages: bool) -> None:
        self.numel, self._huge_pages = numel, huge_pages
        self.grad = self._new(numel, torch.bfloat16).normal_(std=1e-3)
        self.out = self._new(numel, torch.bfloat16).zero_()
        self.master = self._new(numel).normal_()
        self.exp_avg, self.exp_avg_sq = self._new(numel).zero_(), self._new(numel).zero_()
        self.grad32 = self._new(numel).copy_(self.grad)  # for contenders that step whole tensors
        self.source, self.target = self._new(2 * numel).zero_(), self._new(2 * numel).zero_()

    def _new(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return empty_aligned(numel * dtype.itemsize).view(dtype) if self._huge_pages else torch.empty(numel, dtype=dtype)

    def state(self, step: Any) -> dict[str, Any]:
        return {"step": step, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


@dataclass(frozen=True)
class Contender:
    """A kernel to be timed. bytes_per_parameter: bytes that a step reads and writes; None where its passes are not known."""

    name: str
    bytes_per_parameter: int | None
    what: str
    step: Callable[[], object]


def _zeroshard(memory: Memory, threads: int, team: cpu_kernels.Team) -> list[Contender]:
    """Return zeroshard's contenders. While one steps, torch has `threads` threads; each thread of `team` uses one of its own."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], **OPTIONS)
    options = optimizer.param_groups[0]
    kernel = cpu_kernels.kernel_for(optimizer, options)
    assert kernel is not None
    state = memory.state(torch.zeros(()))

    def job(team: cpu_kernels.Team | None = team) -> None:
        cpu_kernels.step_stretch(kernel, memory.master, memory.grad, state, options, out=memory.out, team=team)

    def alone() -> None:
        cpu_kernels.step_stretch(kernel, memory.master, memory.grad32, state, options, team=team)

    found = [
        Contender(OURS, 28, "the job, in chunks", job),
        Contender(f"{OURS} kernel", 28, "fp32 gradients given, no bf16 parameters", alone),
    ]
    if threads > 1:
        found.append(Contender(f"{OURS} joint", 28, "torch's threads on one chunk at a time", partial(job, None)))
    return found


def _whole(memory: Memory, name: str, bytes_per_parameter: int | None, optimizer: torch.optim.Optimizer) -> Contender:
    """Return the contender whose optimizer steps the whole fp32 master, with casts of gradients before and parameters after."""

    def job() -> None:
        memory.grad32.copy_(memory.grad)
        optimizer.step()
        memory.out.copy_(memory.master)

    return Contender(name, bytes_per_parameter, "the job: cast, step, cast over whole tensors", job)


def _torch(memory: Memory, variant: dict[str, bool]) -> torch.optim.AdamW:
    param = nn.Parameter(memory.master)
    param.grad = memory.grad32
    optimizer = torch.optim.AdamW([param], **OPTIONS, **variant)
    optimizer.state[param] = memory.state(torch.zeros(()))
    return optimizer


def _deepspeed(memory: Memory) -> list[Contender]:
    """Return DeepSpeed's contenders. Raises where the package is missing or its extension does not build."""
    with contextlib.redirect_stdout(sys.stderr):  # importing it prints a banner, and the output of its compiler
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        param, small = nn.Parameter(memory.master), nn.Parameter(memory.out)
        optimizer, light = (DeepSpeedCPUAdam([p], **OPTIONS) for p in (param, small))
    param.grad, small.grad = memory.grad32, memory.grad
    optimizer.state[param], light.state[small] = memory.state(0), memory.state(0)
    return [
        _whole(memory, DEEPSPEED, 40, optimizer),
        Contender(f"{DEEPSPEED} kernel", 28, "fp32 gradients given, no bf16 parameters", optimizer.step),
        Contender(f"{DEEPSPEED} bf16", 22, "bf16 parameters without masters: not the job", light.step),
    ]


@torch.no_grad()
def measure(numel: int = 1 << 25, rounds: int = 5, *, threads: int = 1, deepspeed: bool = True) -> list[dict[str, Any]]:
    """Measure all contenders; return one row for each. By default a memory copy moves 512 MB: far more than caches hold.

    Keys: name, what, threads, core_share (processor time of the step over threads x wall time), ms, bytes_per_parameter,
    gb_s (1e9 bytes a second), g_parameters_s (1e9 parameters a second), and ratio: its time over zeroshard's for the job.
    The last two are None for the memory copy. The row of a contender that cannot run has name and skipped (the reason).
    """
    with closing(cpu_kernels.Team(threads)) as team, cpu_kernels.stepping_threads(threads):
        memory = Memory(numel, huge_pages=True)
        theirs = Memory(numel, huge_pages=False)
        copy = Contender(COPY, 16, "copy_ within a working set as large", lambda: memory.target.copy_(memory.source))
        contenders, skipped = [*_zeroshard(memory, threads, team), copy], []
        if deepspeed:
            try:
                contenders += _deepspeed(theirs)
            except Exception as error:  # without the package, a compiler or ninja it raises errors of several types
                skipped = [{"name": DEEPSPEED, "skipped": one_line(error)}]
        contenders += [_whole(theirs, FUSED, 40, _torch(theirs, {"fused": True}))]
        contenders += [_whole(theirs, FOREACH, None, _torch(theirs, {"foreach": True}))]
        samples = take_turns({c.name: partial(_times, c.step) for c in contenders}, rounds, warmup=1)
    walls, rows = {name: [wall_s for wall_s, _ in of] for name, of in samples.items()}, []
    for contender in contenders:
        median_s, nbytes, updates = median(walls[contender.name]), contender.bytes_per_parameter, contender.name != COPY
        rows.append({
            "name": contender.name, "what": contender.what, "threads": threads,
            "core_share": median(cpu_s / (threads * wall_s) for wall_s, cpu_s in samples[contender.name]),
            "ms": 1e3 * median_s, "bytes_per_parameter": nbytes,
            "gb_s": None if nbytes is None else nbytes * numel / median_s / 1e9,
            "g_parameters_s": numel / median_s / 1e9 if updates else None,
            "ratio": median_ratio(walls[contender.name], walls[OURS]) if updates else None,
        })  # fmt: skip
    return rows + skipped


def _times(step: Callable[[], object]) -> tuple[float, float]:
    """Return the wall time of a step, and the processor time of all threads in it."""
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure_section() -> dict[int, list[dict[str, Any]]]:
    """Return the rows of `measure` by number of threads: one, and one for each core."""
    return {threads: measure(threads=threads) for threads in sorted({1, cpu_kernels.visible_cores()})}


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    """Return the goals with the values that the rows of one `measure` give."""
    by_name = {row["name"]: row for row in rows if "ms" in row}
    ours, found = by_name[OURS], []
    for peer, text, limit in GOALS:
        row = by_name.get(peer)
        value = None if row is None else ours["gb_s"] / row["gb_s"] if peer == COPY else row["ratio"]
        found.append(Goal(f"host Adam, {_threads(ours)}: {text}", value, limit, "hostadam", at_least=True))
    return found


def sheet(rows: list[dict[str, Any]]) -> Sheet:
    """Return the rows of one `measure` as a table."""
    measured = [row for row in rows if "ms" in row]
    notes = [(f"{row['name']}: skipped: {row['skipped']}", WARNING) for row in rows if "skipped" in row]
    share = max(row["core_share"] for row in measured)
    if share < BUSY_CORE_SHARE:
        notes.append((f"The machine was busy: this process got {share:.0%} of its cores. Run again.", WARNING))
    return sheet_of(f"Host Adam, bf16 gradients to bf16 parameters, {_threads(rows[0])}", COLUMNS, measured, notes)


def _threads(row: dict[str, Any]) -> str:
    return f"{row['threads']} thread{'s' * (row['threads'] > 1)}"
