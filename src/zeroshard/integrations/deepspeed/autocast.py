"""deepspeed.runtime.torch_autocast: an engine's forward runs under the autocast of its configuration, not of its caller."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .logs import warning_once

# attribute by which DeepSpeed marks parameters; here communication_data_type determines the dtype of all gradients
PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"


def autocast_if_enabled(engine: Any) -> contextlib.AbstractContextManager:
    """Return torch.autocast with the options of the section torch_autocast; without it, disable the caller's and warn once."""
    kind, enabled = engine.device.type, engine.torch_autocast_enabled()
    dtype = engine.torch_autocast_dtype()
    if enabled and dtype is not None:
        return torch.autocast(kind, dtype)
    if not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    warning_once(
        "torch.autocast is enabled outside of the engine, whose configuration does not ask for it: inside it is off, as in DeepSpeed. "
        'Say {"torch_autocast": {"enabled": true, "dtype": "bfloat16"}}, or {"bf16": {"enabled": true}} alone.'
    )
    return torch.autocast(kind, enabled=False)


def has_comm_dtype(param: torch.nn.Parameter) -> bool:
    """Return whether a parameter is marked with a dtype for communication."""
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: torch.nn.Parameter) -> torch.dtype:
    """Return a parameter's dtype for communication: its mark, or its own dtype."""
    return getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)
