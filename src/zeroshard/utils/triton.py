"""The test for Triton. Nothing requires Triton: torch's kernels give the same bytes."""

from __future__ import annotations

import functools
import importlib.util

import torch


@functools.cache
def has_triton(device: torch.device) -> bool:
    """Return True where Triton is installed and compiles for this GPU."""
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)
