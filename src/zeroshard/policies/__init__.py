"""Policies, found before a model is sharded: which modules become units, and the dtype in which each module computes."""

from .dtypes import cast_modules, input_dtype
from .units import LARGE_FRACTION, ROOT, check_lazy, collect, device_of, find_blocks, partition

__all__ = [
    "LARGE_FRACTION", "ROOT", "cast_modules", "check_lazy", "collect", "device_of", "find_blocks", "input_dtype", "partition",
]  # fmt: skip
