"""What a program for FSDP2 gets of zeroshard beside it: `configure`, and the options of zs.shard that calls of fully_shard become."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config import Config, Offload
from ..errors import ConfigError
from ..utils.tensor_tree import map_tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..config import ShardOptions
    from .sharding import Call

_options: dict[str, Any] = {}
_PRECISIONS = {None: "fp32", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def configure(**options: Unpack[ShardOptions]) -> None:
    """Give options of zs.shard to every model that fully_shard shards from now on: configure(offload_optimizer="cpu").

    They override what arguments of fully_shard say. A call without options removes all. Raise ConfigError for a wrong option.
    """
    Config.build(None, **options)
    _options.clear()
    _options.update(options)


def options_of(root: Call, inner: Sequence[Call], names: dict[int, str]) -> dict[str, Any]:
    """Return the options of zs.shard for a model whose root is `root` and whose other units are `inner`.

    names: of the model's modules, by id.
    """
    calls, policy = [root, *inner], root.mp_policy
    if policy.param_dtype not in _PRECISIONS:
        raise ConfigError(f"mp_policy: param_dtype: expected float32, bfloat16 or float16 for the root, got {policy.param_dtype}.")
    units = {id(module) for call in inner for module in call.modules}
    options: dict[str, Any] = {
        "stage": 3,
        "units": lambda _, module: id(module) in units,
        "precision": _PRECISIONS[policy.param_dtype],
        "dtypes": _dtypes(root, inner, names),
        "master_weights": any(call.lowers for call in calls),
        "cast_inputs": policy.cast_forward_inputs,
        "reduce_dtype": _reduce_dtype(calls),
    }
    if options["precision"] == "fp16":
        options["loss_scale"] = 1.0  # the program has a GradScaler of its own
    if any(call.offload is not None for call in calls):
        pinned = all(call.offload.pin_memory for call in calls if call.offload is not None)
        options |= dict.fromkeys(("offload_param", "offload_optimizer"), Offload("cpu", pin_memory=pinned))
    kept = {call.reshard_after_forward for call in calls}
    sizes = {size for size in kept if isinstance(size, int) and not isinstance(size, bool)}
    if kept == {False} or (kept == {False, None} and root.reshard_after_forward is None and inner):
        options["max_live_parameters"] = math.inf  # until its backward a unit stays gathered
    elif len(sizes) == 1:
        options["zero_hpz_partition_size"] = sizes.pop()
    elif sizes:
        raise ConfigError(f"reshard_after_forward: expected one number of ranks for all units, got {sorted(sizes)}.")
    options |= _options
    if "stage" in _options and _options["stage"] != 3:
        options = {name: value for name, value in options.items() if name not in ("max_live_parameters", "zero_hpz_partition_size")}
        if _options["stage"] != 3 and "offload_param" not in _options:
            options.pop("offload_param", None)
    return options


def _dtypes(root: Call, inner: Sequence[Call], names: dict[int, str]) -> dict[str, torch.dtype]:
    """Return the dtype of each parameter, by name, whose unit computes in another one than the root; without a dtype: in its own.

    Keys name parameters, not modules, so that the engine casts nothing on a unit's way: each policy says what is cast.
    """
    found: dict[str, torch.dtype] = {}
    for call in inner:
        asked = call.mp_policy.param_dtype
        if asked == root.mp_policy.param_dtype:
            continue
        for module in call.managed():
            for attribute, param in module.named_parameters(recurse=False):
                if param.is_floating_point():
                    found[f"{names[id(module)]}.{attribute}"] = asked or param.dtype
    return found


def _reduce_dtype(calls: Sequence[Call]) -> torch.dtype | None:
    """Return the dtype in which gradients are sent: the widest that a policy names; None: each unit's own."""
    asked = {call.mp_policy.reduce_dtype for call in calls if call.mp_policy.reduce_dtype is not None}
    if not asked:
        return None
    widest = max(asked, key=lambda dtype: dtype.itemsize)
    if len(asked) > 1:
        warnings.warn(f"zeroshard.fsdp: policies name several reduce_dtypes; all gradients are sent in {widest}.", stacklevel=2)
    return widest


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return arguments or an output with all their floating-point tensors cast to a dtype, as a policy asks."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def moved(module: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers of a module to a device, as fully_shard does; those of the meta device stay there."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device != device and not tensor.is_meta:
            tensor.data = tensor.data.to(device)
