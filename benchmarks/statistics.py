"""From samples of a race to figures: medians, ratios per round, differences of losses.

A ratio of two contenders is taken in each round from their medians in that round, and the median over the
rounds is reported: what slows the machine for a while slows both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median, quantiles

from .race import Outcome

# Relative to the reference of the same precision, at any step. Measured over 11 steps: fp32 contenders differ by
# 1e-7, bf16 ones by 4e-5 (autocast); a race that mixed up gradient buffers now and then, found by this check,
# gave 1e-4 to 7e-4.
LOSS_TOLERANCE = {"fp32": 2e-5, "bf16": 5e-4}
# Optimizer on disk: at most so many times its bound or the step in memory, whichever is longer.
DISK_BOUND_FACTOR, DISK_MEMORY_FACTOR = 1.15, 1.10
BUSY_CORE_SHARE = 0.85  # below, timings of the default model are not to be trusted
LOSS_REFERENCES = ("ddp", "fsdp2")


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    q1: float
    q3: float


def step_spread(outcome: Outcome) -> Spread:
    """Seconds per step over all rounds."""
    values = [seconds for turn in outcome.rounds_step_s for seconds in turn]
    q1, middle, q3 = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return Spread(middle, q1, q3)


def core_share(outcomes: list[Outcome], ranks: int) -> float | None:
    """Share of a core that a rank got while it stepped, of the contender that got most (waiting counts as none).

    Near 1 on a quiet machine with a core per rank; clearly less means that other programs ran.
    """
    shares = [median(o.cpu_s) / (ranks * step_spread(o).median) for o in by_name(outcomes).values()]
    return max(shares, default=None)


def by_name(outcomes: list[Outcome]) -> dict[str, Outcome]:
    """Outcomes that were measured, by contender name."""
    return {o.contender.name: o for o in outcomes if o.ran and o.rounds_step_s}


def time_ratio(outcomes: list[Outcome], ours: str, theirs: str) -> float | None:
    """Median over rounds of (median step of ours / median step of theirs)."""
    found = by_name(outcomes)
    return _ratio(found[ours], map(median, found[theirs].rounds_step_s)) if {ours, theirs} <= found.keys() else None


def memory_ratio(outcomes: list[Outcome], ours: str, theirs: str) -> float | None:
    """Ratio of the peaks of resident memory while stepping, largest rank each."""
    found = by_name(outcomes)
    peaks = [peak for name in (ours, theirs) if name in found and (peak := found[name].peak_rss)]
    return peaks[0] / peaks[1] if len(peaks) == 2 else None


def host_memory_ratio(outcomes: list[Outcome], ours: str, theirs: str) -> float | None:
    """Ratio of the peaks of resident memory of all ranks together, a shared page counted once, while stepping."""
    found = by_name(outcomes)
    peaks = [peak for name in (ours, theirs) if name in found and (peak := found[name].peak_pss_sum)]
    return peaks[0] / peaks[1] if len(peaks) == 2 else None


def loss_reference(outcome: Outcome, outcomes: list[Outcome]) -> Outcome | None:
    """Whose losses those of `outcome` are compared with: DDP, else FSDP2, else the first of the same precision."""
    same = [o for o in outcomes if _comparable(o) and o.contender.precision == outcome.contender.precision]
    preferred = [o for kind in LOSS_REFERENCES for o in same if o.contender.kind == kind]
    return next(iter(preferred + same), None)


def loss_difference(outcome: Outcome, outcomes: list[Outcome]) -> float | None:
    """Largest relative difference of the losses from the reference's; None where there is nothing to compare."""
    reference = loss_reference(outcome, outcomes)
    if reference is None or reference is outcome or not _comparable(outcome):
        return None
    pairs = zip(outcome.losses, reference.losses, strict=False)
    return max(abs(a - b) / abs(b) if a == a else float("inf") for a, b in pairs)  # NaN agrees with nothing


def losses_agree(outcomes: list[Outcome]) -> bool | None:
    """Whether all contenders computed the same training run; None if there is nothing to compare."""
    differences = [(o, loss_difference(o, outcomes)) for o in outcomes]
    compared = [d <= LOSS_TOLERANCE[o.contender.precision] for o, d in differences if d is not None]
    return all(compared) if compared else None


def _comparable(outcome: Outcome) -> bool:
    return outcome.ran and outcome.trains_together and bool(outcome.losses)


def formula_difference(outcomes: list[Outcome]) -> float | None:
    """Relative difference of model-state bytes at rest from the closed formula of the stage, the largest of zeroshard's."""
    at_rest = [o.at_rest for o in by_name(outcomes).values() if o.contender.kind == "zs" and o.at_rest]
    sums = [(sum(states["measured"].values()), sum(states["formula"].values())) for states in at_rest]
    return max((abs(measured - formula) / formula for measured, formula in sums), default=None)


def bounds_s(outcome: Outcome) -> list[float]:
    """Of each round: bytes moved between host and disk in a step, over the bandwidth that the disk had in that round."""
    return [
        speed.seconds(moved.get("disk -> host", 0.0), moved.get("host -> disk", 0.0))
        for moved, speed in zip(outcome.moved, outcome.disk, strict=False)
    ]


def bound_ratio(outcome: Outcome) -> float | None:
    """Median over rounds of (median step / bound of that round); None where nothing rests on disk."""
    return _ratio(outcome, bounds_s(outcome))


def disk_ratio(outcomes: list[Outcome], ours: str = "zs3-disk", in_memory: str = "zs3") -> float | None:
    """Median over rounds of step / max(1.15 x bound, 1.10 x the step in memory), each of that round."""
    found = by_name(outcomes)
    if not {ours, in_memory} <= found.keys():
        return None
    rounds = zip(bounds_s(found[ours]), map(median, found[in_memory].rounds_step_s), strict=False)
    return _ratio(found[ours], (max(DISK_BOUND_FACTOR * bound, DISK_MEMORY_FACTOR * memory) for bound, memory in rounds))


def _ratio(outcome: Outcome, allowed_s: Iterable[float]) -> float | None:
    """Median over rounds of (median step / what is given for that round); None without rounds."""
    ratios = [median(steps) / allowed for steps, allowed in zip(outcome.rounds_step_s, allowed_s, strict=False)]
    return median(ratios) if ratios else None
