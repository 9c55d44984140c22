"""A memory limit for a group of processes, enforced by the kernel (cgroups), to prove that a training run fits into it.

    with MemoryCage(6 << 30) as cage:   each process: cage.enter();   afterwards: cage.peak_nbytes()

Works with cgroups v1 and v2; both need the right to make a group below this process's own (root, or delegation).
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


class CageUnavailable(RuntimeError):
    """Raised if this system does not let the process set a memory limit."""


class MemoryCage:
    """A cgroup with a limit. Processes that exceed it together are killed by the kernel."""

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        self.old = (_ROOT / "memory").is_dir()
        self.folder = self._parent() / f"zeroshard-{os.getpid()}-{secrets.token_hex(3)}"

    def _parent(self) -> Path:
        """Return the folder of this process's own cgroup."""
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        if self.old:
            own = next((path for _, kinds, path in lines if "memory" in kinds.split(",")), "/")
            parent = _ROOT / "memory" / own.lstrip("/")
            return parent if parent.is_dir() else _ROOT / "memory"
        own = next((path for number, _, path in lines if number == "0"), "/")
        return _ROOT / own.lstrip("/")

    def __enter__(self) -> MemoryCage:
        name = "memory.limit_in_bytes" if self.old else "memory.max"
        try:
            self.folder.mkdir()
            (self.folder / name).write_text(str(self.limit_nbytes))
        except OSError as error:
            self.__exit__()
            raise CageUnavailable(f"no memory limit can be set here: {error}") from None
        return self

    def enter(self) -> None:
        """Move the calling process into the group: memory that it allocates from now on counts against the limit."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def peak_nbytes(self) -> int:
        """Return the most bytes that all processes inside have used together so far, page cache included."""
        return int((self.folder / ("memory.max_usage_in_bytes" if self.old else "memory.peak")).read_text())

    def __exit__(self, *_: object) -> None:
        if self.folder.is_dir():
            self.folder.rmdir()  # works when the processes have ended
