"""deepspeed.comm: torch.distributed under DeepSpeed's names, and its initialisation.

Names that this module does not define are torch.distributed's (`__getattr__`). Operations take DeepSpeed's arguments `prof`,
`log_name` and `debug`; after `configure(enabled=True)` they are timed and counted for `log_summary`. The engine does not use
them for training: zeroshard has its own collectives, which `zs.report(model)` counts.

In threads of `zeroshard.testing.run_threads`, rank, world size and barrier are those of the thread as a rank.
"""

from __future__ import annotations

import functools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as torch_dist

from ...comm import backend_select
from ...comm.launch import free_port, rank_environment
from ...errors import ConfigError, ZeroshardError
from ...utils.tensor_tree import find_tensors
from .accelerator import always, get_accelerator

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

R = TypeVar("R")
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
default_pg_timeout = timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "10")))
_timeouts = [default_pg_timeout]  # timeout of the process group
_FROM_MPI = {"RANK": "OMPI_COMM_WORLD_RANK", "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE", "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK"}

# -- start and end -----------------------------------------------------------------------------------------------


def init_distributed(
    dist_backend: str | None = None, auto_mpi_discovery: bool = True, distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True, timeout: timedelta = default_pg_timeout, init_method: str | None = None,
    dist_init_required: bool | None = None, config: object = None, rank: int = -1, world_size: int = -1,
) -> None:  # fmt: skip
    """Initialise torch.distributed, unless it is initialised already: with gloo on the CPU, nccl on CUDA.

    The rank comes from the arguments, from torchrun's variables, or (auto_mpi_discovery) from Open MPI's. Without any of them
    this is a world of one process, and torchrun's variables are set accordingly.

    Raises:
        ConfigError: dist_init_required=False and there is no process group; or only some of the variables are set.
    """
    if config is not None:
        configure(config)
    if torch_dist.is_initialized():
        return
    if dist_init_required is False:
        raise ConfigError(
            "init_distributed: dist_init_required=False, and no process group has started. Call "
            "torch.distributed.init_process_group() before it, or leave dist_init_required at None."
        )
    if rank < 0 and init_method in (None, "env://"):
        _complete_environment(auto_mpi_discovery, distributed_port)
    backend = dist_backend or get_accelerator().communication_backend_name()
    if rank < 0:  # both come from the environment or from init_method
        rank = world_size = -1
    torch_dist.init_process_group(backend, timeout=timeout, init_method=init_method, rank=rank, world_size=world_size)
    _timeouts[:] = [timeout]


def stall_timeout_s() -> float:
    """Return the stall timeout in seconds: that of the process group (DEEPSPEED_TIMEOUT minutes, or 10)."""
    return _timeouts[0].total_seconds()


def _complete_environment(auto_mpi_discovery: bool, port: int) -> None:
    """Set torchrun's variables for a single process, or from Open MPI's. Raises ConfigError if some are missing."""
    env = os.environ
    if auto_mpi_discovery and "RANK" not in env and all(name in env for name in _FROM_MPI.values()):
        env.update({name: env[theirs] for name, theirs in _FROM_MPI.items()})
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in env]
    alone = missing == ["RANK", "WORLD_SIZE"] or (not missing and env["WORLD_SIZE"] == "1")
    if alone:
        port = free_port() if port == TORCH_DISTRIBUTED_DEFAULT_PORT else port
        for name, value in rank_environment(0, 1, port).items():
            if name != "LOCAL_WORLD_SIZE":  # DeepSpeed does not set it either
                env.setdefault(name, value)
        return
    env.setdefault("MASTER_PORT", str(port))
    missing += [name for name in ("MASTER_ADDR",) if name not in env]
    if missing:
        raise ConfigError(
            f"init_distributed: {', '.join(missing)} must be set as well as {', '.join(n for n in _FROM_MPI if n in env)}. "
            "Start the script with torchrun or zeroshard-deepspeed, which set them."
        )


