"""deepspeed.accelerator: one interface for the device of this process, CUDA or CPU.

`get_accelerator()` chooses the device once: by the variable DS_ACCELERATOR ("cuda", "cpu"), else CUDA if torch finds a device.
Memory is in bytes; on the CPU it is this process's resident memory, and its peak is the largest value at a call so far.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError
from ...memory.host_memory import available_nbytes
from ...utils import torch_compat

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


class DeepSpeedAccelerator:
    """Base class of both accelerators. `_name` is "cuda" or "cpu"."""

    _name: str
    _communication_backend_name: str
    _compile_backend = "inductor"
    Stream: Any = None
    Event: Any = None

    def __getattr__(self, name: str) -> Any:
        if name in _TENSORS:  # FloatTensor([0.0]) makes a tensor of that type on this device
            return functools.partial(torch.tensor, dtype=_TENSORS[name], device=self._name)
        raise AttributeError(f"the {self._name} accelerator of zeroshard.deepspeed has no {name}; torch.{self._name} may have it")

    def is_synchronized_device(self) -> bool:
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def communication_backend_name(self) -> str:
        """Return "nccl" or "gloo"."""
        return self._communication_backend_name

    def random(self) -> Any:
        return torch.random

    def is_fp64_supported(self) -> bool:
        return True

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

    def create_op_builder(self, class_name: str) -> Any:
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    def get_op_builder(self, class_name: str) -> Any:
        """Return the class of deepspeed.ops.op_builder of that name, or None."""
        from .op_builders import BUILDERS

        return BUILDERS.get(class_name)

    def op_builder_dir(self) -> str:
        return "deepspeed.ops.op_builder"

    def is_current_stream_capturing(self) -> bool:
        return False


class CPU_Accelerator(DeepSpeedAccelerator):
    """Accelerator for the CPU. Streams and events are None, as in DeepSpeed."""

    _name, _communication_backend_name = "cpu", "gloo"

    def __init__(self) -> None:
        self.max_mem = _resident_nbytes()

    def is_available(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def current_device_name(self) -> str:
        return "cpu"

    def device(self, device_index: int | None = None) -> None:
        return None

    def set_device(self, device_index: int) -> None:
        pass

    def current_device(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def device_count(self) -> int:
        """Return the ranks of this machine from LOCAL_SIZE or LOCAL_WORLD_SIZE, else the number of NUMA nodes with cores."""
        given = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or "0"
        nodes = [path.read_text().strip() for path in Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")]
        return int(given) or max(1, sum(bool(cores) for cores in nodes))

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: int | None = None) -> torch.Generator:
        return torch.default_generator

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> None:
        return None

    default_stream = current_stream

    def empty_cache(self) -> None:
        pass

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

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        """Return whether this CPU has fp16 instructions. Training in fp16 also works without them, slowly."""
        return torch_compat.fp16_on_cpu()

    def is_triton_supported(self) -> bool:
        return False

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        pass

    def range_pop(self, domain: str | None = None) -> None:
        pass

    def lazy_call(self, callback: Any) -> Any:
        return callback()

    def export_envs(self) -> list[str]:
        return []

    visible_devices_envs = export_envs

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        pass


_SAME_IN_TORCH = (
    "synchronize current_device set_device device_count is_available manual_seed manual_seed_all initial_seed "
    "Stream Event stream current_stream default_stream empty_cache memory_stats memory_allocated max_memory_allocated "
    "memory_reserved max_memory_reserved reset_peak_memory_stats"
).split()


class CUDA_Accelerator(DeepSpeedAccelerator):
    """Accelerator for CUDA; the functions in _SAME_IN_TORCH are torch.cuda's."""

    _name, _communication_backend_name = "cuda", "nccl"

    def __getattribute__(self, name: str) -> Any:
        return getattr(torch.cuda, name) if name in _SAME_IN_TORCH else super().__getattribute__(name)

    memory_cached = staticmethod(torch.cuda.memory_reserved)
    max_memory_cached = staticmethod(torch.cuda.max_memory_reserved)
    reset_max_memory_allocated = reset_max_memory_cached = staticmethod(torch.cuda.reset_peak_memory_stats)

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def device(self, device_index: int | None = None) -> Any:
        return torch.device("cuda", device_index)  # type: ignore[arg-type]  # None: the current one

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.cuda.default_generators[device_index]

    def total_memory(self, device_index: int | None = None) -> int:
        return torch.cuda.mem_get_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        return torch.cuda.mem_get_info(device_index)[0]

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return torch.cuda.get_device_capability()[0] >= 7

    def is_triton_supported(self) -> bool:
        return torch.cuda.get_device_capability()[0] >= 8

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> Any:
        return torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: str | None = None) -> Any:
        return torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Any) -> Any:
        return torch_compat.call_when_cuda_starts(callback)

    def is_current_stream_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def create_graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        graph.replay()

    def export_envs(self) -> list[str]:
        return ["NCCL"]

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

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
