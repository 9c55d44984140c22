"""Starting local ranks: `spawn` for commands, `run_processes` for functions (tests, benchmarks).

Both give each rank the environment of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), and keep three
promises: when a rank fails, the others are ended after a short grace (in which they can print what they know); a rank that
hangs is ended at the time limit; and no rank outlives the launcher, even one that is killed by SIGKILL.

    launcher --+-- rank 0 (own process group) -- its children
               +-- rank 1 (own process group) -- its children
    a rank fails -> wait `grace_s` -> SIGTERM to the groups -> wait -> SIGKILL to the groups
"""

import contextlib
import ctypes
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..utils.host_memory import quiet_heap

GRACE_S = 3.0  # time that peers of a failed rank have to notice it and to print
TERMINATE_S = 3.0  # time between SIGTERM and SIGKILL
USAGE_EXIT_CODE = 2  # exit code for a mistake in the call, which the rank has explained itself
TIMEOUT_EXIT_CODE = 124  # as timeout(1)
PARENT_VARIABLE = "ZEROSHARD_PARENT_PID"
_method = "spawn"  # start method of multiprocessing
FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


_PORTS, _BLOCK = 15000, 64  # first port, and ports per process; Linux assigns ports from 32768 on by itself
_given = itertools.count()


def free_port() -> int:
    """Return a TCP port of this machine that was free a moment ago.

    The system could assign one of its own ports to another socket (gloo's, or a connection's) before rank 0 listens on it. So
    each process takes ports in turn from a block of its own, below the ports that the system assigns.
    """
    first = _PORTS + os.getpid() % 256 * _BLOCK  # the last of 256 blocks ends at 31384
    for _ in range(_BLOCK):
        port = first + next(_given) % _BLOCK
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun would set for a rank of one local machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def end_with_parent(parent_pid: int | None = None) -> None:
    """Make this process die when its launcher does. Without an argument: only if the launcher asked for it."""
    if parent_pid is None:
        if PARENT_VARIABLE not in os.environ:
            return
        parent_pid = int(os.environ.pop(PARENT_VARIABLE))
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch_parent, args=(parent_pid,), daemon=True).start()
    if os.getppid() != parent_pid:  # the parent died before this process could register for the signal
        os._exit(1)


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(0.5)
    os._exit(1)


def describe_exit(exitcode: int | None) -> str:
    """Return an exit code of subprocess or multiprocessing in words: negative ones are signals."""
    if exitcode is None:
        return "still running"
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        return f"killed by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"killed by signal {-exitcode}"


# --------------------------------------------------------------------------------------------------- commands


def spawn(argv: Sequence[str], ranks: int, timeout_s: float | None = None, *, grace_s: float = GRACE_S) -> int:
    """Run `python -m zeroshard *argv` on `ranks` local ranks and wait for all of them.

    Returns 0 if all ranks succeed, else the exit code of the first that failed (128 + n for signal n, 124 for the time
    limit), after a line on stderr that names it.
    """
    if ranks < 1:
        raise ValueError(f"ranks: expected at least 1, got {ranks}")
    port = free_port()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    children: list[subprocess.Popen] = []
    received: list[int] = []  # signals to forward
    previous = {number: signal.signal(number, lambda n, _: received.append(n)) for number in FORWARDED_SIGNALS}
    try:
        for rank in range(ranks):
            environment = os.environ | quiet_heap(os.environ) | rank_environment(rank, ranks, port)
            environment[PARENT_VARIABLE] = str(os.getpid())
            command = [sys.executable, "-m", "zeroshard", *argv]
            # a session of its own, so that signals reach its children as well
            children.append(subprocess.Popen(command, env=environment, start_new_session=True))
        return _wait(children, received, deadline, grace_s)
    finally:
        _end(children)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(children: list[subprocess.Popen], received: list[int], deadline: float | None, grace_s: float) -> int:
    """Wait until all children have ended, one has failed, a signal has come or the time is over; return the exit code."""
    while True:
        codes = [child.poll() for child in children]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed:
            _wait_quietly(children, grace_s)
            rank, code = failed[0]
            others = "" if len(children) == 1 else "; the other ranks were stopped"
            if code != USAGE_EXIT_CODE:
                print(f"zeroshard: rank {rank} failed: {describe_exit(code)}{others}", file=sys.stderr, flush=True)
            return code if code > 0 else 128 - code  # negative: the number of the signal that killed it
        if all(code == 0 for code in codes):
            return 0
        if received:
            for child in children:
                _signal_group(child.pid, received[0])
            _wait_quietly(children, grace_s)
            return 128 + received[0]  # as shells do
        if deadline is not None and time.monotonic() > deadline:
            running = [rank for rank, code in enumerate(codes) if code is None]
            print(f"zeroshard: time limit reached; ranks {running} still ran and were stopped", file=sys.stderr, flush=True)
            return TIMEOUT_EXIT_CODE
        time.sleep(0.05)


