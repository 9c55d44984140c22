"""Descriptions of how a rank ended: from its last message to its peers, or else from the status of its process.

an uncaught exception     its traceback, from sys.excepthook       "rank 2 failed: Traceback ..."
an uncaught PeerFailed    the rank that failed first, and its reason: no chain of victims
sys.exit(3)               noted in sys.exit, sent at exit          "rank 2 left by sys.exit(3)"
SIGKILL, os._exit         nothing; peers read the process's status "rank 2 failed: its process was killed by ..."
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from ..engine.comm.desk import GONE, Failure
from ..errors import SCRIPT_ENDED, PeerFailed

_STATE, _EXIT_CODE = 0, 49  # fields of /proc/PID/stat behind the name of the command
_left: list[Failure] = []  # the last call of sys.exit; its rank is _SELF where no other rank's failure caused it
_SELF = -1


def failure_of(error: BaseException, rank: int) -> Failure:
    """Return the Failure for an error that ends rank `rank`: its own, or that of the peer whose failure caused it."""
    if isinstance(error, SystemExit):  # 'left by sys.exit(3)' for status 3
        status: object = error.code
        shown = repr(status) if isinstance(status, (int, str)) else "" if status is None else type(status).__name__
        return Failure(rank, f"left by sys.exit({shown})")
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, PeerFailed):
            return Failure(cause.rank, cause.reason)
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return Failure(rank, "".join(traceback.format_exception(error)).rstrip())


def note_exits() -> None:
    """Replace `sys.exit` by a function that records its argument, which atexit handlers can not find out."""
    plain = sys.exit
    if getattr(plain, "_zeroshard", False):  # it is replaced already
        return

    def exit(status: Any = None, /) -> None:
        failure, handled = failure_of(SystemExit(status), _SELF), sys.exc_info()[1]
        if status not in (None, 0) and isinstance(handled, Exception):  # sys.exit in an `except` block: that error is the cause
            cause = failure_of(handled, _SELF)
            theirs = cause.rank != _SELF
            failure = cause if theirs else Failure(_SELF, f"{failure.reason} while it handled this:\n{cause.reason}")
        _left[:] = [failure]
        plain(status)

    exit._zeroshard = True  # type: ignore[attr-defined]
    sys.exit = exit  # type: ignore[assignment]


def last_words(rank: int) -> Failure | None:
    """Return the Failure that this rank sends its peers at exit; None if its script has run to its end."""
    raised = sys.exc_info()[1]  # multiprocessing runs its finalizers while it handles the child's exception
    if raised is not None:
        return failure_of(raised, rank)
    return next((Failure(rank, left.reason) if left.rank == _SELF else left for left in _left), None)


def how_it_ended(pid: int, patience_s: float = 3.0) -> str:
    """Return a text that says how a process of this host ended, after it has closed its connections.

    GONE if its status can not be read any more, because its launcher has collected it by wait().
    """
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return GONE
        if fields[_STATE] in "ZX":  # zombie or dead: it has ended, and its parent has not collected its status yet
            break
        time.sleep(0.005)  # its sockets close before its status is set
    else:
        return "it closed its connections, and its process has not ended yet"
    status = int(fields[_EXIT_CODE])
    if not os.WIFSIGNALED(status):
        code = os.WEXITSTATUS(status)
        early = "" if code else f": {SCRIPT_ENDED}"
        return f"its process ended with exit code {code}{early}"
    number = os.WTERMSIG(status)
    known = number in {each.value for each in signal.Signals}
    name = signal.Signals(number).name if known else f"signal {number}"
    hint = " (by hand, by a launcher, or for want of memory: see the kernel's log, dmesg)"
    return f"its process was killed by {name}{hint if number == signal.SIGKILL else ''}"
