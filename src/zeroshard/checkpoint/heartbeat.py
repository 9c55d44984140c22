"""Work that ranks do side by side and that may take one of them minutes, as reading and writing files does.

    rank 0   work ---> done .  .  .  .  .  .  .  .  all know
    rank 1   work ---------|---------|------> done  all know        |: a beat, an exchange that says "still at it"

In a plain `Comm.exchange` a rank with a slow disk would be taken for lost after the stall timeout. Here a thread of each
rank meets the others again and again while the rank works. As long as all come to the beats nobody gives up; who has died,
left, or entered another collective is found as in any exchange.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..comm.base import Comm
from ..comm.codec import decode, encode
from ..errors import CheckpointError, CheckpointWriteError, ZeroshardError

_BEAT_S = 1.0  # and at least four in a stall timeout


def together(comm: Comm, label: str, work: Callable[[], Any], stop: Callable[[], None] | None = None) -> list[Any]:
    """Do `work()` on every rank; what it returned on each of them, in rank order (collective).

    Args:
        label: "zs.verb: what".
        work: in the calling thread. It must not use `comm`, and returns plain values (`comm.codec`).
        stop: called from another thread, perhaps more than once, where this rank's work is in vain: another has failed or is
            gone. May be None where work ends soon by itself.

    Raises:
        what work raised on one rank, on every rank: a ZeroshardError as it is, all else as CheckpointError (see `telling`).
    """
    beats = _Beats(comm, label, stop)
    beats.start()
    error: BaseException | None = None
    try:
        result = encode((work(), None, False))
    except BaseException as raised:
        error = raised if not isinstance(raised, Exception) else telling(raised, label, comm.rank)
        told = error if isinstance(error, Exception) else telling(error, label, comm.rank)
        result = encode((None, told, beats.stopped))
    everyone = beats.end(result, error)
    if error is not None and not isinstance(error, Exception):  # interrupted: the others know
        raise error
    causes = [None if late else problem for _, problem, late in everyone]  # not what followed from `stop`
    raise_first(causes if any(causes) else [problem for _, problem, _ in everyone], comm.rank, error)
    return [value for value, _, _ in everyone]


def telling(error: BaseException, label: str, rank: int) -> Exception:
    """An error as it can be told to other ranks: a ZeroshardError is; any other becomes the cause of a CheckpointError."""
    if isinstance(error, ZeroshardError):
        return error
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    told = CheckpointError(f"{label.partition(':')[0]}: rank {rank} failed: {text}")
    told.__cause__ = error
    return told


def raise_first(problems: Sequence[Exception | None], rank: int, mine: Exception | None) -> None:
    """Raise on all ranks the same of what went wrong on some, if anything did. mine: this rank's, with its cause."""
    found = [(at, problem) for at, problem in enumerate(problems) if problem is not None]
    if found:
        at, problem = min(found, key=lambda item: not isinstance(item[1], CheckpointWriteError))  # that is the cause of others
        raise mine if at == rank and mine is not None else problem


class _Beats:
    """The exchanges of one piece of work.

    Threads: the Comm is `_meet`'s thread's from `start` to the end of `end`; the one that works leaves it alone (its `exchange`
    refuses a second), and `Tiers.beside_comm` keeps failures of disks from it. `stop` is called in `_meet`'s.
    """

    def __init__(self, comm: Comm, label: str, stop: Callable[[], None] | None) -> None:
        self.comm, self.label, self.stop = comm, label, stop
        self.seconds = min(_BEAT_S, getattr(comm, "stall_timeout_s", 60.0) / 4)
        self.stopped = False  # this rank's work is in vain
        self._result = b""  # while it works
        self._ended = threading.Event()
        self._everyone: list[tuple] = []
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self.comm.world_size > 1:
            thread = threading.Thread(target=self._meet, name="zeroshard-beats", daemon=True)
            with suppress(RuntimeError):  # no more threads: then there is one beat, at the end
                thread.start()
                self._thread = thread

    def end(self, result: bytes, error: BaseException | None) -> list[tuple]:
        """The results of all ranks, when all have ended."""
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
                if all(everyone):
                    self._everyone = [decode(part) for part in everyone]
                    return
                if any(part and decode(part)[1] is not None for part in everyone):
                    self._in_vain()
        except BaseException as error:
            self._failure = error
            self._in_vain()

    def _in_vain(self) -> None:
        if not self._result:
            self.stopped = True
            if self.stop is not None:
                self.stop()
