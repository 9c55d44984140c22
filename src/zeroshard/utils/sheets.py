"""The tables of text that commands, plans and benchmarks show: as plain text, or in Markdown. rich draws them in cli/sheets.py."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

GOOD, BAD, WARNING, PLAIN = "green", "bold red", "yellow", "dim"  # rich's styles of notes
WORDS = ("", "does", "found")  # headings of columns of words in a table of numbers
_NARROWEST = 12  # characters below which no column is wrapped

Note = tuple[str, str]  # text, rich's style


@dataclass(frozen=True)
class Sheet:
    """A table of text cells. header: names of the columns, or (). numbers: align all columns to the right but the first and WORDS.

    total: number of rows at the end that are set apart, since they sum up those above. notes: lines below the table.
    """

    title: str = ""
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    numbers: bool = False
    total: int = 0
    notes: Sequence[Note] = ()

    def to_the_right(self, column: int) -> bool:
        """Return True if cells of this column are aligned to the right."""
        return self.numbers and column > 0 and not (self.header and self.header[column] in WORDS)

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Return aligned columns. width: characters into which the widest columns are wrapped; None: as many as they need."""
        rows = [row for row in (self.header, *self.rows) if row]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        while width is not None and sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > _NARROWEST:
            widths[widths.index(max(widths))] -= 1
        lines = [self.title] if self.title else []
        for row in rows:
            cells = [[cell] if len(cell) <= room else textwrap.wrap(cell, room) for cell, room in zip(row, widths, strict=True)]
            for number in range(max(map(len, cells))):
                line = []
                for column, (parts, room) in enumerate(zip(cells, widths, strict=True)):
                    part = parts[number] if number < len(parts) else ""
                    line.append(part.rjust(room) if self.to_the_right(column) else part.ljust(room))
                lines.append("  ".join(line).rstrip())
        return "\n".join([*lines, *(text if width is None else textwrap.fill(text, width) for text, _ in self.notes)])

    def markdown(self) -> str:
        table = [markdown(self.header, self.rows)] if self.rows else []
        return "\n\n".join([f"### {self.title}", *table, *(text for text, _ in self.notes), ""])


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])
