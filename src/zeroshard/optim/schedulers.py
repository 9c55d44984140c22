"""Learning-rate schedulers and skipped steps: a step that was skipped for non-finite gradients does not count.

The ordinary loop calls `scheduler.step()` after every `optimizer.step()` and can not know. So the schedulers of torch
ask the optimizer, once per process patched to do so; for optimizers that are not sharded nothing changes.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.optim import lr_scheduler


def respect_skipped_steps() -> None:
    """Let every scheduler stand still after a skipped step of a sharded optimizer. Idempotent."""
    for name in dir(lr_scheduler):
        cls = getattr(lr_scheduler, name)
        if isinstance(cls, type) and issubclass(cls, lr_scheduler.LRScheduler) and "step" in cls.__dict__:
            if not getattr(cls.step, "_zeroshard", False):
                cls.step = _standing_still(cls.step)


def _standing_still(step: Any) -> Any:
    @functools.wraps(step)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        record = getattr(getattr(self, "optimizer", None), "last_step", None)
        if record is not None and record.skipped and record.nonfinite and self.last_epoch >= 0:
            return None
        return step(self, *args, **kwargs)

    wrapper._zeroshard = True  # type: ignore[attr-defined]
    return wrapper
