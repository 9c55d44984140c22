"""deepspeed.checkpointing: recompute a function's activations with torch's own checkpoint.

To keep inputs of checkpoints on the host, or partitioned over a model-parallel group, `initialize` calls
`zs.checkpoint_activations` if the configuration asks for it (cpu_checkpointing, partition_activations with an mpu).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ...activations.checkpoint import checkpoint_activations
from .accelerator import always
from .config_keys import Values
from .ds_config import read_config
from .logs import logger

R = TypeVar("R")
_in_cpu: bool | None = None  # whether `checkpoint` keeps inputs on the host; None before `configure`


def configure(
    mpu_: object = None, deepspeed_config: object = None, partition_activations: bool | None = None, contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None, checkpoint_in_cpu: bool | None = None, synchronize: bool | None = None, profile: bool | None = None,
) -> None:  # fmt: skip
    """Set how `checkpoint` keeps inputs. Arguments override the configuration's section activation_checkpointing."""
    global _in_cpu
    section = {} if deepspeed_config is None else section_of(deepspeed_config)

    def chosen(given: bool | None, key: str) -> bool:
        return bool(section.get(key) if given is None else given)

    ignored = {
        "contiguous_checkpointing": chosen(contiguous_checkpointing, "contiguous_memory_optimization"),
        "synchronize": chosen(synchronize, "synchronize_checkpoint_boundary"), "profile": chosen(profile, "profile"),
    }  # fmt: skip
    if any(ignored.values()):
        names = ", ".join(name for name, on in ignored.items() if on)
        logger.info(f"deepspeed.checkpointing.configure: {names}: no effect here.")
    _in_cpu = chosen(checkpoint_in_cpu, "cpu_checkpointing")


def section_of(config: object) -> Values:
    """Return the activation_checkpointing section of a configuration in any form."""
    whole: Values = config._param_dict if hasattr(config, "_param_dict") else read_config(config)
    return whole.get("activation_checkpointing", {})


def is_configured() -> bool:
    return _in_cpu is not None


reset = always(None)  # DeepSpeed frees its buffers for activations here, and zeroshard has none


def checkpoint(function: Callable[..., R], *args: object, **kwargs: object) -> R:
    """Return function(*args, **kwargs), whose activations are recomputed in backward."""
    with torch.autograd.graph.save_on_cpu(pin_memory=True) if _in_cpu and torch.cuda.is_available() else contextlib.nullcontext():
        return torch_checkpoint(functools.partial(function, **kwargs), *args, use_reentrant=False)


def apply_config(model: nn.Module, config: object, mpu: Any) -> None:
    """Call zs.checkpoint_activations for a model that calls torch's checkpoint itself, if the configuration asks for it."""
    section = section_of(config)
    group = mpu.get_model_parallel_group() if mpu is not None and section.get("partition_activations") else None
    offload = "cpu" if section.get("cpu_checkpointing") and torch.cuda.is_available() else None
    if (group is not None or offload is not None) and "_zeroshard_activations" not in model.__dict__:
        checkpoint_activations(model, blocks=None, partition=group, offload=offload)


model_parallel_cuda_manual_seed = torch.manual_seed  # Megatron's separate generator for tensor parallelism does not exist here
