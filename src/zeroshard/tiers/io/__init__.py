"""The engine of zs.io (zeroshard/io.py): direct reads and writes of files, beside computation."""

from ...errors import OffloadIOError, SwapError
from ...utils.aligned import ALIGN, empty_aligned
from .async_file import Engine, File, Handle, Syscalls, open_file
from .swap_folder import SwapFolder, measure

__all__ = [
    "ALIGN", "Engine", "File", "Handle", "OffloadIOError", "SwapError", "SwapFolder", "Syscalls", "empty_aligned",
    "measure", "open_file",
]  # fmt: skip
