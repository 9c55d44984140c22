"""Learning-rate schedulers do not count optimizer steps that were skipped for non-finite gradients.

The usual loop calls `scheduler.step()` after every `optimizer.step()`, or after an epoch of steps, and does not know which
of them were skipped. So the `step` of torch's scheduler classes is patched, once per process, to ask the optimizer.
Schedulers of optimizers that are not sharded work as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.optim import lr_scheduler

from ..engine.optimizer import Tally


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
