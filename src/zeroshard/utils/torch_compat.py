"""What differs between the supported releases of torch (>= 2.11), in one place."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint

# renamed in torch 2.13; the old names warn there
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def alone(tensor: torch.Tensor) -> bool:
    """Whether nothing else has the memory of a tensor: no view, no detached alias, no array. False where torch does not tell."""
    owners = getattr(torch._C, "_storage_Use_Count", None)
    if owners is None:
        return False
    fresh = torch.empty(1, device="cpu")
    return owners(tensor.untyped_storage()._cdata) == owners(fresh.untyped_storage()._cdata)


def original(module: torch.nn.Module) -> torch.nn.Module:
    """What `torch.compile(module)` wraps; every other module is its own."""
    return module._modules["_orig_mod"] if type(module).__name__ == "OptimizedModule" else module  # type: ignore[return-value]


_idle = threading.local()


def idle_nodes() -> int:
    """Nodes of autograd's graph that torch's own checkpoints have made on this thread and that lead nowhere."""
    return getattr(_idle, "count", 0)


def _count_idle_nodes() -> None:
    """Before torch 2.13 a checkpoint keeps its inputs in a node of its own, of which no output depends."""
    saver = getattr(torch.utils.checkpoint, "_NoopSaveInputs", None)
    if saver is None:
        return
    plain = saver.forward

    def forward(*args: Any) -> Any:
        _idle.count = idle_nodes() + 1
        return plain(*args)

    saver.forward = staticmethod(forward)


_count_idle_nodes()


@contextlib.contextmanager
def without_fake_logs() -> Iterator[None]:
    """Errors of operators on fake tensors are raised; torch would also log a page of its internals for each."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
