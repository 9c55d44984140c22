"""The search for remedies: the cheapest changes of a run that make its plan fit, each with what it frees and what it costs.

    changes of one or several rows of CHANGES  -> those that fit by formula, without changes that are not needed
                                               -> the cheapest by formula -> a dry run each, simulated, while there is time

The cost is the seconds of a step; changes that need more ranks come last. A remedy that no dry run has confirmed says "fits by
formula".
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...config import Tier
from ...errors import ConfigError
from ...utils.axes import PP
from ...utils.setting import setting
from ..faults import OutOfTime
from ..plan import Plan
from ..recorder import deadline, tell
from ..request import WHERE, Request, Verdict, gb, gib, judge, verdicts
from ..search.layout import Layout
from ..search.load import Load, load_of, step_seconds
from ..search.memory import held_of, memory_of
from ..search.profile import Profile
from ..search.requested import layout_of, profile_of
from ..search.search import in_order
from ..simulator.hardware import NETWORK, Hardware
from ..simulator.simulate import simulate
from ..simulator.spread import two_digits
from ..simulator.trace import Resource, Trace
from .changes import CHANGES, Change, changes, flags

ENOUGH = 3  # remedies that are shown
_MOST_CHANGES = 4  # in one remedy
_TRIED = 8  # choices of as many ranks that dry runs may try: those that fit by formula, the cheapest
_SURE = 0.95  # share of the memory up to which formulas alone are believed
_COPIES = {"host": (Resource.DOWN, Resource.UP), "disk": (Resource.READ, Resource.WRITE)}
_LOADED = 1.02  # a load that grows by a smaller factor is not mentioned


@dataclass(frozen=True)
class Remedy:
    """A change that makes the run fit. flags: to add to the command. then: the verdict with them. verdict: None: by formula.

    frees: bytes of the memory that was short. seconds: of a step. cost: in words.
    """

    flags: str
    request: Request
    then: str
    verdict: Verdict | None
    frees: int
    seconds: float
    cost: str


def remedies(request: Request, plans: Sequence[Plan], seconds: float = 60.0) -> list[Remedy]:
    """Return the cheapest changes after which the run fits, at most ENOUGH: those confirmed by a dry run, then those by formula.

    seconds: the time for it, of which formulas get a third; a dry run that is not over by the end is given up. 0: return [].
    """
    if seconds <= 0:
        return []
    until = time.monotonic() + seconds
    confirmed: list[Remedy] = []
    left: list[_Choice] = []
    try:
        with setting(deadline, until):
            formulas = _Formulas(request, plans)
            soon = time.monotonic() + (until - time.monotonic()) / 3
            left = _cheapest(_fitting(formulas, soon))
            while left and len(confirmed) < ENOUGH:
                confirmed += _tried(formulas, plans, left[0])
                left = left[1:]
    except OutOfTime:  # left[0] and those after it remain as they are by formula
        pass
    except ConfigError:  # no profile can be made of this model
        return []
    sure = [choice for choice in left if choice.share <= _SURE]
    return cheapest_first(confirmed) + [_by_formula(formulas, choice) for choice in sure[: ENOUGH - len(confirmed)]]


# -- formulas ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Choice:
    """A changed request that fits by formula. share: used over capacity of the memory that it fills most. seconds: of a step."""

    request: Request
    changes: frozenset
    share: float
    then: str
    seconds: float


class _Formulas:
    """The memory and the seconds of requests by formulas, corrected by what the dry run of the given request says.

    error, pace: the given request's bytes of the memory that is short, and seconds of a step: the dry run's over the formulas'.
    """

    def __init__(self, request: Request, plans: Sequence[Plan]) -> None:
        self.request, self.verdict = request, judge(plans, request.hardware)
        self.profile = profile_of(request, plans)
        self.error = self.pace = 1.0
        by_formula = sum(held_of(self.profile, layout_of(request))[self.verdict.tier].values())
        if by_formula:
            self.error = sum(self.verdict.held.values()) / by_formula
        if request.axes[PP] == 1:  # else simulating takes dry runs of all stages
            self.pace = simulate(plans[0].trace, request.hardware).step_s / self.seconds(request)

    def uses(self, request: Request) -> dict[Tier, tuple[float, int]]:
        """Return what is used of each memory and its capacity, as `judge` counts them."""
        found, hardware = held_of(self.profile, layout_of(request)), request.hardware
        nbytes = {tier: sum(held.values()) * (self.error if tier is self.verdict.tier else 1) for tier, held in found.items()}
        return {
            tier: (hardware.used(tier, each, request.ranks_of_node), hardware.capacity(tier)) for tier, each in nbytes.items()
        }

    def seconds(self, request: Request) -> float:
        return self.pace * step_seconds(self.profile, layout_of(request), request.hardware)[0]


def _fitting(formulas: _Formulas, until: float) -> list[_Choice]:
    """Return choices that fit, those of fewer changes first, and none that would fit with a part of its changes.

    At most two changes are combined; more only if that finds nothing on the given number of ranks.
    """
    found: list[_Choice] = []
    for count in range(1, _MOST_CHANGES + 1):
        for chosen in itertools.combinations(CHANGES, count):
            for request in _changed(formulas.request, chosen):
                if time.monotonic() > until:
                    return found
                tell(f"looking for changes that make it fit: {len(found)} by formula so far")
                named = changes(formulas.request, request)
                # any smaller number of rows is one and the same change: the largest that fits is found first
                made = frozenset((name, "fewer" if name == "rows" else str(value)) for name, value in named.items())
                if any(each.changes <= made for each in found):
                    continue
                try:
                    uses = formulas.uses(request)
                except ConfigError:  # not for this model or mesh
                    continue
                share, tier = max((used / capacity, tier) for tier, (used, capacity) in uses.items())
                if share <= 1:
                    used, capacity = uses[tier]
                    then = f"fits by formula: {gib(used)} of {gib(capacity)} GiB{WHERE[tier]}"
                    found.append(_Choice(request, made, share, then, formulas.seconds(request)))
        if count > 1 and any(each.request.ranks == formulas.request.ranks for each in found):
            break
    return found


def _changed(request: Request, chosen: Sequence[Change]) -> Iterator[Request]:
    """Yield requests with one change of each chosen row."""
    if not chosen:
        yield request
        return
    for each in chosen[0].offers(request):
        yield from _changed(each, chosen[1:])


def _cheapest(fitting: list[_Choice]) -> list[_Choice]:
    """Return the cheapest first; choices of more ranks only if there are too few others."""
    found: list[_Choice] = []
    for ranks in sorted({each.request.ranks for each in fitting}):
        if len(found) < ENOUGH:
            found += cheapest_first([each for each in fitting if each.request.ranks == ranks])[:_TRIED]
    return found


def cheapest_first(found: Sequence[Any]) -> list[Any]:
    """Order by ranks, then as a search orders layouts. found: each has a request, and seconds of a step."""
    by_ranks = [
        [each for each in found if each.request.ranks == ranks] for ranks in sorted({each.request.ranks for each in found})
    ]
    return [each for same in by_ranks for each in in_order(same, lambda each: (each.seconds, layout_of(each.request)))]


# -- what is said --------------------------------------------------------------------------------------------------


def _tried(formulas: _Formulas, plans: Sequence[Plan], choice: _Choice) -> list[Remedy]:
    """Make a dry run of a choice; return the remedy if it fits by that, else []."""
    before, after = formulas.request, choice.request
    try:
        changed = after.plans()
    except ConfigError:  # not for this model or mesh
        return []
    verdict, short = judge(changed, after.hardware), formulas.verdict
    if not verdict.fits:
        return []
    uses = (each.used for plan in changed for each in verdicts(plan, after.hardware) if each.tier is short.tier)
    frees = short.used - max(uses, default=0)

    steps = []
    for made, request in ((plans, before), (changed, after)):
        steps.append(Step(made[0].trace, made[0].peak(Tier.HOST), request.simulated(made).step_s, request.ranks))
    return [Remedy(flags(before, after), after, str(verdict), verdict, frees, steps[1].seconds, _cost(*steps))]


def _by_formula(formulas: _Formulas, choice: _Choice) -> Remedy:
    before, after = formulas.request, choice.request
    found = (Step.by_formula(formulas.profile, layout_of(each), each.hardware) for each in (before, after))
    steps = [replace(step, seconds=formulas.pace * step.seconds) for step in found]
    frees = round(formulas.verdict.used - formulas.uses(after)[formulas.verdict.tier][0])
    return Remedy(flags(before, after), after, choice.then, None, frees, choice.seconds, _cost(*steps))


@dataclass(frozen=True)
class Step:
    """A step. load: of the first rank. host: bytes of host memory that it takes at the most. ranks: of the run."""

    load: Trace | Load
    host: int
    seconds: float
    ranks: int

    @classmethod
    def by_formula(cls, profile: Profile, layout: Layout, hardware: Hardware) -> Step:
        host = round(sum(memory_of(profile, layout)[Tier.HOST].values()))
        return cls(load_of(profile, layout), host, step_seconds(profile, layout, hardware)[0], layout.ranks)


def _cost(old: Step, new: Step) -> str:
    """Describe the seconds of a step before and after a change, and what it does more."""
    return "; ".join([f"{two_digits(new.seconds)} s a step, not {two_digits(old.seconds)}", *burdens(old, new)])


def burdens(old: Step, new: Step) -> list[str]:
    """Describe what a step does more after a change, a phrase for each resource."""
    said = []
    sent = [step.load.total(*NETWORK) for step in (old, new)]
    if sent[1] > _LOADED * sent[0]:
        said.append(f"sends {gb(sent[1])} GB a step, not {gb(sent[0])}")
    computed = [step.load.flops for step in (old, new)]
    if computed[1] > _LOADED * computed[0]:
        said.append(f"computes {computed[1] / computed[0] - 1:.0%} more")
    for where, ways in _COPIES.items():
        moved = [step.load.total(*ways) for step in (old, new)]
        if moved[1] > _LOADED * moved[0]:
            instead = f", not {gb(moved[0])}" if moved[0] else ""
            said.append(f"moves {gb(moved[1])} GB to and from the {where}{instead}")
    if new.host > old.host:
        said.append(f"takes {gib(new.host)} GiB of host memory a rank")
    if new.ranks > old.ranks:
        said.append(f"{new.ranks / old.ranks:g} times the devices")
    return said
