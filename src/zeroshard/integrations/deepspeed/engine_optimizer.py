"""`engine.optimizer`: a wrapper of the sharded optimizer with the interface of DeepSpeed's optimizers."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ...errors import NonFiniteError
from . import stand_ins
from .cpu_optimizers import FusedAdam
from .optimizer_views import LossScalerView, OptimizerViews
from .parameter_offload import ParameterOffload
from .sliced_states import show_slices

_INSTEAD = {
    **dict.fromkeys(
        ("parallel_partitioned_bit16_groups", "fp16_partitioned_groups", "fp16_partitioned_groups_flat", "bit16_groups_flat"),
        "zs.value_of(param).local(), or deepspeed.utils.safe_get_local_fp32_param",
    ),
    **dict.fromkeys(("grad_partitions_flat_buffer", "averaged_gradients_flat"), "zs.gradient_of(param).local()"),
    "nccl_start_alignment_factor": "zs.value_of(param).local(): what a rank holds begins at multiples of 32 elements",
    "get_hp_param_device": "zs.report(model), which tells where states rest",
}  # fmt: skip


class EngineOptimizer(OptimizerViews):
    """Wrapper of a sharded optimizer, `.optimizer`, in which attributes are looked up that the wrapper lacks."""

    def __init__(self, optimizer: Any, config: Any) -> None:
        self.optimizer = optimizer
        self._config = config
        self.custom_loss_scaler = False
        self._sharded: Any = None  # the sharded optimizer while `.optimizer` is the copy of `flat_picture`

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet (copying, unpickling): looking it up would recurse
            raise AttributeError(name)
        if name in _INSTEAD:
            told = f"engine.optimizer.{name} is about DeepSpeed's buffers, which zeroshard does not have"
            raise AttributeError(f"{told}: use {_INSTEAD[name]}.")
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    def step(self, closure: Any = None) -> Any:
        scaler, zero = self.loss_scaler, self._config.zero_enabled  # DeepSpeed's stage 0 continues at the smallest scale
        at_end = (
            zero
            and scaler is not None
            and self.dynamic_loss_scale
            and scaler.patience == 1
            and scaler.scale == scaler.config.min_loss_scale
        )
        loss = self.optimizer.step(closure)
        if at_end and self.overflow:
            raise NonFiniteError(
                "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run. The latest gradients that are not finite: "
                f"{', '.join(self.optimizer.last_step.nonfinite[:5])}. A model that was trained in bf16 overflows in fp16: use bf16."
            )
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Call loss.backward(). The runtime multiplies the gradients of the model's outputs by the loss scale."""
        loss.backward(retain_graph=retain_graph)

    def get_lr(self) -> float:
        """Return the learning rate of the first group."""
        return self.optimizer.param_groups[0]["lr"]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all groups."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """Return the sharded optimizer's state dict and DeepSpeed's entries: this rank's master slices by group, stage, scale."""
        stage, slices = int(self._config.zero_optimization_stage), self.fp32_partitioned_groups_flat
        told = {
            "zero_stage": stage, "overflow": self.overflow, "dynamic_loss_scale": self.dynamic_loss_scale, "cur_scale": self.loss_scale,
            "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups": slices,
        }  # fmt: skip
        return {**self.optimizer.state_dict(), **told}

    def load_state_dict(self, state_dict: dict[str, Any], *unused: Any, **options: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    @property
    def overflow(self) -> bool:
        """True if the last step was skipped because a gradient was not finite."""
        record = self.optimizer.last_step
        return record is not None and record.skipped and not math.isfinite(record.grad_norm)

    @property
    def loss_scale(self) -> float:
        return self.optimizer.core.runtime.progress.loss_scale

    cur_scale = loss_scale

    @property
    def loss_scaler(self) -> LossScalerView | None:
        """The loss scaler in fp16, else None."""
        return LossScalerView(self.optimizer.core) if self.optimizer.core.runtime.progress.scaler is not None else None

    @property
    def dynamic_loss_scale(self) -> bool:
        scaler = self.loss_scaler
        return scaler is not None and scaler.dynamic

    def needs_scaler(self) -> bool:
        """Return whether there is a loss scale (fp16). A plain loss.backward() works too: the runtime applies the scale."""
        return self.loss_scaler is not None

    @property
    def _global_grad_norm(self) -> float | None:
        record = self.optimizer.last_step
        return None if record is None else record.grad_norm

    def refresh_fp32_params(self) -> None:
        """Do nothing: a step copies writes to parameters into the masters by itself."""

    def empty_partition_cache(self) -> None:
        """Do nothing: parameters are not kept gathered between steps."""

    def destroy(self) -> None:
        """Do nothing: `engine.destroy()` frees everything."""


class Stages1And2(EngineOptimizer, stand_ins.DeepSpeedZeroOptimizer):
    """Optimizer of stages 1 and 2; isinstance of DeepSpeed's class for them holds."""


class Stage3(EngineOptimizer, stand_ins.DeepSpeedZeroOptimizer_Stage3):
    """Optimizer of stage 3; isinstance of DeepSpeed's class for it holds."""

    def _set_fp32_optimizer_param_groups(self) -> None:
        """Make `.optimizer` a copy in DeepSpeed's flat layout until `_clear_fp32_optimizer_param_groups` (collective)."""
        self._clear_fp32_optimizer_param_groups()
        self._sharded, self.optimizer = self.optimizer, self.flat_picture()

    def _clear_fp32_optimizer_param_groups(self) -> None:
        self.optimizer, self._sharded = self._sharded or self.optimizer, None

    @functools.cached_property
    def parameter_offload(self) -> ParameterOffload:
        """The model's hooks, for programs that generate during training."""
        return ParameterOffload(self.optimizer.core.runtime.model)


class InBF16(EngineOptimizer, stand_ins.BF16_Optimizer):
    """Optimizer of stage 1 in bf16 with fp32 gradients, an instance of DeepSpeed's BF16_Optimizer."""


class Fused(EngineOptimizer, stand_ins.FP16_Optimizer):
    """Optimizer of stage 0 in fp16 or bf16 with FusedAdam, an instance of DeepSpeed's FP16_Optimizer."""


class Unfused(EngineOptimizer, stand_ins.FP16_UnfusedOptimizer):
    """Optimizer of stage 0 in fp16 or bf16 with another class, an instance of DeepSpeed's FP16_UnfusedOptimizer."""


def wrap(optimizer: torch.optim.Optimizer | None, config: Any) -> Any:
    """Return the optimizer in the wrapper whose class DeepSpeed would use; at stage 0 in fp32 the optimizer itself."""
    stage, dtype = int(config.zero_optimization_stage), config.model_dtype
    if optimizer is None:
        return None
    show_slices(optimizer)
    if not stage:
        if dtype is torch.float32:
            return optimizer
        return (Fused if isinstance(optimizer, FusedAdam) else Unfused)(optimizer, config)
    offload = config.zero_config.offload_optimizer
    on_device = offload is None or offload.device == "none"
    if stage == 1 and on_device and (dtype, config.gradient_dtype) == (torch.bfloat16, torch.float32):
        return InBF16(optimizer, config)
    return (Stage3 if stage == 3 else Stages1And2)(optimizer, config)
