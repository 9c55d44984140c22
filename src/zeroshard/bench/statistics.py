"""From samples to figures: medians, ratios per round, and the goals with their verdicts.

A ratio of two contenders is taken in each round from their medians in that round, and the median over the
rounds is reported: what slows the machine for a while slows both.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from .host_overhead import HostWork
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


@dataclass(frozen=True)
class Goal:
    """One measured ratio beside its limit; `value` is None where something needed was not measured."""

    text: str
    value: float | None
    limit: float
    section: str  # "race", "host", "tiers", "hostadam" or "disk"
    at_least: bool = False  # the limit is one from below

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        met = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "met" if met else "missed"


def spread(values: list[float]) -> Spread:
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, q1, q3)


def step_spread(outcome: Outcome) -> Spread:
    """Seconds per step over all rounds."""
    return spread([t for turn in outcome.rounds_step_s for t in turn])


def core_share(outcomes: list[Outcome], ranks: int) -> float | None:
    """Share of a core that a rank got while it stepped, of the contender that got most (waiting counts as none).

    Near 1 on a quiet machine with a core per rank; clearly less means that other programs ran.
    """
    shares = [spread(o.cpu_s).median / (ranks * step_spread(o).median) for o in by_name(outcomes).values()]
    return max(shares, default=None)


def by_name(outcomes: list[Outcome]) -> dict[str, Outcome]:
    """Outcomes that were measured, by contender name."""
    return {o.contender.name: o for o in outcomes if o.ran and o.rounds_step_s}


def time_ratio(outcomes: list[Outcome], ours: str, theirs: str) -> float | None:
    """Median over rounds of (median step of ours / median step of theirs)."""
    found = by_name(outcomes)
    if ours not in found or theirs not in found:
        return None
    pairs = zip(found[ours].rounds_step_s, found[theirs].rounds_step_s)
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)


def memory_ratio(outcomes: list[Outcome], ours: str, theirs: str) -> float | None:
    """Ratio of the peaks of resident memory while stepping, largest rank each."""
    found = by_name(outcomes)
    if ours not in found or theirs not in found:
        return None
    a, b = found[ours].peak_rss, found[theirs].peak_rss
    return a / b if a and b else None


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
    pairs = zip(outcome.losses, reference.losses)
    return max(abs(a - b) / abs(b) if a == a else float("inf") for a, b in pairs)  # NaN agrees with nothing


def losses_agree(outcomes: list[Outcome]) -> bool | None:
    """Whether all contenders computed the same training run; None if there is nothing to compare."""
    differences = [(o, loss_difference(o, outcomes)) for o in outcomes]
    compared = [d <= LOSS_TOLERANCE[o.contender.precision] for o, d in differences if d is not None]
    return all(compared) if compared else None


def _comparable(outcome: Outcome) -> bool:
    return outcome.ran and outcome.trains_together and bool(outcome.losses)


def formula_difference(outcome: Outcome | None) -> float | None:
    """Relative difference of model-state bytes at rest from the closed formula of the stage."""
    if outcome is None or not outcome.at_rest:
        return None
    measured, formula = (sum(outcome.at_rest[key].values()) for key in ("measured", "formula"))
    return abs(measured - formula) / formula


def goals(outcomes: list[Outcome], host: HostWork | None) -> list[Goal]:
    """The goals of the first race and of the host's work; ratios below 1 mean that zeroshard is faster or smaller."""

    def step(text: str, ours: str, theirs: str, limit: float) -> Goal:
        return Goal(f"{text}, step time", time_ratio(outcomes, ours, theirs), limit, "race")

    def peak(text: str, theirs: str, limit: float) -> Goal:
        return Goal(f"{text}, peak resident memory", memory_ratio(outcomes, "zs3", theirs), limit, "race")

    at_rest = [formula_difference(o) for name, o in by_name(outcomes).items() if o.contender.kind == "zs"]
    worst_at_rest = max((d for d in at_rest if d is not None), default=None)
    return [
        step("stage 1 / DDP", "zs1", "ddp", 0.95),
        step("stage 2 / DDP", "zs2", "ddp", 0.95),
        step("stage 3 / DDP", "zs3", "ddp", 1.00),
        step("stage 3 / FSDP2", "zs3", "fsdp2", 0.70),
        step("stage 3 / DeepSpeed 3", "zs3", "ds3", 0.45),
        step("stage 3 bf16 / FSDP2 bf16", "zs3-bf16", "fsdp2-bf16", 0.75),
        peak("stage 3 / FSDP2", "fsdp2", 0.80),
        peak("stage 3 / DeepSpeed 3", "ds3", 1.00),
        Goal("model states at rest, difference from the formula", worst_at_rest, 0.01, "race"),
        Goal("host work per unit and step / FSDP2", host and host.unit_ratio, 0.25, "host"),
        Goal("optimizer step and clipping / FSDP2", host and host.optimizer_ratio, 0.20, "host"),
    ]


def bounds_s(outcome: Outcome) -> list[float]:
    """Of each round: bytes moved between host and disk in a step, over the bandwidth that the disk had in that round."""
    return [
        speed.seconds(moved.get("disk -> host", 0.0), moved.get("host -> disk", 0.0))
        for moved, speed in zip(outcome.moved, outcome.disk)
    ]


def bound_ratio(outcome: Outcome) -> float | None:
    """Median over rounds of (median step / bound of that round); None where nothing rests on disk."""
    pairs = list(zip(outcome.rounds_step_s, bounds_s(outcome)))
    return statistics.median(statistics.median(steps) / bound for steps, bound in pairs) if pairs else None


def disk_ratio(outcomes: list[Outcome], ours: str = "zs3-disk", in_memory: str = "zs3") -> float | None:
    """Median over rounds of step / max(1.15 x bound, 1.10 x the step in memory), each of that round."""
    found = by_name(outcomes)
    if ours not in found or in_memory not in found:
        return None
    ratios = []
    for steps, bound, memory in zip(found[ours].rounds_step_s, bounds_s(found[ours]), found[in_memory].rounds_step_s):
        allowed = max(DISK_BOUND_FACTOR * bound, DISK_MEMORY_FACTOR * statistics.median(memory))
        ratios.append(statistics.median(steps) / allowed)
    return statistics.median(ratios) if ratios else None


def tier_goals(outcomes: list[Outcome]) -> list[Goal]:
    """The goals of the race of the tiers."""
    everything = "stage 3, everything on the host / "
    longer = f"max({DISK_BOUND_FACTOR:g} bound, {DISK_MEMORY_FACTOR:g} in memory)"
    return [
        Goal(everything + "DeepSpeed 3 offload, step time", time_ratio(outcomes, "zs3-host", "ds3-offload"), 0.6, "tiers"),
        Goal(everything + "FSDP2 offload, step time", time_ratio(outcomes, "zs3-host", "fsdp2-offload"), 0.6, "tiers"),
        Goal(f"stage 3, optimizer on disk / {longer}, step time", disk_ratio(outcomes), 1.0, "tiers"),
    ]
