"""The class of published tables: cells with a printed and a computed value, how they are compared and shown.

52.5 = 52.5        equal in every printed digit
30.3 ~ 28.1 -7%    within the cell's tolerance
1.95 # 1.56 [1]    different; note 1 gives the reason

The printed values are CSV files in `data/`, each below three lines that name the paper, the table and how it was read.
"""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from importlib.resources import files
from statistics import correlation

from zeroshard.utils.sheets import markdown

RUNTIME, CODE, FORMULA, SIMULATED = "runtime", "library", "formula", "simulated"  # how a cell was computed
WITHIN = 0.2  # relative difference up to which a value that a model of the hardware gives agrees with one that was measured

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


@dataclass(frozen=True)
class Cell:
    """One number of a table. computed: text with as many digits as were printed. by: RUNTIME (on imagined ranks), CODE (a library
    function), FORMULA or SIMULATED. within: largest relative difference of values that agree. note: reason of a difference.
    """

    row: str
    column: str
    printed: str
    computed: str
    by: str = FORMULA
    within: float = 0.0
    note: str = ""

    @property
    def difference(self) -> float | None:
        """The relative difference of the computed from the printed value; None if one of them is no number."""
        try:
            return float(self.computed) / float(self.printed) - 1.0
        except (ValueError, ZeroDivisionError):
            return None

    @property
    def agrees(self) -> bool:
        if self.printed in ("", self.computed):
            return True
        return self.within > 0 and self.difference is not None and abs(self.difference) <= self.within

    def text(self, note: int | None) -> str:
        if not self.printed:
            shown = self.computed
        elif self.printed == self.computed:
            shown = f"{self.printed} = {self.computed}"
        else:
            shown = f"{self.printed} {'~' if self.agrees else '#'} {self.computed}"
            shown += f" {self.difference:+.0%}" if self.within and self.difference is not None else ""
        return shown + (f" [{note}]" if note else "")


@dataclass(frozen=True)
class Table:
    """A published table. source: paper and table. remarks: lines on the whole table. bars: axis label of a bar chart of the cells
    without those of the columns `apart`; "": no chart. curves: x label, y label and lines by name of a plot."""

    name: str
    title: str
    source: str
    cells: Sequence[Cell]
    remarks: Sequence[str] = ()
    bars: str = ""
    apart: tuple[str, ...] = ()
    curves: tuple[str, str, dict[str, tuple[list[float], list[float]]]] | None = None
    corner: str = ""

    @property
    def notes(self) -> list[str]:
        return list(dict.fromkeys(cell.note for cell in self.cells if cell.note))

    @property
    def compared(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.printed]

    @property
    def unexplained(self) -> list[Cell]:
        return [cell for cell in self.cells if not cell.agrees and not cell.note]

    def grid(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows as text."""
        columns = list(dict.fromkeys(cell.column for cell in self.cells))
        places = {(cell.row, cell.column): cell for cell in self.cells}
        notes = {note: number for number, note in enumerate(self.notes, 1)}
        rows = []
        for row in dict.fromkeys(cell.row for cell in self.cells):
            found = [places.get((row, column)) for column in columns]
            rows.append([row, *("" if cell is None else cell.text(notes.get(cell.note)) for cell in found)])
        return [self.corner, *columns], rows

    def verdict(self) -> str:
        """Return a sentence on how many cells agree."""
        compared, agreed = self.compared, [cell for cell in self.compared if cell.agrees]
        if not compared:
            return ""
        makers = ", ".join(f"{sum(c.by == by for c in self.cells)} by {by}" for by in dict.fromkeys(c.by for c in self.cells))
        return f"{len(agreed)} of {len(compared)} agree; computed: {makers}"

    def below(self) -> list[str]:
        """Return the lines below the grid."""
        lines = [f"[{number}] {note}" for number, note in enumerate(self.notes, 1)]
        return [line for line in (*lines, *self.remarks, self.verdict(), f"Source: {self.source}") if line]

    def markdown(self) -> str:
        header, rows = self.grid()
        return "\n".join([f"## {self.title}", "", markdown(header, rows), "", *(f"{line}  " for line in self.below()), ""])

    def csv(self) -> str:
        """Return the cells as CSV, one a line."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("row", "column", "printed", "computed", "difference", "agrees", "by", "note"))
        for cell in self.cells:
            difference = "" if cell.difference is None or not cell.printed else f"{cell.difference:.4f}"
            agrees = ("no", "yes")[cell.agrees] if cell.printed else ""
            writer.writerow((cell.row, cell.column, cell.printed, cell.computed, difference, agrees, cell.by, cell.note))
        return text.getvalue()


def near(row: str, column: str, chart: str, value: float, form: str, by: str = CODE, why: str = "") -> Cell:
    """Return the cell of a value that agrees with that of a chart if it is WITHIN. why: its note where it does not."""
    differs = abs(value / float(chart) - 1) > WITHIN
    return Cell(row, column, chart, format(value, form), by, WITHIN, why if differs else "")


def bounded(row: str, column: str, bound: str, value: float, by: str = FORMULA) -> Cell:
    """Return the cell of a value that a paper gives as a bound such as "> 49" or "> 90 %": equal to it where the bound holds."""
    sign, limit, *unit = bound.split()
    holds = value >= float(limit) if sign == ">" else value < float(limit)
    return Cell(row, column, bound, bound if holds else " ".join([f"{value:.1f}", *unit]), by)


def digits(value: float, printed: str, truncate: bool = False) -> str:
    """Return `value` as text with as many decimals as `printed`; halves are rounded up, as in the papers, or all cut off."""
    exact = Decimal(repr(value))
    if abs(exact) < 10**9:  # a binary fraction such as 1.8749999999 is 1.875
        exact = exact.quantize(Decimal(1).scaleb(-9), ROUND_HALF_UP)
    decimals = len(printed.partition(".")[2])
    return str(exact.quantize(Decimal(1).scaleb(-decimals), ROUND_DOWN if truncate else ROUND_HALF_UP))


def rank_correlation(pairs: Iterable[tuple[float, float]]) -> float:
    """Return Spearman's rank correlation: 1 where both orders are the same. Equal values share their mean rank."""
    first, second = zip(*pairs, strict=True)

    def ranks(values: tuple[float, ...]) -> list[float]:
        return [sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2 for value in values]

    return correlation(ranks(first), ranks(second))
