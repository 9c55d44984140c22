"""deepspeed.utils.safe_get_* and safe_set_*: master, gradient and states of a parameter, whole or this rank's slice.

The get functions return copies, of floating-point values in fp32 (float64 stays). They return None for a frozen parameter, for
one of no sharded model, for a parameter without gradient, and for states before the first step. The set functions ignore frozen
parameters, as in DeepSpeed; for a value of another shape they raise on every rank. The functions for slices (local), which have
the elements of `param.ds_tensor`, are for stage 3 only. A name that the optimizer does not use for a state raises ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ...optim.parameter_access import ParameterPart, gradient_of, state_of, value_of
from ...zero.gathered_parameters import home_of
from ...zero.parameter import ParamHome
from .partition import is_zero_param


def _getter(part_of: Callable[..., ParameterPart], local: bool = False) -> Callable[..., Any]:
    """Return a function that reads a part of a parameter whole (collective), or this rank's slice of it, flat."""

    def get(param: Tensor, optim_state_key: str | None = None) -> Any:
        assert not local or is_zero_param(param), _ONLY_STAGE_3
        if not _is_trained(param):
            return None
        part: Any = part_of(param) if optim_state_key is None else part_of(param, optim_state_key)
        found = part.local() if local else part.full()
        if found is None and optim_state_key is not None and (names := part.names()):
            raise ValueError(
                f"{optim_state_key!r} not found in the optimizer state of {part.home.name}, which has {', '.join(names)}."
            )
        floating = isinstance(found, Tensor) and found.is_floating_point() and found.dtype != torch.float64
        return found.float() if floating else found

    return get


def _setter(part_of: Callable[..., ParameterPart], local: bool = False) -> Callable[..., None]:
    """Return a function that sets a part of a parameter from a whole tensor, or from each rank's slice (collective)."""

    def change(param: Tensor, value: Tensor, optim_state_key: str | None = None) -> None:
        assert not local or is_zero_param(param), _ONLY_STAGE_3
        if not _is_trained(param):
            return
        part = part_of(param) if optim_state_key is None else part_of(param, optim_state_key)
        if local:
            part.set_local(value.reshape(-1))
        else:
            part.set_full(value.reshape(param.shape) if value.numel() == param.numel() else value)

    return change


_ONLY_STAGE_3 = "this function is for parameters that are partitioned: ZeRO stage 3"
safe_get_full_fp32_param, safe_set_full_fp32_param = _getter(value_of), _setter(value_of)  # the master, and so the parameter
safe_get_local_fp32_param, safe_set_local_fp32_param = _getter(value_of, local=True), _setter(value_of, local=True)
_get_full_grad, _set_full_grad = _getter(gradient_of), _setter(gradient_of)  # the mean gradient, which the next step uses
safe_get_local_grad, safe_set_local_grad = _getter(gradient_of, local=True), _setter(gradient_of, local=True)
safe_get_full_optimizer_state, safe_set_full_optimizer_state = _getter(state_of), _setter(state_of)  # of a name: exp_avg
safe_get_local_optimizer_state, safe_set_local_optimizer_state = _getter(state_of, local=True), _setter(state_of, local=True)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """Return the whole mean gradient (collective); the gradient of a parameter of no sharded model as it is."""
    return param.grad if home_of(param) is None else _get_full_grad(param)


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Set the gradient that the next step uses (collective)."""
    if home_of(param) is not None:
        _set_full_grad(param, value)
    elif param.grad is not None:
        param.grad.copy_(value)


def safe_update_full_grad_vectorized(param_list: Iterable[Tensor], update_func: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Set each existing gradient to update_func(whole gradient, parameter), whose result is equal on every rank (collective)."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def _is_trained(param: Tensor) -> bool:
    """Return whether a parameter is a trained one of a sharded model, with master, gradient and states."""
    home = home_of(param)
    return isinstance(home, ParamHome) and home.group.trainable and param.requires_grad
