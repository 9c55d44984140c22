"""Scenarios of failing ranks: each in a child that a rank forks, which forms a process group of its own and lives and dies as a rank.

Starting processes costs more than all that they do in a scenario, so the ranks themselves are started once for many.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from zeroshard.comm.launch import rank_environment

Scenario = Callable[[int, int], Any]  # (rank, world) -> what the child answers
LIMIT_S = 40.0  # for one scenario


class Outcome(NamedTuple):
    """How one rank of a scenario ended."""

    exitcode: int  # negative: a signal, SIGKILL where it hung
    value: Any
    text: str  # the traceback, or ""


def run_forked(
    rank: int, world: int, ports: dict[str, int], scenarios: dict[str, Scenario], waiting: Collection[str] = ()
) -> dict[str, Outcome]:
    """Every scenario that has a port in a child of its own; name -> how it ended. Those that mostly wait do so together."""
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # torch imports half of itself here: once, not in each child
    rounds, ended = [[name for name in ports if name in waiting], *([name] for name in ports if name not in waiting)], {}
    for names in rounds:
        children = {name: _Child(scenarios[name], ports[name], rank, world) for name in names}
        while not all(child.over() for child in children.values()):
            time.sleep(0.01)
        ended |= {name: child.outcome for name, child in children.items()}
    return ended


class _Child:
    """A rank of a scenario: forked, listened to, killed if it hangs."""

    def __init__(self, scenario: Scenario, port: int, rank: int, world: int) -> None:
        os.environ.update(rank_environment(rank, world, port))
        self.reader, writer = os.pipe()
        self.started, self.data, self.outcome = time.monotonic(), b"", None
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.reader)
            _live(scenario, rank, world, writer)
        os.close(writer)
        os.set_blocking(self.reader, False)

    def over(self) -> bool:
        """Whether it has ended, `outcome` then says how. Never waits."""
        if self.outcome is not None:
            return True
        pid, code = os.waitpid(self.pid, os.WNOHANG)
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.reader, 1 << 20):
                self.data += part
        if pid:
            os.close(self.reader)
            value, text = pickle.loads(self.data) if self.data else (None, "")
            self.outcome = Outcome(os.waitstatus_to_exitcode(code), value, text)
        elif time.monotonic() - self.started > LIMIT_S:
            os.kill(self.pid, signal.SIGKILL)
        return self.outcome is not None


def _live(scenario: Scenario, rank: int, world: int, writer: int) -> None:
    """The child: an uncaught exception goes through sys.excepthook, as in a script."""
    code, answer = 0, (None, "")
    try:
        torch.set_num_threads(1)
        answer = (scenario(rank, world), "")
    except SystemExit as end:
        code = end.code or 0
    except BaseException as error:
        code, answer = 1, (None, traceback.format_exc())
        sys.excepthook(type(error), error, error.__traceback__)
    data = pickle.dumps(answer)
    while data:
        data = data[os.write(writer, data) :]
    os._exit(code)
