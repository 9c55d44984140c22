"""What would make a plan fit: the cheapest changes, each with what it frees and what it costs.

    changes in the order of what they cost ->  each alone, and on top of all before it, until something fits: could it free
                                               enough? then a dry run says whether it does; what was not needed goes

Whether a change *could* free enough is arithmetic: no more than the categories hold that it is about. What it frees and costs is
read off a dry run of the changed run, never estimated; seconds are the simulator's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..activation_checkpointing.storage import CHECKPOINTS
from ..config import STAGES, Placement, Tier
from ..errors import ConfigError
from ..memory.ledger import GATHERED, GRADIENTS, MASTERS, OPTIMIZER, PARAMETERS, PARTIAL, SECONDARY, STAGING
from ..simulator.simulate import simulate
from ..simulator.trace import Resource
from .plan import ACTIVATIONS, Plan
from .request import Request, Verdict, gib, judge

STATES = (OPTIMIZER, MASTERS)
ENOUGH = 3  # remedies that are shown
_COPIES = {"host": (Resource.DOWN, Resource.UP), "disk": (Resource.READ, Resource.WRITE)}
_LOADED = 1.02  # times: less is not worth a word


@dataclass(frozen=True)
class Change:
    """apply: the changed request, None where there is nothing to change. frees: at most these categories of a tier."""

    apply: Callable[[Request], Request | None]
    tier: Tier
    frees: tuple[str, ...]


@dataclass(frozen=True)
class Remedy:
    """flags: what to add to the command. frees: bytes at the moment that decides. cost: in words, by the changed run's own plan."""

    flags: str
    request: Request
    verdict: Verdict
    frees: int
    cost: str


def remedies(request: Request, plans: Sequence[Plan], seconds: float = 60.0) -> list[Remedy]:
    """The cheapest changes after which it fits, at most ENOUGH; empty where none was found in so many seconds of dry runs."""
    search = _Search(request, plans, judge(plans, request), time.monotonic() + seconds)
    found: list[Remedy] = []
    rungs: list[Change] = []
    stacked = request
    for change in CHANGES:
        if change.tier is not search.verdict.tier or len(found) == ENOUGH:
            continue
        alone, on_top = change.apply(request), change.apply(stacked)
        if alone is not None and search.could([change]):
            found += search.tried(alone)
        if not found and on_top is not None:
            rungs, stacked = [*rungs, change], on_top
            if stacked != alone and search.could(rungs):
                found += search.pruned(rungs, search.tried(stacked))
    return found


class _Search:
    """Dry runs of changed requests, while there is time."""

    def __init__(self, request: Request, plans: Sequence[Plan], verdict: Verdict, until: float) -> None:
        self.request, self.plans, self.verdict, self.until = request, plans, verdict, until

    def could(self, changes: Sequence[Change]) -> bool:
        """Whether they are about as many bytes as are missing."""
        names = {name for change in changes for name in change.frees}
        return sum(self.verdict.held.get(name, 0) for name in names) >= self.verdict.short

    def tried(self, changed: Request) -> list[Remedy]:
        """The remedy, if it is one and there is time left to look."""
        if time.monotonic() > self.until:
            return []
        try:
            plans = changed.plans()
        except ConfigError:  # not for this model or mesh
            return []
        verdict = judge(plans, changed)
        if not verdict.fits:
            return []
        frees = self.verdict.used - sum(_at(plans, self.verdict).values()) - self.verdict.overhead
        return [Remedy(flags(self.request, changed), changed, verdict, frees, cost(self.request, self.plans, changed, plans))]

    def pruned(self, rungs: list[Change], found: list[Remedy]) -> list[Remedy]:
        """Without the changes that it fits without, the most expensive first."""
        for rung in rungs[-2::-1] if found else ():
            fewer = [each for each in rungs if each is not rung]
            request: Request | None = self.request
            for each in fewer:
                request = each.apply(request) if request is not None else None
            without = found if request == found[0].request else self.tried(request) if request is not None else []
            if without:
                rungs, found = fewer, without
        return found


