"""Notes of a rank's state for peers that have waited too long for it: step, gather, collectives, Python stack.

training thread        notes each collective (an append to a short list) and what it waits for; it sends nothing
desk's thread          `Progress.report()`, only when a peer asks: the notes, and the training thread's stack
rank that waited long  `describe(reports)`: the text of its StallError, the same on every backend
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn

_LAST = 8  # number of collectives in a report
_DEEPEST = 40  # most frames of a stack in a report
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))  # code here is torch's or ours, not the user's
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
    calls: tuple[tuple[int, int, str, str], ...]  # the last that every rank must make: number, step, what was called, where


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
        """Note that the program calls what every rank must call."""
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
            around = [label for label in turns if not waiting and f"{module}.".startswith(f"{_unit(label)}.")]
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


# -- the sentence --------------------------------------------------------------------------------------------


def describe(waited_s: float, reports: Mapping[int, Report | str], hint: str) -> str:
    """Return the text of a stall: the ranks that lag, the place of every rank, and its last collectives.

    reports: world rank -> its report, or why there is none. hint: what to say where all ranks have made the same calls.
    """
    hint = f"Did all ranks run the same modules and calls?{_one_sided(reports) or hint}"
    told = {rank: report for rank, report in sorted(reports.items()) if isinstance(report, Report)}
    steps = {report.step for report in told.values()}
    one = len(steps) == 1

    def place(rank: int) -> str:
        return _place(told[rank]) + ("" if one else f" in step {told[rank].step}")

    busy = [rank for rank in told if not told[rank].waiting]
    places = [f"rank {rank} {report}" for rank, report in sorted(reports.items()) if isinstance(report, str)]
    for some in (busy, [rank for rank in told if told[rank].waiting]):
        for text, each in _alike(some, place):
            plural = text.replace("computes or sleeps", "compute or sleep", 1).replace("waits", "wait", 1)
            places.append(f"{_ranks(each)} {plural if len(each) > 1 else text}")
    head = f"no progress for {waited_s:.0f} s: " + "; ".join(places) + (f"; step {next(iter(steps))}" if one else "")
    last = [f"{_ranks(each)}: {text}" for text, each in _alike(list(told), lambda rank: ", ".join(told[rank].last) or "none")]
    parts = [f"{head}. {hint} Last collectives: {'; '.join(last)}."]
    parts += [f"The Python stack of rank {rank}, which computes or sleeps:\n{told[rank].stack.rstrip()}\n" for rank in busy]
    return "\n".join(parts)


def _one_sided(reports: Mapping[int, Report | str]) -> str:
    """Return ' Rank 0 called zs.full_state_dict() ...' for the first of the last calls that not all ranks have made."""
    told = {
        rank: {call[0]: call[1:] for call in each.calls} for rank, each in sorted(reports.items()) if isinstance(each, Report)
    }
    first = max((min(calls, default=1) for calls in told.values()), default=1)  # earlier calls are not kept everywhere
    for number in sorted({number for calls in told.values() for number in calls if number >= first}):
        made = {rank: calls.get(number, (0, "", "")) for rank, calls in told.items()}
        if len({what for _, what, _ in made.values()}) > 1:
            caller = max(told, key=lambda rank: (max(told[rank], default=0), -rank))  # who has made more calls
            step, what, place = made[caller]
            missed = [rank for rank in made if made[rank][1] != what]
            called = _ranks([rank for rank in made if made[rank][1] == what]).capitalize()
            on_the_way = not all(isinstance(each := reports[rank], Report) and each.waiting for rank in missed)
            so_far = " so far: every rank must call it." if on_the_way else ": call it on all ranks."
            return f" {called} called {what} in step {step} ({place}), and {_ranks(missed)} did not{so_far}"
    return ""


def places_of(reports: Mapping[int, Report | str]) -> dict[int, str]:
    """Return rank -> label of its wait, or "forward of <module>", for ranks in one of these (see `control.misuse`)."""
    told = {rank: report for rank, report in reports.items() if isinstance(report, Report)}
    places = {rank: each.waiting or (f"forward of {each.module}" if each.module else "") for rank, each in told.items()}
    return {rank: place for rank, place in places.items() if place}


def _place(report: Report) -> str:
    """Return 'waits at `layers.7` (gather #40)' or 'computes or sleeps in `layers.8` (...)'."""
    unit, place = _unit(report.gather), _unit(report.waiting) if report.waiting else report.module
    number = f"gather #{report.turn}" if report.turn else "no gather so far"
    number += f": `{unit}`" if report.turn and unit != place else ""
    if not report.waiting:
        where = f" in `{report.module}`" if report.module else ""
        return f"computes or sleeps{where}{f', in {report.function}' if report.function else ''} ({number})"
    quoted = f"`{place}`" if report.waiting == report.gather else f"'{place}'"
    return f"waits at {quoted} ({number}){f' for {_ranks(report.missing)}' if report.missing else ''}"


def _unit(label: str) -> str:
    """Return 'layers.7' for the label 'gather layers.7 (torch.float32)'."""
    return label.removeprefix("gather ").rpartition(" (torch.")[0] or label


def _alike(ranks: list[int], text: Callable[[int], str]) -> list[tuple[str, list[int]]]:
    """Return (text, ranks) for each distinct text, so that ranks with the same text are named together."""
    found: dict[str, list[int]] = {}
    for rank in ranks:
        found.setdefault(text(rank), []).append(rank)
    return list(found.items())


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
