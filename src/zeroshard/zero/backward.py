"""One backward of a model: what is true only while it runs. Dropping the object is the reset.

    a gradient reaches the model's output ... units, parameters ... end: the callback that autograd was given

A backward that fails never calls its end, and autograd tells nobody: it only drops the callback. So the callback is an
object that this looks after; where it is gone and the end was not reached, the backward has failed.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from ..utils import torch_compat
from .unit import Unit


class _End:
    """What autograd calls when the backward is over."""

    def __init__(self, backward: Backward, at_end: Callable[[], None]) -> None:
        self.backward, self.at_end = backward, at_end

    def __call__(self) -> None:
        if self.backward.begun:
            self.at_end()


@dataclass
class _Tally:
    """Gradients of one unit's parameters."""

    complete: int = 0  # parameters that have one
    since_left: set[int] = field(default_factory=set)  # numbers of those with one since the unit was last left
    task: int = -1  # autograd's number of the (reentrant) backward that brought them


class Backward:
    """begun: it has reached a unit; scaled: the loss scale was applied; thread: on which its first hook ran."""

    def __init__(self, at_end: Callable[[], None]) -> None:
        """To be made inside of the backward: `at_end` is called when it is over, if it has begun."""
        self.begun = self.scaled = False
        self.thread = threading.get_ident()
        self._arrived: set[int] = set()  # numbers of parameters
        self._tallies: dict[int, _Tally] = defaultdict(_Tally)  # by number of the unit
        end = _End(self, at_end)
        self._end = weakref.ref(end)
        torch_compat.at_end_of_backward(end)

    @property
    def alive(self) -> bool:
        """False where autograd has given it up, or is done with it."""
        return self._end() is not None

    def arrive(self, unit: Unit, number: int) -> tuple[bool, bool]:
        """A parameter of the unit has its gradient. (The last that the unit was waiting for?, all of them since it was left?)

        The second happens again with each reentrant checkpoint that uses the unit: its own backward brings all of them.
        """
        tally, task = self._tallies[unit.number], torch_compat.graph_task()
        if task != tally.task:
            tally.task = task
            tally.since_left.clear()
        tally.since_left.add(number)
        completes = False
        if number not in self._arrived:
            self._arrived.add(number)
            tally.complete += 1
            completes = tally.complete == unit.expected
        leaves = len(tally.since_left) == unit.expected
        if leaves:
            tally.since_left.clear()
        return completes, leaves

    def awaits(self, unit: Unit) -> bool:
        """True where some of the unit's gradients have come since it was last left, and others have not."""
        return bool(self._tallies[unit.number].since_left)
