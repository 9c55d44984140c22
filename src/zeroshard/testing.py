"""Functions that run ranks in tests. `run_threads`: N ranks as threads of one process, for tests that take milliseconds.

    results = run_threads(4, train, config)     # train(rank, config) in four threads; zs.shard works in each

`imagined_mesh`: one rank of any mesh, on fake tensors; the other ranks do not exist.

    with imagined_mesh({"pp": 12, "dp": 8, "tp": 4}, rank=0) as mesh:
        run = zs.parallelize(model, mesh, ...)

Ranks that are threads share most state of their process. The table lists which state each rank has for itself ("own"):

| own | grad mode, autocast's switch, default device, saved-tensor hooks, dispatch modes, functorch's levels: all thread-local |
| own | the cache of torch.nn.utils.parametrize.cached (PEFT's experts use it): `run_threads` makes it thread-local |
| shared, as are objects | hooks for all modules (register_module_*_hook), flags of torch.backends and torch.__future__, the default process group |
| shared, in C | the random generator: draw with a torch.Generator of your own, or before. The default dtype. Autocast's cache of casts: a rank that leaves autocast clears it for all ranks. Levels of forward-mode AD: torch raises if two ranks enter one at once. Anomaly mode, the profiler, deterministic algorithms, kernels of attention (sdpa_kernel) |
| shared, in other libraries | Transformers replaces functions of torch.nn.init while it makes a model, and the default dtype; its and PEFT's tables of classes; Accelerate's state |

For tests that change shared state while ranks run, use processes (`zeroshard.comm.launch.run_processes`). Automatic garbage
collection is off until the threads have ended.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .comm import backend_select
from .comm.shared_memory import SharedComm
from .comm.transport import ThreadTransport, ThreadWorld
from .diagnostics import failure_of
from .errors import ConfigError, PeerFailed
from .utils import torch_compat
from .utils.torch_compat import PlanMode, give_threads_their_own_parametrizations

Result = TypeVar("Result")


def run_threads(world_size: int, fn: Callable[..., Result], *args: object, timeout_s: float = 300.0) -> list[Result]:
    """Run fn(rank, *args) in `world_size` threads; return the results, or raise the first rank's error or TimeoutError."""
    give_threads_their_own_parametrizations()
    with torch_compat.FakeTensorMode() if torch.__version__ < "2.13" else contextlib.nullcontext():
        pass  # without a GPU, older ones keep the guard that the first fake mode sets for as long as its thread lives, and then crash
    shared = ThreadWorld(world_size)
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        comm = SharedComm(ThreadTransport(shared, rank), torch.device("cpu"), stall_timeout_s=timeout_s)
        backend_select.set_thread_comm(comm)
        try:
            results[rank] = fn(rank, *args)
        except BaseException as error:
            errors[rank] = error
            comm.fail(failure_of(error, rank))  # wakes peers that wait for this rank
        finally:
            comm.leave()
            backend_select.set_thread_comm(None)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True, name=f"rank{rank}") for rank in range(world_size)]
    with _no_automatic_collection():
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_s  # one for all threads
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback(file=sys.stderr)
        raise TimeoutError(f"threads still ran after {timeout_s} s: {[t.name for t in threads if t.is_alive()]}")
    if errors:
        # the error that came first, not the PeerFailed that it caused on other ranks
        rank, error = min(errors.items(), key=lambda item: (isinstance(item[1], PeerFailed), item[0]))
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"(on rank {rank} of {world_size}; ranks with errors: {sorted(errors)})")
        raise error
    return [results[rank] for rank in range(world_size)]


@contextlib.contextmanager
def imagined_mesh(axes: dict[str, int], rank: int = 0) -> Iterator[DeviceMesh]:
    """Context with a mesh whose other ranks do not exist: torch's fake process group, and fake tensors.

    axes: name -> number of ranks, outermost first. Code inside runs as on that rank: shapes, the ledger and the bytes of all
    collectives are right, but tensors have no values. Build the model on the meta device. Raises ConfigError if this process has
    a process group already.
    """
    if dist.is_initialized():
        raise ConfigError(
            "a plan over axes pp and tp makes a process group of its own, and this process has one already: plan before "
            "torch.distributed.init_process_group(), or in another process (`zeroshard plan`)."
        )
    torch_compat.clear_sharding_caches()  # they cache meshes by shape, and so would return another rank's groups
    dist.init_process_group("fake", rank=rank, world_size=math.prod(axes.values()), store=torch_compat.FakeStore())
    try:
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        with PlanMode(allow_non_fake_inputs=True):
            yield mesh
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _no_automatic_collection() -> Iterator[None]:
    """Context without automatic garbage collection, for as long as the threads run.

    Else two threads may deadlock in C. torch.get_rng_state() holds the generator's lock while it allocates its tensor, and the
    allocation may start a collection. If a finalizer then releases Python's lock, and another thread takes that lock and calls
    get_rng_state() (every checkpointed block does), that one waits for the generator's lock, and the first one for Python's.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
