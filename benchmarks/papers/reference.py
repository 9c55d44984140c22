"""The published values: CSV files in `data/`, each below three lines that name the paper, the table and how it was read."""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from importlib.resources import files

Row = dict[str, str]


@dataclass(frozen=True)
class Printed:
    """The content of one file. how: "printed", or digitized from a chart."""

    paper: str
    table: str
    how: str
    rows: tuple[Row, ...]

    @property
    def source(self) -> str:
        return f"{self.paper}; {self.table} ({self.how})"


@functools.cache
def printed(name: str) -> Printed:
    """Read `data/<name>.csv`."""
    lines = (files(__package__) / "data" / f"{name}.csv").read_text().splitlines()
    facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    rows = tuple(csv.DictReader(line for line in lines if not line.startswith("# ")))
    return Printed(facts["paper"], facts["table"], facts["how"], rows)


@functools.cache
def stated(key: str) -> Row:
    """Return a number that a paper states in its text: paper, where, what, value, unit."""
    return next(row for row in printed("stated").rows if row["key"] == key)
