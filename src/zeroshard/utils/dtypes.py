"""Dtypes that a precision converts: fp32, fp16 and bf16, which only round a number. The bits of all others have a meaning."""

from __future__ import annotations

import torch


def is_narrow(dtype: torch.dtype) -> bool:
    """Return whether a dtype is a floating-point one of at most 8 bits: fp8, fp4, and the exponents (e8m0) that scale them.

    A quantizer makes such values, which have scales kept elsewhere, so that a cast would lose their meaning.
    """
    return dtype.is_floating_point and dtype.itemsize == 1


def casts_to(given: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype after converting `given` to `dtype`: `given` if that is narrow or no float, or if dtype is None."""
    return given if dtype is None or not given.is_floating_point or is_narrow(given) else dtype


def follows_precision(dtype: torch.dtype) -> bool:
    """Return whether values of a dtype are cast to a module's compute dtype; fp64, narrow ones and integers are not."""
    return dtype.is_floating_point and dtype != torch.float64 and not is_narrow(dtype)
