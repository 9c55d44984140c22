"""Helpers of deepspeed.utils, .utils.groups, .runtime.utils, .runtime.torch_autocast and .checkpoint that scripts call.

Groups: the engine has only data parallelism over all ranks, so the data-parallel group is the world, and functions for every
other kind of group return size 1, rank 0 and None as the group.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from ...utils import torch_compat
from . import communication as dist
from .accelerator import CPU_Accelerator, always, get_accelerator
from .logs import warning_once
from .stand_ins import NotSupported

if TYPE_CHECKING:
    from .engine_settings import Settings

T = TypeVar("T")

# -- deepspeed.utils.groups ---------------------------------------------------------------------------------------


def initialize(ep_size: int = 1, mpu: object = None) -> None:
    """Do nothing for ep_size=1. Raises NotSupported for expert or model parallelism."""
    if ep_size != 1 or mpu is not None:
        raise NotSupported(f"groups.initialize(ep_size={ep_size}, mpu={mpu}): there is data parallelism only; leave both out.")


def _get_data_parallel_group_ranks() -> range:
    return range(dist.get_world_size())


get_data_parallel_group = _get_data_parallel_group = _get_sequence_data_parallel_group = dist.get_world_group
get_data_parallel_world_size = _get_data_parallel_world_size = _get_sequence_data_parallel_world_size = dist.get_world_size
get_data_parallel_rank = _get_data_parallel_rank = _get_sequence_data_parallel_rank = dist.get_rank
_get_model_parallel_world_size = get_model_parallel_world_size = always(1)
get_tensor_model_parallel_world_size = _get_expert_model_parallel_world_size = always(1)
get_model_parallel_rank = get_tensor_model_parallel_rank = _get_broadcast_src_rank = always(0)
get_model_parallel_group = get_tensor_model_parallel_group = always(None)
_get_zero_param_intra_parallel_group = always(None)
_get_expert_parallel_group_dict = _get_expert_data_parallel_group_dict = always(dict[str, object]())


# -- deepspeed.utils ----------------------------------------------------------------------------------------------


def required_torch_version(min_version: object = None, max_version: object = None) -> bool:
    """Return whether torch is at least min_version and at most max_version (2.6, or "2.6.1"); 2.6.1 is above 2.6."""
    assert min_version or max_version, "required_torch_version: expected min_version or max_version"
    now = _numbers(torch.__version__)
    return not (min_version and _numbers(min_version) > now) and not (max_version and _numbers(max_version) < now)


def _numbers(version: object) -> tuple[int, ...]:
    """Return a version's numbers, '2.13.0a1+cpu' -> (2, 13), without trailing zeros and anything after the numbers."""
    found = re.match(r"[0-9]+(\.[0-9]+)*", str(version))
    parts = [int(part) for part in found[0].split(".")] if found else []
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


class RepeatingLoader(Generic[T]):
    """Iterator over a data loader that starts again when the loader ends."""

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader[T]:
        return self

    def __next__(self) -> T:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


@contextlib.contextmanager
def OnDevice(dtype: torch.dtype | None = None, device: str | torch.device = "meta", enabled: bool = True) -> Iterator[None]:
    """Context in which modules are built with parameters on this device and in this dtype."""
    before = torch.get_default_dtype()
    if enabled and dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        with torch.device(device) if enabled else contextlib.nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


def noop_decorator(func: T) -> T:
    """Return the function itself; profilers show it by its own name."""
    return func


instrument_w_nvtx = noop_decorator


def recursive_getattr(model: object, module_name: str) -> Any:
    """Return model.a.b for 'a.b'."""
    for part in module_name.split("."):
        model = getattr(model, part)
    return model


def recursive_setattr(model: object, module_name: str, module: object) -> None:
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


def copy_to_device(item: Any, device: str | torch.device, criterion_func: Callable[[object], bool]) -> Any:
    """Return a copy of `item` (nested lists, tuples, dicts) in which each entry that criterion_func selects is on the device."""
    if criterion_func(item):
        return item.to(device)
    return _each(item, lambda value: copy_to_device(value, device, criterion_func))


def move_to_device(item: Any, device: str | torch.device, criterion_func: Callable[[object], bool] | None = None) -> Any:
    """Return `item` with its tensors on the device. Those that criterion_func selects stay the same objects, others do not."""
    if criterion_func is not None and criterion_func(item):
        item.data = item.to(device)
        return item
    if isinstance(item, (list, tuple, dict)):
        return _each(item, lambda value: move_to_device(value, device, criterion_func))
    return item.to(device) if isinstance(item, (Tensor, torch.nn.Module)) else item


