"""Helpers of deepspeed.utils, deepspeed.utils.groups and deepspeed.runtime.utils that scripts call.

Groups: the engine has only data parallelism over all ranks, so the data-parallel group is the world, and functions for every
other kind of group return size 1, rank 0 and None as the group.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...utils import torch_compat
from . import communication as dist
from .accelerator import CPU_Accelerator, get_accelerator
from .stand_ins import NotSupported

# -- deepspeed.utils.groups ---------------------------------------------------------------------------------------


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Do nothing for ep_size=1. Raises NotSupported for expert or model parallelism."""
    if ep_size != 1 or mpu is not None:
        raise NotSupported(f"groups.initialize(ep_size={ep_size}, mpu={mpu}): there is data parallelism only; leave both out.")


def get_data_parallel_group() -> Any:
    return dist.get_world_group()


def get_data_parallel_world_size() -> int:
    return dist.get_world_size()


def get_data_parallel_rank() -> int:
    return dist.get_rank()


def _get_data_parallel_group_ranks() -> range:
    return range(dist.get_world_size())


def _size_of_one() -> int:
    return 1


def _rank_in_one() -> int:
    return 0


def _no_group() -> None:
    return None


def _no_groups() -> dict[str, Any]:
    return {}


_get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = _get_sequence_data_parallel_rank = get_data_parallel_rank
_get_sequence_parallel_world_size = _get_model_parallel_world_size = get_model_parallel_world_size = _size_of_one
get_tensor_model_parallel_world_size = _get_expert_model_parallel_world_size = _size_of_one
_get_sequence_parallel_rank = get_model_parallel_rank = get_tensor_model_parallel_rank = _get_broadcast_src_rank = _rank_in_one
_get_sequence_parallel_group = get_model_parallel_group = get_tensor_model_parallel_group = _no_group
_get_zero_param_intra_parallel_group = _no_group
_get_expert_parallel_group_dict = _get_expert_data_parallel_group_dict = _no_groups


# -- deepspeed.utils ----------------------------------------------------------------------------------------------


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Return whether torch is at least min_version and at most max_version (2.6, or "2.6.1"); 2.6.1 is above 2.6."""
    assert min_version or max_version, "required_torch_version: expected min_version or max_version"
    now = _numbers(torch.__version__)
    return not (min_version and _numbers(min_version) > now) and not (max_version and _numbers(max_version) < now)


def _numbers(version: Any) -> tuple[int, ...]:
    """Return a version's numbers, '2.13.0+cpu' -> (2, 13), without trailing zeros and anything after the numbers."""
    parts = []
    for part in str(version).split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
        if digits != part:
            break
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


class RepeatingLoader:
    """Iterator over a data loader that starts again when the loader ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


@contextlib.contextmanager
def OnDevice(dtype: torch.dtype | None = None, device: Any = "meta", enabled: bool = True) -> Iterator[None]:
    """Context in which modules are built with parameters on this device and in this dtype."""
    before = torch.get_default_dtype()
    if enabled and dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        with torch.device(device) if enabled else contextlib.nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function itself; profilers show it by its own name."""
    return func


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return model.a.b for 'a.b'."""
    for part in module_name.split("."):
        model = getattr(model, part)
    return model


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set model.a.b to the module for 'a.b'."""
    *above, last = module_name.split(".")
    setattr(recursive_getattr(model, ".".join(above)) if above else model, last, module)


# -- deepspeed.runtime.utils --------------------------------------------------------------------------------------


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print, if forced and on rank 0, the device's current and peak memory and the host's, and reset the peak."""
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    gc.collect()
    device, gib = get_accelerator(), 2**30
    allocated, peak, cached = device.memory_allocated(), device.max_memory_allocated(), device.memory_reserved()
    print(f"{message}\nMA {allocated / gib:.2f} GB  Max_MA {peak / gib:.2f} GB  CA {cached / gib:.2f} GB")
    host = CPU_Accelerator()
    total, free = host.total_memory(), host.available_memory()
    print(f"CPU Virtual Memory:  used = {(total - free) / gib:.2f} GB, percent = {100 * (total - free) / total:.1f}%")
    device.reset_peak_memory_stats()


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Print the device's memory, on print_rank (-1: on all ranks)."""
    rank = dist.get_rank()
    if print_rank in (-1, rank):
        device = get_accelerator()
        now, peak = device.memory_allocated() / 2**30, device.max_memory_allocated() / 2**30
        print(f"RANK={rank} MEMSTATS {msg} alloc={now:.4f}GB max={peak:.4f}GB")
        if reset_max:
            device.reset_peak_memory_stats()


def empty_cache() -> None:
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def set_random_seed(seed: int) -> None:
    """Seed random, numpy and torch."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool]) -> Any:
    """Return a copy of `item` (nested lists, tuples, dicts) in which each entry that criterion_func selects is on the device."""
    if criterion_func(item):
        return item.to(device)
    return _each(item, lambda value: copy_to_device(value, device, criterion_func))


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Return `item` with its tensors on the device. Those that criterion_func selects stay the same objects, others do not."""
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device)
        return item
    if isinstance(item, (list, tuple, dict)):
        return _each(item, lambda value: move_to_device(value, device, criterion_func))
    return item.to(device) if isinstance(item, (Tensor, torch.nn.Module)) else item


def _each(item: Any, fn: Callable[[Any], Any]) -> Any:
    if isinstance(item, dict):
        return {key: fn(value) for key, value in item.items()}
    return type(item)(map(fn, item)) if type(item) in (list, tuple) else item


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """Return the value that all items equal. Raises RuntimeError if they differ."""
    found = set(items)
    if len(found) != 1:
        raise RuntimeError(f"expected all items to be equal, got {sorted(map(str, found))}")
    return found.pop()


def ensure_directory_exists(filename: str) -> None:
    """Make the folder of a file's path."""
    os.makedirs(os.path.dirname(filename) or ".", exist_ok=True)


def get_global_norm(norm_list: list[Any]) -> float:
    """Return the norm of norms; inf if one is negative or not finite."""
    norms = [float(norm) for norm in norm_list]
    return math.sqrt(sum(n * n for n in norms)) if all(math.isfinite(n) and n >= 0 for n in norms) else math.inf


def get_tensor_bytes(item: Any) -> int:
    """Return the bytes of the tensors within lists, tuples and dicts."""
    if isinstance(item, Tensor):
        return item.numel() * item.element_size()
    held = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
    return sum(map(get_tensor_bytes, held))


def maybe_loss_for_backward(value: Any) -> bool:
    """Return whether a value is a tensor of one element with a grad_fn."""
    return isinstance(value, Tensor) and value.numel() == 1 and value.grad_fn is not None


def check_internal_apis_for_count_used_parameters() -> bool:
    """Return whether this torch can tell which nodes a running backward will execute."""
    return torch_compat.tells_nodes_to_run()


def count_used_parameters_in_backward(parameters: Iterable[Tensor]) -> int:
    """Return how many of the parameters get a gradient in the running backward. Raises RuntimeError outside of a backward."""
    if torch_compat.graph_task() == -1:
        raise RuntimeError("count_used_parameters_in_backward: must be called during backward execution, from a gradient hook")
    return torch_compat.nodes_to_run([p for p in parameters if isinstance(p, Tensor) and p.requires_grad])


def noop_decorator(func: Callable[..., Any]) -> Callable[..., Any]:
    return func


noop_context = contextlib.nullcontext


class DummyOptim:
    """Optimizer-like object with one parameter group, which steps nothing."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]
