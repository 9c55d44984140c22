"""Host memory that direct I/O accepts, and the bytes of tensors.

Direct I/O moves data between a device and the memory of a process without a copy; address, offset and length must be
multiples of ALIGN. `torch.empty` aligns to 64 only.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from collections import deque

import torch
from torch import Tensor

from . import torch_compat

ALIGN = 4096  # a multiple of every usual logical block size
_HUGE_NBYTES = 4 << 20  # two huge pages: a smaller block may contain no aligned one
_MAP_NBYTES = 1 << 16  # from this size on memory is a mapping of its own, exact in size; below, a slice of a larger tensor
_TOGETHER = 8  # number of tensors that one loop reads at the same positions: parameters, gradients, masters, states, and two more
_marks: deque[int] = deque(maxlen=_TOGETHER - 1)  # `way_mark` of the newest large tensors
_marking = threading.Lock()
_told_unpinned = False  # True once a line was printed about memory that can not be pinned
_HASHED = ((12, 27), (13, 26), (14, 25), (15, 20), (16, 21), (17, 22), (18, 23), (19, 24))  # bits of an address, xored in pairs


def round_up(nbytes: int) -> int:
    """Return the smallest multiple of ALIGN that is at least `nbytes`."""
    return (nbytes + ALIGN - 1) & -ALIGN


def round_down(nbytes: int) -> int:
    """Return the largest multiple of ALIGN that is at most `nbytes`."""
    return nbytes & -ALIGN


def empty_aligned(nbytes: int, *, pin: bool = False) -> Tensor:
    """Return uninitialised memory at an address that direct I/O accepts.

    Args:
        nbytes: size; the memory is that size rounded up to a page, not to a power of two as `pin_memory()` rounds.
        pin: lock the pages for copies from and to a CUDA device; has no effect without one, and where the system
            refuses, prints one line. The caller must keep the tensor until copies from and to it are done.

    Returns:
        a tensor of (nbytes,) uint8 with `data_ptr() % 4096 == 0`
    """
    if torch_compat.faking():  # inside FakeTensorMode: a tensor without memory
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    if nbytes < _MAP_NBYTES and not pin:
        whole = torch.empty(nbytes + ALIGN, dtype=torch.uint8, device="cpu")
        skip = -whole.data_ptr() % ALIGN
        return whole[skip : skip + nbytes]
    room = _TOGETHER * ALIGN if nbytes >= _HUGE_NBYTES else 0  # takes address space, and no memory
    memory = _Mapping(-1, max(nbytes, 1) + room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            # fewer page faults, and fewer segments per transfer: writes at 2.1 GB/s and reads at 1.6, without 1.7 and 1.2
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    if pin and torch.cuda.is_available():
        memory.pin(whole)
    begin = _apart(whole.data_ptr()) if room else 0
    return torch.frombuffer(memory, dtype=torch.uint8, offset=begin, count=max(nbytes, 1))[:nbytes]


def _apart(address: int) -> int:
    """Return the bytes to skip at `address`, so that the tensor's `way_mark` differs from those of the newest tensors.

    AMD's processors select a way of the first-level cache by a hash of the address, of eight bits (Lipp et al., Take A Way,
    2020; Zen's, as measured on an EPYC). Tensors with equal hashes that a loop reads at the same positions evict each other: where
    columns of 256 MiB were mapped one behind the other, Adam took five to six times as long (docs/log.md). On other processors
    the skipped bytes cost nothing.
    """
    with _marking:
        for begin in range(0, _TOGETHER * ALIGN, ALIGN):
            if (mark := way_mark(address + begin)) not in _marks:
                break
        _marks.append(mark)
    return begin


def way_mark(address: int) -> int:
    """Return the hash of an address that `_apart` describes: addresses with equal hashes evict each other from the cache."""
    return sum(((address >> low ^ address >> high) & 1) << i for i, (low, high) in enumerate(_HASHED))


def empty(numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return an uninitialised tensor (numel,), to be filled at once: large ones on the host have huge pages."""
    nbytes = numel * dtype.itemsize
    if torch.device(device).type != "cpu" or nbytes < _HUGE_NBYTES:
        return torch.empty(numel, dtype=dtype, device=device)
    return empty_aligned(nbytes).view(dtype)


def zeros(numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return zeros (numel,). Large ones on the host take no memory until they are written, and then huge pages."""
    if torch.device(device).type != "cpu" or numel * dtype.itemsize < _HUGE_NBYTES:
        return torch.zeros(numel, dtype=dtype, device=device)
    return empty_aligned(numel * dtype.itemsize).view(dtype)  # a new mapping, which reads as zeros


class _Mapping(mmap.mmap):
    """Mapped memory that can be locked for CUDA, and is unlocked just before it is unmapped."""

    _pinned: int = 0  # address of the locked pages; 0: none
    _device: int = 0  # CUDA device that was current

    def pin(self, whole: Tensor) -> None:
        global _told_unpinned
        cudart = torch.cuda.cudart()
        failed = cudart.cudaHostRegister(whole.data_ptr(), whole.nbytes, 0)
        if not int(failed):
            self._pinned, self._device = whole.data_ptr(), torch.cuda.current_device()
            return
        with contextlib.suppress(RuntimeError, AssertionError):
            torch.ones(1, device="cuda")  # CUDA reports the failure again at the next kernel: launch one here that may fail
        if not _told_unpinned:  # copies are correct but slower, so the run goes on
            _told_unpinned = True
            print(
                f"zeroshard: {whole.nbytes} bytes of host memory can not be pinned ({cudart.cudaGetErrorString(failed)}): copies from "
                "and to the device are slower. Raise the limit of locked memory (ulimit -l), or offload less to the host",
                file=sys.stderr,
            )

    def __del__(self) -> None:  # a weakref's callback would come after munmap
        if self._pinned:
            # owners wait for their copies, but one may still run: the documentation of cudaHostUnregister promises no wait for it
            with contextlib.suppress(RuntimeError):  # an earlier kernel's error must not keep the memory locked
                torch.cuda.synchronize(self._device)
            torch.cuda.cudart().cudaHostUnregister(self._pinned)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor on the host as bytes, valid for as long as the caller holds the tensor.

    Numpy is avoided: `tensor.numpy()` marks the storage as one that can never be resized again, and released buffers of this
    library are resized to nothing. Raises ValueError for a tensor that is not contiguous, on the CPU, or without its memory.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError(
            f"expected a contiguous tensor on the CPU, got shape {tuple(tensor.shape)}, stride "
            f"{tuple(tensor.stride()) if tensor.layout == torch.strided else tensor.layout} on {tensor.device}; "
            "pass tensor.contiguous().cpu(), or a flat slice of one buffer"
        )
    if tensor.nbytes == 0:
        return memoryview(b"")
    end = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
    if tensor.untyped_storage().nbytes() < end or not tensor.data_ptr():
        raise ValueError(f"expected a tensor that has its memory, got shape {tuple(tensor.shape)} without; was it released?")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def host_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's elements as bytes on the host: its own memory if it is contiguous there, else that of a copy."""
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")
