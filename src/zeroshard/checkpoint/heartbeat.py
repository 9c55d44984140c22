"""Work that all ranks do at the same time, each at its own pace, such as reading and writing files.

    rank 0   work ---> done .  .  .  .  .  .  .  .  all know
    rank 1   work ---------|---------|------> done  all know        |: a beat, an exchange that says "still working"

If ranks only met in a `Comm.exchange` after the work, a rank with a slow disk would exceed the stall timeout. So a thread of each
rank exchanges beats with the others while the rank works. As long as all ranks answer beats, no wait times out; a rank that has
died, left, or entered another collective is detected as in any exchange.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..errors import CheckpointError, CheckpointWriteError, ZeroshardError
from ..seam import DirectComm, decode, encode

T = TypeVar("T")
_BEAT_S = 1.0  # seconds between beats, or a quarter of the stall timeout if that is shorter


def together(comm: DirectComm, label: str, work: Callable[[], T], stop: Callable[[], None] | None = None) -> list[T]:
    """Call `work()` on every rank and return all ranks' results, in rank order (collective).

    Args:
        label: "zs.verb: what", for messages.
        work: called in the calling thread. It must not use `comm`, and returns plain values (`comm.codec`).
        stop: called from another thread, perhaps more than once, if another rank has failed or is gone: it should make `work` end
            early. None if `work` is short.

    Raises:
        On every rank, the error that `work` raised on one: a ZeroshardError unchanged, others as CheckpointError (`telling`).
    """
    result, stopped = b"", False  # result: empty while this rank works. stopped: another rank failed meanwhile
    ended = threading.Event()
    everyone: list[tuple] = []
    failure: BaseException | None = None
    seconds = min(_BEAT_S, getattr(comm, "stall_timeout_s", 60.0) / 4)
    end_early = stop or (lambda: None)

    # While its thread runs, only that uses the Comm, whose `exchange` raises ThreadsMet for a second thread; inside
    # `Tiers.beside_comm` the working thread does not report disk failures by it.
    def meet() -> None:
        nonlocal everyone, failure, stopped
        try:
            while True:
                ended.wait(seconds)
                told = comm.exchange(result, label)
                if all(told):  # every rank has a result: the work of all has ended
                    everyone = [decode(part) for part in told]
                    return
                if not result and any(part and decode(part)[1] is not None for part in told):
                    stopped = True
                    end_early()
        except BaseException as raised:
            failure = raised
            if not result:
                stopped = True
                end_early()

    thread: threading.Thread | None = None
    if comm.world_size > 1:
        thread = threading.Thread(target=meet, name="zeroshard-beats", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: the ranks exchange once, without beats
            thread = None
    error: BaseException | None = None
    try:
        mine = encode((work(), None, False))
    except BaseException as raised:
        error = telling(raised, label, comm.rank) if isinstance(raised, Exception) else raised
        mine = encode((None, telling(error, label, comm.rank), stopped))
    result = mine
    ended.set()
    thread.join() if thread is not None else meet()
    if failure is not None:
        if error is not None:
            raise failure from error
        raise failure
    if error is not None and not isinstance(error, Exception):  # KeyboardInterrupt, ...: other ranks raise a CheckpointError
        raise error
    causes = [None if late else problem for _, problem, late in everyone]  # without errors that `stop` caused
    raise_first(causes if any(causes) else [problem for _, problem, _ in everyone], comm.rank, error)
    return [value for value, _, _ in everyone]


def telling(error: BaseException, label: str, rank: int) -> Exception:
    """Return an error that can be sent to other ranks: a ZeroshardError itself; for any other error, a CheckpointError."""
    if isinstance(error, ZeroshardError):
        return error
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    told = CheckpointError(f"{label.partition(':')[0]}: rank {rank} failed: {text}")
    told.__cause__ = error
    return told


def raise_first(problems: Sequence[Exception | None], rank: int, mine: Exception | None) -> None:
    """Raise one of the ranks' errors, the same on all ranks, if there are any. mine: this rank's own error, with its cause."""
    found = [(at, problem) for at, problem in enumerate(problems) if problem is not None]
    if found:
        at, problem = min(found, key=lambda item: not isinstance(item[1], CheckpointWriteError))  # a failed write causes others
        raise mine if at == rank and mine is not None else problem
