"""What a step did: `optimizer.last_step`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step.

    grad_norm: global norm before clipping (of the unscaled mean gradient). clip_coefficient: what gradients were
    multiplied with (1.0: not clipped). skipped: nothing was stepped, because of non-finite gradients or for want of
    any. nonfinite: "name (rank r)" of each parameter with non-finite gradients. loss_scale: fp16, before the step.
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
