"""State of the forwards of a model that run now: from the hook at the beginning of the model's call to the one at its end."""

from __future__ import annotations

from dataclasses import dataclass
from types import FrameType

from ..utils.autograd import ended
from ..utils.tensor_tree import Exchanged
from .unit import Unit


@dataclass(eq=False)
class ModelForward:
    """One running forward of a model. frame: of its call; None if compiled. given: its arguments if any is cast, else None."""

    frame: FrameType | None
    given: Exchanged | None


class ModelForwards:
    """The running forwards of a model, which nest if it calls itself. False if none runs.

    training: the model was entered with gradients enabled. viewed: units whose forward has returned views of their memory, which
    therefore stay gathered until the outermost forward ends.
    """

    def __init__(self) -> None:
        self.training = False
        self.viewed: list[Unit] = []
        self._running: list[ModelForward] = []

    def __bool__(self) -> bool:
        return bool(self._running)

    @property
    def outermost(self) -> ModelForward:
        """The first of the running forwards; there must be one."""
        return self._running[0]

    def begin(self, frame: FrameType | None, given: Exchanged | None) -> None:
        """A forward begins."""
        self._running.append(ModelForward(frame, given))

    def end(self) -> None:
        """The newest forward ends, if one had begun: give its caller what it has changed in copies of its arguments."""
        for forward in self._running[-1:]:
            self._running.pop()
            if forward.given is not None:
                forward.given.hand_back()
        self.training = False

    def drop_interrupted(self) -> bool:
        """Drop the forwards whose calls have ended without the hook at their end (KeyboardInterrupt); return whether there were any."""
        interrupted = [each for each in self._running if each.frame is not None and ended(each.frame)]
        self._running = [each for each in self._running if each not in interrupted]
        return bool(interrupted)
