"""The goals and the tables of a run: shown on the terminal by rich, written to results.md as Markdown.

A *sheet* is one table of text cells with its title and the notes below it. It is made from *columns*, each of which says how
to show a value of an item, and a list of items, one for each row. A value that was not measured is shown as "-".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

MIB, GB = 2**20, 1e9
GOOD, BAD, WARNING, PLAIN = "green", "bold red", "yellow", "dim"  # rich's styles of notes
WORDS = ("", "does", "found")  # headings of columns of text, which are aligned to the left
VERDICTS = {"met": "green", "missed": "red", "not measured": "yellow"}
TERMINAL_COLUMNS = 135  # width of tables where output is no terminal

Note = tuple[str, str]  # text, rich's style


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


@dataclass(frozen=True)
class Sheet:
    """A table of text cells, with a title and notes."""

    title: str
    headings: tuple[str, ...] = ()
    rows: list[list[str]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    @classmethod
    def of(cls, title: str, columns: Iterable[Column], items: Iterable[object], notes: Iterable[Note] = ()) -> Sheet:
        columns = tuple(columns)
        rows = [[column.cell(item) for column in columns] for item in items]
        return cls(title, tuple(column.heading for column in columns), rows, list(notes))

    def show(self, console: Console) -> None:
        from rich import box
        from rich.table import Table

        if self.rows:
            table = Table(title=self.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
            for heading in self.headings:
                table.add_column(heading, justify="left" if heading in WORDS else "right", no_wrap=True)
            for row in self.rows:
                table.add_row(*(f"[{VERDICTS[cell]}]{cell}[/]" if cell in VERDICTS else cell for cell in row))
            console.print(table)
        for text, style in self.notes:
            console.print(text, style=style, markup=False, highlight=False)

    def markdown(self) -> str:
        table = [markdown(self.headings, self.rows)] if self.rows else []
        return "\n\n".join([f"### {self.title}", *table, *(text for text, _ in self.notes), ""])


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (headings, *rows)]
    return "\n".join([lines[0], "|---" * len(headings) + "|", *lines[1:]])


def goals_sheet(goals: Iterable[Goal], notes: Iterable[Note] = ()) -> Sheet:
    """Return the table of goals with their verdicts."""
    columns = (
        Column("", lambda goal: goal.text),
        Column("measured", lambda goal: goal.value, ".3f"),
        Column("goal", lambda goal: f"{'>=' if goal.at_least else '<='} {goal.limit:.2f}"),
        Column("", lambda goal: goal.verdict),
    )
    return Sheet.of("Goals", columns, goals, notes)


def make_console() -> Console:
    """Return rich's console for standard output."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=TERMINAL_COLUMNS)


def show(*sheets: Sheet) -> None:
    """Print the tables of a program."""
    console = make_console()
    for sheet in sheets:
        sheet.show(console)
