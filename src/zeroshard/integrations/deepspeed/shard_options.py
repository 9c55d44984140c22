"""Translate a DeepSpeed configuration to zeroshard: options of zs.shard, the optimizer, dtypes of buffers."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...errors import did_you_mean
from ...optim.lion import Lion
from ...optim.muon import Muon
from ...utils.dtypes import is_narrow
from ...utils.transformers_compat import kept_in_fp32
from .config_keys import KEYS, Treatment
from .cpu_optimizers import DeepSpeedCPUAdam, FusedAdam
from .ds_config import OFFLOAD_STAGES, DeepSpeedConfig, dtype_of
from .sections import DeepSpeedConfigError, Section, without_auto

# -- zs.shard ------------------------------------------------------------------------------------------------------


def shard_options(config: DeepSpeedConfig) -> dict[str, Any]:
    """Return keyword options of zs.shard. Options that the configuration does not set keep zeroshard's defaults.

    Raises ValueError if compute_grad_norm is off but the norm is needed, DeepSpeedConfigError for nvme without a folder.
    """
    zero = config.zero_config
    if not zero.compute_grad_norm and (config.gradient_clipping or config.offloads("offload_optimizer")):
        raise ValueError(
            "zero_optimization.compute_grad_norm false: clipping and offload_optimizer need the norm. Set gradient_clipping to 0 "
            "and leave offload_optimizer out, or leave compute_grad_norm out."
        )
    options: dict[str, object] = {"stage": zero.stage, "gradient_dtype": config.gradient_dtype, **_precision(config)}
    if config.gradient_clipping > 0:
        options["max_grad_norm"] = config.gradient_clipping
    if config.communication_data_type is not None:
        options["reduce_dtype"] = config.communication_data_type
    # DeepSpeed's behaviour, where zeroshard's defaults differ
    options |= {"skip_nonfinite": _skips_nonfinite(config), "max_skipped_steps": math.inf}
    options |= {"hold_schedulers": False, "agree_buffers": False, "cast_inputs": False}
    if zero.stage == 3:
        options |= _stage3(zero)
    for name, lowest in OFFLOAD_STAGES.items():
        if config.offloads(name) and zero.stage >= lowest:
            options[name] = _offload(getattr(zero, name))
    return options | config.planned_options


def _skips_nonfinite(config: DeepSpeedConfig) -> bool:
    """Return whether DeepSpeed's optimizer of this stage and precision skips a step whose gradients are not finite.

    DeepSpeed's optimizers for fp16 and for stage 3 skip it. At stage 0 in fp32 DeepSpeed has only the plain optimizer, which
    steps. At stages 1 and 2 its optimizer skips if compute_grad_norm is on; in bf16 if check_grad_overflow is on, and always at
    stage 1 with fp32 gradients.
    """
    zero, bf16 = config.zero_config, config.bfloat16_config
    if config.float16_config.enabled or zero.stage == 3:
        return True
    if zero.stage == 0:
        scaled = config.torch_autocast_enabled and config.torch_autocast_dtype is torch.float16  # torch's GradScaler skips steps
        return bf16.enabled or scaled
    if bf16.enabled:
        own = zero.stage == 1 and config.gradient_dtype is torch.float32 and not config.offloads("offload_optimizer")
        return own or bf16.check_grad_overflow
    return zero.compute_grad_norm


def _precision(config: DeepSpeedConfig) -> dict[str, object]:
    fp16, bf16 = config.float16_config, config.bfloat16_config
    if bf16.enabled and bf16.bf16_master_weights_and_grads:
        return {"precision": "bf16", "master_weights": "split" if fp32_states(config) else False}
    if bf16.enabled:
        return {"precision": "bf16"}
    if not fp16.enabled:
        return {"precision": "fp32"}
    options: dict[str, object] = {"precision": "fp16"}
    if fp16.loss_scale:
        return {**options, "loss_scale": fp16.loss_scale}
    return options | {
        "loss_scale": "dynamic",
        "initial_loss_scale": 2.0**fp16.initial_scale_power,
        "loss_scale_window": fp16.loss_scale_window,
        "loss_scale_delay": 1,  # DeepSpeed counts good steps from the second one
        "loss_scale_hysteresis": fp16.hysteresis if config.zero_enabled else 1,  # its optimizers of stage 0 have no hysteresis
        "consecutive_hysteresis": fp16.consecutive_hysteresis,
        "min_loss_scale": float(fp16.min_loss_scale),
    }


def fp32_states(config: DeepSpeedConfig) -> bool:
    """Return whether optimizer states are fp32 where masters are bf16; states of fp32 masters are in any case.

    DeepSpeed keeps bf16 masters and fp32 states by rounding the masters after each step. `master_weights="split"` takes as many
    bytes, since the masters share the parameters' 16 bits, and does not round.
    """
    given = without_auto(config.optimizer_params or {}).get("fp32_optimizer_states")
    return not config.bfloat16_config.bf16_optimizer_states and given is not False


def _stage3(zero: Section) -> dict[str, object]:
    """Return the options of stage 3: gathering (prefetching and reuse of units if they are given), ZeRO++ and MiCS.

    The bit widths are those of DeepSpeed's kernels.
    """
    options = {name: getattr(zero, name) for name in ("param_persistence_threshold", "model_persistence_threshold")}
    if "prefetch_bucket_size" in zero.given:
        options["prefetch_bucket_size"] = zero.prefetch_bucket_size
    if zero.given & {"max_live_parameters", "max_reuse_distance"}:
        options["max_live_parameters"] = min(zero.max_live_parameters, zero.max_reuse_distance)
    if zero.zero_hpz_partition_size > 1:
        options["zero_hpz_partition_size"] = zero.zero_hpz_partition_size
    if zero.mics_shard_size > 0:
        options["shard_size"] = zero.mics_shard_size
    if zero.zero_quantized_weights:
        options["zero_quantized_weights"] = "int8"
    if zero.zero_quantized_gradients:
        options["zero_quantized_gradients"] = {"codec": "int4", "error_feedback": zero.zeropp_loco_param is not None}
    return options


def _offload(section: Section) -> dict[str, object]:
    """Return the fields of a zs.Offload. Buffers keep zeroshard's sizes."""
    offload: dict[str, object] = {"device": section.device.value, "pin_memory": section.pin_memory}
    if section.device == "nvme":
        if section.nvme_path is None:
            raise DeepSpeedConfigError(f"{section.prefix}: device nvme needs nvme_path, a folder on a local disk.")
        with contextlib.suppress(OSError):  # if it cannot be made, zs.shard raises on every rank
            section.nvme_path.mkdir(parents=True, exist_ok=True)
        offload["path"] = str(section.nvme_path)
    if getattr(section, "ratio", 1.0) < 1:
        offload["ratio"] = section.ratio
    return offload


