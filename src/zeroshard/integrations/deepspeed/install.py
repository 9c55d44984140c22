"""What makes `import deepspeed` find zeroshard in child processes."""

from __future__ import annotations

import os
from pathlib import Path


def child_environment() -> dict[str, str]:
    """PYTHONPATH with the folder that holds the package `deepspeed` first, and what it had after it."""
    ours = str(Path(__file__).with_name("site"))
    rest = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != ours]
    return {"PYTHONPATH": os.pathsep.join([ours, *rest])}
