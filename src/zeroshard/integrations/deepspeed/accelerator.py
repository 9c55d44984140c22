"""deepspeed.accelerator: one interface for the device of this process, CUDA or CPU.

`get_accelerator()` chooses the device once: by the variable DS_ACCELERATOR ("cuda", "cpu"), else CUDA if torch finds a device.
Memory is in bytes; on the CPU it is this process's resident memory, and its peak is the largest value at a call so far.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ...errors import ConfigError
from ...memory.host_memory import available_nbytes
from ...utils import torch_compat

if TYPE_CHECKING:
    from .op_builders import OpBuilder

T = TypeVar("T")
SUPPORTED_ACCELERATOR_LIST = ["cuda", "cpu"]
_TENSORS = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.double,
    "FloatTensor": torch.float,
    "HalfTensor": torch.half,
    "IntTensor": torch.int,
    "LongTensor": torch.long,
}


def always(value: T) -> Callable[..., T]:
    """Return a function or method that answers the same, whatever its arguments are."""
    return lambda *args, **kwargs: copy.copy(value)


class DeepSpeedAccelerator:
    """Base class of both accelerators. `_name` is "cuda" or "cpu"."""

    _name: str
    _communication_backend_name: str
    _compile_backend = "inductor"
    random = staticmethod(lambda: torch.random)
    is_fp64_supported, op_builder_dir = always(True), always("deepspeed.ops.op_builder")

    def __getattr__(self, name: str) -> Any:
        if name in _TENSORS:  # FloatTensor([0.0]) makes a tensor of that type on this device
            return functools.partial(torch.tensor, dtype=_TENSORS[name], device=self._name)
        raise AttributeError(f"the {self._name} accelerator of zeroshard.deepspeed has no {name}; torch.{self._name} may have it")

    def communication_backend_name(self) -> str:
        """Return "nccl" or "gloo"."""
        return self._communication_backend_name

    def supported_dtypes(self) -> list[torch.dtype]:
        found = [torch.float]
        found += [torch.half] if self.is_fp16_supported() else []
        return found + ([torch.bfloat16] if self.is_bf16_supported() else [])

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """Return a copy in page-locked memory; the tensor itself if there is no CUDA device."""
        return tensor.pin_memory() if torch.cuda.is_available() else tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return torch.cuda.is_available() and tensor.is_pinned()

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        self._compile_backend = backend

    def create_op_builder(self, class_name: str) -> OpBuilder | None:
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    def get_op_builder(self, class_name: str) -> type[OpBuilder] | None:
        """Return the class of deepspeed.ops.op_builder of that name, or None."""
        from .op_builders import BUILDERS

        return BUILDERS.get(class_name)


class CPU_Accelerator(DeepSpeedAccelerator):
    """Accelerator for the CPU. Streams and events are None, as in DeepSpeed."""

    _name, _communication_backend_name = "cpu", "gloo"
    Stream = Event = None
    is_available = is_bf16_supported = always(True)
    is_synchronized_device = use_host_timers = resolves_data_dependency = handles_memory_backpressure = always(True)
    is_triton_supported = is_current_stream_capturing = always(False)
    device_name = current_device_name = always("cpu")
    device = set_device = synchronize = empty_cache = current_stream = default_stream = always(None)
    range_push = range_pop = set_visible_devices_envs = always(None)
    export_envs = visible_devices_envs = always(list[str]())
    is_fp16_supported = staticmethod(torch_compat.fp16_on_cpu)  # training in fp16 also works without the instructions, slowly
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    initial_seed = staticmethod(torch.initial_seed)
    get_rng_state = staticmethod(lambda device_index=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda new_state, device_index=None: torch.set_rng_state(new_state))
    default_generator = staticmethod(lambda device_index=None: torch.default_generator)
    stream = staticmethod(lambda stream: contextlib.nullcontext())
    lazy_call = staticmethod(lambda callback: callback())

    def __init__(self) -> None:
        self.max_mem = _resident_nbytes()

    def current_device(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def device_count(self) -> int:
        """Return the ranks of this machine from LOCAL_SIZE or LOCAL_WORLD_SIZE, else the number of NUMA nodes with cores."""
        given = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or "0"
        nodes = [path.read_text().strip() for path in Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")]
        return int(given) or max(1, sum(bool(cores) for cores in nodes))

    def memory_allocated(self, device_index: int | None = None) -> int:
        now = _resident_nbytes()
        self.max_mem = max(self.max_mem, now)
        return now

    memory_cached = memory_reserved = memory_allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        self.memory_allocated()
        return self.max_mem

    max_memory_cached = max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self.max_mem = _resident_nbytes()

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        return {"allocated_bytes.all.current": self.memory_allocated(), "allocated_bytes.all.peak": self.max_mem}

    def total_memory(self, device_index: int | None = None) -> int:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def available_memory(self, device_index: int | None = None) -> int:
        found = available_nbytes()
        return self.total_memory() - _resident_nbytes() if found is None else found


_SAME_IN_TORCH = (
    "synchronize current_device set_device device_count is_available manual_seed manual_seed_all initial_seed "
    "Stream Event stream current_stream default_stream empty_cache memory_stats memory_allocated max_memory_allocated "
    "memory_reserved max_memory_reserved reset_peak_memory_stats is_bf16_supported "
    "is_current_stream_capturing"
).split()


class CUDA_Accelerator(DeepSpeedAccelerator):
    """Accelerator for CUDA; the functions in _SAME_IN_TORCH are torch.cuda's."""

    _name, _communication_backend_name = "cuda", "nccl"
    is_synchronized_device = use_host_timers = resolves_data_dependency = handles_memory_backpressure = always(False)
    export_envs, visible_devices_envs = always(["NCCL"]), always(["CUDA_VISIBLE_DEVICES"])
    memory_cached = staticmethod(torch.cuda.memory_reserved)
    max_memory_cached = staticmethod(torch.cuda.max_memory_reserved)
    reset_max_memory_allocated = reset_max_memory_cached = staticmethod(torch.cuda.reset_peak_memory_stats)
    current_device_name = staticmethod(lambda: f"cuda:{torch.cuda.current_device()}")
    device_name = staticmethod(lambda device_index=None: "cuda" if device_index is None else f"cuda:{device_index}")
    device = staticmethod(lambda device_index=None: torch.device("cuda", device_index))  # None: the current one
    default_generator = staticmethod(lambda device_index: torch.cuda.default_generators[device_index])
    total_memory = staticmethod(lambda device_index=None: torch.cuda.mem_get_info(device_index)[1])
    available_memory = staticmethod(lambda device_index=None: torch.cuda.mem_get_info(device_index)[0])
    is_fp16_supported = staticmethod(lambda: torch.cuda.get_device_capability()[0] >= 7)
    is_triton_supported = staticmethod(lambda: torch.cuda.get_device_capability()[0] >= 8)
    range_push = staticmethod(lambda msg, domain=None, category=None: torch.cuda.nvtx.range_push(msg))
    range_pop = staticmethod(lambda domain=None: torch.cuda.nvtx.range_pop())
    lazy_call = staticmethod(torch_compat.call_when_cuda_starts)
    create_graph = staticmethod(torch.cuda.CUDAGraph)
    capture_to_graph = staticmethod(lambda graph, pool=None, stream=None: torch.cuda.graph(graph, pool, stream))
    replay_graph = staticmethod(lambda graph: graph.replay())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name) if name in _SAME_IN_TORCH else super().__getattr__(name)

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        current_env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, local_accelerator_ids))


