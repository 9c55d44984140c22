"""Streams and events, owned in one place: sums of received gradients run beside the computation.

    compute   | B3 | B2 | B1 | ....... wait(e3) ... step |
    side      |    | wait a2a, sum 3 -> e3 |

A `Ticket` stands for work on the side stream; waiting for it orders the current stream, not the host. On the CPU
there is one order of things and everything here does nothing. `RecordingStreams` (tests) keeps what was ordered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor


class Streams:
    """The host: work runs where it is called.

    separate_host: the device has a memory of its own, so that tiers device and host differ.
    """

    separate_host = False
    side: torch.cuda.Stream  # of a GPU, for sums

    def packed(self, nbytes: int) -> None:
        """Of an imagined device: a kernel packs or unpacks what travels, so many bytes read and written (planning)."""

    def run_beside(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        """Run `work` on the side stream, after what the current stream has done so far; (its result, a ticket)."""
        return work(), None

    def join(self, ticket: Any) -> None:
        """Order the current stream after the ticket's work."""

    def copy(self, target: Tensor, source: Tensor, *, up: bool) -> Any:
        """target <- source from host to device (up) or back, after what the current stream has done so far; a ticket."""
        return self.run_beside(lambda: target.copy_(source, non_blocking=True))[1]

    def finished(self, ticket: Any) -> bool:
        """True when `finish` would return at once."""
        return True

    def finish(self, ticket: Any) -> None:
        """Let the host wait for the ticket's work."""
        self.join(ticket)

    def mark(self) -> Any:
        """What the current stream has been given so far."""

    def stepping(self, numel: int, nbytes: int) -> AbstractContextManager[None]:
        """Around what the host's cores do to step so many parameters, of which they read and write about so many bytes."""
        return nullcontext()

    @contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        """For another thread: its current stream is one of its own, which begins after a mark."""
        yield


class CudaStreams(Streams):
    """One side stream per device for sums, and one for each direction of copies, so that these pass each other.

    Threads: any, each from its own current stream; a stream takes work in order, and an event stands for what was before it.
    """

    separate_host = True

    def __init__(self, device: torch.device) -> None:
        self.side = torch.cuda.Stream(device)
        self.down, self.up = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def run_beside(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        self.side.wait_stream(torch.cuda.current_stream(self.side.device))
        with torch.cuda.stream(self.side):
            result = work()
            ticket = self.side.record_event()
        return result, ticket

    def join(self, ticket: Any) -> None:
        torch.cuda.current_stream(self.side.device).wait_event(ticket)

    def copy(self, target: Tensor, source: Tensor, *, up: bool) -> Any:
        stream = self.up if up else self.down
        stream.wait_stream(torch.cuda.current_stream(self.side.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            (target if up else source).record_stream(stream)
            return stream.record_event()

    def finished(self, ticket: Any) -> bool:
        return ticket.query()

    def finish(self, ticket: Any) -> None:
        ticket.synchronize()

    def mark(self) -> Any:
        return torch.cuda.current_stream(self.side.device).record_event()

    @contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        stream = torch.cuda.Stream(self.side.device)
        stream.wait_event(mark)
        with torch.cuda.stream(stream):  # sets the thread's device, too
            yield


class RecordingStreams(Streams):
    """For tests: work is deferred until it is joined, so that a missing join shows as a wrong number."""

    def __init__(self, separate_host: bool = False) -> None:
        self.separate_host = separate_host
        self.log: list[str] = []
        self._deferred: dict[int, Callable[[], Any]] = {}
        self._next = 0
        self._lock = threading.RLock()  # a save copies in a thread of its own

    def run_beside(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        with self._lock:
            self._next += 1
            self._deferred[self._next] = work
            self.log.append(f"begin {self._next}")
            return None, self._next

    def join(self, ticket: int) -> None:
        """Run what was deferred up to the ticket, in order, as one stream would."""
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


def streams_for(device: torch.device) -> Streams:
    """The streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else Streams()