def _at(plans: Sequence[Plan], verdict: Verdict) -> dict[str, int]:
    """What the changed run holds where the given one is fullest: the same rank, tier and phase."""
    plan = next((each for each in plans if each.rank == verdict.plan.rank), plans[0])
    phase = next((each for each in plan.phases if each.name == verdict.phase), None)
    return phase.held.get(verdict.tier, {}) if phase is not None else {}


# -- the changes, cheapest first -------------------------------------------------------------------------------


def _stage(number: int) -> Change:
    """A higher stage of ZeRO. Stages 1 and 2 send what plain data parallelism sends, stage 3 half as much again."""
    row = STAGES[number]
    sharded = [(row.optimizer, STATES), (row.gradient, (GRADIENTS, PARTIAL)), (row.parameter, (PARAMETERS,))]
    frees = tuple(name for placement, names in sharded if placement is Placement.SHARDED for name in names)

    def apply(request: Request) -> Request | None:
        return _with(request, stage=number) if request.config.stage < number and request.axes["dp"] > 1 else None

    return Change(apply, Tier.DEVICE, frees)


def _with(request: Request, **options: Any) -> Request:
    return replace(request, options={**request.options, **options})


def _checkpoint(request: Request) -> Request | None:
    return replace(request, checkpointing=True) if not request.checkpointing else None


