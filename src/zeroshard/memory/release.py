"""Memory that is given back to the system while its tensors, and all views of them, stay.

    device with an allocator     the storage is resized to nothing, and back: at another address, with any content
    the host                     pages are dropped, the address stays; what is read there again are zeros

Of the host's memory whole pages go, also those that ranks share (a memfd: for all ranks that map them).
"""

from __future__ import annotations

import ctypes
import os

from torch import Tensor

from ..io.aligned import round_down, round_up
from .host_memory import mapped_nbytes

_MADV_DONTNEED, _MADV_REMOVE, _MADV_HUGEPAGE = 4, 9, 14  # linux/mman.h: private pages; those of a file in memory
_HUGE_NBYTES = 4 << 20  # two huge pages at least


def give_back(tensor: Tensor) -> int:
    """Give up the memory of a contiguous tensor that nothing reads or writes. What `take_again` wants to be told."""
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    if tensor.device.type == "cpu":
        _drop_pages(tensor.data_ptr(), tensor.nbytes)
    else:
        storage.resize_(0)
    return nbytes


def take_again(tensor: Tensor, nbytes: int) -> None:
    """Have memory again; its content is to be written."""
    storage = tensor.untyped_storage()
    if storage.nbytes() != nbytes:
        storage.resize_(nbytes)
        if storage.device.type == "cpu":  # neither a device's nor imagined
            _use_huge_pages(tensor)


def _use_huge_pages(tensor: Tensor) -> None:
    """Of a block that the C library has just mapped, and unmaps when it is freed: 50 MB are filled in 10 ms instead of 34-40,
    for what the system takes to clear 12,000 pages. Blocks of its heap stay as they are: they are not cleared again."""
    if tensor.nbytes >= max(_HUGE_NBYTES, mapped_nbytes()):
        _advise(tensor.data_ptr(), tensor.nbytes, _MADV_HUGEPAGE)


def _drop_pages(address: int, nbytes: int) -> None:
    _advise(address, nbytes, _MADV_REMOVE, _MADV_DONTNEED)  # the first is refused for private memory


def _advise(address: int, nbytes: int, *advices: int) -> None:
    """The first advice that the system takes on the whole pages of [address, address + nbytes). Where it has no such call, none."""
    begin, end = round_up(address), round_down(address + nbytes)
    if begin >= end or not hasattr(os, "memfd_create"):  # Linux's
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    for advice in advices:
        if madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice) == 0:
            return