def is_initialized() -> bool:
    """Return whether torch.distributed is initialised, or this is a thread of run_threads."""
    return torch_dist.is_initialized() or _in_threads()


def _in_threads() -> bool:
    try:
        return not torch_dist.is_initialized() and backend_select.rank_and_size()[1] > 1
    except ConfigError:  # a launcher's variables are set, but there is no process group
        return False


def _rank_and_size() -> tuple[int, int]:
    if not is_initialized():
        raise ZeroshardError("deepspeed.comm: no process group has started. Call deepspeed.init_distributed() first.")
    return backend_select.rank_and_size()


def get_rank(group: ProcessGroup | None = None) -> int:
    """Return this process's rank in the group (None: among all); -1 outside of it."""
    return _rank_and_size()[0] if group is None else torch_dist.get_rank(group)


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Return the group's number of ranks (None: of all); -1 outside of it."""
    return _rank_and_size()[1] if group is None else torch_dist.get_world_size(group)


def get_local_rank() -> int:
    """Return the rank on this machine, from LOCAL_RANK or Open MPI's variable, which launchers set."""
    _rank_and_size()
    return int(os.environ.get("LOCAL_RANK") or os.environ.get(_FROM_MPI["LOCAL_RANK"]) or 0)


def get_world_group() -> ProcessGroup | None:
    _rank_and_size()
    return torch_dist.GroupMember.WORLD


def new_group(ranks: Iterable[int]) -> ProcessGroup:
    """Make a process group of these ranks (collective over all ranks, also those outside)."""
    made: Any = torch_dist.new_group(list(ranks))
    return made


def get_global_rank(group: ProcessGroup | None = None, group_rank: int = 0) -> int:
    return group_rank if group is None else torch_dist.get_global_rank(group, group_rank)


# -- counting ----------------------------------------------------------------------------------------------------


# log of operations, switched on by `configure`. records: operation -> bytes of its tensor -> seconds of each call
comms_logger = SimpleNamespace(
    enabled=False, verbose=False, debug=False, prof_all=True, prof_ops=[], records=defaultdict(lambda: defaultdict(list))
)  # fmt: skip


def configure(
    deepspeed_config: object = None, enabled: bool | None = None, prof_all: bool | None = None, prof_ops: list[str] | None = None,
    verbose: bool | None = None, debug: bool | None = None,
) -> None:  # fmt: skip
    """Configure the log of this module's operations. None: a setting is not changed.

    deepspeed_config: a configuration whose `comms_config` (comms_logger_enabled, comms_logger) is read first.
    """
    section = getattr(deepspeed_config, "comms_config", None)
    if section is not None and getattr(section, "comms_logger_enabled", False):
        comms_logger.enabled = True
        for name in ("prof_all", "prof_ops", "verbose", "debug"):
            setattr(comms_logger, name, getattr(section.comms_logger, name, getattr(comms_logger, name)))
    given = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    vars(comms_logger).update({name: value for name, value in given.items() if value is not None})


