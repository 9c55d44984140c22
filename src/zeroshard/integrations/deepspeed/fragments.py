"""deepspeed.utils.safe_get_* and safe_set_*: master, gradient and states of a parameter, whole or this rank's slice.

The get functions return copies, of floating-point values in fp32 (float64 stays). They return None for a frozen parameter, for
one of no sharded model, for a parameter without gradient, and for states before the first step. The set functions ignore frozen
parameters, as in DeepSpeed; for a value of another shape they raise on every rank. The functions for slices (local) are for stage
3 only.
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


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """Return the whole fp32 master (collective)."""
    return _fp32(value_of(param).full()) if _is_trained(param) else None


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set the master, and so the parameter, from a whole tensor (collective)."""
    _set_full(param, value_of, value)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """Return the whole mean gradient (collective)."""
    return _fp32(gradient_of(param).full()) if _is_trained(param) else param.grad if home_of(param) is None else None


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Set the gradient that the next step uses (collective)."""
    if home_of(param) is None and param.grad is not None:
        param.grad.copy_(value)
    _set_full(param, gradient_of, value)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Any:
    """Return a whole optimizer state (collective). Raises ValueError for a name that the optimizer does not use."""
    return _state(param, optim_state_key, lambda part: part.full())


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set an existing optimizer state (collective)."""
    _set_full(param, lambda param: state_of(param, optim_state_key), value)


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """Return this rank's slice of the fp32 master, flat, with the same elements as `param.ds_tensor`."""
    _check_local(param)
    return _fp32(value_of(param).local()) if _is_trained(param) else None


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set this rank's slice of the master, and so of the parameter (collective)."""
    _set_local(param, value_of, value)


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """Return this rank's slice of the mean gradient, flat."""
    _check_local(param)
    return _fp32(gradient_of(param).local()) if _is_trained(param) else None


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Set this rank's slice of the gradient (collective)."""
    _set_local(param, gradient_of, value)


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Any:
    """Return this rank's slice of an optimizer state, flat."""
    _check_local(param)
    return _state(param, optim_state_key, lambda part: part.local())


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's slice of an optimizer state (collective)."""
    _set_local(param, lambda param: state_of(param, optim_state_key), value)


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


def _fp32(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
        return value.float()
    return value


def _state(param: Tensor, key: str, get: Callable[[ParameterPart], Any]) -> Any:
    if not _is_trained(param):
        return None
    part = state_of(param, key)
    found = get(part)
    if found is None and (names := part.names()):
        raise ValueError(f"{key!r} not found in the optimizer state of {part.home.name}, which has {', '.join(names)}.")
    return _fp32(found)


def _set_full(param: Tensor, part_of: Callable[[Tensor], ParameterPart], value: Tensor) -> None:
    if _is_trained(param):
        part_of(param).set_full(value.reshape(param.shape) if value.numel() == param.numel() else value)


def _set_local(param: Tensor, part_of: Callable[[Tensor], ParameterPart], value: Tensor) -> None:
    _check_local(param)
    if _is_trained(param):
        part_of(param).set_local(value.reshape(-1))


def _check_local(param: Tensor) -> None:
    assert is_zero_param(param), "this function is for parameters that are partitioned: ZeRO stage 3"
