"""Learning-rate schedulers do not count optimizer steps that were skipped for non-finite gradients.

The usual loop calls `scheduler.step()` after every `optimizer.step()`, or after an epoch of steps, and does not know which
of them were skipped. So the `step` of torch's scheduler classes is patched, once per process, to ask the optimizer.
Schedulers of optimizers that are not sharded work as before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch.optim import lr_scheduler

if TYPE_CHECKING:
    from ..engine.optimizer import StepRecord


class Tally:
    """Counts of an optimizer's `step` calls and of its skipped steps, now and at each scheduler's last step.

    holds: whether schedulers must not advance after skipped steps (Config.hold_schedulers).
    """

    def __init__(self, holds: bool) -> None:
        self.holds = holds
        self.asked = self.skipped = 0
        self.scheduling = False  # True inside a scheduler's step: the schedulers that it chains then step without asking
        self._seen: WeakKeyDictionary[lr_scheduler.LRScheduler, tuple[int, int]] = WeakKeyDictionary()

    @property
    def schedulers(self) -> list[lr_scheduler.LRScheduler]:
        """The schedulers that have stepped since sharding, in the order of their first step."""
        return list(self._seen)

    def note(self, record: StepRecord) -> StepRecord:
        """Count the step of a record, and return the record. A step without gradients does not count as skipped."""
        self.asked += 1
        self.skipped += record.skipped and not math.isfinite(record.grad_norm)
        return record

    def counts(self, scheduler: lr_scheduler.LRScheduler) -> bool:
        """Return whether the scheduler may step: not if the optimizer has skipped every step since the scheduler's last one."""
        asked, skipped = self._seen.get(scheduler, (0, 0))
        self._seen[scheduler] = self.asked, self.skipped
        return not self.holds or self.asked == asked or self.asked - asked > self.skipped - skipped


def respect_skipped_steps() -> None:
    """Patch torch's schedulers not to advance after skipped steps of a sharded optimizer. Idempotent."""
    for name in dir(lr_scheduler):
        cls = getattr(lr_scheduler, name)
        own = isinstance(cls, type) and issubclass(cls, lr_scheduler.LRScheduler) and "step" in cls.__dict__
        if own and not getattr(cls.step, "_zeroshard", False):
            cls.step = _standing_still(cls.step)


def _standing_still(step: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(step)
    def wrapper(self: lr_scheduler.LRScheduler, *args: object, **kwargs: object) -> None:
        optimizer = getattr(self, "optimizer", None)
        tally = getattr(getattr(optimizer, "core", optimizer), "tally", None)  # a late optimizer has one before it has a core
        if not isinstance(tally, Tally) or tally.scheduling:
            return step(self, *args, **kwargs)
        if not tally.counts(self) and getattr(self, "last_epoch", 0) >= 0:  # -1: the constructor's own first step
            return None
        tally.scheduling = True
        try:
            return step(self, *args, **kwargs)
        finally:
            tally.scheduling = False

    wrapper._zeroshard = True  # type: ignore[attr-defined]
    return wrapper


def rewrap_for_schedulers(optimizer: torch.optim.Optimizer) -> None:
    """Wrap `optimizer.step` for a scheduler built before sharding: it warns unless it finds its mark on that method."""
    plain: Callable[..., object] = optimizer.step

    def step(*args: object, **kwargs: object) -> object:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return plain(*args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign, assignment]
