"""Host memory: the bytes that each limit leaves, and settings by which the C library keeps or returns freed memory.

Training frees and allocates the same large tensors each step. glibc maps large blocks afresh and trims its heap, so the
kernel zeroes the same pages again and again: 13,000-23,000 page faults a step and rank for the 34M GPT, 3-5% of its time
(docs/log.md). Two settings stop that. The price is a heap with holes: blocks of some MiB that come and go occupy several
times what is in use at once (0.9 GiB for 0.3, docs/log.md), as with glibc's own settings. Where even parameters rest on
disk, memory is scarce: there blocks of 1 MiB and more are mapped, and are unmapped when they are freed.

Most holes have one cause. torch aligns blocks to 64 bytes, for which glibc cuts pieces off a larger block. Before 2.39
(bug 30723) these pieces go to the thread's cache of small blocks, and small allocations take them: the hole that the
block leaves is then too short for the next one of the same size. Without that cache they merge again. An environment variable
turns it off, if set before a process starts (`quiet_heap`, for the ranks of launchers). It also turns on huge pages for
newly mapped blocks; gathered units ask for them in any case (`release.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

try:
    import resource
except ImportError:  # not a POSIX system, which has no such limits
    resource = None  # type: ignore[assignment]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEEP_NBYTES = 128 << 20  # free memory that is kept at the top of the heap
MMAP_NBYTES = 32 << 20  # the largest value that glibc accepts; smaller blocks come from its heap
_RETURNED_NBYTES = 1 << 20  # blocks of this size and more are unmapped when they are freed, without `large`
mapped_nbytes = MMAP_NBYTES  # the C library maps each block of this size and more anew; smaller ones come from its heap
_TUNABLES, _MENDED = "GLIBC_TUNABLES", (2, 39)  # the version without bug 30723
_CACHE, _HUGE = "glibc.malloc.tcache_count=0", "glibc.malloc.hugetlb=1"


def quiet_heap(given: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables for a process to start with: its heap then reuses freed blocks and maps huge pages.

    Tunables that `given` sets keep their values. With huge pages (from glibc 2.35 on) a step with all states on disk takes 0.85
    of the time.
    """
    name, version = platform.libc_ver()
    if name != "glibc":
        return {}
    old = tuple(map(int, version.split(".")[:2])) < _MENDED
    tunables = given.get(_TUNABLES, "")
    more = [each for each in ([_CACHE] if old else []) + [_HUGE] if each.partition("=")[0] not in tunables]
    return {_TUNABLES: ":".join(filter(None, (tunables, *more)))} if more else {}


def keep_freed_memory(large: bool = True) -> bool:
    """Tell glibc's allocator to keep freed memory or, without `large`, to give large blocks back at once.

    Return False where the C library has no such setting.
    """
    global mapped_nbytes
    trim_nbytes, mmap_nbytes = (KEEP_NBYTES, MMAP_NBYTES) if large else (_RETURNED_NBYTES, _RETURNED_NBYTES)
    mapped_nbytes = mmap_nbytes
    try:
        mallopt = ctypes.CDLL(None).mallopt  # of the C library that the process has loaded
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, trim_nbytes)) and bool(mallopt(_M_MMAP_THRESHOLD, mmap_nbytes))


@dataclass(frozen=True)
class Limit:
    """The limit `name`, which leaves `nbytes` to allocate. of_process: it limits this process alone, not its host."""

    name: str
    nbytes: int
    remedy: str
    of_process: bool = False


def limits() -> list[Limit]:
    """Return the known limits to this process's memory. Swap counts as memory: it is slow, but nothing is killed."""
    swap = field_nbytes("SwapFree", "/proc/meminfo") or 0
    found = []
    if (free := field_nbytes("MemAvailable", "/proc/meminfo")) is not None:
        found.append(Limit("RAM and swap" if swap else "RAM", free + swap, "a host with more memory"))
    found += [
        Limit(f"cgroup {folder}", left + swap, "raise the memory limit of the container or control group")
        for folder, left in _groups_left()
    ]
    if resource is not None and hasattr(resource, "RLIMIT_AS"):
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        with contextlib.suppress(OSError):  # no /proc
            left = limit - int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            remedy = "raise the limit of the process's address space (ulimit -v)"
            found += [Limit("RLIMIT_AS", max(left, 0), remedy, of_process=True)] if limit != resource.RLIM_INFINITY else []
    return found


def available_nbytes() -> int | None:
    """Return the bytes that the machine and this process's control groups still leave to it; None where unknown."""
    free = field_nbytes("MemAvailable", "/proc/meminfo")
    left = ([] if free is None else [free]) + [left for _, left in _groups_left()]
    return max(min(left), 0) if left else None


def field_nbytes(name: str, file: str = "/proc/self/status") -> int | None:
    """Return a field of a file of /proc that counts kB, in bytes; None where there is none."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path(file).read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) << 10 if found else None


def _groups_left() -> list[tuple[Path, int]]:
    """Return (control group, bytes that its limit leaves) of all that have one. Cached files count as free."""
    found = []
    for root, limit, used, cached in (
        ("", "memory.max", "memory.current", ("active_file", "inactive_file")),  # control groups, version 2
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),  # version 1
    ):
        for folder in _own_groups(root):
            try:
                left = int((folder / limit).read_text()) - int((folder / used).read_text())
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # there is no such group, or its limit is "max"
                continue
            found.append((folder, max(left + sum(int(counts.get(name, 0)) for name in cached), 0)))
    return found


def resident_nbytes() -> int:
    """Return the resident bytes of this process, or their peak where the system gives only that."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if resource is not None else 0
        return peak if platform.system() == "Darwin" else peak << 10  # macOS counts bytes, others KiB


def _own_groups(root: str) -> list[Path]:
    """Return the folders that may be this process's control group or its ancestors' (in a container, the root)."""
    base, found = Path("/sys/fs/cgroup") / root, [Path("/sys/fs/cgroup") / root]
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return found
    for _, kinds, path in lines:
        if root in kinds.split(","):  # version 2 has one line, which names no kind
            own = Path(path.lstrip("/"))
            found += [base / folder for folder in (own, *own.parents) if folder.parts]
    return found
