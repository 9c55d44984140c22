"""Which machine this process runs on, as ranks compare it: for shared memory, local disks and process numbers."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def ranks_here(otherwise: int) -> int:
    """Ranks of this machine: LOCAL_WORLD_SIZE, which launchers set; `otherwise` where it is not set, or is no such number."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(given), 1) if given.isascii() and given.isdigit() else otherwise


def host_identity() -> tuple[str, str]:
    """(name, boot id): the same for all processes that share memory and local disks; the boot id is "" where there is none."""
    try:
        return socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname(), ""
