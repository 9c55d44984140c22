"""Notes of a rank's state: step, gather, collectives, Python stack. Peers that have waited too long for it ask for them.

training thread        notes each collective (an append to a short list) and what it waits for; it sends nothing
desk's thread          `Progress.report()`, only when a peer asks: the notes, and the training thread's stack
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn

_LAST = 8  # number of collectives in a report
_DEEPEST = 40  # most frames of a stack in a report
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))  # code here is torch's or ours, not the user's
_NOT_USERS = (*_OWN, contextlib.__file__, "<")
_DULL = (str(Path(nn.__file__).parent / "modules" / "module.py"),)  # left out: every call of a module has its frames


class Report(NamedTuple):
    """A rank's report of itself, in plain values."""

    rank: int  # world rank
    step: int  # number of the current step, from 1
    turn: int  # number in this step, from 1, of the gather that the rank waits in, else of the latest one; 0: none so far
    gather: str  # label of that gather
    last: tuple[str, ...]  # labels of the last collectives, the latest last
    waiting: str  # label of the operation in which the rank waits for peers; "": it computes or sleeps
    missing: tuple[int, ...]  # ranks that it waits for, where they are known
    module: str  # name of the module whose forward runs
    function: str  # "name (file:line)": the innermost call outside of torch and this library
    stack: str
    calls: tuple[tuple[int, int, str, str], ...]  # last calls of collective functions: number, step, what was called, where


class Progress:
    """Notes of one rank about its step and collectives. models: `report` looks up names of modules in them.

    Threads: only the thread that uses the Comm writes. `report` may run in any thread (a desk's), and reads atomic copies.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.step, self.waiting = 1, ""
        self._missing: Callable[[], list[int]] | None = None
        self.gathers = 0  # number of gathers begun in this step
        self.turns: dict[str, int] = {}  # label -> number of its latest gather in this step
        self.last: deque[str] = deque(maxlen=_LAST)
        self.calls: deque[tuple[int, int, str, str]] = deque(maxlen=_LAST)
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._home = self._acting = threading.get_ident()

    def note(self, label: str) -> None:
        """Note that a collective begins."""
        self.last.append(label)
        self._acting = threading.get_ident()  # backward on a GPU has threads of its own

    def note_gather(self, label: str) -> None:
        """Note that a gather begins."""
        self.note(label)
        self.gathers += 1
        self.turns[label] = self.gathers

    def note_call(self, what: str) -> None:
        """Note that the program calls a collective function of this library, and from which line."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
            frame = frame.f_back
        place = "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        self.calls.append((self.calls[-1][0] + 1 if self.calls else 1, self.step, what, place))

    def place(self, label: str) -> str:
        """Return `label` with this rank's step appended, for errors."""
        return label if label.endswith("]") else f"{label} [step {self.step}]"

    def step_over(self, steps: int) -> None:
        """Note that `steps` steps of a model are done: all ranks have met, so that a call of one rank before it stalls nothing."""
        self.step, self.gathers = steps + 1, 0
        self.turns.clear()
        self.calls.clear()

    def wait(self, label: str, missing: Callable[[], list[int]] | None = None) -> None:
        """Note that this rank begins to wait for peers. missing: returns the ranks that it waits for."""
        self.waiting, self._missing = label, missing

    def awake(self) -> None:
        """Note that this rank no longer waits."""
        self.waiting, self._missing = "", None

    def report(self) -> Report:
        """Return the present state of this rank. May be called from any thread."""
        running, stacks = sys._current_frames(), list[list[FrameType]]()  # of each thread, from the innermost call outwards
        for ident in dict.fromkeys((self._home, self._acting)):
            frames: list[FrameType] = []
            frame = running.get(ident)
            while frame is not None:
                frames.append(frame)
                frame = frame.f_back
            if frames:
                stacks.append(frames)
        shown = []
        for frames in stacks:
            told = [call for call in frames if call.f_code.co_filename not in _DULL][:_DEEPEST]
            summary = traceback.StackSummary.extract((call, call.f_lineno) for call in reversed(told))
            shown.append("".join(summary.format()))
        calls = [call for frames in stacks for call in frames]
        holders = (call.f_locals.get("self") for call in calls)
        module = next((self._name(each) for each in holders if isinstance(each, nn.Module)), "")  # the innermost
        users = (call for call in calls if not call.f_code.co_filename.startswith(_NOT_USERS))
        places = (f"{call.f_code.co_name} ({Path(call.f_code.co_filename).name}:{call.f_lineno})" for call in users)
        waiting, turns = self.waiting, dict(self.turns)
        gather = waiting  # the gather waited for, else the one that fetched the module, else the latest
        if waiting not in turns:
            around = [label for label in turns if not waiting and f"{module}.".startswith(f"{unit_of(label)}.")]
            gather = max(around, key=len, default=max(turns, key=lambda label: turns[label], default=""))
        missing = self._missing
        whom = tuple(missing()) if missing is not None else ()
        return Report(
            self.rank, self.step, turns.get(gather, 0), gather, tuple(self.last), waiting, whom, module,
            next(places, ""),
            "".join(shown[:1] + [f"  (and in the thread of autograd)\n{stack}" for stack in shown[1:]]), tuple(self.calls),
        )  # fmt: skip

    def _name(self, module: nn.Module) -> str:
        """Return the name of a module in its model, or that of its class."""
        with contextlib.suppress(RuntimeError):  # the training thread is changing the model
            for model in list(self.models):
                for name, each in model.named_modules(remove_duplicate=False):
                    if each is module:
                        return name or type(module).__name__
        return type(module).__name__


def unit_of(label: str) -> str:
    """Return 'layers.7' for the label 'gather layers.7 (torch.float32)'."""
    return label.removeprefix("gather ").rpartition(" (torch.")[0] or label
