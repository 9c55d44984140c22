"""How far training has come, as a checkpoint keeps it: steps, and the loss scale of fp16.

The ordinary loop calls `loss.backward()` on an unscaled loss, so the scale is applied where the gradient enters the
model: outputs leave in fp32, and the gradient that comes back for them is multiplied there, still in fp32.
"""

from __future__ import annotations

from typing import Any

from ..config import Config


class LossScaler:
    """The loss scale: fixed, or dynamic (halved on overflow, doubled after `window` good steps)."""

    def __init__(self, scale: float, dynamic: bool, window: int) -> None:
        self.scale, self.dynamic, self.window = scale, dynamic, window
        self.good_steps = 0

    def update(self, overflow: bool) -> None:
        """Note one step; every rank must pass the same value."""
        if not self.dynamic:
            return
        if overflow:
            self.scale, self.good_steps = max(self.scale / 2, 2.0**-14), 0
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.scale, self.good_steps = self.scale * 2, 0


class Progress:
    """steps: that were taken, not skipped; scaler: None unless precision is fp16."""

    def __init__(self, config: Config) -> None:
        self.steps = 0
        self.scaler: LossScaler | None = None
        if config.precision == "fp16":
            dynamic = config.loss_scale == "dynamic"
            scale = config.initial_loss_scale if dynamic else float(config.loss_scale)
            self.scaler = LossScaler(scale, dynamic, config.loss_scale_window)

    @property
    def loss_scale(self) -> float:
        """What gradients are multiplied by as they enter the model; 1 without a scaler."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def note_step(self, skipped: bool) -> None:
        """After each step, the same on every rank. skipped: for gradients that were not finite."""
        self.steps += not skipped
        if self.scaler is not None:
            self.scaler.update(overflow=skipped)

    def state(self) -> dict[str, Any]:
        """For a checkpoint (docs/checkpoint-format.md, zeroshard.state)."""
        scaler = self.scaler
        return {"steps": self.steps, "scaler": None if scaler is None else {"scale": scaler.scale, "good_steps": scaler.good_steps}}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`. A fixed loss scale stays that of the configuration."""
        self.steps = state["steps"]
        if self.scaler is not None and self.scaler.dynamic and state["scaler"] is not None:
            self.scaler.scale, self.scaler.good_steps = state["scaler"]["scale"], state["scaler"]["good_steps"]
