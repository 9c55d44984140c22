"""The sections that are programs of their own, host Adam and the disk: run in a process of their own, as rows and goals.

Each of them can also be called by itself: `python -m zeroshard.bench.cpu_adam`, `python -m zeroshard.bench.disk`.
What cannot be measured here (no room, no disk) is a line in place of the numbers.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .statistics import Goal

HOSTADAM_NUMEL, HOSTADAM_ROUNDS = 1 << 25, 5  # 512 MB a memory copy moves: far beyond any cache
DISK_NBYTES, DISK_ROUNDS = 1 << 29, 4


@dataclass(frozen=True)
class Measured:
    """What a program gave, or why it gave nothing. hostadam: rows by number of threads; disk: see disk.run."""

    hostadam: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    disk: dict[str, Any] | None = None
    skipped: dict[str, str] = field(default_factory=dict)  # by section

    @property
    def goals(self) -> list[Goal]:
        return [*self._hostadam_goals(), *self._disk_goals()]

    def _hostadam_goals(self) -> list[Goal]:
        from .cpu_adam import goals

        return [
            Goal(f"host Adam, {threads} thread{'s' * (threads > 1)}: {g['text']}", g["value"], g["limit"], "hostadam", True)
            for threads, rows in self.hostadam.items()
            for g in goals(rows)
        ]

    def _disk_goals(self) -> list[Goal]:
        from .disk import GOAL

        if self.disk is None:
            return []
        return [
            Goal(f"file engine / best of dd and fio, {mode}", self.disk[mode]["ratio"], GOAL, "disk", True)
            for mode in ("write", "read")
        ]


def measure(sections: tuple[str, ...], path: str | None, log_dir: Path, say: Callable[[str], None]) -> Measured:
    """Run those of the two that are asked for."""
    hostadam: dict[int, list[dict[str, Any]]] = {}
    disk, skipped = None, {}
    log_dir.mkdir(parents=True, exist_ok=True)
    if "hostadam" in sections:
        say("host Adam beside memory copies, DeepSpeed's CPUAdam and torch's AdamW")
        try:
            hostadam = apart(_hostadam, str(log_dir / "hostadam.log"))
        except Exception as error:
            skipped["hostadam"] = _line(error)
    if "disk" in sections and path is None:
        skipped["disk"] = "no folder on a local disk; name one with --path"
    elif "disk" in sections:
        say("file engine beside dd and fio")
        try:
            disk = apart(_disk, path, str(log_dir / "disk.log"))
        except Exception as error:
            skipped["disk"] = _line(error)
    return Measured(hostadam, disk, skipped)


def apart(function: Callable[..., Any], *args: object) -> Any:
    """The function's result, from a fresh process; raises what it raises there, or if it dies."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def _hostadam(log_file: str) -> dict[int, list[dict[str, Any]]]:
    from ..optim.cpu_kernels import host_threads
    from . import cpu_adam as hostadam
    from .worker import divert_output

    divert_output(log_file)  # of DeepSpeed and the compiler of its extension
    counts = sorted({1, host_threads(1)})
    return {threads: hostadam.measure(HOSTADAM_NUMEL, HOSTADAM_ROUNDS, threads=threads) for threads in counts}


def _disk(path: str, log_file: str) -> dict[str, Any]:
    from . import disk
    from .worker import divert_output

    divert_output(log_file)
    return disk.run(path, DISK_NBYTES, DISK_ROUNDS)


def _line(error: Exception) -> str:
    text = str(error).strip() or repr(error)
    return f"{type(error).__name__}: {text.splitlines()[0]}"
