"""Identity of the machine that a process runs on (for shared memory, local disks and process numbers), its ranks and caches."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

_TOKEN = uuid.uuid4().hex  # a forked process has its parent's


def ranks_here(otherwise: int) -> int:
    """Return the number of ranks on this machine, from LOCAL_WORLD_SIZE, which launchers set; else `otherwise`."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(given), 1) if given.isascii() and given.isdigit() else otherwise


def cache_nbytes(level: int) -> int | None:
    """Return the size in bytes of the first core's data cache of a level, from Linux's sysfs; None if it is not there."""
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind, found, size = ((index / name).read_text().strip() for name in ("type", "level", "size"))
        except OSError:
            continue
        if found == str(level) and kind != "Instruction" and size.endswith("K") and size[:-1].isdigit():
            return int(size[:-1]) << 10
    return None


def process_identity() -> str:
    """Return what tells this process from all others: ranks that are threads have the same one."""
    return f"{os.getpid()} {_TOKEN}"


def host_identity() -> tuple[str, str]:
    """Return (host name, boot id or ""), equal for all processes that share memory and local disks."""
    try:
        return socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname(), ""


def node_identity() -> tuple[str, ...]:
    """Return `host_identity` and the network namespace: equal for processes that also reach each other's abstract sockets.

    To divide one host into several nodes, set ZEROSHARD_NODE to a different name for the ranks of each.
    """
    place = *host_identity(), os.environ.get("ZEROSHARD_NODE", "")
    try:
        return *place, os.readlink("/proc/self/ns/net")
    except OSError:
        return place
