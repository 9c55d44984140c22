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
from contextlib import suppress
from typing import Any

from ..comm.base import DirectComm
from ..comm.codec import decode, encode
from ..errors import CheckpointError, CheckpointWriteError, ZeroshardError

_BEAT_S = 1.0  # seconds between beats, or a quarter of the stall timeout if that is shorter


def together(comm: DirectComm, label: str, work: Callable[[], Any], stop: Callable[[], None] | None = None) -> list[Any]:
    """Call `work()` on every rank and return all ranks' results, in rank order (collective).

    Args:
        label: "zs.verb: what", for messages.
        work: called in the calling thread. It must not use `comm`, and returns plain values (`comm.codec`).
        stop: called from another thread, perhaps more than once, if another rank has failed or is gone: it should make `work` end
            early. None if `work` is short.

    Raises:
        On every rank, the error that `work` raised on one: a ZeroshardError unchanged, others as CheckpointError (`telling`).
    """
    beats = _Beats(comm, label, stop)
    beats.start()
    error: BaseException | None = None
    try:
        result = encode((work(), None, False))
    except BaseException as raised:
        error = raised if not isinstance(raised, Exception) else telling(raised, label, comm.rank)
        told = error if isinstance(error, Exception) else telling(error, label, comm.rank)  # for KeyboardInterrupt, ...
        result = encode((None, told, beats.stopped))
    everyone = beats.end(result, error)
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


class _Beats:
    """The exchanges during one call of `together`.

    Threads: from `start` to the end of `end` only the thread of `_meet` uses the Comm, whose `exchange` raises ThreadsMet for a
    second thread; inside `Tiers.beside_comm` the working thread does not report disk failures by it. That thread calls `stop`.
    """

    def __init__(self, comm: DirectComm, label: str, stop: Callable[[], None] | None) -> None:
        self.comm, self.label, self.stop = comm, label, stop
        self.seconds = min(_BEAT_S, getattr(comm, "stall_timeout_s", 60.0) / 4)
        self.stopped = False  # True if another rank failed while this one was working
        self._result = b""  # empty while this rank works
        self._ended = threading.Event()
        self._everyone: list[tuple] = []
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self.comm.world_size > 1:
            thread = threading.Thread(target=self._meet, name="zeroshard-beats", daemon=True)
            with suppress(RuntimeError):  # no more threads: `end` exchanges once, without beats
                thread.start()
                self._thread = thread

    def end(self, result: bytes, error: BaseException | None) -> list[tuple]:
        """Wait until all ranks have ended, and return their results."""
        self._result = result
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        else:
            self._meet()
        if self._failure is not None:
            if error is not None:
                raise self._failure from error
            raise self._failure
        return self._everyone

    def _meet(self) -> None:
        try:
            while True:
                self._ended.wait(self.seconds)
                everyone = self.comm.exchange(self._result, self.label)
                if all(everyone):  # every rank has a result: the work of all has ended
                    self._everyone = [decode(part) for part in everyone]
                    return
                if any(part and decode(part)[1] is not None for part in everyone):  # a rank has ended with an error
                    self._in_vain()
        except BaseException as error:
            self._failure = error
            self._in_vain()

    def _in_vain(self) -> None:
        if not self._result:  # this rank still works
            self.stopped = True
            if self.stop is not None:
                self.stop()
