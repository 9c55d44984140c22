"""System calls on files that fail when they are told to, and what that raises."""

import itertools
import os
from collections.abc import Callable

from zeroshard.engine.runtime import Runtime
from zeroshard.tiers.io import async_file


class Faulty(async_file.Syscalls):
    """The system, until `arm`: then one kind of call fails, from the given one on."""

    def __init__(self) -> None:
        self.kind, self.left, self.act = None, 0, None
        self.failed: list[tuple[str, int]] = []  # (file, offset) of calls that failed

    def arm(self, kind: str, act: int | Callable[[Callable[[], int]], int], after: int = 0) -> None:
        """kind: "read" or "write". act: an errno, or what is done with the call. after: calls that go well before."""
        self.act, self.left, self.kind = act, after, kind

    def disarm(self) -> None:
        self.kind = None

    def preadv(self, file, buffers, offset):
        return self._call("read", super().preadv, file, buffers, offset)

    def pwritev(self, file, buffers, offset):
        return self._call("write", super().pwritev, file, buffers, offset)

    def _call(self, kind, plain, file, buffers, offset):
        if kind != self.kind:
            return plain(file, buffers, offset)
        self.left -= 1
        if self.left >= 0:
            return plain(file, buffers, offset)
        self.failed.append((file.path, offset))
        if callable(self.act):
            return self.act(lambda: plain(file, buffers, offset))
        raise OSError(self.act, os.strerror(self.act))


def calls_of(runtime: Runtime) -> Faulty:
    (folder,) = runtime.tiers._folders.values()
    return folder.engine.calls


def raised_by(what: Callable[[], object]) -> Exception | None:
    """Without its traceback, which would keep models alive."""
    try:
        what()
    except Exception as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    return None


class Faults(async_file.Syscalls):
    """The system, with a rule: `rule(mode, file, offset, nbytes)` may raise, sleep, or return how many bytes go."""

    def __init__(self, rule):
        self.rule, self.calls = rule, []

    def _limited(self, mode, file, buffers, offset):
        (buffer,) = buffers
        self.calls.append((mode, offset, len(buffer)))
        return self.rule(mode, file, offset, len(buffer))

    def preadv(self, file, buffers, offset):
        limit = self._limited("read", file, buffers, offset)
        count = super().preadv(file, buffers, offset)
        return count if limit is None else min(count, limit)

    def pwritev(self, file, buffers, offset):
        limit = self._limited("write", file, buffers, offset)
        if limit == 0:
            return 0
        count = super().pwritev(file, buffers, offset)
        return count if limit is None else min(count, limit)


def fails(mode: str, at: int, number: int, times: int | None = None):
    """A rule: the transfer of `mode` that touches byte `at` raises, always or the first few times."""
    left = itertools.count() if times is None else iter(range(times))

    def rule(called, file, offset, nbytes):
        if called == mode and offset <= at < offset + nbytes and next(left, None) is not None:
            raise OSError(number, os.strerror(number))

    return rule
