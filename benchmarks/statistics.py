"""The statistics of a race: ratios per round, differences of losses, bounds by bandwidth.

The ratio of two contenders is that of their medians within a round, and the median of these ratios over all
rounds is reported: a slow phase of the machine slows both contenders of its rounds.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .race import Outcome

# Largest relative difference from the losses of the reference of the same precision, at any step. Measured over 11
# steps: fp32 contenders differ by 1e-7, bf16 ones by 4e-5 (autocast); a race condition between gradient buffers,
# which this check found, made 1e-4 to 7e-4.
LOSS_TOLERANCE = {"fp32": 2e-5, "bf16": 5e-4, "int8": 5e-3, "host8": 5e-3}  # with int8 states losses are others by design
BUSY_CORE_SHARE = 0.85  # with a smaller share of a core other programs ran, and timings cannot be trusted


def median_ratio(over: list[float], under: list[float]) -> float:
    """Return the median of the ratios within each round."""
    return median(a / b for a, b in zip(over, under, strict=True))


def core_share(outcomes: list[Outcome], ranks: int) -> float | None:
    """Return processor time over wall time of a rank's steps, for the contender where it is largest. Waiting lowers it.

    Near 1 on a quiet machine with a core per rank; clearly less if other programs ran.
    """
    measured = [o for o in outcomes if o.ran and o.rounds_step_s]
    return max((median(o.cpu_s) / (ranks * median(o.round_s)) for o in measured), default=None)


def compared_losses(outcomes: list[Outcome]) -> list[tuple[Outcome, Outcome, float]]:
    """Return (outcome, its reference, largest relative difference of their losses) for all that can be compared.

    The reference is DDP, FSDP2, else the first outcome of the same precision, and is compared with none.
    """
    found, usable = [], [o for o in outcomes if o.ran and o.trains_together and o.losses]
    for outcome in usable:
        same = [o for o in usable if o.contender.precision == outcome.contender.precision]
        preferred = [o for kind in ("ddp", "fsdp2") for o in same if o.contender.kind == kind]
        reference = (preferred + same)[0]
        if reference is not outcome:
            pairs = zip(outcome.losses, reference.losses, strict=False)
            # a NaN loss differs from all
            difference = max(abs(a - b) / abs(b) if a == a else float("inf") for a, b in pairs)
            found.append((outcome, reference, difference))
    return found


def formula_difference(outcomes: list[Outcome]) -> float | None:
    """Return the largest relative difference of model-state bytes at rest from the stage's formula, over zeroshard's stages."""
    at_rest = [o.at_rest for o in outcomes if o.ran and o.contender.kind == "zs" and o.at_rest]
    sums = [(sum(states["measured"].values()), sum(states["formula"].values())) for states in at_rest]
    return max((abs(measured - formula) / formula for measured, formula in sums), default=None)


def bounds_s(outcome: Outcome) -> list[float]:
    """Return by round: bytes moved between host and disk in a step, over the bandwidth that the disk had in that round."""
    return [
        speed.seconds(moved.get("disk -> host", 0.0), moved.get("host -> disk", 0.0))
        for moved, speed in zip(outcome.moved, outcome.disk, strict=False)
    ]
