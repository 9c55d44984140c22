"""Host memory: keep what the C library would give back to the kernel after every step.

Training frees and allocates the same large tensors each step. glibc maps large blocks afresh and trims its heap, so the
kernel zeroes the same pages again and again: 13,000-23,000 page faults a step and rank for the 34M GPT, 3-5% of its time
(docs/log.md). Two settings stop that; the price is that at most 128 MiB of freed heap stay with the process.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEEP_NBYTES = 128 << 20
_MMAP_NBYTES = 32 << 20  # the largest value that glibc accepts


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to keep freed memory; False where the C library has no such setting."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _KEEP_NBYTES)) and bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_NBYTES))
