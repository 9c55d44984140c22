"""The statistics of a race: medians, ratios per round, differences of losses.

The ratio of two contenders is that of their medians within a round, and the median of these ratios over all
rounds is reported: a slow phase of the machine slows both contenders of its rounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median, quantiles

from .plan import Contender
from .race import Outcome

# Largest relative difference from the losses of the reference of the same precision, at any step. Measured over 11
# steps: fp32 contenders differ by 1e-7, bf16 ones by 4e-5 (autocast); a race condition between gradient buffers,
# which this check found, made 1e-4 to 7e-4.
LOSS_TOLERANCE = {"fp32": 2e-5, "bf16": 5e-4}
INT8_STATES_TOLERANCE = 5e-3  # their losses are others by design
# Goal of a step with the optimizer on disk: the larger of these times its bound, and times the step in memory.
DISK_BOUND_FACTOR, DISK_MEMORY_FACTOR = 1.15, 1.10
BUSY_CORE_SHARE = 0.85  # with a smaller `core_share` other programs ran, and timings cannot be trusted


@dataclass(frozen=True)
class Spread:
    """The median and quartiles of samples."""

    median: float
    q1: float
    q3: float


def step_spread(outcome: Outcome) -> Spread:
    """Return the median and quartiles of seconds per step over all rounds."""
    values = [seconds for turn in outcome.rounds_step_s for seconds in turn]
    q1, middle, q3 = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return Spread(middle, q1, q3)


def core_share(outcomes: list[Outcome], ranks: int) -> float | None:
    """Return processor time over wall time of a rank's steps, for the contender where it is largest. Waiting lowers it.

    Near 1 on a quiet machine with a core per rank; clearly less if other programs ran.
    """
    shares = [median(o.cpu_s) / (ranks * step_spread(o).median) for o in by_name(outcomes).values()]
    return max(shares, default=None)


def by_name(outcomes: list[Outcome]) -> dict[str, Outcome]:
    """Return the outcomes that were measured, by contender name."""
    return {o.contender.name: o for o in outcomes if o.ran and o.rounds_step_s}


def time_ratio(outcomes: list[Outcome], ours: str, theirs: str) -> float | None:
    """Return the median over rounds of (median step of ours / median step of theirs)."""
    found = by_name(outcomes)
    return _ratio(found[ours], map(median, found[theirs].rounds_step_s)) if {ours, theirs} <= found.keys() else None


def memory_ratio(outcomes: list[Outcome], ours: str, theirs: str, peak: str = "peak_rss") -> float | None:
    """Return the ratio of the contenders' peaks of memory while stepping. peak: the attribute of Outcome that has them."""
    found = by_name(outcomes)
    peaks = [value for name in (ours, theirs) if name in found and (value := getattr(found[name], peak))]
    return peaks[0] / peaks[1] if len(peaks) == 2 else None


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


def losses_agree(outcomes: list[Outcome]) -> bool | None:
    """Return True if the losses of all contenders agree with their references; None if there are none to compare."""
    compared = compared_losses(outcomes)
    return all(d <= loss_tolerance(o.contender) for o, _, d in compared) if compared else None


def loss_tolerance(contender: Contender) -> float:
    """Return the largest relative difference that a contender's losses may have from those of its reference."""
    return INT8_STATES_TOLERANCE if contender.offload == "int8" else LOSS_TOLERANCE[contender.precision]


def formula_difference(outcomes: list[Outcome]) -> float | None:
    """Return the largest relative difference of model-state bytes at rest from the stage's formula, over zeroshard's stages."""
    at_rest = [o.at_rest for o in by_name(outcomes).values() if o.contender.kind == "zs" and o.at_rest]
    sums = [(sum(states["measured"].values()), sum(states["formula"].values())) for states in at_rest]
    return max((abs(measured - formula) / formula for measured, formula in sums), default=None)


def bounds_s(outcome: Outcome) -> list[float]:
    """Return by round: bytes moved between host and disk in a step, over the bandwidth that the disk had in that round."""
    return [
        speed.seconds(moved.get("disk -> host", 0.0), moved.get("host -> disk", 0.0))
        for moved, speed in zip(outcome.moved, outcome.disk, strict=False)
    ]


def bound_ratio(outcome: Outcome) -> float | None:
    """Return the median over rounds of (median step / bound of that round); None where no state rests on disk."""
    return _ratio(outcome, bounds_s(outcome))


def disk_ratio(outcomes: list[Outcome], ours: str = "zs3-disk", in_memory: str = "zs3") -> float | None:
    """Return the median over rounds of step / max(1.15 x bound, 1.10 x the step in memory), each of that round."""
    found = by_name(outcomes)
    if not {ours, in_memory} <= found.keys():
        return None
    rounds = zip(bounds_s(found[ours]), map(median, found[in_memory].rounds_step_s), strict=False)
    return _ratio(found[ours], (max(DISK_BOUND_FACTOR * bound, DISK_MEMORY_FACTOR * memory) for bound, memory in rounds))


def _ratio(outcome: Outcome, allowed_s: Iterable[float]) -> float | None:
    """Return the median over rounds of (median step / `allowed_s` of that round); None without rounds."""
    ratios = [median(steps) / allowed for steps, allowed in zip(outcome.rounds_step_s, allowed_s, strict=False)]
    return median(ratios) if ratios else None
