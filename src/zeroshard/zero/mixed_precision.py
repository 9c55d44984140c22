"""How far training has come, as a checkpoint keeps it: steps, and the loss scale of fp16.

The ordinary loop calls `loss.backward()` on an unscaled loss, so the scale is applied where the gradient enters the
model: outputs leave in fp32, and the gradient that comes back for them is multiplied there, still in fp32.
"""

from __future__ import annotations

from typing import Any

from ..config import Config


class LossScaler:
    """The loss scale: fixed, or dynamic, halved by overflows and doubled after `loss_scale_window` good steps.

    good_steps: since the last change or overflow; below 0 while they do not count yet (loss_scale_delay).
    patience:   the scale is halved by the overflow that finds 1.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.dynamic = config, config.loss_scale == "dynamic"
        self.scale = config.initial_loss_scale if self.dynamic else float(config.loss_scale)
        self.good_steps, self.patience = -config.loss_scale_delay, config.loss_scale_hysteresis

    def update(self, overflow: bool) -> None:
        """Note one step; every rank must pass the same value."""
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
        """For a checkpoint. Of patience only what is not that of the start."""
        spent = {} if self.patience == self.config.loss_scale_hysteresis else {"patience": self.patience}
        return {"scale": self.scale, "good_steps": self.good_steps, **spent}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`. A fixed scale stays that of the configuration."""
        if self.dynamic:
            self.scale, self.good_steps = state["scale"], state["good_steps"]
            hysteresis = self.config.loss_scale_hysteresis
            self.patience = min(state.get("patience", hysteresis), hysteresis)


class Progress:
    """steps: that were taken, not skipped; scaler: None unless precision is fp16."""

    def __init__(self, config: Config) -> None:
        self.steps = 0
        self.scaler: LossScaler | None = None
        if config.precision == "fp16":
            self.scaler = LossScaler(config)

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
        return {"steps": self.steps, "scaler": None if self.scaler is None else self.scaler.state()}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.steps = state["steps"]
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load(state["scaler"])
