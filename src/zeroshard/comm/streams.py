"""Streams and events, owned in one place: sums of received gradients run beside the computation.

    compute   | B3 | B2 | B1 | ....... wait(e3) ... step |
    side      |    | wait a2a, sum 3 -> e3 |

A `Ticket` stands for work on the side stream; waiting for it orders the current stream, not the host. On the CPU
there is one order of things and everything here does nothing. `RecordingStreams` (tests) keeps what was ordered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Streams:
    """The host: work runs where it is called."""

    def run_beside(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        """Run `work` on the side stream, after what the current stream has done so far; (its result, a ticket)."""
        return work(), None

    def join(self, ticket: Any) -> None:
        """Order the current stream after the ticket's work."""


class CudaStreams(Streams):
    """One side stream per device."""

    def __init__(self, device: torch.device) -> None:
        self.side = torch.cuda.Stream(device)

    def run_beside(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        self.side.wait_stream(torch.cuda.current_stream(self.side.device))
        with torch.cuda.stream(self.side):
            result = work()
            ticket = self.side.record_event()
        return result, ticket

    def join(self, ticket: Any) -> None:
        torch.cuda.current_stream(self.side.device).wait_event(ticket)


class RecordingStreams(Streams):
    """For tests: work is deferred until it is joined, so that a missing join shows as a wrong number."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._deferred: dict[int, Callable[[], Any]] = {}
        self._next = 0

    def run_beside(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        self._next += 1
        self._deferred[self._next] = work
        self.log.append(f"begin {self._next}")
        return None, self._next

    def join(self, ticket: int) -> None:
        """Run what was deferred up to the ticket, in order, as one stream would."""
        for number in sorted(n for n in self._deferred if n <= ticket):
            self._deferred.pop(number)()
        self.log.append(f"join {ticket}")


def streams_for(device: torch.device) -> Streams:
    """The streams of a device."""
    return CudaStreams(device) if device.type == "cuda" else Streams()
