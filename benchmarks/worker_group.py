"""The controller's side of the worker processes: the team of all ranks of one contender, and the teams of one race.

A team that fails (an exception, a dead process, no answer in time) raises `TeamFailed` and is closed; the
others go on.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from unittest import mock

from zeroshard.tiers import visible_cores
from zeroshard.utils import torch_compat

from . import worker
from .plan import Contender, Workload

START_TIMEOUT_S = 400.0  # DeepSpeed compiles an extension on its first start
ANSWER_TIMEOUT_S, LONG_ANSWER_TIMEOUT_S = 600.0, 3600.0  # the second where a step takes minutes (sequences.py)
PRELOADED = (torch_compat.DYNAMO, "torch.distributed.fsdp", "zeroshard.parallel.parallelize", worker.__name__)
T = TypeVar("T")


class TeamFailed(RuntimeError):
    """Raised when the team of a contender fails; the message is one line for the table."""


class Team:
    """The processes of one contender, one per rank; they sleep on a pipe while other teams have their turn."""

    def __init__(self, contender: Contender, workload: Workload, log_dir: Path) -> None:
        self.contender = contender
        self.ready: list[Any] = []
        self._answer_s = LONG_ANSWER_TIMEOUT_S if workload.long else ANSWER_TIMEOUT_S
        self._meeting_dir = tempfile.TemporaryDirectory(prefix="zeroshard-bench-")
        self._pipes, self._processes = [], []
        meeting_file = os.path.join(self._meeting_dir.name, "store")
        method = "spawn"
        if (workload.mesh or workload.long or workload.forked) and "forkserver" in multiprocessing.get_all_start_methods():
            method = "forkserver"  # it has done all imports: with many ranks on a core, they would take minutes
            multiprocessing.set_forkserver_preload(list(PRELOADED))
        context: Any = multiprocessing.get_context(method)
        threads = max(1, visible_cores() // workload.ranks) if workload.device == "cuda" else 1  # peers step on the host, too
        with mock.patch.dict(os.environ, OMP_NUM_THREADS=str(threads)):  # processes read it when they import torch
            for rank in range(workload.ranks):
                here, there = context.Pipe()
                log_file = str(log_dir / f"{contender.name}.{rank}.log")
                given = (there, contender, workload, rank, meeting_file, log_file)
                process = context.Process(target=worker.serve, args=given, daemon=True)
                process.start()
                there.close()
                self._pipes.append(here)
                self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def wait_ready(self) -> None:
        self.ready = self._answers(START_TIMEOUT_S)

    def ask(self, *message: object, meanwhile: Callable[[], None] | None = None) -> list:
        """Send one message to every rank; return the answers in rank order. `meanwhile` is called repeatedly until all are in."""
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send(message)
            except OSError:
                self._fail_dead(rank)
        return self._answers(self._answer_s, meanwhile)

    def close(self) -> None:
        """End the processes; safe to call twice."""
        for pipe, process in zip(self._pipes, self._processes, strict=False):
            if process.is_alive():
                with suppress(OSError):
                    pipe.send(("quit",))
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []
        self._meeting_dir.cleanup()

    def _answers(self, timeout_s: float, meanwhile: Callable[[], None] | None = None) -> list:
        deadline = time.monotonic() + timeout_s
        answers: dict[int, object] = {}
        while len(answers) < len(self._pipes):
            waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            slice_s = 0.01 if meanwhile else min(1.0, timeout_s)
            for pipe in multiprocessing.connection.wait(list(waiting), slice_s):
                answers[waiting[pipe]] = self._receive(pipe, waiting[pipe])
            if meanwhile:
                meanwhile()
            if time.monotonic() > deadline:
                silent = ", ".join(str(r) for r in waiting.values() if r not in answers)
                self._fail(f"no answer from rank {silent} within {timeout_s:.0f} s")
        return [answers[rank] for rank in range(len(self._pipes))]

    def _receive(self, pipe: Any, rank: int) -> object:
        try:
            answer = pipe.recv()
        except (EOFError, ConnectionError):
            self._fail_dead(rank)
        if isinstance(answer, worker.Failure):
            self._fail(f"rank {rank}: {answer.summary}")
        return answer

    def _fail_dead(self, rank: int) -> NoReturn:
        self._processes[rank].join(5)
        self._fail(f"rank {rank} died (exit code {self._processes[rank].exitcode}); see its log")

    def _fail(self, reason: str) -> NoReturn:
        for process in self._processes:  # the other ranks may wait in a collective for ever
            process.kill()
        self.close()
        raise TeamFailed(reason)


class Teams(dict[str, Team]):
    """The teams that still run, by contender name; leaving the context ends their processes."""

    def __enter__(self) -> Teams:
        return self

    def __exit__(self, *_: object) -> None:
        for team in self.values():
            team.close()

    def attempt(self, record: Any, action: Callable[[Team], object]) -> None:
        """Call `action` with the team of record.contender if it still runs. If it fails, tell `record.fail` and remove the team."""
        name = record.contender.name
        if name in self:
            try:
                action(self[name])
            except TeamFailed as error:
                record.fail(str(error))
                del self[name]


def turned(items: list[T], index: int) -> list[T]:
    """Return `items` rotated by the index of the round, so that each has each place in the order."""
    at = index % len(items) if items else 0
    return items[at:] + items[:at]
