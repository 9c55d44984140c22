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


class ModelForwards(list[ModelForward]):
    """The running forwards of a model, the outermost first: they nest if it calls itself.

    training: the model was entered with gradients enabled. viewed: units whose forward has returned views of their memory, which
    therefore stay gathered until the outermost forward ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.training = False
        self.viewed: list[Unit] = []

    def end(self) -> None:
        """End the newest forward, if any: apply its changes of copied arguments to the caller's own objects."""
        forward = self.pop() if self else None
        if forward is not None and forward.given is not None:
            forward.given.hand_back()
        self.training = False

    def drop_interrupted(self) -> bool:
        """Drop the forwards whose calls have ended without the hook at their end (KeyboardInterrupt); return whether there were any."""
        interrupted = [each for each in self if each.frame is not None and ended(each.frame)]
        self[:] = [each for each in self if each not in interrupted]
        return bool(interrupted)
