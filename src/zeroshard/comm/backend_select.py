"""Chooses this rank's Comm, once per process group, by the hosts and devices of the ranks.

one process                           SharedComm of a world of one
a thread of `testing.run_threads`     SharedComm over threads
gloo, all ranks on one Linux host     SharedComm over processes
gloo across hosts                     DistComm; ranks of the same host also have a SharedComm among them (`local`)
nccl                                  DistComm
fake (torch's fake process group)     FakeComm: this rank runs alone, and its peers are imagined
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import sys
import threading
import weakref
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..diagnostics import JudgingDesk, ProcessDesk, failure_of, last_words, note_exits
from ..engine.comm import DirectComm, DistComm, backend_for
from ..errors import ConfigError, did_you_mean
from ..utils import torch_compat
from ..utils.host import host_identity, node_identity
from ..utils.registry import Registry
from .fake import FakeComm
from .rendezvous import Door
from .shared_memory import SharedComm
from .transport import ProcessTransport, ThreadTransport, ThreadWorld

BACKENDS = ("auto", "shared", "dist")
OWN_COMMS = Registry("communicator", BACKENDS)  # the program's: wrapped.py:WrappedComm around that of "auto"
Choice = DirectComm | str | dist.ProcessGroup | DeviceMesh

_local = threading.local()  # .comm: this thread's Comm, in a world of threads
_by_group: dict[tuple, DirectComm] = {}  # (id of the group, choice, device) -> Comm, until the group is destroyed
_live: weakref.WeakSet[DirectComm] = weakref.WeakSet()
_solo_said = False  # whether the line about a world of one was printed
_hooked = False  # whether `_hook_failures` has installed its hooks in this process


def set_thread_comm(comm: DirectComm | None) -> None:
    """Make `comm` the one that `current` returns in this thread (None: undo)."""
    _local.comm = comm


def is_started() -> bool:
    """Return True if this rank can communicate: it is a thread of a world of threads, or has a process group."""
    return getattr(_local, "comm", None) is not None or (dist.is_available() and dist.is_initialized())


def rank_and_size() -> tuple[int, int]:
    """Return (rank, world size) of this process or thread, without starting anything.

    Raises ConfigError where a launcher has set RANK or WORLD_SIZE and no process group was started.
    """
    comm = getattr(_local, "comm", None)
    if comm is not None:
        return comm.rank, comm.world_size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        raise ConfigError(
            "RANK or WORLD_SIZE is set, but no process group was started: call torch.distributed.init_process_group() first, or unset both."
        )
    return 0, 1


def in_threads() -> bool:
    """Return True where this rank is a thread of zeroshard.testing.run_threads."""
    return getattr(_local, "comm", None) is not None


def current(choice: Choice | None, device: torch.device, stall_timeout_s: float, option: str = "comm") -> DirectComm:
    """Return the Comm for this rank, which is made on the first call for a process group (collective).

    choice: a Comm; "auto", "shared", "dist" or a registered name, over all ranks; a process group or 1-D mesh, over its ranks.
    option: the argument's name in errors. Raises ConfigError where a launcher's variables are set but the process group has not been
    started: otherwise each rank would train alone, without an error.
    """
    if isinstance(choice, DirectComm):  # the caller has made one
        return choice
    if choice is not None and not isinstance(choice, str):
        return _of_group(choice, device, stall_timeout_s, option)
    choice = choice or os.environ.get("ZEROSHARD_COMM") or "auto"
    if choice in OWN_COMMS:
        return OWN_COMMS[choice](current("auto", device, stall_timeout_s, option))
    if choice not in BACKENDS:
        known = (*BACKENDS, *OWN_COMMS)
        expected = f"one of {known}, a process group, a 1-D DeviceMesh or a Comm"
        raise ConfigError(f"{option}: expected {expected}, got {choice!r}.{did_you_mean(choice, known)}")
    if getattr(_local, "comm", None) is not None:
        return _local.comm
    if not (dist.is_available() and dist.is_initialized()):
        return _solo(device, stall_timeout_s)
    if is_imagined():
        return FakeComm(dist.get_rank(), dist.get_world_size(), device)  # not kept: it holds no connection
    world: Any = dist.GroupMember.WORLD
    key = (id(world), choice, device)
    if key not in _by_group:
        _by_group[key] = _known(_connect(choice, device, stall_timeout_s), world)
    return _by_group[key]


def _known(comm: DirectComm, group: dist.ProcessGroup) -> DirectComm:
    """Let the Comm of a process group tell its peers of failures, and rest as the group is destroyed. Return it."""
    weakref.finalize(torch_compat.dies_with(group), _group_gone, weakref.ref(comm)).atexit = False
    _live.add(comm)
    _hook_failures()
    return comm


def _group_gone(where: weakref.ref[DirectComm]) -> None:
    """Drop the Comm of a destroyed process group, and end its desk's thread: a program may keep the Comm, but no peer asks."""
    comm = where()
    if comm is not None:
        for key in [key for key, known in _by_group.items() if known is comm]:
            del _by_group[key]
        comm.desk.rest()


def is_imagined() -> bool:
    """Return True where the process group is torch's fake one, whose collectives return at once: for planning and for counting."""
    return dist.is_available() and dist.is_initialized() and dist.get_backend() == "fake"


