"""The goals of a run with their verdicts, and sheets (tables of text cells) made from columns.

A *column* says how to show a value of an item; a sheet has a row for each item. A value that was not measured is shown as "-".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from zeroshard.utils.sheets import Note, Sheet

MIB, GB = 2**20, 1e9


@dataclass(frozen=True)
class Goal:
    """A measured ratio and its limit. value: None where a measurement that it needs is missing."""

    text: str
    value: float | None
    limit: float
    section: str  # "race", "host", "tiers", "hostadam", "codecs", "disk", "checkpoints", "network" or "parallel"
    at_least: bool = False  # the goal is value >= limit; else value <= limit

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        met = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "met" if met else "missed"


@dataclass(frozen=True)
class Column:
    """A column. value: item -> value to show, None if not measured; it is multiplied by `scale`, then formatted with `form`."""

    heading: str
    value: Callable[[Any], Any]
    form: str = ""
    scale: float = 1

    def cell(self, item: object) -> str:
        value = self.value(item)
        return "-" if value is None else format(value if self.scale == 1 else value * self.scale, self.form)


def sheet_of(title: str, columns: Iterable[Column], items: Iterable[object], notes: Iterable[Note] = ()) -> Sheet:
    """Return a sheet with a row for each item."""
    columns = tuple(columns)
    rows = [[column.cell(item) for column in columns] for item in items]
    return Sheet(title, tuple(column.heading for column in columns), rows, numbers=True, notes=list(notes))


def goals_sheet(goals: Iterable[Goal], notes: Iterable[Note] = ()) -> Sheet:
    """Return the table of goals with their verdicts."""
    columns = (
        Column("", lambda goal: goal.text),
        Column("measured", lambda goal: goal.value, ".3f"),
        Column("goal", lambda goal: f"{'>=' if goal.at_least else '<='} {goal.limit:.2f}"),
        Column("", lambda goal: goal.verdict),
    )
    return sheet_of("Goals", columns, goals, notes)
