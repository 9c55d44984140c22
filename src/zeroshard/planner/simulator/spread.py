"""The text of a simulation's numbers: two digits, and the range in which published runs lie around such a number.

Each hardware has its `spread`: the real seconds of a step over the simulated ones, from the lowest to the highest of eight in ten
published runs (`zeroshard papers`). A prediction of 2.0 s with a spread of 0.8 to 1.5 is shown as "2.0 s (1.6 to 3.0)".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

RANGE = "the range holds eight of ten published runs on such devices"
UNKNOWN = "no published run on such devices was compared: the range is not known"


def two_digits(value: float) -> str:
    """Return a number with as many digits as a simulation can answer for: 0.86, 1.8, 25, 1,200."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    decimals = 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, decimals)
    decimals = 1 - math.floor(math.log10(abs(rounded)))  # 0.0996 became 0.10
    return f"{rounded:,.{max(decimals, 0)}f}"


def seconds_with_spread(value: float, spread: Sequence[float]) -> str:
    """Return a step's seconds with their range. spread: lowest and highest of real over simulated seconds; (): not known."""
    return _with_range(value, [value * each for each in spread])


def rate_with_spread(value: float, spread: Sequence[float]) -> str:
    """Return a rate (flops or tokens a second) with its range; it falls as the seconds of a step grow."""
    return _with_range(value, [value / each for each in reversed(spread)])


def said_of(spread: Sequence[float]) -> str:
    """Explain the range beside a number, or why there is none."""
    return RANGE if spread else UNKNOWN


def _with_range(value: float, ends: Sequence[float]) -> str:
    return two_digits(value) + (f" ({two_digits(ends[0])} to {two_digits(ends[1])})" if ends else "")
