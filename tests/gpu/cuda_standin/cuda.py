"""What `torch.cuda` answers: streams, events, memory and the CUDA runtime's few calls, over the native part.

Signatures are torch's own. Whatever takes a device takes an index, a name, a torch.device or None (the current one).
"""

from __future__ import annotations

import time
from types import SimpleNamespace, TracebackType
from typing import Any

import _standin as native
import torch

DeviceLike = torch.device | str | int | None
CUDA = 1  #: c10::DeviceType::CUDA


def index_of(device: DeviceLike = None) -> int:
    if device is None:
        return native.get_device()
    if isinstance(device, int):
        return native.get_device() if device < 0 else device
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"expected a cuda device, got {device}")
    return native.get_device() if device.index is None else device.index


# -- streams and events ------------------------------------------------------------------------------------------------


class Stream(torch.Stream):
    def __new__(cls, device: DeviceLike = None, priority: int = 0, **kwargs: Any) -> Stream:
        if kwargs:  # stream_id, device_index, device_type: one that exists
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, torch.device("cuda", index_of(device)), priority=priority)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    @property
    def cuda_stream(self) -> int:
        return self.stream_id


class Event(torch.Event):
    recorded_at: float  #: seconds of the host's clock

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> Event:
        return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: Stream | None = None) -> None:
        self.recorded_at = time.perf_counter()
        super().record(current_stream() if stream is None else stream)

    def wait(self, stream: Stream | None = None) -> None:
        super().wait(current_stream() if stream is None else stream)

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds, never 0: kernels take time."""
        return max(1e3 * (end_event.recorded_at - self.recorded_at), 1e-3)


def current_stream(device: DeviceLike = None) -> Stream:
    index = index_of(device)
    return Stream(stream_id=native.stream_id(index), device_index=index, device_type=CUDA)


def default_stream(device: DeviceLike = None) -> Stream:
    return Stream(stream_id=0, device_index=index_of(device), device_type=CUDA)


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        native.exchange_device(stream.device_index)
        native.set_stream(stream.device_index, stream.stream_id)


class StreamContext:
    """`with torch.cuda.stream(s)`: s and its device are current."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.device = native.get_device()
            self.before = current_stream(self.stream.device_index)
            set_stream(self.stream)

    def __exit__(self, *raised: type | BaseException | TracebackType | None) -> None:
        if self.stream is not None:
            set_stream(self.before)
            native.exchange_device(self.device)


class device:
    """`with torch.cuda.device(d)`: d is current."""

    def __init__(self, where: DeviceLike) -> None:
        self.index = -1 if where is None else index_of(where)

    def __enter__(self) -> None:
        self.before = native.exchange_device(self.index)

    def __exit__(self, *raised: type | BaseException | TracebackType | None) -> None:
        native.exchange_device(self.before)


class device_of(device):
    def __init__(self, obj: torch.Tensor) -> None:
        super().__init__(obj.get_device() if obj.is_cuda else -1)


# -- the runtime -------------------------------------------------------------------------------------------------------


class Status(int):
    """A cudaError: 0 is success."""


SUCCESS, INVALID = Status(0), Status(1)


class Runtime:
    """What `torch.cuda.cudart()` gives."""

    cudaError = SimpleNamespace(success=0)

    @staticmethod
    def cudaHostRegister(pointer: int, nbytes: int, flags: int) -> Status:
        native.pin(pointer, nbytes)
        return SUCCESS

    @staticmethod
    def cudaHostUnregister(pointer: int) -> Status:
        return SUCCESS if native.unpin(pointer) else INVALID

    @staticmethod
    def cudaGetErrorString(error: int) -> str:
        return "no error" if error == SUCCESS else "invalid argument"

    @staticmethod
    def cudaMemGetInfo(index: int) -> tuple[int, int]:
        """(free, total) bytes."""
        return native.capacity() - native.allocated(index), native.capacity()


def get_device_properties(device: DeviceLike = None) -> SimpleNamespace:
    return SimpleNamespace(name="stand-in", major=9, minor=0, total_memory=native.capacity(), multi_processor_count=1)


# -- installing --------------------------------------------------------------------------------------------------------


def _set(module: Any, **names: Any) -> None:
    for name, value in names.items():
        setattr(module, name, value)


def _install_devices() -> None:
    def set_device(device: DeviceLike) -> None:
        native.exchange_device(index_of(device))

    _set(
        torch.cuda,
        is_available=lambda: True, is_initialized=lambda: True, init=lambda: None, _lazy_init=lambda: None, _initialized=True,
        _is_in_bad_fork=lambda: False, device_count=native.device_count, current_device=native.get_device, set_device=set_device,
        device=device, device_of=device_of, _exchange_device=native.exchange_device, _maybe_exchange_device=native.exchange_device,
        synchronize=lambda device=None: native.synchronize(), cudart=Runtime, ipc_collect=lambda: None,
        is_bf16_supported=lambda including_emulation=True: True, get_device_capability=lambda device=None: (9, 0),
        get_device_name=lambda device=None: "stand-in", get_device_properties=get_device_properties,
    )  # fmt: skip
    torch.version.cuda = "13.0"


def _install_streams() -> None:
    _set(
        torch.cuda,
        Stream=Stream, Event=Event, StreamContext=StreamContext, stream=StreamContext, current_stream=current_stream,
        default_stream=default_stream, set_stream=set_stream, is_current_stream_capturing=lambda: False,
        get_sync_debug_mode=lambda: 0,
    )  # fmt: skip
    _set(torch.cuda.streams, Stream=Stream, Event=Event)


def _install_memory() -> None:
    def allocated(device: DeviceLike = None) -> int:
        return native.allocated(index_of(device))

    def peak(device: DeviceLike = None) -> int:
        return native.peak(index_of(device))

    _set(
        torch.cuda,
        memory_allocated=allocated, max_memory_allocated=peak, memory_reserved=allocated, max_memory_reserved=peak,
        reset_peak_memory_stats=lambda device=None: native.reset_peak(index_of(device)), empty_cache=lambda: None,
        mem_get_info=lambda device=None: Runtime.cudaMemGetInfo(index_of(device)),
    )  # fmt: skip
    torch.cuda.memory.memory_allocated = allocated
    resize_on_host = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return resize_on_host(self, nbytes)
        native.resize_storage(self, nbytes)
        return self

    torch.UntypedStorage.resize_ = resize_


def _install_random_numbers() -> None:
    generators = tuple(native.default_generator(index) for index in range(native.device_count()))

    def generator(device: DeviceLike = None) -> torch.Generator:
        return generators[index_of(device)]

    def manual_seed_all(seed: int) -> None:
        for each in generators:
            each.manual_seed(seed)

    names = {
        "get_rng_state": lambda device="cuda": generator(device).get_state(),
        "set_rng_state": lambda state, device="cuda": generator(device).set_state(state),
        "manual_seed": lambda seed: generator().manual_seed(seed),
        "manual_seed_all": manual_seed_all,
    }
    _set(torch.cuda.random, **names)
    _set(torch.cuda, **names, default_generators=generators, initial_seed=lambda: generator().initial_seed())
    manual_seed_all(0)


def install() -> None:
    """From now on torch.cuda is the stand-in's."""
    _install_devices()
    _install_streams()
    _install_memory()
    _install_random_numbers()
