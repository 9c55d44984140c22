"""Progress of training, which checkpoints store: the number of steps, and the loss scale of fp16.

The ordinary loop calls `loss.backward()` on an unscaled loss, so the scale is applied where gradients enter the model:
outputs leave it in fp32, and their gradients are multiplied by the scale, still in fp32.
"""

from __future__ import annotations

from typing import Any

from ..config import Config


class LossScaler:
    """The loss scale, fixed or dynamic: overflows halve it, `loss_scale_window` good steps in a row double it.

    good_steps: number of good steps since the last change or overflow; starts, also after an overflow, at -loss_scale_delay.
    patience: the scale is halved at the overflow of this number, 1 being the next one (loss_scale_hysteresis).
    """

    def __init__(self, config: Config) -> None:
        self.config, self.dynamic = config, config.loss_scale == "dynamic"
        self.scale = config.initial_loss_scale if self.dynamic else float(config.loss_scale)
        self.good_steps, self.patience = -config.loss_scale_delay, config.loss_scale_hysteresis

    def update(self, overflow: bool) -> None:
        """Update the scale after one step; every rank must pass the same value."""
        config = self.config
        if not self.dynamic:
            return
        if overflow:
            if self.patience > 1:
                self.patience -= 1
            else:
                self.scale = max(self.scale / 2, config.min_loss_scale)
            self.good_steps = -config.loss_scale_delay
            return
        self.good_steps += 1
        grows = self.good_steps == config.loss_scale_window
        if grows:
            self.scale, self.good_steps = self.scale * 2, 0
        if grows or config.consecutive_hysteresis:
            self.patience = config.loss_scale_hysteresis

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; `patience` is in it only if it differs from its initial value."""
        spent = {} if self.patience == self.config.loss_scale_hysteresis else {"patience": self.patience}
        return {"scale": self.scale, "good_steps": self.good_steps, **spent}

    def load(self, state: dict[str, Any]) -> None:
        """Load a `state`. A fixed scale keeps the configuration's value."""
        if self.dynamic:
            self.scale, self.good_steps = state["scale"], state["good_steps"]
            hysteresis = self.config.loss_scale_hysteresis
            self.patience = min(state.get("patience", hysteresis), hysteresis)


class Progress:
    """Progress of training. steps: number of steps taken, without skipped ones. scaler: None unless precision is fp16."""

    def __init__(self, config: Config) -> None:
        self.steps = 0
        self.scaler: LossScaler | None = None
        if config.precision == "fp16":
            self.scaler = LossScaler(config)

    @property
    def loss_scale(self) -> float:
        """Factor by which gradients are multiplied as they enter the model; 1 without a scaler."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def note_step(self, skipped: bool) -> None:
        """Count a step; every rank must pass the same value. skipped: the gradients were not finite."""
        self.steps += not skipped
        if self.scaler is not None:
            self.scaler.update(overflow=skipped)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint (docs/checkpoint-format.md, zeroshard.state)."""
        return {"steps": self.steps, "scaler": None if self.scaler is None else self.scaler.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Load a `state`."""
        self.steps = state["steps"]
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load(state["scaler"])
