"""The record of one optimizer step: `optimizer.last_step`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepRecord:
    """The outcome of one optimizer step.

    grad_norm: global norm before clipping (of the unscaled mean gradient). clip_coefficient: factor by which gradients were
    multiplied (1.0: not clipped). skipped: nothing was stepped, because gradients were non-finite or there were
    none. nonfinite: "name (rank r)" of each parameter with non-finite gradients. loss_scale: of fp16, before the step.
    """

    grad_norm: float
    clip_coefficient: float
    skipped: bool
    nonfinite: tuple[str, ...] = ()
    loss_scale: float = 1.0

    @property
    def clipped_norm(self) -> float:
        """Global norm after clipping."""
        return self.grad_norm * self.clip_coefficient
