"""What differs between the supported releases of torch (>= 2.11), in one place."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

# renamed in torch 2.13; the old names warn there
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def alone(tensor: torch.Tensor) -> bool:
    """Whether nothing else has the memory of a tensor: no view, no detached alias, no array. False where torch does not tell."""
    return references(tensor) == references(torch.empty(1, device="cpu")) != 0


def original(module: torch.nn.Module) -> torch.nn.Module:
    """What `torch.compile(module)` wraps; every other module is its own."""
    return module._modules["_orig_mod"] if type(module).__name__ == "OptimizedModule" else module  # type: ignore[return-value]


def references(tensor: torch.Tensor) -> int:
    """How many tensors (views, detached aliases, what autograd has saved) have the memory of this one; 0 where torch does not tell."""
    owners = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if owners is None else owners(tensor.untyped_storage()._cdata)


def top_saved_tensors_hooks() -> tuple[Callable, Callable] | None:
    """The innermost saved-tensor hooks (pack, unpack) in force on this thread, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@contextlib.contextmanager
def without_fake_logs() -> Iterator[None]:
    """Errors of operators on fake tensors are raised; torch would also log a page of its internals for each."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
