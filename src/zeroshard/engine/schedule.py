"""The order in which units are gathered: recorded in the first step, followed and checked in later ones.

    step 1     record   root 0 1 2 | 2' 1' 0' root'        (' in backward)
    step 2..   follow   at each visit the units that come next are prefetched within a byte budget

A visit that differs from the record is reported once, and the step is recorded anew; its unit is gathered on demand, as
the caller does in any case. Evaluation (no gradients) has a record of its own. So has each kind of step that begins apart from
the model's forward: a loss in chunks calls the head alone, and back, and then runs the backward of all that comes before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

_MOST_VISITS = 1 << 16  # in one step: a longer one consists of forwards whose backward never comes
_MOST_NOTES = 100  # kept for reports: a program may deviate in every step


class Visit(NamedTuple):
    """One use of a unit, for which it has to be gathered: its number, in forward or in backward."""

    unit: int
    backward: bool


@dataclass
class Track:
    """The recorded orders of visits, and the visits of the present step.

    orders: by first visit, of a step that began apart; None: of the others. first: the present step's. entered: some visit came in a
    forward of the model.
    """

    orders: dict[Visit | None, list[Visit]] = field(default_factory=dict)
    current: list[Visit] = field(default_factory=list)
    deviated: bool = False
    first: Visit | None = None
    entered: bool = False

    @property
    def order(self) -> list[Visit]:
        """The record that the present step follows; between steps that of a forward of the model, and where it begins alike."""
        usual = self.orders.get(None, [])
        return usual if self.first in (None, *usual[:1]) else self.orders.get(self.first, [])

    def begins_apart(self, visit: Visit, alone: bool) -> bool:
        """Return whether a step begins with a visit that belongs to no forward of the model."""
        return not self.current and alone and (visit.backward or self.entered)

    @property
    def following(self) -> bool:
        """True while the visits of this step agree with the record, if there is one."""
        return bool(self.order) and not self.deviated


class Schedule:
    """Records visits and predicts the next ones. notes: sentences for zs.report, on deviations and other facts of steps."""

    def __init__(self, names: list[str], notes: Iterable[str] = ()) -> None:
        self.names = names
        self.restart()
        self.notes: deque[str] = deque(notes, maxlen=_MOST_NOTES)

    def restart(self) -> None:
        """Drop both records and record anew, since ranks' records may differ: one whose data ended has missed forwards."""
        self.tracks = {True: Track(), False: Track()}

    def note(self, message: str) -> None:
        """Add a message to the notes, unless it is there already."""
        if message not in self.notes:
            self.notes.append(message)

    def visit(self, visit: Visit, training: bool, alone: bool = False) -> None:
        """Add a visit that happens now, and a note if it is the first deviation of this step. alone: outside of the model's forward."""
        track = self.tracks[training]
        if track.begins_apart(visit, alone):
            track.first = visit
        track.entered |= not alone
        cursor = len(track.current)
        expected = track.order[cursor] if track.following and cursor < len(track.order) else None
        if cursor == _MOST_VISITS:
            track.current, track.deviated = [], True
        track.current.append(visit)
        if not track.following or expected == visit:
            return
        track.deviated = True
        wanted, got = (
            "the end of the step" if each is None else self.names[each.unit] + ("'" if each.backward else "")
            for each in (expected, visit)
        )
        self.note(f"unit order changed: expected {wanted}, got {got} (visit {cursor})")

    def upcoming(self, training: bool) -> list[Visit]:
        """Return the visits that the record expects after the present one, in order; empty while recording."""
        track = self.tracks[training]
        return track.order[len(track.current) :] if track.following else []

    def skipped(self, visit: Visit | None, alone: bool = False) -> list[Visit]:
        """Return the visits that the record of training expects before `visit` (None: before the end of the step).

        Where gathers need every rank, a rank whose batch does not use these units takes part in their gathers:

            record     stem tower.0 tower.1 head | head' tower.1' tower.0' stem'
            rank 0     stem tower.0 tower.1 head | head' tower.1' tower.0' stem'      an image and a text
            rank 1     stem (     .      . ) head | head' (      .        . ) stem'   a text: it gathers where the record says

        The record is the same on all ranks, whichever rank skips. A unit that no rank used in the recorded step can only be
        gathered if all ranks use it; otherwise ranks wait for one another until a StallError names it. The runtime does not ask
        where communicators match gathers and reductions by one order (NCCL), since a skipped unit has no reduction in its turn,
        nor with `max_live_parameters`, since a unit's release then depends on the units gathered before.

        Empty if the record does not expect `visit`; in a step that begins in backward (a second backward over one graph) or apart; and
        for a backward that enters no unit (a loss of parameters alone, by `p.full_tensor()`): in these no unit was skipped.
        """
        upcoming = self.upcoming(training=True)
        track = self.tracks[True]
        if not track.current and (visit is None or visit.backward or track.begins_apart(visit, alone)):
            return []
        if visit is None:
            return upcoming
        return upcoming[: upcoming.index(visit)] if visit in upcoming else []

    def end(self, training: bool) -> None:
        """End a step (or evaluation); its order becomes the record if there was none or if it deviated."""
        track = self.tracks[training]
        if not track.current:
            return
        if not track.following or len(track.current) != len(track.order):  # a shorter step is a new record, too
            track.orders[None if track.first in track.orders.get(None, [])[:1] else track.first] = track.current
        track.current, track.deviated, track.first = [], False, None
