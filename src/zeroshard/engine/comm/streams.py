"""CUDA streams and events, owned in one place: sums of received gradients overlap with the computation.

    compute   | B3 | B2 | B1 | ....... wait(e3) ... step |
    side      |    | wait a2a, sum 3 -> e3 |

A ticket stands for work on a stream; `join` orders the current stream after it, without making the host wait. On the CPU
work runs where it is called, and tickets are None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...config import Tier
from ...utils.work import Work
from .sums import device_square_sum, square_sum

T = TypeVar("T")


class Streams:
    """Streams of the host: work runs at once, in the calling thread.

    separate_host: the device has a memory of its own, so that the tiers device and host differ.
    """

    separate_host = False
    side: torch.cuda.Stream  # a GPU's stream for sums of gradients

    def packed(self, nbytes: int) -> None:
        """Report to a dry run's watcher a kernel that packs or unpacks messages and moves `nbytes`; else do nothing."""

    def beside(self) -> AbstractContextManager[None]:
        """Context whose work is enqueued on the side stream, after the work enqueued on the current stream so far."""
        return nullcontext()

    def run_beside(self, work: Callable[[], T]) -> tuple[T, Any]:
        """Run `work` in `beside`; return (its result, a ticket)."""
        return work(), None

    def join(self, ticket: Any) -> None:
        """Order the current stream after the ticket's work."""

    def copy(self, target: Tensor, source: Tensor, *, up: bool) -> Any:
        """Copy source to target, from host to device (up) or back, after the current stream's work so far; return a ticket."""
        return self.run_beside(lambda: target.copy_(source, non_blocking=True))[1]

    def finished(self, ticket: Any) -> bool:
        """Return True when `finish` would return at once."""
        return True

    def finish(self, ticket: Any) -> None:
        """Make the host wait for the ticket's work."""
        self.join(ticket)

    def moved(self, source: Tier, target: Tier, nbytes: int) -> Any:
        """Return a dry run's ticket for a move between tiers in which no byte moves; None: there is nothing to wait for."""

    def mark(self) -> Any:
        """Return a mark of the present end of the current stream, for `behind`."""

    def stepping(self, numel: int, nbytes: int) -> AbstractContextManager[None]:
        """Context of the host's step of `numel` parameters, which moves about `nbytes`; a dry run's watcher overrides it."""
        return nullcontext()

    def square_sums(self, tensors: Sequence[Tensor]) -> float:
        """Return the sum of all squares of 1-D tensors, as a Python number; on a GPU the host waits for one transfer.

        On the CPU it computes the same dot products in the same order as `sum_in_rank_order`, so that a norm has the same bits
        whichever of the two computed it.
        """
        if all(tensor.device.type == "cpu" for tensor in tensors):
            return sum(square_sum(tensor) for tensor in tensors)
        return float(device_square_sum(*tensors))

    @contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        """Context for another thread: its current stream is a new one, which begins after the work of `mark`."""
        yield


class Copy(Work):
    """A copy between host and device that has been started."""

    def __init__(self, streams: Streams, ticket: Any) -> None:
        self.streams, self.ticket = streams, ticket

    def done(self) -> bool:
        """Return True when `wait` would return at once."""
        return self.streams.finished(self.ticket)

    def wait(self) -> None:
        """Return when the host may use the target, or overwrite the source."""
        self.streams.finish(self.ticket)

    def join(self) -> None:
        """Make the current stream of the device, instead of the host, wait."""
        self.streams.join(self.ticket)


class CudaStreams(Streams):
    """One side stream per device for sums, and one for each direction of copies, so that copies up and down overlap.

    Threads: any, each with its own current stream. A stream runs work in order, and an event stands for all work before it.
    """

    separate_host = True

    def __init__(self, device: torch.device) -> None:
        self.side = torch.cuda.Stream(device)
        self.down, self.up = torch.cuda.Stream(device), torch.cuda.Stream(device)

    @contextmanager
    def beside(self) -> Iterator[None]:
        self.side.wait_stream(torch.cuda.current_stream(self.side.device))
        with torch.cuda.stream(self.side):
            yield

    def run_beside(self, work: Callable[[], T]) -> tuple[T, Any]:
        with self.beside():
            return work(), self.side.record_event()

    def join(self, ticket: Any) -> None:
        torch.cuda.current_stream(self.side.device).wait_event(ticket)

    def copy(self, target: Tensor, source: Tensor, *, up: bool) -> Any:
        stream = self.up if up else self.down
        stream.wait_stream(torch.cuda.current_stream(self.side.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            (target if up else source).record_stream(stream)  # the caching allocator must not reuse it before the copy is done
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
        with torch.cuda.stream(stream):  # also sets the thread's current device
            yield


def streams_for(device: torch.device) -> Streams:
    """Return the streams for a device."""
    return CudaStreams(device) if device.type == "cuda" else Streams()
