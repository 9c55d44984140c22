"""Host memory: how much there is, and keeping what the C library would give back to the kernel after every step.

Training frees and allocates the same large tensors each step. glibc maps large blocks afresh and trims its heap, so the
kernel zeroes the same pages again and again: 13,000-23,000 page faults a step and rank for the 34M GPT, 3-5% of its time
(docs/log.md). Two settings stop that; the price is that at most 128 MiB of freed heap stay with the process.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

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


def available_nbytes() -> int | None:
    """Memory that this process may still take: what the machine has, and what the limit of its group leaves. None if unknown."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    left = [int(found[1]) << 10] if found else []
    for root, limit, used in (
        ("", "memory.max", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for folder in _own_groups(root):
            try:
                left.append(int((folder / limit).read_text()) - int((folder / used).read_text()))
            except (OSError, ValueError):  # no such group, or "max"
                continue
    return max(min(left), 0) if left else None


def _own_groups(root: str) -> list[Path]:
    """Where the control group of this process may be found: inside a container its own is the root."""
    base, found = Path("/sys/fs/cgroup") / root, [Path("/sys/fs/cgroup") / root]
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return found
    return found + [base / path.lstrip("/") for _, kinds, path in lines if root in kinds.split(",") and path != "/"]
