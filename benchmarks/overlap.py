"""The share of copies between device and host that overlaps with computation, measured by CUDA events.

    compute   |  B3  |  B2  |wait|  B1  |      pieces: each is the computation of one unit
    down        g4 >>>   g3 >>>                gradients to the host, on a stream of their own
    up          p2 >>  p1 >>>>>>>              parameters to the device, on another stream

The overlapped fraction is the time of copies that lies inside pieces of computation, over the time of all copies. A piece
begins after the wait for the unit's copies, so waits are not inside. The head of the model and the loss have no piece, so
the fraction is rather too low than too high.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zeroshard.zero.runtime import Runtime

Interval = tuple[float, float]  # begin, end


def union(intervals: list[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint intervals, in order."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        elif end > begin:
            joined.append((begin, end))
    return joined


def covered(intervals: list[Interval], by: list[Interval]) -> float:
    """Return the sum over `intervals` of the length of each that lies inside the union of `by`."""
    cover = union(by)
    return sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in intervals for b, e in cover)


@dataclass(frozen=True)
class Overlap:
    """The milliseconds of copies and computation in some steps. Keys are directions: "up" (to the device) and "down"."""

    compute_ms: float
    copies_ms: dict[str, float]
    inside_ms: dict[str, float]
    copied_nbytes: dict[str, int]

    def fraction(self, *ways: str) -> float | None:
        """Return the share of the copying time (of directions `ways`; none: both) inside computation; None without copies."""
        total, inside = (sum(of[way] for way in ways or of) for of in (self.copies_ms, self.inside_ms))
        return inside / total if total else None

    @classmethod
    def of(cls, compute: list[Interval], copies: dict[str, list[Interval]], nbytes: dict[str, int]) -> Overlap:
        lengths = {way: sum(end - begin for begin, end in found) for way, found in copies.items()}
        inside = {way: covered(found, compute) for way, found in copies.items()}
        return cls(sum(end - begin for begin, end in union(compute)), lengths, inside, dict(nbytes))


@dataclass
class Recorder:
    """A context that records every piece of computation and every copy of a sharded model; `overlap` returns the result.

    While entered it replaces three methods, on the objects: of the runtime, of its streams and of its prefetcher.
    """

    runtime: Runtime
    pieces: list[tuple[Any, Any]] = field(default_factory=list)  # of computation: begin, end
    copies: list[tuple[str, int, Any, Any]] = field(default_factory=list)  # way, bytes, begin, end
    begun: Any = None  # event at the start of the piece under way
    origin: Any = None

    def __enter__(self) -> Recorder:
        runtime: Any = self.runtime
        streams, prefetcher = runtime.comm.streams, runtime.prefetcher
        self._copy, self._open, self._give_out = streams.copy, runtime._open, prefetcher.staged
        streams.copy, runtime._open, prefetcher.staged = self.copy, self.open, self.give_out
        self.origin = self.mark()
        return self

    def __exit__(self, *_: object) -> None:
        self.end_piece()
        del self.runtime.comm.streams.copy, self.runtime._open, self.runtime.prefetcher.staged  # the classes' methods again

    def mark(self, stream: Any = None) -> Any:
        """Record and return a timing event on a CUDA stream (None: the current stream, on which computation runs)."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def since_origin(self, event: Any) -> float:
        """Return the milliseconds from entering the context to an event."""
        return self.origin.elapsed_time(event)

    def open(self, unit: Any, backward: bool) -> None:
        """Make a unit ready, in place of `Runtime._open`; its piece of computation begins afterwards."""
        self.end_piece()
        self._open(unit, backward)
        self.begun = self.mark()

    def give_out(self, training: bool) -> None:
        """End a piece once its kernels are launched, in place of `Prefetcher.staged`: what follows may wait for other copies."""
        self.end_piece()
        self._give_out(training)

    def end_piece(self) -> None:
        if self.begun is not None:
            self.pieces.append((self.begun, self.mark()))
            self.begun = None

    def copy(self, target: Tensor, source: Tensor, *, up: bool) -> Any:
        """Copy, in place of `Streams.copy`, and record the copy's begin and end on its stream, after its wait for computation."""
        streams = self.runtime.comm.streams
        way = "up" if up else "down"
        stream = getattr(streams, way)
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        begin = self.mark(stream)
        ticket = self._copy(target, source, up=up)
        self.copies.append((way, target.nbytes, begin, self.mark(stream)))
        return ticket

    def overlap(self) -> Overlap:
        """Return the result. Call it after torch.cuda.synchronize."""
        times = lambda begin, end: (self.since_origin(begin), self.since_origin(end))  # noqa: E731
        copies: dict[str, list[Interval]] = {"up": [], "down": []}
        nbytes = dict.fromkeys(copies, 0)
        for way, size, begin, end in self.copies:
            copies[way].append(times(begin, end))
            nbytes[way] += size
        return Overlap.of([times(*piece) for piece in self.pieces], copies, nbytes)
