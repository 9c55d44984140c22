"""The record of one optimizer step: `optimizer.last_step`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepRecord:
    """The outcome of one call of `optimizer.step()`.

    Attributes:
        grad_norm: global norm of the mean gradient before clipping, without the loss scale.
        clip_coefficient: the factor by which gradients were clipped; 1.0 where they were not.
        skipped: True if no parameter was stepped, because gradients were not finite or no parameter had one.
        nonfinite: "name (rank r)" of each parameter whose gradient was not finite.
        loss_scale: the loss scale of fp16 before the step.
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
