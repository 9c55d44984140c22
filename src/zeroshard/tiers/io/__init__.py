"""The engine of zs.io (zeroshard/io.py): direct reads and writes of files, beside computation."""

from ...errors import OffloadIOError, SwapError
from ...utils.aligned import ALIGN, empty_aligned
from .async_file import Engine, File, Handle, Syscalls, bytes_of, open_file
from .filesystems import MEMORY_FILESYSTEMS, filesystem_of
from .swap_folder import NETWORK_FILESYSTEMS, SwapFolder, measure

__all__ = ["ALIGN", "MEMORY_FILESYSTEMS", "NETWORK_FILESYSTEMS", "Engine", "File", "Handle", "OffloadIOError", "SwapError", "SwapFolder", "Syscalls", "bytes_of", "empty_aligned", "filesystem_of", "measure", "open_file"]  # fmt: skip