def _wait_quietly(children: list[subprocess.Popen], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(child.poll() is None for child in children):
        time.sleep(0.02)


def _end(children: list[subprocess.Popen]) -> None:
    """End all children: SIGTERM to the groups that still run, then SIGKILL to every group."""
    if any(child.poll() is None for child in children):
        for child in children:
            _signal_group(child.pid, signal.SIGTERM)
        _wait_quietly(children, TERMINATE_S)
    for child in children:
        _signal_group(child.pid, signal.SIGKILL)
        child.wait()


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
        os.killpg(pid, number)


# -------------------------------------------------------------------------------------------------- functions


@dataclass(frozen=True)
class ProcessResult:
    """The outcome of one rank of `run_processes`: a value, an error (its traceback), or neither (killed)."""

    rank: int
    value: Any
    error: str | None
    exitcode: int | None  # negative: killed by that signal

    @property
    def ok(self) -> bool:
        return self.error is None and self.exitcode == 0


class ProcessesFailed(RuntimeError):
    """Raised where a rank of `run_processes` raised, died or ran past the time limit; `results` has the outcome of all ranks."""

    def __init__(self, results: list[ProcessResult], order: list[int], timeout_s: float | None) -> None:
        """order: the ranks that failed, the first one first. timeout_s: the time limit, if ranks ran past it."""
        codes = ", ".join(f"rank {result.rank}: {describe_exit(result.exitcode)}" for result in results)
        if timeout_s is not None:
            message = f"expected all ranks to end within {timeout_s:g} s; the slow ones were killed ({codes})"
        else:
            first = results[order[0]]
            reason = first.error or f"it died without an answer: {describe_exit(first.exitcode)}"
            message = f"rank {first.rank} failed first ({codes}):\n{reason}"
        super().__init__(message)
        self.results = results


def share_imports(modules: Sequence[str]) -> None:
    """Let `run_processes` fork its ranks from a server that has imported `modules`: a rank starts in 0.1 s, not in 3 s of a core.

    For test suites, where the system can fork. With an empty list it starts fresh interpreters again.
    """
    global _method
    _method = "forkserver" if modules and "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    multiprocessing.set_forkserver_preload(list(modules))


def run_processes(
    fn: Callable[..., object], ranks: int, *args: object, timeout_s: float = 60.0, grace_s: float = GRACE_S, check: bool = True
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` in `ranks` fresh processes and return their values in the order of ranks.

    `fn`, `args` and the values must be picklable. If a rank fails, raises `ProcessesFailed` with the traceback of the
    first that did and all exit codes; with `check=False` it returns a `ProcessResult` per rank instead and raises
    nothing.
    """
    context: Any = multiprocessing.get_context(_method)
    port, workers, readers = free_port(), [], []
    outcomes: dict[int, tuple[object, str | None]] = {}
    order: list[int] = []  # ranks that failed, the first one first
    try:
        for rank in range(ranks):
            reader, writer = context.Pipe(duplex=False)
            # a forked rank's parent is the server, which ends with this process and still has its initial environment
            settings = (os.getpid() if _method == "spawn" else None, dict(os.environ), rank, ranks, port)
            worker = context.Process(target=_work, args=(writer, settings, fn, args), name=f"rank{rank}")
            with _quiet_heap():
                worker.start()
            writer.close()  # the child's copy is then the only one, so that its death reads as end of file
            workers.append(worker)
            readers.append(reader)
        late = _collect(workers, readers, outcomes, order, time.monotonic() + timeout_s, grace_s)
    finally:
        for worker in workers:
            if worker.exitcode is None:
                worker.kill()
        for worker in workers:
            worker.join()
            _signal_group(worker.pid, signal.SIGKILL)  # ends its children, too
    results = [ProcessResult(r, *outcomes.get(r, (None, None)), workers[r].exitcode) for r in range(ranks)]
    if not check:
        return results
    if order or late:
        raise ProcessesFailed(results, order, timeout_s if late else None)
    return [result.value for result in results]


@contextlib.contextmanager
def _quiet_heap() -> Iterator[None]:
    """Context with the variables of `quiet_heap` set: processes started inside it (the fork server, too) inherit them."""
    added = quiet_heap(os.environ)
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


def _work(writer: multiprocessing.connection.Connection, settings: tuple, fn: Callable[..., object], args: tuple) -> None:
    """Run a rank: set its environment, call the function, send the answer."""
    parent_pid, environment, rank, ranks, port = settings
    os.setpgid(0, 0)  # its children are then killed with it (`run_processes`)
    end_with_parent(os.getppid() if parent_pid is None else parent_pid)
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(rank_environment(rank, ranks, port))
    if "torch" in sys.modules:  # ranks share the cores of one machine
        sys.modules["torch"].set_num_threads(1)
    try:
        answer = pickle.dumps((fn(rank, ranks, *args), None))  # plain pickle: torch's own one shares memory handles
    except BaseException as error:
        world = sys.modules.get("zeroshard.comm.backend_select")  # not imported by this file, which works without it
        if world is not None:
            world.announce(error)  # os._exit, below, runs no hook that would send the error to the peers
        writer.send_bytes(pickle.dumps((None, traceback.format_exc())))
        writer.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a broken process group may block an ordinary exit
    writer.send_bytes(answer)  # only now: an answer that can not be pickled counts as the rank's error
    writer.close()


def _collect(workers: list, readers: list, outcomes: dict, order: list[int], deadline: float, grace_s: float) -> bool:
    """Receive answers until all have come, a failure's grace is over, or the deadline has passed (then return True)."""
    waiting = dict(enumerate(readers))
    limit = deadline
    while waiting:
        remaining = limit - time.monotonic()
        ready = multiprocessing.connection.wait(list(waiting.values()), max(0.0, remaining))
        if not ready and remaining <= 0:
            return not order
        for rank in [rank for rank, reader in waiting.items() if reader in ready]:
            try:
                outcomes[rank] = pickle.loads(waiting.pop(rank).recv_bytes())
            except EOFError:  # the rank died without an answer
                outcomes[rank] = (None, None)
                workers[rank].join(1.0)
            if outcomes[rank][1] is not None or workers[rank].exitcode not in (None, 0):
                order.append(rank)
                limit = min(limit, time.monotonic() + grace_s)
    for rank, worker in enumerate(workers):
        worker.join(max(0.0, limit - time.monotonic()))
        if worker.exitcode not in (None, 0) and rank not in order:  # the rank answered, then failed at exit
            order.append(rank)
    return any(worker.exitcode is None for worker in workers) and not order