def _of_group(given: object, device: torch.device, stall_timeout_s: float, option: str) -> DirectComm:
    """Return the Comm of a process group's or mesh's ranks, each of which calls this (collective)."""
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            axis = (given.mesh_dim_names or ("dp",))[-1]
            raise ConfigError(
                f"{option}: expected a 1-D DeviceMesh, got one of shape {tuple(given.shape)}. Pass one axis, e.g. mesh[{axis!r}]."
            )
        given = given.get_group()
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(f"{option}: the process group has not been started: call torch.distributed.init_process_group() first.")
    if not isinstance(given, dist.ProcessGroup):
        raise ConfigError(
            f"{option}: expected a DeviceMesh, a process group, a Comm or None, got {type(given).__name__}. Each rank passes a group "
            "that it is a member of: new_group() returns no process group to the other ranks."
        )
    if is_imagined():
        world = FakeComm(dist.get_rank(), dist.get_world_size(), device)
        return world.subgroup([dist.get_process_group_ranks(given)])
    return _known(DistComm(given, device, stall_timeout_s, desk=JudgingDesk()), given)


def _solo(device: torch.device, stall_timeout_s: float) -> DirectComm:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or ("RANK" in os.environ and "WORLD_SIZE" not in os.environ):
        raise ConfigError(
            f"RANK={os.environ.get('RANK')} and WORLD_SIZE={os.environ.get('WORLD_SIZE')} are set, but the process "
            "group has not been started: call torch.distributed.init_process_group() before zs.shard()."
        )
    global _solo_said
    if not _solo_said:
        print("zeroshard: no process group and no RANK: this is a single process (world size 1)", file=sys.stderr)
        _solo_said = True
    return SharedComm(ThreadTransport(ThreadWorld(1, device), 0), device, stall_timeout_s)


def _connect(choice: str, device: torch.device, stall_timeout_s: float) -> DirectComm:
    """Ask all ranks where they run, and share memory if all are on one host and on the CPU (collective)."""
    host = _host()
    door = Door() if host is not None and device.type == "cpu" else None
    try:
        told: list = [None] * dist.get_world_size()
        backend_for(device)
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():  # not the current one
            # by pickle: ranks of the group are trusted
            dist.all_gather_object(told, (host, str(device.type), door.address if door is not None else None))
        here = [rank for rank, other in enumerate(told) if other[:2] == (host, str(device.type))]
        same_host = len(here) == len(told) and host is not None
        if choice == "shared" and not same_host:
            raise ConfigError(
                "comm='shared' needs all ranks on one Linux host, and their models on the CPU; got these hosts and devices: "
                f"{[p[:2] for p in told]}. Leave comm out, or pass comm='dist'."
            )
        if choice == "dist" or door is None or (len(here) == 1 and not same_host):  # no rank shares this one's host
            return DistComm(None, device, stall_timeout_s, desk=JudgingDesk())
        transport = ProcessTransport(here.index(dist.get_rank()), door, [told[rank][2] for rank in here], stall_timeout_s)
        shared = SharedComm(transport, device, stall_timeout_s, ranks=here)
        if same_host:
            if len(here) > 1:  # otherwise there is no peer to ask
                shared.desk = ProcessDesk.among(shared, on_this_host=True)
            return shared
        comm = DistComm(None, device, stall_timeout_s, desk=JudgingDesk())
        comm.local, shared.desk, shared.shares_desk, shared.pending = shared, comm.desk, True, comm.pending
        return comm
    finally:
        if door is not None:
            door.close()


def _host() -> tuple | None:
    """Return a tuple that is equal for processes which can open each other's memory; None where the system has no memfd."""
    host = host_identity()
    if not hasattr(os, "memfd_create") or not all(host):
        return None
    try:
        return *node_identity(), os.readlink("/proc/self/ns/pid"), os.getuid()
    except OSError:
        return None


def announce(error: BaseException) -> None:
    """Send the peers the error that ends this rank; for callers that then end the process without exit hooks (os._exit)."""
    for comm in list(_live):
        try:
            comm.fail(failure_of(error, comm.ranks[comm.rank]))
        except Exception as second:  # the process is ending: print the error, and let it end
            print(f"zeroshard: this rank failed, and could not tell the other ranks so: {second}", file=sys.stderr)


def _hook_failures() -> None:
    """Install hooks (excepthook, sys.exit, atexit) that send the peers a Failure when this process ends."""
    if getattr(sys.excepthook, "_zeroshard", False):
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        announce(error)
        previous(kind, error, trace)

    global _hooked
    hook._zeroshard = _hooked = True  # type: ignore[attr-defined]
    sys.excepthook = hook
    note_exits()
    atexit.register(_close_all)
    multiprocessing.util.Finalize(None, _close_all, exitpriority=0)  # its children run no atexit and no excepthook


def _close_all() -> None:
    """Send the peers the Failure with which this process ends, if any, and leave all groups."""
    for comm in list(_live):
        failure = last_words(comm.ranks[comm.rank])
        try:
            if failure is not None:
                comm.fail(failure)
            comm.leave()
        except Exception as error:
            print(f"zeroshard: this rank ends, and could not tell the other ranks so: {error}", file=sys.stderr)
    _live.clear()


def _end_groups() -> None:
    """Destroy the process groups at exit, where this library was used over gloo and the script has not done so.

    A thread of gloo drops its references to the tensors of the last collectives only after their caller has gone on, and needs
    the GIL for it. While the interpreter is being finalized, Python ends a thread that asks for the GIL; here in a C++
    destructor, so that the process aborts ("terminate called without an active exception"; seen with gdb: pt_gloo_runloop,
    ~AsyncWork, decref_pyobject, take_gil, PyThread_exit_thread). Destroying a group before that waits for its threads.
    """
    _by_group.clear()
    if not (_hooked and dist.is_available() and dist.is_initialized()):
        return
    if {pair.rpartition(":")[2] for pair in dist.get_backend_config().split(",")} == {"gloo"}:  # the fault is gloo's alone
        dist.destroy_process_group()


atexit.register(_end_groups)  # runs after handlers that are registered later, `_close_all` among them


def _forget_all() -> None:
    global _hooked
    _hooked = False
    _live.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)  # the end of a forked child is not the rank's end
