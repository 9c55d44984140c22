"""The order in which units are gathered: recorded in the first step, followed and checked in later ones.

    step 1     record   root 0 1 2 | 2' 1' 0' root'        (' in backward)
    step 2..   follow   at each visit the units that come next are prefetched within a byte budget

A visit that differs from the record is reported once, and the step is recorded anew; its unit is gathered on demand, as
the caller does in any case. Evaluation (no gradients) has a record of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

_MOST_VISITS = 1 << 16  # in one step: a longer one consists of forwards whose backward never comes
_MOST_DEVIATIONS = 100  # messages kept for reports


class Visit(NamedTuple):
    """One use of a unit, for which it has to be gathered: its number, in forward or in backward."""

    unit: int
    backward: bool


@dataclass
class Track:
    """One recorded order of visits, and the visits of the present step."""

    order: list[Visit] = field(default_factory=list)
    current: list[Visit] = field(default_factory=list)
    complete: bool = False
    deviated: bool = False

    @property
    def following(self) -> bool:
        """True while the visits of this step agree with a complete record."""
        return self.complete and not self.deviated


class Schedule:
    """Records visits, predicts the next ones, and reports deviations."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.tracks: dict[bool, Track] = {True: Track(), False: Track()}
        self.deviations: deque[str] = deque(maxlen=_MOST_DEVIATIONS)

    def visit(self, visit: Visit, training: bool) -> str | None:
        """Add a visit that happens now. Return a message if it is the first deviation of this step, else None."""
        track = self.tracks[training]
        cursor = len(track.current)
        expected = track.order[cursor] if track.following and cursor < len(track.order) else None
        if cursor == _MOST_VISITS:
            track.current, track.deviated = [], True
        track.current.append(visit)
        if not track.following or expected == visit:
            return None
        track.deviated = True
        wanted = self._name(expected) if expected is not None else "the end of the step"
        message = f"unit order changed: expected {wanted}, got {self._name(visit)} (visit {cursor})"
        self.deviations.append(message)
        return message

    def upcoming(self, training: bool) -> list[Visit]:
        """Return the visits that the record expects after the present one, in order; empty while recording."""
        track = self.tracks[training]
        return track.order[len(track.current) :] if track.following else []

    def skipped(self, visit: Visit | None) -> list[Visit]:
        """Return the visits that the record of training expects before `visit` (None: before the end of the step).

        Empty if the record does not expect `visit`; in a step that begins in backward (a second backward over one graph); and for
        a backward that enters no unit (a loss of parameters alone, by `p.full_tensor()`): in these no unit was skipped.
        """
        upcoming = self.upcoming(training=True)
        if (visit is None or visit.backward) and not self.tracks[True].current:
            return []
        if visit is None:
            return upcoming
        return upcoming[: upcoming.index(visit)] if visit in upcoming else []

    def restart(self) -> None:
        """Drop both records and record anew, since ranks have done different things."""
        self.tracks = {True: Track(), False: Track()}

    def repeats(self, visit: Visit, training: bool) -> bool:
        """True if the record expects `visit` next: the unit need not be released."""
        track = self.tracks[training]
        cursor = len(track.current)
        return track.following and cursor < len(track.order) and track.order[cursor] == visit

    def returns(self, unit: int, budget: int, numel_of: Callable[[int], int], training: bool) -> bool:
        """True if, after its forward, a unit is used again before other units of more than `budget` elements are gathered."""
        if self.repeats(Visit(unit, False), training):
            return True
        seen = {unit}
        for visit in self.upcoming(training) if budget >= 0 else ():
            if visit.unit == unit:
                return True
            if visit.unit not in seen:
                seen.add(visit.unit)
                budget -= numel_of(visit.unit)
            if budget < 0:  # other units need the memory before this one returns
                return False
        return False

    def end(self, training: bool) -> None:
        """End a step (or evaluation); its order becomes the record if there was none or if it deviated."""
        track = self.tracks[training]
        if not track.current:
            return
        if not track.following or len(track.current) != len(track.order):  # a shorter step is a new record, too
            track.order, track.complete = track.current, True
        track.current, track.deviated = [], False

    def _name(self, visit: Visit) -> str:
        return self.names[visit.unit] + ("'" if visit.backward else "")

    def __str__(self) -> str:
        lines = []
        for training, track in self.tracks.items():
            order = " ".join(map(self._name, track.order))
            lines.append(f"{'training' if training else 'evaluation'}: {order or '(not recorded yet)'}")
        return "\n".join(lines)