# -- the optimizer -------------------------------------------------------------------------------------------------

Options = dict[str, Any]  # keyword arguments of an optimizer's class
_ADAM: Options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_LION: Options = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
_MUON: dict[bool, Options] = {
    True: {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0},
    False: {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0},
}
_OWN = "pass an optimizer to initialize(optimizer=...), or use AdamW, Lion or SGD"
_REFUSED = {
    "lamb": "scales each parameter's update by the norms of the whole, which no rank has",
    **dict.fromkeys(("muadam", "muadamw", "musgd"), "is of the package mup"),
    **dict.fromkeys(("onebitadam", "zerooneadam", "onebitlamb"), "is removed from DeepSpeed as well"),
}
_SET_ASIDE = ("torch_adam", "adam_w_mode", "fp32_optimizer_states", "set_grad_none")  # only DeepSpeed's classes have these


def build_optimizer(config: DeepSpeedConfig, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Make the optimizer that the configuration names, of parameters or groups. Defaults are those of DeepSpeed's classes.

    Raises DeepSpeedConfigError for a refused or unknown optimizer, ValueError for max_grad_norm in its params and, for Muon,
    if a parameter has no mark use_muon.
    """
    name = config.optimizer_name
    if name is None:
        raise DeepSpeedConfigError("optimizer.type is missing: name one, or pass an optimizer to initialize(optimizer=...).")
    given = without_auto(config.optimizer_params or {})
    if "max_grad_norm" in given:
        raise ValueError(
            "optimizer.params.max_grad_norm is not an option of the optimizer: set gradient_clipping at the top level."
        )
    low = name.lower()
    if low in _REFUSED:
        raise DeepSpeedConfigError(f"optimizer.type {name!r} is not supported: it {_REFUSED[low]}. Instead {_OWN}.")
    for key in given:
        row = KEYS.get(f"optimizer.params.{key}")
        if row is not None and row.treatment is Treatment.REFUSED:
            raise DeepSpeedConfigError(f"{row.name} is not supported: {row.text}.")
    params: Options = {
        key: tuple(value) if isinstance(value, list) else value for key, value in given.items() if key not in _SET_ASIDE
    }
    if low in ("adam", "adamw"):
        if not params.pop("bias_correction", True):
            raise DeepSpeedConfigError(f"optimizer.params.bias_correction = False is not supported: leave it out, or {_OWN}.")
        decoupled = low == "adamw" or given.get("adam_w_mode", True)
        if given.get("torch_adam") or params.keys() - _ADAM.keys():  # options that DeepSpeed's own classes do not have
            return (torch.optim.AdamW if decoupled else torch.optim.Adam)(
                parameters, **({} if given.get("torch_adam") else _ADAM) | params
            )
        if config.offloads("offload_optimizer"):
            states = fp32_states(config)
            return DeepSpeedCPUAdam(parameters, adamw_mode=decoupled, fp32_optimizer_states=states, **{**_ADAM, **params})
        return FusedAdam(parameters, adam_w_mode=decoupled, **{**_ADAM, **params})
    if low == "lion":
        return Lion(parameters, **{**_LION, **params})
    if low == "muon":
        return Muon(_muon_groups(parameters, params))
    classes = {
        cls.__name__: cls for cls in vars(torch.optim).values() if isinstance(cls, type) and cls is not torch.optim.Optimizer
    }
    cls = classes.get(name) or {known.lower(): cls for known, cls in classes.items()}.get(low)
    if cls is None:
        raise DeepSpeedConfigError(
            f"optimizer.type {name!r} is neither one of DeepSpeed's nor of torch.optim.{did_you_mean(name, classes)}"
        )
    return cls(parameters, **params)


def _muon_groups(parameters: Iterable[Any], params: Options) -> list[Options]:
    """Divide each group by its parameters' `use_muon`. An option is the group's own, else from params, else the default.

    The learning rate in params is muon_lr or adam_lr, else lr.

    Raises ValueError if a parameter has no such mark.
    """
    entries = list(parameters)
    found = []
    for group in entries if entries and isinstance(entries[0], dict) else [{"params": entries}]:
        members: list[Any] = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        untold = [tuple(param.shape) for param in members if not hasattr(param, "use_muon")]
        if untold:
            raise ValueError(
                f"optimizer.type Muon: {len(untold)} parameters have no mark use_muon, first one of shape {untold[0]}: set param.use_muon "
                "to True (hidden matrices) or False (the others: stepped by AdamW)."
            )
        for use_muon, defaults in _MUON.items():
            half = [param for param in members if bool(param.use_muon) is use_muon]
            lr = params.get("muon_lr" if use_muon else "adam_lr") or params.get("lr", defaults["lr"])
            options = {key: params.get(key, default) for key, default in defaults.items()} | {"lr": lr}
            if half:
                found.append({**options, **group, "params": half, "use_muon": use_muon})
    return found


# -- buffers -----------------------------------------------------------------------------------------------------------


def cast_buffers(config: DeepSpeedConfig, model: nn.Module) -> None:
    """Cast floating-point buffers to data_types.buffer_dtype, and those that keep_in_fp32_modules matches to fp32.

    A pattern matches anywhere in a buffer's name, and * any characters; "auto": the names that a Transformers model declares.
    Without buffer_dtype nothing changes. Call this before zs.shard, which does not change buffers.
    """
    dtype = dtype_of("data_types.buffer_dtype", config.buffer_dtype)
    if dtype is None:
        return
    if config.keep_in_fp32_modules != "auto":
        patterns = [name.replace("*", ".*") for name in config.keep_in_fp32_modules]
    else:
        patterns = [
            (rf"^{re.escape(prefix)}\..*" if prefix else "") + name.replace("*", ".*")
            for prefix, module in model.named_modules()
            for name in kept_in_fp32(module, bool(config.float16_config.enabled))
        ]
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            full = f"{prefix}.{name}".removeprefix(".")
            if buffer.is_floating_point() and not is_narrow(buffer.dtype):
                kept = any(re.search(pattern, full) for pattern in patterns)
                setattr(module, name, buffer.to(torch.float32 if kept else dtype))
