"""What differs between the supported releases of torch (>= 2.11), in one place."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import parametrize

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


def swap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Exchange what two tensor objects are. False where torch can not, or a live graph would be made unusable."""
    if one._use_count() > 1 or other._use_count() > 1:  # type: ignore[attr-defined]
        return False  # torch would swap, and poison the gradient accumulator that the graph keeps
    try:
        torch.utils.swap_tensors(one, other)
    except RuntimeError:
        return False
    return True


def exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    """As `swap`, where graphs and weak references may refer to both: graphs go on with the tensors that they know."""
    torch._C._swap_tensor_impl(one, other)
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__


HOOK_TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")  # attributes of a tensor: key -> hook; None where there are none


def carry_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Tensor hooks follow to the tensor that autograd sees: swapping leaves their tables with the Python object."""
    for table in HOOK_TABLES:
        hooks = getattr(source, table)
        if hooks and getattr(target, table) is not hooks:
            setattr(target, table, hooks)


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks of any kind are registered on a tensor."""
    return any(getattr(tensor, table) for table in HOOK_TABLES)


def post_accumulate_hooks(tensor: torch.Tensor) -> dict[int, Callable]:
    """The hooks of a tensor that run when its gradient is complete: torch's own table, in which they may be exchanged."""
    return tensor._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]


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


class _ParametrizationCache(threading.local):
    """The values that `torch.nn.utils.parametrize` keeps while a thread is in `cached()`, for each thread its own.

    Torch's `_cache_enabled` counts those of all threads, and stays the integer that torch.compile reads.
    """

    depth = 0

    def __init__(self) -> None:
        self._values: dict[Any, torch.Tensor | None] = {}

    def get(self, key: Any) -> torch.Tensor | None:
        """The value of a parametrization; None, so that it is computed, where this thread is not in `cached()`."""
        return self._values.get(key)

    def __setitem__(self, key: Any, value: torch.Tensor | None) -> None:
        if self.depth:
            self._values[key] = value

    def move(self, by: int) -> None:
        """This thread enters `cached()` (1) or leaves it (-1)."""
        with _counting:
            parametrize._cache_enabled += by
        self.depth += by
        if not self.depth:
            self._values.clear()


_counting = threading.Lock()
_cache = _ParametrizationCache()


def _cached() -> Iterator[None]:
    """The body of `parametrize.cached`: it runs in that module, and finds `_cache` there."""
    _cache.move(1)
    try:
        yield
    finally:
        _cache.move(-1)


@functools.cache
def give_threads_their_own_parametrizations() -> None:
    """From now on `parametrize.cached()` concerns the thread that entered it. Call it while no thread is inside.

    Torch has one cache for the process. Of two threads in `cached()` the first that leaves it empties neither, so the other's
    next use, the repeated forward of a checkpoint say, finds the value of an earlier one instead of computing it.
    """
    parametrize._cache = _cache  # type: ignore[assignment]
    parametrize.cached.__wrapped__.__code__ = _cached.__code__  # its code: others hold the function by its name