def _fewer_rows(request: Request) -> Request | None:
    """Half as many sequences at a time, twice as often: the same step."""
    return replace(request, rows=request.rows // 2, micro_batches=2 * request.micro_batches) if request.rows % 2 == 0 else None


def _one_row(request: Request) -> Request | None:
    return replace(request, rows=1, micro_batches=request.rows * request.micro_batches) if request.rows > 2 else None


def _split(request: Request) -> Request | None:
    """Blocks gathered in parts: attention, and each map of the MLP, of 4 dim^2 elements and biases."""
    hidden = request.source.shape.hidden
    largest = 4 * hidden * (hidden + 2) if hidden else 0
    fine = request.config.max_unit_numel is not None and request.config.max_unit_numel <= largest
    return None if fine or not largest or request.config.stage != 3 else _with(request, max_unit_numel=largest)


def _partition(request: Request) -> Request | None:
    """A part of each checkpoint on each rank of tp (Pa: ZeRO, arXiv 1910.02054, section 6.1)."""
    given = dict(request.checkpointing) if isinstance(request.checkpointing, Mapping) else {}
    return replace(request, checkpointing={**given, "partition": True}) if request.axes["tp"] > 1 and "partition" not in given else None


def _activations_to_host(request: Request) -> Request | None:
    given = dict(request.checkpointing) if isinstance(request.checkpointing, Mapping) else {}
    return replace(request, checkpointing={**given, "offload": "cpu"}) if "offload" not in given and request.hardware.separate else None


def _offload(name: str, tier: str, stage: int, *before: str) -> Callable[[Request], Request | None]:
    """States to a tier: those named before it as well, where they are not there."""

    def apply(request: Request) -> Request | None:
        names = [each for each in (*before, name) if request.options.get(each) not in ("nvme", tier)]
        if name not in names or (tier == "cpu" and not request.hardware.separate) or request.axes["dp"] == 1 and request.config.stage == 0:
            return None
        path = {"offload_path": request.options.get("offload_path") or "."} if tier == "nvme" else {}
        return _with(request, stage=max(stage, request.config.stage), **dict.fromkeys(names, tier), **path)

    return apply


def _more_ranks(times: int) -> Callable[[Request], Request | None]:
    def apply(request: Request) -> Request | None:
        return replace(request, axes={**request.axes, "dp": times * request.axes["dp"]}) if request.config.stage else None

    return apply


_ALL = (*STATES, GRADIENTS, PARTIAL, PARAMETERS, SECONDARY, GATHERED, STAGING)
CHANGES = (
    _stage(1),
    _stage(2),
    _stage(3),
    Change(_split, Tier.DEVICE, (GATHERED, STAGING)),
    Change(_fewer_rows, Tier.DEVICE, (ACTIVATIONS, CHECKPOINTS)),
    Change(_one_row, Tier.DEVICE, (ACTIVATIONS, CHECKPOINTS)),
    Change(_checkpoint, Tier.DEVICE, (ACTIVATIONS,)),
    Change(_partition, Tier.DEVICE, (ACTIVATIONS, CHECKPOINTS)),
    Change(_activations_to_host, Tier.DEVICE, (ACTIVATIONS, CHECKPOINTS)),
    Change(_offload("offload_optimizer", "cpu", 2), Tier.DEVICE, (*STATES, GRADIENTS, PARTIAL)),
    Change(_offload("offload_param", "cpu", 3, "offload_optimizer"), Tier.DEVICE, _ALL),
    Change(_offload("offload_optimizer", "nvme", 2), Tier.HOST, STATES),
    Change(_offload("offload_param", "nvme", 3, "offload_optimizer", "offload_gradient"), Tier.HOST, _ALL),
    Change(_more_ranks(2), Tier.DEVICE, _ALL),
    Change(_more_ranks(4), Tier.DEVICE, _ALL),
    Change(_more_ranks(16), Tier.DEVICE, _ALL),
    Change(_more_ranks(2), Tier.HOST, _ALL),
    Change(_more_ranks(2), Tier.DISK, _ALL),
)


# -- what they cost --------------------------------------------------------------------------------------------


def flags(before: Request, after: Request) -> str:
    """The options of the command that make one request of the other."""
    found = []
    for name in sorted({*before.options, *after.options}):
        value = after.options.get(name)
        if value != before.options.get(name) and name != "offload_path":
            found.append(f"--{name.replace('_', '-')} {value}")
    if after.checkpointing != before.checkpointing:
        kept = after.checkpointing if isinstance(after.checkpointing, Mapping) else {}
        named = {"partition": "--partition-activations", "offload": "--offload-activations cpu"}
        found += [named[name] for name in kept] or ["--checkpoint-activations"]
    if after.rows != before.rows:
        found.append(f"--batch {after.rows} --accumulate {after.micro_batches}")
    if after.ranks != before.ranks:
        mesh = ",".join(f"{axis}={size}" for axis, size in after.axes.items() if size > 1)
        found.append(f"--ranks {after.ranks}" + (f" --mesh {mesh}" if after.ranks > after.axes["dp"] else ""))
    return " ".join(found)


def cost(before: Request, plans: Sequence[Plan], after: Request, changed: Sequence[Plan]) -> str:
    """What a step does more, of the first rank that both plans are about."""
    old, new = plans[0], changed[0]
    said = []
    if sum(new.sent.values()) > _LOADED * sum(old.sent.values()):
        said.append(f"sends {sum(new.sent.values()) / 1e9:,.3g} GB a step, not {sum(old.sent.values()) / 1e9:,.3g}")
    computed = [sum(task.flops for task in plan.trace.tasks) for plan in (old, new)]
    if computed[1] > _LOADED * computed[0]:
        said.append(f"computes {computed[1] / computed[0] - 1:.0%} more")
    for where, ways in _COPIES.items():
        moved = [sum(plan.trace.total(way) for way in ways) for plan in (old, new)]
        if moved[1] > _LOADED * moved[0]:
            instead = f", not {moved[0] / 1e9:,.3g}" if moved[0] else ""
            said.append(f"moves {moved[1] / 1e9:,.3g} GB to and from the {where} a step{instead}")
    if new.peak(Tier.HOST) > old.peak(Tier.HOST):
        said.append(f"takes {gib(new.peak(Tier.HOST))} GiB of host memory a rank")
    if after.ranks > before.ranks:
        said.append(f"{after.ranks / before.ranks:g} times the devices")
    if before.axes["pp"] == 1:
        times = [simulate(plan.trace, before.hardware).step_s for plan in (old, new)]
        said.append(f"{times[1]:.3g} s a step, not {times[0]:.3g}")
    return "; ".join(said) or "nothing that a step would show"
