"""A published table beside its computation: cells of a printed and a computed value, how they compare and are shown.

52.5 = 52.5        equal in every printed digit
30.3 ~ 28.1 -7%    within the cell's tolerance
1.95 # 1.56 [1]    different; note 1 says why
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

RUNTIME, CODE, FORMULA, SIMULATED = "runtime", "library", "formula", "simulated"  # what has computed a cell


@dataclass(frozen=True)
class Cell:
    """One number. computed: as text, with as many digits as were printed. by: the runtime on imagined ranks, a function of the
    library, a closed formula, or a simulation. within: largest relative difference that still is agreement. note: why it differs.
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
        """Relative, of what is a number."""
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
    """source: paper and table. remarks: what holds for all of it. bars: the figure's axis, where the cells make a bar chart,
    but for those of the columns `apart`; curves: x axis, y axis and lines by name, where they make a plot."""

    name: str
    title: str
    source: str
    cells: tuple[Cell, ...]
    remarks: tuple[str, ...] = ()
    bars: str = ""
    apart: tuple[str, ...] = ()
    curves: tuple[str, str, dict[str, tuple[list[float], list[float]]]] | None = None
    corner: str = field(default="", kw_only=True)

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
        """Header and rows of text."""
        columns = list(dict.fromkeys(cell.column for cell in self.cells))
        places = {(cell.row, cell.column): cell for cell in self.cells}
        notes = {note: number for number, note in enumerate(self.notes, 1)}
        rows = []
        for row in dict.fromkeys(cell.row for cell in self.cells):
            found = [places.get((row, column)) for column in columns]
            rows.append([row, *("" if cell is None else cell.text(notes.get(cell.note)) for cell in found)])
        return [self.corner, *columns], rows

    def verdict(self) -> str:
        """One sentence on how many cells agree."""
        compared, agreed = self.compared, [cell for cell in self.compared if cell.agrees]
        if not compared:
            return ""
        makers = ", ".join(f"{sum(c.by == by for c in self.cells)} by {by}" for by in dict.fromkeys(c.by for c in self.cells))
        return f"{len(agreed)} of {len(compared)} agree; computed: {makers}"

    def below(self) -> list[str]:
        """The lines below the grid."""
        lines = [f"[{number}] {note}" for number, note in enumerate(self.notes, 1)]
        return [line for line in (*lines, *self.remarks, self.verdict(), f"Source: {self.source}") if line]

    def markdown(self) -> str:
        header, rows = self.grid()
        lines = [f"## {self.title}", "", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
        return "\n".join([*lines, "", *(f"{line}  " for line in self.below()), ""])

    def csv(self) -> str:
        """One cell a line."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(("row", "column", "printed", "computed", "difference", "agrees", "by", "note"))
        for cell in self.cells:
            difference = "" if cell.difference is None or not cell.printed else f"{cell.difference:.4f}"
            agrees = ("no", "yes")[cell.agrees] if cell.printed else ""
            writer.writerow((cell.row, cell.column, cell.printed, cell.computed, difference, agrees, cell.by, cell.note))
        return text.getvalue()


def digits(value: float, printed: str, truncate: bool = False) -> str:
    """`value` with the decimals of `printed`, halves rounded up (the papers' way), or cut off."""
    exact = Decimal(repr(value))
    exact = (
        exact.quantize(Decimal(1).scaleb(-9), ROUND_HALF_UP) if abs(exact) < 10**9 else exact
    )  # binary fractions: 1.8749999999
    decimals = len(printed.partition(".")[2])
    return str(exact.quantize(Decimal(1).scaleb(-decimals), ROUND_DOWN if truncate else ROUND_HALF_UP))


def rank_correlation(pairs: Iterable[tuple[float, float]]) -> float:
    """Spearman's: 1 where both orders are the same. Equal values share their mean rank."""
    first, second = zip(*pairs, strict=True)

    def ranks(values: tuple[float, ...]) -> list[float]:
        return [sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2 for value in values]

    a, b = ranks(first), ranks(second)
    mean = (len(a) - 1) / 2
    product = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    return product / (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5
