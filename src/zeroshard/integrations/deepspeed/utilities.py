"""Helpers of deepspeed.utils, .utils.groups, .runtime.utils, .checkpoint and .git_version_info that scripts call.

Groups: those of the last engine whose layers are cut (AutoTP, PipelineModule). Without one the data-parallel group is the world,
and functions for every other kind of group return size 1, rank 0 and None as the group.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...utils import torch_compat
from ...utils.axes import DP, TP
from ...utils.tensor_tree import map_tensors
from . import communication as dist
from .accelerator import CPU_Accelerator, get_accelerator
from .stand_ins import NotSupported

T = TypeVar("T")
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"  # key in client_state that Megatron's scripts use


def initialize(ep_size: int = 1, mpu: object = None) -> None:
    """Do nothing for ep_size=1. Raises NotSupported for expert or model parallelism."""
    if ep_size != 1 or mpu is not None:
        raise NotSupported(f"groups.initialize(ep_size={ep_size}, mpu={mpu}): there is data parallelism only; leave both out.")


_meshes: list[DeviceMesh] = []  # that of the last engine whose model has an axis besides dp


def set_mesh(mesh: DeviceMesh) -> None:
    """Let the functions below tell this rank's groups along the axes of a mesh."""
    _meshes[:] = [mesh]


def _along(axis: str) -> DeviceMesh | None:
    return _meshes[0][axis] if _meshes and axis in (_meshes[0].mesh_dim_names or ()) else None


def get_data_parallel_group() -> dist.ProcessGroup | None:
    line = _along(DP)
    return dist.get_world_group() if line is None else line.get_group()


def get_data_parallel_world_size() -> int:
    return dist.get_world_size(get_data_parallel_group())


def get_data_parallel_rank() -> int:
    return dist.get_rank(get_data_parallel_group())


def get_tensor_model_parallel_group() -> dist.ProcessGroup | None:
    """Return the group of the ranks that share this rank's layers, or None."""
    line = _along(TP)
    return None if line is None else line.get_group()


def get_tensor_model_parallel_world_size() -> int:
    line = _along(TP)
    return 1 if line is None else line.size()


def get_tensor_model_parallel_rank() -> int:
    line = _along(TP)
    return 0 if line is None else line.get_local_rank()


_get_data_parallel_group, _get_data_parallel_rank = get_data_parallel_group, get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size
get_model_parallel_group, get_model_parallel_rank = get_tensor_model_parallel_group, get_tensor_model_parallel_rank
get_model_parallel_world_size = get_tensor_model_parallel_world_size


def required_torch_version(min_version: object = None, max_version: object = None) -> bool:
    """Return whether torch is at least min_version and at most max_version (2.6, or "2.6.1"); 2.6.1 is above 2.6."""
    assert min_version or max_version, "required_torch_version: expected min_version or max_version"
    now = _numbers(torch.__version__)
    return not (min_version and _numbers(min_version) > now) and not (max_version and _numbers(max_version) < now)


def _numbers(version: object) -> tuple[int, ...]:
    """Return a version's first four numbers, and 0 for those that it lacks: '2.13.0a1+cpu' -> (2, 13, 0, 0)."""
    found = re.match(r"[0-9]+(\.[0-9]+)*", str(version))
    parts = [int(part) for part in found[0].split(".")] if found else []
    return (*parts, 0, 0, 0, 0)[:4]


def _short(version: str | tuple | None) -> str:
    """Shorten a version: '2.13.0+cpu' -> '2.13'. '0.0' for None, as in DeepSpeed."""
    parts = version if isinstance(version, tuple) else (version or "0.0").split("+")[0].split(".")
    return ".".join(map(str, parts[:2]))


torch_info: dict[str, object] = {
    "version": _short(torch.__version__),
    "bf16_support": torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
    "cuda_version": _short(torch.version.cuda),
    "nccl_version": _short(torch.cuda.nccl.version() if torch.version.cuda and torch.cuda.is_available() else None),
    "hip_version": _short(torch.version.hip),
}


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


def instrument_w_nvtx(func: T) -> T:
    """Return the function itself; profilers show it by its own name."""
    return func


def recursive_getattr(model: object, module_name: str) -> Any:
    """Return model.a.b for 'a.b'."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: object, module_name: str, module: object) -> None:
    """Set model.a.b to the module for 'a.b'."""
    above, _, last = module_name.rpartition(".")
    setattr(recursive_getattr(model, above) if above else model, last, module)


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


def set_random_seed(seed: int) -> None:
    """Seed random, numpy and torch."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Return a container with its tensors on a device. Those for which criterion_func is true, the same tensors with other memory."""

    def moved(tensor: Tensor) -> Tensor:
        if criterion_func is not None and criterion_func(tensor):
            tensor.data = tensor.to(device)
            return tensor
        return tensor.to(device)

    return map_tensors(moved, item)


def count_used_parameters_in_backward(parameters: Iterable[Tensor]) -> int:
    """Return how many of the parameters get a gradient in the running backward. Raises RuntimeError outside of a backward."""
    if torch_compat.graph_task() == -1:
        raise RuntimeError("count_used_parameters_in_backward: must be called during backward execution, from a gradient hook")
    return torch_compat.nodes_to_run([p for p in parameters if isinstance(p, Tensor) and p.requires_grad])


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
