"""zs.io: asynchronous direct reads and writes between tensor memory and files, usable without the rest of the library.

    import zeroshard as zs
    memory = zs.io.empty_aligned(1 << 30)                            # uint8, at an address that direct I/O accepts
    file = zs.io.open_file("/nvme/states.bin", memory.nbytes, create=True)
    with zs.io.Engine() as engine:
        handle = engine.write(file, 0, memory)                       # returns at once
        ...
        handle.wait()                                                # done, or OffloadIOError with file, offset, errno

Any contiguous CPU tensor and any offset are accepted; where both are aligned (4096) there is no copy. `SwapFolder` is a
folder for such files that is removed with its process; `measure` returns the speed of a disk.
"""

from .errors import OffloadIOError, SwapError
from .tiers.io import ALIGN, Engine, File, Handle, SwapFolder, Syscalls, empty_aligned, measure, open_file

__all__ = ["ALIGN", "Engine", "File", "Handle", "OffloadIOError", "SwapError", "SwapFolder", "Syscalls", "empty_aligned", "measure", "open_file"]  # fmt: skip
