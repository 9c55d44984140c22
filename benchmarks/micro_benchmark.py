"""Helpers of the micro-benchmarks: rounds in which all contenders take turns, medians, and a fresh process for a function.

warm up   copy   ours   peer          not counted
round 1   peer   copy   ours          who follows whom changes: a large cache holds what the last one left
round 2   ours   peer   copy          ratios are taken within a round: a slow moment of the machine hits all
"""

from __future__ import annotations

import os
import random
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TypeVar

from zeroshard.comm.launch import describe_exit, run_processes

Sample = TypeVar("Sample")
LIMIT_S = 3600.0


def take_turns(contenders: dict[str, Callable[[], Sample]], rounds: int, warmup: int = 0) -> dict[str, list[Sample]]:
    """Call each contender once a round, in a new order; return what each gave, round by round, after the `warmup` rounds."""
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    for number in range(warmup + rounds):
        for name in random.Random(number).sample(list(contenders), len(contenders)):
            sample = contenders[name]()
            if number >= warmup:
                samples[name].append(sample)
    return samples


def seconds(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def median_ratio(over: list[float], under: list[float]) -> float:
    """Return the median of the ratios within each round."""
    return median(a / b for a, b in zip(over, under, strict=True))


class Unmeasured(RuntimeError):
    """Raised when a measurement has no result; the message says why, in one line."""


def apart(function: Callable[..., Sample], *args: object, log_file: object, timeout_s: float = LIMIT_S) -> Sample:
    """Call a function in a fresh process whose output goes to a file; return its result. Raises Unmeasured if it fails."""
    (ended,) = run_processes(_call, 1, function, args, str(log_file), timeout_s=timeout_s, check=False)
    if not ended.ok:
        raise Unmeasured(f"the process ended by {describe_exit(ended.exitcode)}, at most {timeout_s:.0f} s")
    value, why = ended.value
    if why:
        raise Unmeasured(why)
    return value


def _call(
    rank: int, world_size: int, function: Callable[..., object], args: tuple[object, ...], log_file: str
) -> tuple[object, str]:
    divert_output(log_file)  # DeepSpeed, and the compiler of its extension, print much
    try:
        return function(*args), ""
    except Exception as error:
        traceback.print_exc()
        return None, one_line(error)


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