def _op(fn: Callable[..., R]) -> Callable[..., R]:
    """Decorator: add DeepSpeed's three arguments for its logger, and log calls as `configure` has set."""

    @functools.wraps(fn)
    def call(*args: object, prof: bool = False, log_name: str | None = None, debug: object = None, **kwargs: object) -> R:
        name = log_name or fn.__name__
        if not (comms_logger.enabled and (prof or comms_logger.prof_all or name in comms_logger.prof_ops)):
            return fn(*args, **kwargs)
        started = time.perf_counter()
        result = fn(*args, **kwargs)
        get_accelerator().synchronize()  # else the time would be that of starting the operation
        seconds = time.perf_counter() - started
        # its input or output
        nbytes = max((tensor.numel() * tensor.element_size() for tensor in find_tensors((args, kwargs))), default=0)
        comms_logger.records[name][nbytes].append(seconds)
        if comms_logger.verbose and get_rank() == 0:
            print(f"deepspeed.comm {name}: {nbytes} bytes, {seconds * 1e3:.2f} ms")
        return result

    return call


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, object] | None:
    """Print, on rank 0, calls and times by operation and size (collective). return_dict: also return them, on all ranks.

    show_straggler: the returned dict also has this rank's waiting time by operation: its seconds less the fastest rank's.
    """
    rank, summary = get_rank(), {name: dict[int, dict[str, float]]() for name in comms_logger.records}
    for name, sizes in comms_logger.records.items():
        for nbytes, seconds in sizes.items():
            total_ms, count = sum(seconds) * 1e3, len(seconds)
            row = {"count": count, "total_latency_ms": total_ms, "avg_latency_ms": total_ms / count, "msg_size_bytes": nbytes}
            summary[name][nbytes] = row
            if rank == 0:
                print(f"{name}: {nbytes} bytes x {count}, {total_ms / count:.3f} ms each")
    waited = None
    if show_straggler:
        mine = {name: sum(map(sum, sizes.values())) for name, sizes in comms_logger.records.items()}
        everyone: list[Any] = [{}] * get_world_size()
        torch_dist.all_gather_object(everyone, mine)
        waited = {name: {"waited_ms": (s - min(other.get(name, s) for other in everyone)) * 1e3} for name, s in mine.items()}
    barrier()
    metadata = {"world_size": get_world_size(), "rank": rank, "timestamp": time.strftime("%Y-%m-%d %H:%M:%S")}
    return {"summary": summary, "straggler_analysis": waited, "metadata": metadata} if return_dict else None


# -- operations, with DeepSpeed's names of arguments ----------------------------------------------------------------


_OPERATIONS: dict[str, tuple[str, dict[str, str]]] = {  # name -> (torch's name, DeepSpeed's name of an argument -> torch's)
    **dict.fromkeys(("all_reduce", "inference_all_reduce"), ("all_reduce", {})),
    **dict.fromkeys(
        ("reduce_scatter_tensor", "reduce_scatter_fn"), ("reduce_scatter_tensor", {"output_tensor": "output", "tensor": "input"})
    ),
    "all_to_all_single": ("all_to_all_single", {"tensor": "input"}),
    **{name: (name, {}) for name in (
        "reduce", "reduce_scatter", "all_gather", "all_gather_object", "broadcast",
        "broadcast_object_list", "all_to_all", "send", "recv", "gather", "scatter", "monitored_barrier",
    )},
}  # fmt: skip


def _operation(name: str, theirs: str, renamed: dict[str, str]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        return getattr(torch_dist, theirs)(*args, **{renamed.get(key, key): value for key, value in kwargs.items()})

    call.__name__ = call.__qualname__ = name
    changed = "".join(f"; {old}: its {new}" for old, new in renamed.items())
    call.__doc__ = f"torch.distributed.{theirs}, with its arguments{changed}"
    return _op(call)


globals().update({name: _operation(name, *torchs) for name, torchs in _OPERATIONS.items()})


@_op
def all_gather_into_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """torch.distributed's, which takes a tensor without dimensions on gloo here too, as on NCCL."""
    return torch_dist.all_gather_into_tensor(output_tensor, tensor if tensor.dim() else tensor.view(1), group, async_op)


allgather_fn = all_gather_into_tensor


@_op
def barrier(group: ProcessGroup | None = None, async_op: bool = False, device_ids: list[int] | None = None) -> Work | None:
    """Wait for all ranks of the group."""
    if _in_threads():
        backend_select.current(None, torch.device("cpu"), 60.0).exchange(b"", "deepspeed.comm.barrier")
        return None
    return torch_dist.barrier(group, async_op, device_ids)


has_all_gather_into_tensor = always(True)


def __getattr__(name: str) -> Any:
    if name.startswith("__") or not hasattr(torch_dist, name):
        raise AttributeError(f"zeroshard.deepspeed has no comm.{name}, and neither has torch.distributed")
    return getattr(torch_dist, name)
