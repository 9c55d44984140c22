"""The form in which every section reports: a table of rows with times by round, ratios of rows within a round, and goals.

A `Row` is what one case or contender gave; a `Bound` is a goal on the ratio of two rows; `Measured` is one table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from zeroshard.utils.sheets import PLAIN, WARNING, Note, Sheet

MIB = 2**20
BUSY_CORE_SHARE = 0.85  # with a smaller share of a core other programs ran, and timings cannot be trusted
TIME, SPEED, BYTES = "time", "speed", "bytes a second"  # what a Bound compares, if not one of the facts


def median_ratio(over: list[float], under: list[float]) -> float:
    """Return the median of the ratios within each round: a slow phase of the machine slows both cases of its rounds."""
    return median(a / b for a, b in zip(over, under, strict=True))


@dataclass(frozen=True)
class Goal:
    """A measured ratio and its limit. value: None where a measurement that it needs is missing."""

    text: str
    value: float | None
    limit: float
    at_least: bool = False  # the goal is value >= limit; else value <= limit

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        met = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "met" if met else "missed"


@dataclass
class Row:
    """The seconds of one case, by round. nbytes: read and written in that time. facts: further columns of its line."""

    name: str
    seconds: list[float]
    nbytes: float | None = None
    facts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Bound:
    """A goal on the ratio of two rows: at most `limit` of their times or of a fact, or at least `limit` of SPEED or BYTES.

    theirs: names of peers, of which the fastest counts; less: name of the row whose time is taken off both."""

    text: str
    ours: str
    theirs: tuple[str, ...]
    limit: float
    what: str = TIME
    less: str = ""


@dataclass
class Measured:
    """One table of measurements.

    Attributes:
        peers: columns of ratios, by heading the name of the row that times are compared with.
        skipped: why a row is missing, by its name: "skipped: why", "failed: why".
        more: goals that are not on the ratio of two rows.
        details: what only results.json shows.
        broken: True if a contender failed, or losses differ.
    """

    title: str
    rows: list[Row]
    bounds: Sequence[Bound] = ()
    peers: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    more: list[Goal] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    broken: bool = False

    def row(self, name: str) -> Row | None:
        """Return the row of that name; None where it was not measured."""
        return next((row for row in self.rows if row.name == name), None)

    @property
    def goals(self) -> list[Goal]:
        """The goals with their measured values."""
        return [Goal(b.text, self._ratio(b), b.limit, b.what in (SPEED, BYTES)) for b in self.bounds] + self.more

    def _ratio(self, bound: Bound) -> float | None:
        """Return the ratio of a bound, for times the median of the ratios within a round; None where a row is missing."""
        ours, less = self.row(bound.ours), self.row(bound.less)
        peers = [row for name in bound.theirs if (row := self.row(name)) is not None]
        if ours is None or not peers or (bound.less and less is None):
            return None
        theirs = min(peers, key=lambda row: median(row.seconds))
        if less is not None:
            rounds = zip(ours.seconds, theirs.seconds, less.seconds, strict=True)
            return median((a - c) / (b - c) for a, b, c in rounds)
        if bound.what == TIME:
            return median_ratio(ours.seconds, theirs.seconds)
        if bound.what in (SPEED, BYTES):
            moved = ours.nbytes / theirs.nbytes if bound.what == BYTES and ours.nbytes and theirs.nbytes else 1.0
            return moved * median_ratio(theirs.seconds, ours.seconds)
        found = [row.facts.get(bound.what) for row in (ours, theirs)]
        return found[0] / found[1] if found[0] and found[1] else None

    def sheet(self) -> Sheet:
        """Return the table: median time, bytes, times over those of the peers, and facts. "-": not measured."""
        peers = {heading: row for heading, name in self.peers.items() if (row := self.row(name)) is not None}
        facts = list(dict.fromkeys(name for row in self.rows for name in row.facts))
        timed, moved = any(row.seconds for row in self.rows), any(row.nbytes is not None for row in self.rows)
        lines = []
        for row in self.rows:
            line = [row.name, f"{1e3 * median(row.seconds):.5g}" if row.seconds else "-"][: 1 + timed]
            if row.nbytes is not None:
                line += [f"{row.nbytes / 1e6:.2f}", f"{row.nbytes / median(row.seconds) / 1e9:.2f}"]
            elif moved:
                line += ["-", "-"]
            line += [f"{median_ratio(row.seconds, peer.seconds):.2f}" for peer in peers.values()]
            lines.append(line + [f"{row.facts[name]:.6g}" if name in row.facts else "-" for name in facts])
        header = ["", *["ms"] * timed, *["MB", "GB/s"] * moved, *peers, *facts]
        notes = [(f"{heading}: time over that of {row.name}, within a round.", PLAIN) for heading, row in peers.items()]
        missing = [(f"{name} {why}", WARNING) for name, why in self.skipped.items()]
        return Sheet(self.title, header, lines, numbers=True, notes=[*notes, *self.notes, *missing])


def goals_sheet(goals: Iterable[Goal]) -> Sheet:
    """Return the table of goals with their verdicts."""
    rows = [
        [g.text, "-" if g.value is None else f"{g.value:.3f}", f"{'>=' if g.at_least else '<='} {g.limit:.2f}", g.verdict]
        for g in goals
    ]
    return Sheet("Goals", ("", "measured", "goal", ""), rows, numbers=True)
