"""The share of copies between device and host that overlaps with computation, by the times that CUDA gives torch's profiler.

    compute   |  k  |  k  |wait|  k  |         kernels
    down         g4 >>>   g3 >>>               gradients to the host, on a stream of their own
    up           p2 >>  p1 >>>>>>>             parameters to the device, on another stream

The overlapped fraction is the time of copies during which a kernel ran, over the time of all copies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType

Interval = tuple[float, float]  # begin, end
WAYS = {"Memcpy HtoD": "up", "Memcpy DtoH": "down"}  # names of CUDA's copies, as they begin


@dataclass(frozen=True)
class Overlap:
    """The milliseconds of copies in some steps, and of those beside kernels. Keys: "up" (to the device) and "down"."""

    copies_ms: dict[str, float]
    inside_ms: dict[str, float]

    def fraction(self, *ways: str) -> float | None:
        """Return the share of the copying time (of directions `ways`; none: both) beside kernels; None without copies."""
        total, inside = (sum(of[way] for way in ways or of) for of in (self.copies_ms, self.inside_ms))
        return inside / total if total else None

    @classmethod
    def of(cls, events: Iterable[Any]) -> Overlap:
        """Return the overlap that the profiler's events show; their times are microseconds."""
        kernels: list[Interval] = []
        copies: dict[str, list[Interval]] = {way: [] for way in WAYS.values()}
        for event in events:
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
                interval = event.time_range.start / 1e3, event.time_range.end / 1e3
                if way := next((way for name, way in WAYS.items() if event.name.startswith(name)), None):
                    copies[way].append(interval)
                elif not event.name.startswith(("Memcpy", "Memset")):
                    kernels.append(interval)
        lengths = {way: sum(end - begin for begin, end in found) for way, found in copies.items()}
        return cls(lengths, {way: covered(found, kernels) for way, found in copies.items()})


def covered(intervals: list[Interval], by: list[Interval]) -> float:
    """Return the sum over `intervals` of the length of each that lies inside the union of `by`."""
    union: list[Interval] = []
    for begin, end in sorted(by):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in intervals for b, e in union)
