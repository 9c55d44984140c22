"""Operations that have been started: requests to files, copies between tiers, collectives (engine/comm/base.py)."""

from __future__ import annotations

import time
from collections.abc import Callable


class Work:
    """An operation that has been started. This base class is one that is over."""

    def done(self) -> bool:
        """Return True when `wait` would return at once, or raise."""
        return True

    def wait(self) -> None:
        """Return when the operation is over: its result may be read, its source be overwritten. Raise if it failed."""

    def join(self) -> None:
        """Make the device's current stream wait instead of the host, where the operation runs on a stream; else `wait`."""
        self.wait()


OVER = Work()


class Then(Work):
    """A running operation and one that follows it.

    `start`, `wait` and `join` wait for the first and start the second; `done`, which a poll calls, starts it if the first is over.
    """

    def __init__(self, first: Work, follow: Callable[[], Work]) -> None:
        self.first, self.follow = first, follow
        self.second: Work | None = None

    def start(self) -> Work:
        """Wait for the first operation, and start the second one; return it."""
        if self.second is None:
            self.first.wait()
            self.second = self.follow()
            self.follow = Work  # so that what it refers to, such as a buffer, is not held any longer
        return self.second

    def done(self) -> bool:
        return (self.second is not None or self.first.done()) and (self.second or self.start()).done()

    def wait(self) -> None:
        (self.second or self.start()).wait()

    def join(self) -> None:
        (self.second or self.start()).join()


def pause(begin: float) -> None:
    """Sleep between two polls of a wait that began at `begin` (time.monotonic()): a 32nd of its time so far, 20 us to 0.5 ms.

    A short wait then takes no longer, and in a long one the core is left to other ranks of the machine.
    """
    time.sleep(min(max((time.monotonic() - begin) / 32, 2e-5), 5e-4))