def _each(item: Any, fn: Callable[[object], object]) -> object:
    if isinstance(item, dict):
        return {key: fn(value) for key, value in item.items()}
    return type(item)(map(fn, item)) if type(item) in (list, tuple) else item


def get_only_unique_item(items: Iterable[T]) -> T:
    """Return the value that all items equal. Raises RuntimeError if they differ."""
    found = set(items)
    if len(found) != 1:
        raise RuntimeError(f"expected all items to be equal, got {sorted(map(str, found))}")
    return found.pop()


def ensure_directory_exists(filename: str) -> None:
    """Make the folder of a file's path."""
    os.makedirs(os.path.dirname(filename) or ".", exist_ok=True)


def get_global_norm(norm_list: Iterable[Tensor | float]) -> float:
    """Return the norm of norms; inf if one is negative or not finite."""
    norms = [float(norm) for norm in norm_list]
    return math.sqrt(sum(n * n for n in norms)) if all(math.isfinite(n) and n >= 0 for n in norms) else math.inf


def get_tensor_bytes(item: object) -> int:
    """Return the bytes of the tensors within lists, tuples and dicts."""
    if isinstance(item, Tensor):
        return item.numel() * item.element_size()
    held = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
    return sum(map(get_tensor_bytes, held))


def maybe_loss_for_backward(value: object) -> bool:
    """Return whether a value is a tensor of one element with a grad_fn."""
    return isinstance(value, Tensor) and value.numel() == 1 and value.grad_fn is not None


# whether this torch can tell which nodes a running backward will execute
check_internal_apis_for_count_used_parameters = torch_compat.tells_nodes_to_run


def count_used_parameters_in_backward(parameters: Iterable[Tensor]) -> int:
    """Return how many of the parameters get a gradient in the running backward. Raises RuntimeError outside of a backward."""
    if torch_compat.graph_task() == -1:
        raise RuntimeError("count_used_parameters_in_backward: must be called during backward execution, from a gradient hook")
    return torch_compat.nodes_to_run([p for p in parameters if isinstance(p, Tensor) and p.requires_grad])


noop_context = contextlib.nullcontext


# -- deepspeed.runtime.torch_autocast -----------------------------------------------------------------------------

# attribute by which DeepSpeed marks parameters; here communication_data_type determines the dtype of all gradients
PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"


def autocast_if_enabled(engine: Settings) -> contextlib.AbstractContextManager:
    """Return torch.autocast with the options of the section torch_autocast; without it, disable the caller's and warn once."""
    kind, dtype = engine.device.type, engine.torch_autocast_dtype()
    if engine.torch_autocast_enabled() and dtype is not None:
        return torch.autocast(kind, dtype)
    if not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    warning_once(
        "torch.autocast is enabled outside of the engine, whose configuration does not ask for it: inside it is off, as in DeepSpeed. "
        'Say {"torch_autocast": {"enabled": true, "dtype": "bfloat16"}}, or {"bf16": {"enabled": true}} alone.'
    )
    return torch.autocast(kind, enabled=False)


def has_comm_dtype(param: torch.nn.Parameter) -> bool:
    """Return whether a parameter is marked with a dtype for communication."""
    return hasattr(param, PARAM_COMM_DTYPE_ATTR_NAME)


def get_comm_dtype(param: torch.nn.Parameter) -> torch.dtype:
    """Return a parameter's dtype for communication: its mark, or its own dtype."""
    return getattr(param, PARAM_COMM_DTYPE_ATTR_NAME, param.dtype)


# -- deepspeed.checkpoint -----------------------------------------------------------------------------------------

UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"  # key in client_state that Megatron's scripts use


def clone_tensors_for_torch_save(item: T, device: str | torch.device = torch.device("cpu")) -> T:
    """Return a copy of `item`: new lists, tuples and dicts, each tensor in its own storage; tied tensors get one copy."""
    copies: dict[object, Tensor] = {}

    def cloned(item: Any) -> Any:
        if isinstance(item, dict):
            return type(item)({key: cloned(value) for key, value in item.items()})
        if isinstance(item, (list, tuple)):
            return type(item)(map(cloned, item))
        if not isinstance(item, Tensor):
            return item
        place = (item.data_ptr(), item.shape, item.stride(), item.dtype, item.device) if item.numel() else id(item)
        if place not in copies:
            copy = item.detach().to(device)
            copies[place] = copy.clone() if copy.untyped_storage().data_ptr() == item.untyped_storage().data_ptr() else copy
        return copies[place]

    return cloned(item)


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Return the path of a rank's model states in DeepSpeed's checkpoints."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


# -- optimizers ---------------------------------------------------------------------------------------------------


class DummyOptim:
    """Optimizer-like object with one parameter group, which steps nothing."""

    def __init__(self, params: object) -> None:
        self.param_groups = [{"params": params}]
