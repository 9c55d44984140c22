"""The form of every micro benchmark: cases that take turns in one process, and a fresh process for them.

    warm up   copy   ours   peer          not counted
    round 1   peer   copy   ours          who follows whom changes: a large cache holds what the last one left
    round 2   ours   peer   copy          ratios are taken within a round: a slow moment of the machine hits all

The cases are in cases.py; tables.py has the form of what they give.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

from zeroshard.comm.launch import describe_exit, run_processes
from zeroshard.utils.sheets import WARNING

from .tables import BUSY_CORE_SHARE, Bound, Measured, Row

Sample = TypeVar("Sample")
LIMIT_S = 3600.0


@dataclass(frozen=True)
class Case:
    """One row to be measured. call is timed, before is not; nbytes: bytes that a call reads and writes.

    own_clock: `call` returns the seconds that it took, as a program of its own does, whose start does not count."""

    name: str
    call: Callable[[], object]
    before: Callable[[], object] = lambda: None
    nbytes: float | None = None
    own_clock: bool = False

    def sample(self) -> tuple[float, float]:
        """Return the seconds of one call, and the processor seconds of all threads of this process in it."""
        self.before()
        wall, cpu = time.perf_counter(), time.process_time()
        told = self.call()
        seconds = time.perf_counter() - wall
        return told if self.own_clock and isinstance(told, float) else seconds, time.process_time() - cpu


def measure(
    title: str, cases: list[Case], rounds: int, bounds: Sequence[Bound] = (), *, warmup: int = 1, threads: int = 0
) -> Measured:
    """Let the cases take turns; return their table. threads: that a case keeps busy, to tell a busy machine; 0: unknown."""
    turns = take_turns({case.name: case.sample for case in cases}, rounds, warmup)
    rows = [Row(case.name, [seconds for seconds, _ in turns[case.name]], case.nbytes) for case in cases]
    found = Measured(title, rows, bounds, peers={f"/ {cases[0].name}": cases[0].name})
    if threads:
        share = max(median(cpu / (threads * wall) for wall, cpu in each) for each in turns.values())
        if share < BUSY_CORE_SHARE:
            found.notes.append((f"The machine was busy: this process got {share:.0%} of its cores. Run again.", WARNING))
    return found


def take_turns(contenders: dict[str, Callable[[], Sample]], rounds: int, warmup: int = 0) -> dict[str, list[Sample]]:
    """Call each contender once a round, in a new order; return what each gave, round by round, after the `warmup` rounds.

    The order depends on the number of the round alone: ranks that call this together are always at the same contender.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    for number in range(warmup + rounds):
        for name in random.Random(number).sample(list(contenders), len(contenders)):
            sample = contenders[name]()
            if number >= warmup:
                samples[name].append(sample)
    return samples


class Unmeasured(RuntimeError):
    """Raised when a measurement has no result; the message says why, in one line."""


def apart(function: Callable[..., Sample], *args: object, log_file: object, timeout_s: float = LIMIT_S) -> Sample:
    """Call a function in a fresh process whose output goes to a file; return its result. Raises Unmeasured if it fails."""
    (ended,) = run_processes(_call, 1, function, args, str(log_file), timeout_s=timeout_s, check=False)
    if ended.error:
        with open(str(log_file), "a") as log:
            log.write(ended.error)
        raise Unmeasured(ended.error.strip().splitlines()[-1])
    if not ended.ok:
        raise Unmeasured(f"the process ended by {describe_exit(ended.exitcode)}, at most {timeout_s:.0f} s")
    return ended.value


def _call(rank: int, world_size: int, function: Callable[..., object], args: tuple[object, ...], log_file: str) -> object:
    divert_output(log_file)  # DeepSpeed, and the compiler of its extension, print much
    return function(*args)


def one_line(error: BaseException) -> str:
    """Return an error's type and first line, for a table."""
    text = str(error).strip() or repr(error)
    return f"{type(error).__name__}: {text.splitlines()[0]}"


def divert_output(log_file: str) -> None:
    """Send all further output of this process to a file."""
    Path(log_file).parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
