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
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...errors import ConfigError
from ...utils import torch_compat
from ...utils.host_memory import available_nbytes, resident_nbytes

T = TypeVar("T")
_TENSORS = {
    "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8, "DoubleTensor": torch.double, "FloatTensor": torch.float,
    "HalfTensor": torch.half, "IntTensor": torch.int, "LongTensor": torch.long,
}  # fmt: skip


def always(value: T) -> Callable[..., T]:
    """Return a function or method that answers the same, whatever its arguments are."""
    return lambda *args, **kwargs: copy.copy(value)


def getter(name: str) -> Callable[[Any], Any]:
    """Return a method that returns an attribute."""
    return lambda self: getattr(self, name)


class DeepSpeedAccelerator:
    """Base class of both accelerators. `_name` is "cuda" or "cpu"."""

    _name: str
    _communication_backend_name: str
    random = staticmethod(lambda: torch.random)
    get_compile_backend = always("inductor")

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


class CPU_Accelerator(DeepSpeedAccelerator):
    """Accelerator for the CPU. Streams and events are None, as in DeepSpeed."""

    _name, _communication_backend_name = "cpu", "gloo"
    Stream = Event = None
    is_available = is_bf16_supported = is_synchronized_device = always(True)
    is_triton_supported = always(False)
    current_device = always(torch.device("cpu"))  # no number, as CUDA's: torch takes a number for a GPU's
    device_name = current_device_name = always("cpu")
    device = set_device = synchronize = empty_cache = current_stream = default_stream = always(None)
    is_fp16_supported = staticmethod(torch_compat.fp16_on_cpu)  # training in fp16 also works without the instructions, slowly
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    initial_seed = staticmethod(torch.initial_seed)
    get_rng_state = staticmethod(lambda device_index=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda new_state, device_index=None: torch.set_rng_state(new_state))
    default_generator = staticmethod(lambda device_index=None: torch.default_generator)
    stream = staticmethod(lambda stream: contextlib.nullcontext())

    def __init__(self) -> None:
        self.max_mem = resident_nbytes()

    def device_count(self) -> int:
        """Return the ranks of this machine from LOCAL_SIZE or LOCAL_WORLD_SIZE, else the number of NUMA nodes with cores."""
        given = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or "0"
        nodes = [path.read_text().strip() for path in Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")]
        return int(given) or max(1, sum(bool(cores) for cores in nodes))

    def memory_allocated(self, device_index: int | None = None) -> int:
        now = resident_nbytes()
        self.max_mem = max(self.max_mem, now)
        return now

    memory_cached = memory_reserved = memory_allocated

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        self.memory_allocated()
        return self.max_mem

    max_memory_cached = max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self.max_mem = resident_nbytes()

    def total_memory(self, device_index: int | None = None) -> int:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def available_memory(self, device_index: int | None = None) -> int:
        found = available_nbytes()
        return self.total_memory() - resident_nbytes() if found is None else found


class CUDA_Accelerator(DeepSpeedAccelerator):
    """Accelerator for CUDA; names that it lacks are torch.cuda's."""

    _name, _communication_backend_name = "cuda", "nccl"
    is_synchronized_device = always(False)
    memory_cached = staticmethod(torch.cuda.memory_reserved)
    max_memory_cached = staticmethod(torch.cuda.max_memory_reserved)
    current_device_name = staticmethod(lambda: f"cuda:{torch.cuda.current_device()}")
    device_name = staticmethod(lambda device_index=None: "cuda" if device_index is None else f"cuda:{device_index}")
    device = staticmethod(lambda device_index=None: torch.device("cuda", device_index))  # None: the current one
    default_generator = staticmethod(lambda device_index: torch.cuda.default_generators[device_index])
    total_memory = staticmethod(lambda device_index=None: torch.cuda.mem_get_info(device_index)[1])
    available_memory = staticmethod(lambda device_index=None: torch.cuda.mem_get_info(device_index)[0])
    is_fp16_supported = staticmethod(lambda: torch.cuda.get_device_capability()[0] >= 7)
    is_triton_supported = staticmethod(lambda: torch.cuda.get_device_capability()[0] >= 8)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in _TENSORS or not hasattr(torch.cuda, name) else getattr(torch.cuda, name)

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)


_chosen: DeepSpeedAccelerator | None = None


def get_accelerator() -> DeepSpeedAccelerator:
    """Return the accelerator of this process, always the same object. Raises ConfigError for an unknown DS_ACCELERATOR."""
    global _chosen
    if _chosen is None:
        name = os.environ.get("DS_ACCELERATOR") or ("cuda" if torch.cuda.is_available() else "cpu")
        if name not in ("cuda", "cpu"):
            raise ConfigError(
                f"DS_ACCELERATOR: expected one of ['cuda', 'cpu'], got {name!r}. Unset it: zeroshard finds the device."
            )
        _chosen = CUDA_Accelerator() if name == "cuda" else CPU_Accelerator()
    return _chosen


def set_accelerator(accel_obj: DeepSpeedAccelerator) -> None:
    """Set the object that `get_accelerator` returns."""
    global _chosen
    if not isinstance(accel_obj, DeepSpeedAccelerator):
        raise TypeError(f"set_accelerator: expected a DeepSpeedAccelerator, got {type(accel_obj).__name__}")
    _chosen = accel_obj


def is_current_accelerator_supported() -> bool:
    """Return whether the accelerator is that of CUDA or the CPU."""
    return get_accelerator().device_name() in ("cuda", "cpu")
