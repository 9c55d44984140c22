"""Streams for tests, which defer work and log calls."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from zeroshard.engine.comm.streams import Streams


class RecordingStreams(Streams):
    """Streams for tests: work is deferred until it is joined, so that a missing join shows as a wrong number."""

    def __init__(self, separate_host: bool = False) -> None:
        self.separate_host = separate_host
        self.log: list[str] = []
        self._deferred: dict[int, Callable[[], Any]] = {}
        self._next = 0
        self._lock = threading.RLock()  # a background save copies from another thread

    def run_beside(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        with self._lock:
            self._next += 1
            self._deferred[self._next] = work
            self.log.append(f"begin {self._next}")
            return None, self._next

    def join(self, ticket: int) -> None:
        """Run all deferred work up to the ticket, in order, as one stream would."""
        with self._lock:
            for number in sorted(n for n in self._deferred if n <= ticket):
                self._deferred.pop(number)()
            self.log.append(f"join {ticket}")

    def finished(self, ticket: int) -> bool:
        return ticket not in self._deferred

    def mark(self) -> int:
        return self._next

    @contextmanager
    def behind(self, mark: int) -> Iterator[None]:
        self.join(mark)
        yield
