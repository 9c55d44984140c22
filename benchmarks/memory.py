"""The resident memory of a process, as the kernel counts it (Linux; None elsewhere).

Words: *RSS* counts every page that is mapped, also those that other processes map; *PSS* divides a shared
page by the number of processes that map it, so PSS adds up over the ranks of one host. Libraries' code is
shared by all ranks, and so are the buffers of a shared-memory exchange: RSS counts these once per rank, PSS
once in all. The *high-water mark* exists for RSS only; the peak of PSS is sampled from outside.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

from zeroshard.utils.host_memory import field_nbytes


def peak_rss_nbytes() -> int | None:
    """Return the highest RSS of this process, in bytes, since its start or the last reset."""
    return field_nbytes("VmHWM")


def reset_peak_rss() -> None:
    """Reset the high-water mark to the current RSS; no effect where the kernel has no such file."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def trim() -> None:
    """Return freed memory to the system, as far as the C library can; no effect with other libraries than glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def pss_nbytes(pid: int) -> int | None:
    """Return the current PSS (proportional set size) of a process, in bytes; None if it cannot be read."""
    return field_nbytes("Pss", f"/proc/{pid}/smaps_rollup")
