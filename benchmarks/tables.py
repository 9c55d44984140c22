"""Goals, and tables as plain cells: shown on the terminal by rich, written to results.md as Markdown.

A *sheet* is one table with its title and the lines below it, made of *columns* (what each shows of an item) and items:
what a section shows is data. What was not measured is "-", never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

MIB, GB = 2**20, 1e9
GOOD, BAD, WARNING, PLAIN = "green", "bold red", "yellow", "dim"  # of notes
WORDS = ("", "does", "found")  # headings of columns that are text
VERDICTS = {"met": "green", "missed": "red", "not measured": "yellow"}
TERMINAL_COLUMNS = 135  # where there is no terminal: a log file does not fold tables at 80

Note = tuple[str, str]  # line, style of rich


@dataclass(frozen=True)
class Goal:
    """One measured ratio beside its limit; `value` is None where something needed was not measured."""

    text: str
    value: float | None
    limit: float
    section: str  # "race", "host", "tiers", "hostadam", "codecs", "disk", "checkpoints", "network" or "parallel"
    at_least: bool = False  # the limit is one from below

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        met = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "met" if met else "missed"

    @property
    def bound(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:.2f}"


@dataclass(frozen=True)
class Column:
    """value: what is shown of an item, None where it was not measured; it is multiplied by `scale`, then written in `form`."""

    heading: str
    value: Callable[[Any], Any]
    form: str = ""
    scale: float = 1

    def cell(self, item: object) -> str:
        value = self.value(item)
        return "-" if value is None else format(value if self.scale == 1 else value * self.scale, self.form)


@dataclass(frozen=True)
class Sheet:
    """Cells as text, and the notes below them."""

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
        lines = [f"### {self.title}", ""]
        if self.rows:
            rows = [self.headings, ["---"] * len(self.headings), *self.rows]
            lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows] + [""]
        for text, _ in self.notes:
            lines += [text, ""]
        return "\n".join(lines)


GOAL_COLUMNS = (
    Column("", lambda goal: goal.text),
    Column("measured", lambda goal: goal.value, ".3f"),
    Column("goal", lambda goal: goal.bound),
    Column("", lambda goal: goal.verdict),
)


def goals_sheet(goals: Iterable[Goal], notes: Iterable[Note] = ()) -> Sheet:
    """Goals with their verdicts."""
    return Sheet.of("Goals", GOAL_COLUMNS, goals, notes)


def make_console() -> Console:
    """Of rich, for standard output."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=TERMINAL_COLUMNS)


def show(*sheets: Sheet) -> None:
    """Print the tables of a program."""
    console = make_console()
    for sheet in sheets:
        sheet.show(console)
