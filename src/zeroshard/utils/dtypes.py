"""To which dtypes a precision applies: fp32, fp16 and bf16 are ways to keep a number, all others say what the bits mean."""

from __future__ import annotations

import torch


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a dtype is a floating-point one of at most 8 bits: fp8, fp4, and the exponents (e8m0) that scale them.

    Such values are what a quantizer made, to be read with scales kept elsewhere, so no cast keeps what they stand for.
    """
    return dtype.is_floating_point and dtype.itemsize == 1


def casts_to(given: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """What becomes of `given` where `dtype` is asked for floating-point values: `dtype`, but for narrow ones and where it is None."""
    return given if dtype is None or not given.is_floating_point or is_narrow(given) else dtype


def follows_precision(dtype: torch.dtype) -> bool:
    """Whether values of this dtype take the dtype in which a module computes; fp64, narrow ones and integers keep theirs."""
    return dtype.is_floating_point and dtype != torch.float64 and not is_narrow(dtype)
