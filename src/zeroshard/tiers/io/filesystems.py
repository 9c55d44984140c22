"""The type of the filesystem that holds a folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")


def filesystem_of(path: str | os.PathLike) -> str:
    """Return the type of the filesystem that holds a folder, as the kernel names it ('ext4', 'tmpfs', 'nfs4'); '' if unknown."""
    place = os.path.realpath(path)
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return ""
    found, longest = "", -1
    for line in lines:
        before, _, after = line.partition(" - ")
        mount = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), before.split(" ")[4])  # a blank is \040
        below = place == mount or place.startswith(mount.rstrip("/") + "/")
        if below and len(mount) >= longest:  # of two mounts on one point the later one covers the earlier
            found, longest = after.split(" ")[0], len(mount)
    return found
