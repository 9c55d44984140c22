"""A stand-in for a CUDA device, for machines without one: README.md says what it shows and what it can not.

`import cuda_standin` must come before the first `import torch` of the process (torch looks its hooks up once), and
replaces what torch.cuda and torch.distributed do from then on; `errors()` are the faults of order seen since the last
call. Under pytest, `-p cuda_standin.plugin` does both. Environment:

    CUDA_STANDIN_DEVICES=2   devices (1)
    CUDA_STANDIN_MIB=64      memory of each (8192)
    CUDA_STANDIN_RACES=0     do not check the order of accesses
    CUDA_STANDIN_LATE=0      copies run at once
    CUDA_STANDIN_LOUD=1      print each fault when it is seen
"""

from __future__ import annotations

import ctypes
import os
import sys
import traceback
from pathlib import Path

from .build import LIBRARY

if "torch" in sys.modules:
    raise ImportError("cuda_standin: expected to be imported before torch, which looks its hooks up once")
if not LIBRARY.exists():
    raise ImportError("cuda_standin: the native part is not built; run python tests/gpu/cuda_standin/build.py")
ctypes.CDLL(str(LIBRARY))  # registers memory, guards, hooks and operators, before torch asks for them

import torch  # noqa: E402, F401  (the extension needs its libraries)

sys.path.insert(0, str(LIBRARY.parent))
import _standin as native  # noqa: E402

from . import collectives, cuda  # noqa: E402

__all__ = ["errors", "native"]

HERE = Path(__file__).resolve().parent
FRAMES = 8  #: of the program, below a fault
_faults: list[str] = []


def _note(text: str) -> None:
    """A fault, with the lines of the program (neither torch's nor this tool's) that led to it."""
    stack = [
        frame
        for frame in traceback.extract_stack(limit=40)
        if "site-packages" not in frame.filename and not frame.filename.startswith((str(HERE), sys.base_prefix, "<"))
    ]
    lines = [f"\n    {Path(frame.filename).name}:{frame.lineno} {frame.name}: {frame.line}" for frame in stack[-FRAMES:]]
    _faults.append(text + "".join(lines))
    if os.environ.get("CUDA_STANDIN_LOUD"):
        print("cuda_standin:", _faults[-1], file=sys.stderr)


def errors() -> list[str]:
    """Faults of order since the last call, oldest first."""
    native.take_errors()  # the same, without lines
    found = _faults.copy()
    _faults.clear()
    return found


native.on_error(_note)
native.set_options(os.environ.get("CUDA_STANDIN_RACES") != "0", os.environ.get("CUDA_STANDIN_LATE") != "0")
if os.environ.get("CUDA_STANDIN_MIB"):
    native.set_capacity(int(os.environ["CUDA_STANDIN_MIB"]) << 20)
cuda.install()
collectives.install()