def _resident_nbytes() -> int:
    """Return this process's resident memory in bytes; 0 on systems without /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


_chosen: DeepSpeedAccelerator | None = None


def get_accelerator() -> DeepSpeedAccelerator:
    """Return the accelerator of this process, always the same object. Raises ConfigError for an unknown DS_ACCELERATOR."""
    global _chosen
    if _chosen is None:
        name = os.environ.get("DS_ACCELERATOR") or ("cuda" if torch.cuda.is_available() else "cpu")
        if name not in SUPPORTED_ACCELERATOR_LIST:
            known = SUPPORTED_ACCELERATOR_LIST
            raise ConfigError(f"DS_ACCELERATOR: expected one of {known}, got {name!r}. Unset it: zeroshard finds the device.")
        _chosen = CUDA_Accelerator() if name == "cuda" else CPU_Accelerator()
    return _chosen


def set_accelerator(accel_obj: DeepSpeedAccelerator) -> None:
    """Set the object that `get_accelerator` returns."""
    global _chosen
    if not isinstance(accel_obj, DeepSpeedAccelerator):
        raise TypeError(f"set_accelerator: expected a DeepSpeedAccelerator, got {type(accel_obj).__name__}")
    _chosen = accel_obj


def is_current_accelerator_supported() -> bool:
    """Return whether the accelerator is one of SUPPORTED_ACCELERATOR_LIST."""
    return get_accelerator().device_name() in SUPPORTED_ACCELERATOR_LIST
