"""Which machine this process runs on, as ranks compare it: for shared memory, local disks and process numbers."""

from __future__ import annotations

import socket
from pathlib import Path


def host_identity() -> tuple[str, str]:
    """(name, boot id): the same for all processes that share memory and local disks; the boot id is "" where there is none."""
    try:
        return socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname(), ""
