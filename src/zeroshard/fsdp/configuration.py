"""Options of zs.shard for a program of FSDP2: those that its calls of fully_shard become, and those that `configure` adds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config import PRECISIONS, Config, Offload
from ..errors import ConfigError
from ..seam import stays_whole
from ..utils.tensor_tree import map_tensors

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..config import ShardOptions
    from .calls import Call

_options: dict[str, Any] = {}


def configure(**options: Unpack[ShardOptions]) -> None:
    """Give options of zs.shard to every model that fully_shard shards from now on: configure(offload_optimizer="cpu").

    They override what arguments of fully_shard say. A call without options removes all. Raise ConfigError for a wrong option.
    """
    checked: Any = {"precision": "bf16", **options}  # policies say which it is
    Config.build(None, **checked)
    _options.clear()
    _options.update(options)


def options_of(root: Call, inner: Sequence[Call], names: dict[int, str]) -> dict[str, Any]:
    """Return the options of zs.shard for a model whose root is `root` and whose other units are `inner`.

    names: of the model's modules, by id.
    """
    calls, policy = [root, *inner], root.mp_policy
    units = {id(module) for call in inner for module in call.modules}
    # not fp16: the program scales its losses itself, by torch.amp.GradScaler
    precision = "bf16" if policy.param_dtype == torch.bfloat16 else "fp32"
    options: dict[str, Any] = {
        "stage": 3,
        "units": lambda _, module: id(module) in units,
        "precision": precision,
        "dtypes": _dtypes(calls, names, precision),
        "master_weights": any(call.lowers for call in calls),
        "cast_inputs": False,  # the policies' hooks do
        "cast_buffers": False,
        "reduce_dtype": _reduce_dtype(calls),
    }
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
    if "precision" in _options:  # it takes the place of all policies
        for name in ("dtypes", "master_weights", "cast_inputs", "cast_buffers"):
            del options[name]
    options |= _options
    if options["stage"] != 3:  # what is for sharded parameters alone
        for name in {"max_live_parameters", "zero_hpz_partition_size", "offload_param"} - _options.keys():
            options.pop(name, None)
    return options


def _dtypes(calls: Sequence[Call], names: dict[int, str], precision: str) -> dict[str, torch.dtype]:
    """Return the dtype in which a parameter computes, by its name, where `precision` alone would not give it that dtype.

    Keys name parameters, not modules, so that the engine casts nothing on a unit's way: each policy says what is cast.
    """
    found: dict[str, torch.dtype] = {}
    for call in calls:
        for module, attribute, param in call.unit_parameters():
            wanted = call.mp_policy.param_dtype or param.dtype
            own = param.dtype if precision == "fp32" or param.dtype == torch.float64 else PRECISIONS[precision]
            if param.is_floating_point() and wanted != own:
                found[f"{names[id(module)]}.{attribute}".lstrip(".")] = wanted
    return dict(sorted(found.items()))  # ranks compare their options


def _reduce_dtype(calls: Sequence[Call]) -> torch.dtype | None:
    """Return the dtype in which gradients are sent: the widest that a unit asks for; None: each unit's own, as no policy names one."""
    if all(call.mp_policy.reduce_dtype is None for call in calls):
        return None
    units = (call.mp_policy.reduce_dtype or call.mp_policy.param_dtype or call.given_dtype for call in calls)
    asked = {dtype for dtype in units if dtype is not None}
    widest = max(asked, key=lambda dtype: (dtype.itemsize, str(dtype)))
    if len(asked) > 1:
        warnings.warn(f"zeroshard.fsdp: units ask for several reduce_dtypes; all gradients are sent in {widest}.", stacklevel=2)
    return widest


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return arguments or an output with all their floating-point tensors cast to a dtype, as a policy asks."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def moved(module: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers of a module to a device, as fully_shard does; those of the meta device stay there.

    Parameters that the program keeps stay where they are.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device != device and not (tensor.is_meta or stays_whole(tensor)):
            tensor.data = tensor.data.to(device)
