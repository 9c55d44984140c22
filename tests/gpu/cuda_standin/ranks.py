"""Several ranks on the stand-in against one process: `tests/gpu/cuda_standin/run ranks.py [world]` (2 ranks unless given).

Each rank is a process with the stand-in's "nccl", which keeps stream order and moves bytes with gloo; several_ranks.py has
what they train. Prints a line for each case; exits with 1 if one fails.
"""

from __future__ import annotations

import cuda_standin  # isort: skip  (before torch; processes that are started import this file first)

import sys
import tempfile
from pathlib import Path

from several_ranks import equal_one_process

if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as name:
        sys.exit(not equal_one_process(number, Path(name), faults=cuda_standin.errors))
