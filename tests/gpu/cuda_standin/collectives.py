"""Registers the backend "nccl" of torch.distributed: in stream order as NCCL is, over gloo (native/backend.h)."""

from __future__ import annotations

from typing import Any

import _standin as native
import torch.distributed as dist
from torch.distributed import distributed_c10d


class _IsOrdered(type):
    """`isinstance(backend, ProcessGroupNCCL)` holds for the native class."""

    def __instancecheck__(cls, thing: object) -> bool:
        return isinstance(thing, native.OrderedBackend)


class ProcessGroupNCCL(metaclass=_IsOrdered):
    """A call makes a native backend: (store, rank, world size, options)."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self._timeout: Any = None  # init_process_group sets it

    def __new__(cls, store: dist.Store, rank: int, size: int, options: Options) -> Any:
        return native.OrderedBackend(dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout))


def install() -> None:
    """From now on init_process_group("nccl") makes the stand-in's."""
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL
