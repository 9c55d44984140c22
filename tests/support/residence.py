"""What code adds to a process: its peak of resident memory (Linux), and a process of its own to count in."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from benchmarks.memory import field_nbytes, peak_rss_nbytes, reset_peak_rss
from zeroshard.comm.launch import run_processes


def in_own_process(test: Callable[..., None]) -> Callable[..., None]:
    """The test runs in a new process: what it counts there (memory, threads, descriptors) is none of an earlier test's.

    Fixtures that reach it must be picklable: those that patch this process would not reach it.
    """

    @functools.wraps(test)
    def started(**fixtures: Any) -> None:
        run_processes(_call, 1, test.__module__, test.__name__, fixtures)

    return started


def _call(rank: int, world_size: int, module: str, name: str, fixtures: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    getattr(importlib.import_module(module), name).__wrapped__(**fixtures)


def wait_for_threads(number: int, seconds: float = 10.0) -> None:
    """Until this process has at most `number` threads. One that was joined may still be giving its memory back."""
    deadline = time.monotonic() + seconds
    while (found := psutil.Process().num_threads()) > number:
        assert time.monotonic() < deadline, f"{found} threads, {number} expected"
        time.sleep(0.01)


class Peak:
    """`with Peak() as peak: ...`, then peak.added_nbytes.

    Not getrusage's ru_maxrss: a program inherits that of the process that started it, so a large parent hides everything.
    """

    added_nbytes = 0

    def __enter__(self) -> Peak:
        reset_peak_rss()
        self._before = field_nbytes("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.added_nbytes = peak_rss_nbytes() - self._before
