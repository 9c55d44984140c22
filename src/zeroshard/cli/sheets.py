"""Tables and panels of text on the terminal: drawn by rich where that is installed, in plain columns where it is not.

With `--quiet` nothing of this is printed.
"""

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .arguments import how_to_install, quiet

WIDTH = 160  # characters of a line in a file or a pipe
_NARROWEST = 12  # characters of a column that is wrapped


@dataclass(frozen=True)
class Sheet:
    """Rows of cells. header: names of the columns, or none. numbers: whether all columns but the first are set to the right.

    total: the number of rows at the end that stand apart, since they sum up those above. caption: a line below.
    """

    rows: Sequence[Sequence[str]]
    header: Sequence[str] = ()
    title: str = ""
    numbers: bool = False
    total: int = 0
    caption: str = ""


def width() -> int:
    """Characters of a line: those of the terminal, or of COLUMNS, else WIDTH."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size().columns
    return WIDTH


def show(sheet: Sheet) -> None:
    """Print a sheet on stdout."""
    if quiet():
        return
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        print("\n".join(_plain(sheet)))
        return
    table = Table(show_header=bool(sheet.header), title=sheet.title or None, title_justify="left", title_style="bold",
                  caption=sheet.caption or None, caption_justify="left")  # fmt: skip
    for index in range(len(sheet.header or sheet.rows[0])):
        heading = sheet.header[index] if sheet.header else ""
        table.add_column(heading, justify="right" if sheet.numbers and index else "left", overflow="fold")
    for index, row in enumerate(sheet.rows):
        table.add_row(*row, end_section=index == len(sheet.rows) - sheet.total - 1)
    # no markup: a cell may hold a path with brackets
    Console(highlight=False, markup=False, width=width()).print(table)


def _plain(sheet: Sheet) -> list[str]:
    rows = [tuple(sheet.header), *map(tuple, sheet.rows)] if sheet.header else [tuple(row) for row in sheet.rows]
    widths = _fitted([max(map(len, column)) for column in zip(*rows, strict=True)])
    lines = [sheet.title] if sheet.title else []
    for row in rows:
        cells = [textwrap.wrap(cell, room) or [""] for cell, room in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            left = [part.rjust(room) if sheet.numbers and index else part.ljust(room)
                    for index, (part, room) in enumerate(zip(parts, widths, strict=True))]  # fmt: skip
            lines.append("  ".join(left).rstrip())
    return lines + (textwrap.wrap(sheet.caption, width()) if sheet.caption else [])


def _fitted(widths: list[int]) -> list[int]:
    """The widths of columns, of which the widest give way until a line has room for all."""
    widths = list(widths)
    while sum(widths) + 2 * (len(widths) - 1) > width() and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    return widths


def panel(title: str, text: str) -> None:
    """Print a text in a frame on stdout."""
    if quiet():
        return
    try:
        from rich.console import Console
        from rich.panel import Panel
        from rich.text import Text
    except ModuleNotFoundError:
        print(f"-- {title} --\n{text}\n")
        return
    Console(highlight=False, width=width()).print(Panel(Text(text), title=title, title_align="left", expand=False))


def say(text: str = "") -> None:
    """Print a line that is no result: `--quiet` leaves it out."""
    if not quiet():
        print(text, flush=True)


def drawn(path: Path, draw: Callable[..., Any], *arguments: Any) -> bool:
    """Draw a picture; False, after a line on stderr, where matplotlib is not installed."""
    try:
        draw(*arguments)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print(
            f"{path} is not drawn: matplotlib is not installed; install it with: {how_to_install('matplotlib')}", file=sys.stderr
        )
        return False
    return True


def print_json(value: Any) -> None:
    """Print JSON on stdout. What fits on a line stands on one, and so does an object of plain values: a reader sees a table."""
    print(_json(value, ""))


def _json(value: Any, indent: str) -> str:
    line = json.dumps(value, default=str)
    plain = not isinstance(value, (dict, list, tuple))
    if isinstance(value, dict) and indent:
        plain = not any(isinstance(each, (dict, list, tuple)) for each in value.values())
    if plain or len(indent) + len(line) <= WIDTH:
        return line
    inner = indent + "  "
    if isinstance(value, dict):
        parts = [f"{inner}{json.dumps(str(name))}: {_json(each, inner)}" for name, each in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(f"{inner}{_json(each, inner)}" for each in value) + f"\n{indent}]"


def megabytes(nbytes: float) -> str:
    """Bytes in MB (1e6), in as many digits as tell something."""
    return f"{nbytes / 1e6:,.3f} MB" if nbytes < 1e7 else f"{nbytes / 1e6:,.1f} MB"


def gigabytes(nbytes: float) -> str:
    """Bytes in GB (1e9)."""
    return f"{nbytes / 1e9:,.1f} GB"
