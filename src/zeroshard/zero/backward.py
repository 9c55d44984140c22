"""State of one backward of a model. A new object is made for each backward; dropping it resets the state.

    a gradient reaches the model's output ... units, parameters ... end: the callback that autograd was given

Autograd does not call the callback of a backward that fails, and reports the failure to nobody: it only drops the callback. So
`Backward` keeps a weak reference to the callback: a dead one, before the end was reached, means that the backward failed.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from ..utils import torch_compat
from .unit import Unit


@dataclass
class _Tally:
    """Count of one unit's gradients in this backward."""

    arrived: set[int] = field(default_factory=set)  # numbers of parameters that have a gradient
    since_left: set[int] = field(default_factory=set)  # the same, of this round (see `arrive`)
    task: int = -1  # autograd's number of the (reentrant) backward that computed the newest gradients


class Backward:
    """State of one backward. begun: it has reached a unit; scaled: the loss scale was applied.

    thread: number of the thread on which its first hook ran; None once it has failed.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        """Construct it inside the backward; `at_end` is called when the backward ends, if it has begun."""
        self.begun = self.scaled = False
        self.thread: int | None = threading.get_ident()
        self._tallies: dict[int, _Tally] = defaultdict(_Tally)  # by number of the unit

        def end() -> None:
            if self.begun:
                at_end()

        self._end = weakref.ref(end)
        torch_compat.at_end_of_backward(end)

    @property
    def alive(self) -> bool:
        """True until autograd has dropped the callback: the backward has ended or failed."""
        return self._end() is not None

    def arrive(self, unit: Unit, number: int) -> tuple[bool, bool]:
        """Count the gradient of a parameter. Return (it completes the unit in this backward, it completes a further round).

        A round is complete when every parameter has got a gradient since the round before: there is one for each reentrant
        checkpoint that uses the unit, since each runs a backward of its own.
        """
        tally, task = self._tallies[unit.number], torch_compat.graph_task()
        if task != tally.task:
            tally.task = task
            tally.since_left.clear()
        tally.since_left.add(number)
        first = number not in tally.arrived
        tally.arrived.add(number)
        leaves = len(tally.since_left) == unit.expected
        if leaves:
            tally.since_left.clear()
        return first and len(tally.arrived) == unit.expected, leaves

    def awaits(self, unit: Unit) -> bool:
        """True in the middle of a round (see `arrive`): some of the unit's gradients have come, and others are missing."""
        return bool(self._tallies[unit.number].since_left)
