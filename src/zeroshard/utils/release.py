"""Releases the memory of tensors to the system and restores it, while the tensor objects and all their views stay valid.

    device                       the storage is resized to nothing, and back: at another address, with any content
    host                         pages are dropped, the address stays; reading there again gives zeros

On the host only whole pages are dropped; pages that ranks share (a memfd) are dropped for all ranks that map them.
"""

from __future__ import annotations

import ctypes
import os

from torch import Tensor

from . import host_memory
from .aligned import round_down, round_up

_MADV_DONTNEED, _MADV_REMOVE, _MADV_HUGEPAGE = 4, 9, 14  # linux/mman.h: for private pages, for a memfd's, huge ones
_HUGE_NBYTES = 4 << 20  # two huge pages at least


def give_back(tensor: Tensor) -> int:
    """Release the memory of a contiguous tensor that nothing reads or writes; return the size that `take_again` needs."""
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    if tensor.device.type == "cpu":
        # the system refuses the first for private memory
        _advise(tensor, _MADV_REMOVE, _MADV_DONTNEED)
    else:
        storage.resize_(0)
    return nbytes


def take_again(tensor: Tensor, nbytes: int) -> None:
    """Allocate a tensor's memory again after `give_back`; its content is undefined, and the caller must write it."""
    storage = tensor.untyped_storage()
    if storage.nbytes() != nbytes:
        storage.resize_(nbytes)
        # huge pages in a block that was just mapped: 50 MB are filled in 10 ms, not 34-40 (12,000 pages to clear). Smaller blocks
        # come from the heap, and the kernel does not clear them again. Not on a device, and not fake
        if storage.device.type == "cpu" and tensor.nbytes >= max(_HUGE_NBYTES, host_memory.mapped_nbytes):
            _advise(tensor, _MADV_HUGEPAGE)


def _advise(tensor: Tensor, *advices: int) -> None:
    """Apply the first advice that the system accepts to the whole pages of a tensor; on Linux only."""
    begin, end = round_up(tensor.data_ptr()), round_down(tensor.data_ptr() + tensor.nbytes)
    if begin >= end or not hasattr(os, "memfd_create"):  # present on Linux only
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    for advice in advices:
        if madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice) == 0:
            return
