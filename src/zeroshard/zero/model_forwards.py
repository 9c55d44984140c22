"""The running forwards of a model: each begins in the hook before the model's call and ends in the hook after it."""

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
        """Record that a forward begins."""
        self._running.append(ModelForward(frame, given))

    def end(self) -> None:
        """End the newest forward, if any: apply its changes of copied arguments to the caller's own objects."""
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
