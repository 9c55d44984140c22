"""DeepSpeed's optimizer classes: subclasses of torch's and zeroshard's with DeepSpeed's arguments. Nothing is compiled.

DeepSpeed's classes for the host and for the device are the same here: `zero_optimization.offload_optimizer` determines the tier
of the states, and so whether host or device steps them. The classes set fused=True, so a step has the bits of torch's fused step,
also when the host steps offloaded states (tiers/cpu_kernels.py). States are fp32; `fp32_optimizer_states=False` makes them bf16
where masters are (bf16_master_weights_and_grads), as in DeepSpeed.

bias_correction=False and amsgrad=True raise ConfigError: torch's fused step lacks the first, and DeepSpeed the second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from ...errors import ConfigError
from ...optim.lion import Lion


class _Adam(torch.optim.Adam):
    """torch's fused Adam, with decoupled weight decay or L2 decay."""

    def __init__(self, params: ParamsT, decoupled: bool, bias_correction: bool, **options: Any) -> None:
        self._bias_correction = bias_correction
        super().__init__(params, **options, fused=True, decoupled_weight_decay=bool(decoupled))
        self.defaults["bias_correction"] = bias_correction

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        name = type(self).__name__
        if param_group.get("amsgrad", self.defaults["amsgrad"]):
            raise ConfigError(
                f"{name}: amsgrad=True is not supported; DeepSpeed has none either: use torch.optim.AdamW(amsgrad=True)."
            )
        if not param_group.setdefault("bias_correction", self._bias_correction):
            raise ConfigError(f"{name}: bias_correction=False is not supported; leave it at True (torch's Adam has no other).")
        super().add_param_group(param_group)


class DeepSpeedCPUAdam(_Adam):
    """AdamW (adamw_mode=True, the default) or Adam with L2 decay."""

    def __init__(
        self, model_params: ParamsT, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0, amsgrad: bool = False, adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        super().__init__(model_params, adamw_mode, bias_correction, **options)
        self.adam_w_mode, self.fp32_optimizer_states = adamw_mode, fp32_optimizer_states


class FusedAdam(_Adam):
    """AdamW (adam_w_mode=True, the default) or Adam with L2 decay."""

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0.0, amsgrad: bool = False, set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        super().__init__(params, adam_w_mode, bias_correction, **options)
        self.adam_w_mode, self.set_grad_none = int(adam_w_mode), set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


def _make_dense(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Make sparse gradients dense, which torch's fused step needs; Adagrad's numbers are the same."""
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if param.grad is not None and param.grad.layout is not torch.strided:
            param.grad = param.grad.to_dense()


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """torch's Adagrad with DeepSpeed's arguments."""

    def __init__(
        self, model_params: ParamsT, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0, amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        if amsgrad:
            raise ConfigError(
                "DeepSpeedCPUAdagrad: amsgrad=True is not supported; Adagrad has no such variant: leave it at False."
            )
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay, fused=True)
        self.register_step_pre_hook(_make_dense)
        self.fp32_optimizer_states = fp32_optimizer_states


class DeepSpeedCPULion(Lion):
    """zs.Lion, with DeepSpeed's defaults."""

    def __init__(
        self, model_params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(model_params, lr=lr, betas=betas, weight_decay=weight_decay)
        self.fp32_optimizer_states = fp32_optimizer_states


class FusedLion(Lion):
    """zs.Lion, with DeepSpeed's defaults."""

    def __init__(
        self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
