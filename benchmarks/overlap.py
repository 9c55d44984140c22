"""How much of the copying between device and host lay beside computation, by CUDA events.

    compute   |  B3  |  B2  |wait|  B1  |      pieces between a unit's parameters being there and its work being given out
    down        g4 >>>   g3 >>>                gradients to the host, on a stream of their own
    up          p2 >>  p1 >>>>>>>              parameters to the device, on another

The overlapped fraction is the time of copies that lies inside pieces of computation, over the time of all copies. Waits
for a copy are not inside a piece: an event is recorded after the wait. The head of the model and the loss have no
piece, so the fraction errs on the low side.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zeroshard.zero.runtime import Runtime

Interval = tuple[float, float]  # begin, end


def union(intervals: list[Interval]) -> list[Interval]:
    """The same moments, as intervals that do not meet, in order."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        elif end > begin:
            joined.append((begin, end))
    return joined


def covered(intervals: list[Interval], by: list[Interval]) -> float:
    """Length of all intervals together (each by itself) that lies inside `by`."""
    cover = union(by)
    return sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in intervals for b, e in cover)


@dataclass(frozen=True)
class Overlap:
    """Milliseconds of some steps. copies_ms, inside_ms: by direction, "up" (to the device) and "down"."""

    compute_ms: float
    copies_ms: dict[str, float]
    inside_ms: dict[str, float]
    copied_nbytes: dict[str, int]

    def fraction(self, *ways: str) -> float | None:
        """Of the copying time (one way, or both) that lay beside computation; None where nothing was copied."""
        total, inside = (sum(of[way] for way in ways or of) for of in (self.copies_ms, self.inside_ms))
        return inside / total if total else None

    @classmethod
    def of(cls, compute: list[Interval], copies: dict[str, list[Interval]], nbytes: dict[str, int]) -> Overlap:
        lengths = {way: sum(end - begin for begin, end in found) for way, found in copies.items()}
        inside = {way: covered(found, compute) for way, found in copies.items()}
        return cls(sum(end - begin for begin, end in union(compute)), lengths, inside, dict(nbytes))


@dataclass
class Recorder:
    """While entered: marks every piece of computation and every copy of a sharded model. Afterwards `overlap`.

    It stands in for three methods of the runtime and its streams, on the objects, and takes its places back at the end.
    """

    runtime: Runtime
    pieces: list[tuple[Any, Any]] = field(default_factory=list)  # of computation: begin, end
    copies: list[tuple[str, int, Any, Any]] = field(default_factory=list)  # way, bytes, begin, end
    begun: Any = None  # the piece under way
    origin: Any = None

    def __enter__(self) -> Recorder:
        runtime: Any = self.runtime  # whose methods are exchanged
        streams, prefetcher = runtime.comm.streams, runtime.prefetcher
        self._copy, self._open, self._give_out = streams.copy, runtime._open, prefetcher.staged
        streams.copy, runtime._open, prefetcher.staged = self.copy, self.open, self.give_out
        self.origin = self.mark()
        return self

    def __exit__(self, *_: object) -> None:
        self.end_piece()
        del self.runtime.comm.streams.copy, self.runtime._open, self.runtime.prefetcher.staged  # the class's again

    def mark(self, stream: Any = None) -> Any:
        """A moment on a CUDA stream (None: that of the computation)."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def since_origin(self, event: Any) -> float:
        """Milliseconds."""
        return self.origin.elapsed_time(event)

    def open(self, unit: Any, backward: bool) -> None:
        """A unit is made ready; what follows is its computation."""
        self.end_piece()
        self._open(unit, backward)
        self.begun = self.mark()

    def give_out(self, training: bool) -> None:
        """A unit's computation has been given to the device; what follows may wait for the next unit's copies."""
        self.end_piece()
        self._give_out(training)

    def end_piece(self) -> None:
        if self.begun is not None:
            self.pieces.append((self.begun, self.mark()))
            self.begun = None

    def copy(self, target: Tensor, source: Tensor, *, up: bool) -> Any:
        """A copy, with its moments on its own stream: it begins when what it waits for is over."""
        streams = self.runtime.comm.streams
        way = "up" if up else "down"
        stream = getattr(streams, way)
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        begin = self.mark(stream)
        ticket = self._copy(target, source, up=up)
        self.copies.append((way, target.nbytes, begin, self.mark(stream)))
        return ticket

    def overlap(self) -> Overlap:
        """After the device has done everything."""
        times = lambda begin, end: (self.since_origin(begin), self.since_origin(end))  # noqa: E731
        copies: dict[str, list[Interval]] = {"up": [], "down": []}
        nbytes = dict.fromkeys(copies, 0)
        for way, size, begin, end in self.copies:
            copies[way].append(times(begin, end))
            nbytes[way] += size
        return Overlap.of([times(*piece) for piece in self.pieces], copies, nbytes)
