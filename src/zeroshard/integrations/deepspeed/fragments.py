"""deepspeed.utils.safe_get_* and safe_set_*: master, gradient and states of a parameter, whole or this rank's slice.

The get functions return copies, of floating-point values in fp32 (float64 stays). They return None for a frozen parameter, for
one of no sharded model, for a parameter without gradient, and for states before the first step. The set functions ignore frozen
parameters, as in DeepSpeed; for a value of another shape they raise on every rank. The functions for slices (local), which have
the elements of `param.ds_tensor`, are for stage 3 only. A name that the optimizer does not use for a state raises ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ...seam import info_of
from ...state import ParameterPart, gradient_of, state_of, value_of
from ...values import home_of
from .partition import is_zero_param


def _part(part_of: Callable[..., ParameterPart], param: Tensor, key: str | None, local: bool) -> ParameterPart | None:
    """Return a part of a parameter (key: the name of a state); None unless it is a trained parameter of a sharded model."""
    assert not local or is_zero_param(param), "this function is for parameters that are partitioned: ZeRO stage 3"
    info = info_of(param)
    if info is None or not (info.trainable and param.requires_grad):
        return None
    return part_of(param) if key is None else part_of(param, key)


def _get(part_of: Callable[..., ParameterPart], param: Tensor, key: str | None = None, local: bool = False) -> Tensor | None:
    part = _part(part_of, param, key, local)
    if part is None:
        return None
    found = part.local() if local else part.full()
    if found is None and key is not None and (names := part.names()):  # type: ignore[attr-defined]
        raise ValueError(f"{key!r} not found in the optimizer state of {part.name}, which has {', '.join(names)}.")
    return _in_fp32(found)


def _in_fp32(found: Tensor | None) -> Tensor | None:
    if not isinstance(found, Tensor) or not found.is_floating_point() or found.dtype == torch.float64:
        return found
    return found.float()


def _set(
    part_of: Callable[..., ParameterPart], param: Tensor, value: Tensor, key: str | None = None, local: bool = False
) -> None:
    part = _part(part_of, param, key, local)
    if part is not None and local:
        part.set_local(value.reshape(-1))
    elif part is not None:
        part.set_full(value.reshape(param.shape) if value.numel() == param.numel() else value)


def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """Return the whole master of a parameter (collective)."""
    return _get(value_of, param)


def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set the whole master, and so the parameter (collective)."""
    _set(value_of, param, value)


def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """Return this rank's slice of the master, flat."""
    return _get(value_of, param, local=True)


def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Set the master, and so the parameter, from each rank's slice (collective)."""
    _set(value_of, param, value, local=True)


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """Return the whole mean gradient (collective); the gradient of a parameter of no sharded model as it is.

    While the engine sums locally (`no_sync`, `coalesce_grad_reduction`, micro-steps of stages 0 and 1), return the sum that this
    rank has, without the loss scale, as DeepSpeed does (not collective).
    """
    if home_of(param) is None:
        return param.grad
    if (info := info_of(param)) is not None and info.sums_locally:
        return _in_fp32(info.local_sum)
    return _get(gradient_of, param)


def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Set the gradient that the next step uses (collective)."""
    if home_of(param) is not None:
        _set(gradient_of, param, value)
    elif param.grad is not None:
        param.grad.copy_(value)


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """Return this rank's slice of the mean gradient, flat."""
    return _get(gradient_of, param, local=True)


def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Set the gradient that the next step uses from each rank's slice (collective)."""
    _set(gradient_of, param, value, local=True)


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Return a whole state of the optimizer by its name, as "exp_avg" (collective)."""
    return _get(state_of, param, optim_state_key)


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set a whole state of the optimizer by its name (collective)."""
    _set(state_of, param, value, optim_state_key)


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """Return this rank's slice of a state of the optimizer, flat."""
    return _get(state_of, param, optim_state_key, local=True)


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Set a state of the optimizer from each rank's slice (collective)."""
    _set(state_of, param, value, optim_state_key, local=True)


def safe_update_full_grad_vectorized(param_list: Iterable[Tensor], update_func: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Set each existing gradient to update_func(whole gradient, parameter), whose result is equal on every rank (collective)."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))
