"""Prefetch: gathers and fetches units ahead of use, in the recorded order, within buffers and a byte budget.

compute   | F1 | F2 | F3 | ...
gather    |G1 G2|G3 |              at each visit: fetch from other tiers as far as buffers allow, gather the next unit(s)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..config import Config
from .comm.base import Comm
from .schedule import Schedule, Visit
from .unit import Phase, Unit

LOOKAHEAD = 8  # number of visits considered at a time: bounds the work on the host when units are tiny


def count_ahead(sizes: Sequence[float], limit_nbytes: int | None) -> int:
    """Return how many of the next units to gather ahead: one, and more within the limit (4 4 4 bytes, 10: two); None: no unit."""
    ahead = 0.0
    for count, size in enumerate(sizes if limit_nbytes is not None else ()):
        if ahead and ahead + size > (limit_nbytes or 0):
            return count
        ahead += size
    return len(sizes) if limit_nbytes is not None else 0


def most_gathered(order: Sequence[str], nbytes: Mapping[str, int], limit_nbytes: int | None) -> int:
    """Return the most bytes that are gathered at once while forward visits units in this order, and backward in the reverse.

    A unit that is visited twice (of a tied embedding) stays gathered in backward between the two.
    """
    most = 0
    twice = {name for name in order if order.count(name) > 1}
    for visits, staying in ((order, set()), (order[::-1], twice)):
        for at, name in enumerate(visits):
            here = {name} | {other for other in staying if other in visits[:at] and other in visits[at:]}
            ahead = [nbytes[other] for other in dict.fromkeys(visits[at + 1 : at + 1 + LOOKAHEAD]) if other not in here]
            most = max(most, sum(nbytes[other] for other in here) + sum(ahead[: count_ahead(ahead, limit_nbytes)]))
    return most


class Prefetcher:
    """Prefetches units in the order of a schedule. `training` selects one of its two records."""

    def __init__(self, units: list[Unit], schedule: Schedule, config: Config, comm: Comm, gather: Callable[[Unit], None]) -> None:
        """gather: function that starts to gather a unit, on all ranks."""
        self.units, self.schedule, self.config, self.comm, self.gather = units, schedule, config, comm, gather
        self._alone = comm.world_size == 1 and not comm.ordered

    def ahead(self, training: bool) -> None:
        """Fetch the next units from other tiers as far as buffers allow; gather the next unit, and more within the budget."""
        if not self.config.overlap:
            return
        upcoming = [self.units[visit.unit] for visit in self.schedule.upcoming(training)[:LOOKAHEAD]]
        upcoming = [unit for unit in dict.fromkeys(upcoming) if unit.phase is not Phase.READY]  # READY ones are still in use
        for unit in upcoming:
            if not unit.fetch():  # no buffer is free, so none for later units either
                break
        for unit in upcoming[: count_ahead([each.gathered_nbytes for each in upcoming], self.config.prefetch_limit_nbytes)]:
            # Where ranks share memory a gather is this rank's own copy, which runs no faster ahead of use. A unit whose shards
            # come from another tier is gathered ahead only in a world of one rank: each rank's disk has its own speed, and a
            # gather that only some ranks have started could not be dropped. Ordered communicators gather such units in `staged`.
            if (unit.fetched and self._alone) if unit.staged else unit.meets:
                self.gather(unit)

    def staged(self, training: bool) -> None:
        """Start to gather the next unit if it rests on another tier. Called when all work of a unit is queued on the device."""
        # On ordered communicators alone. `ahead` would wait for the disk, or start gathers in an order that depends on its speed
        if not self.comm.ordered or not self.config.overlap:
            return
        for visit in self.schedule.upcoming(training)[:1]:
            unit = self.units[visit.unit]
            if unit.staged and unit.phase is not Phase.READY:
                self.gather(unit)

    def lives_on(self, unit: Unit, training: bool) -> bool:
        """True if, after its forward, the unit is used again at once or before `max_live_parameters` elements are gathered.

        Never of a unit whose memory is that of all ranks: there is nothing to keep, and only a gather keeps a peer's next write out.
        """
        if not unit.releases:
            return False
        if unit.stays_after(backward=False):
            return True
        upcoming, seen = self.schedule.upcoming(training), {unit.number}
        if upcoming[:1] == [Visit(unit.number, False)]:
            return True
        left = self.config.max_live_parameters - unit.gathered_numel
        for number, _ in upcoming:
            if left < 0:  # other units need the memory before this one returns
                return False
            if number == unit.number:
                return True
            if number not in seen:
                seen.add(number)
                left -= self.units[number].gathered_numel
        return False
