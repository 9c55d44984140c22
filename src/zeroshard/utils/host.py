"""Which machine this process runs on: what ranks compare, for shared memory, local disks and process numbers, and its caches."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def ranks_here(otherwise: int) -> int:
    """Ranks of this machine: LOCAL_WORLD_SIZE, which launchers set; `otherwise` where it is not set, or is no such number."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(given), 1) if given.isascii() and given.isdigit() else otherwise


def cache_nbytes(level: int) -> int | None:
    """Bytes of the first core's data cache of a level, as Linux tells them; None where it does not."""
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind, found, size = ((index / name).read_text().strip() for name in ("type", "level", "size"))
        except OSError:
            continue
        if found == str(level) and kind != "Instruction" and size.endswith("K") and size[:-1].isdigit():
            return int(size[:-1]) << 10
    return None


def host_identity() -> tuple[str, str]:
    """(name, boot id): the same for all processes that share memory and local disks; the boot id is "" where there is none."""
    try:
        return socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname(), ""


def node_identity() -> tuple[str, ...]:
    """As `host_identity`, for processes that reach each other's abstract sockets as well: of one network namespace.

    Who wants several nodes on one host gives ZEROSHARD_NODE, a name, to the ranks of each.
    """
    place = *host_identity(), os.environ.get("ZEROSHARD_NODE", "")
    try:
        return *place, os.readlink("/proc/self/ns/net")
    except OSError:
        return place
