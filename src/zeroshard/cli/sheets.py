"""The tables and panels of text on the terminal: drawn by rich if it is installed, else in plain columns.

With `--quiet` they are not printed.
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
_NARROWEST = 12  # characters below which no column is wrapped


@dataclass(frozen=True)
class Sheet:
    """A table of text cells. header: names of the columns, or (). numbers: align all columns but the first to the right.

    total: number of rows at the end that are set apart, since they sum up those above. caption: a line below the table.
    """

    rows: Sequence[Sequence[str]]
    header: Sequence[str] = ()
    title: str = ""
    numbers: bool = False
    total: int = 0
    caption: str = ""


def width() -> int:
    """Return the characters of a line: those of the terminal or of the variable COLUMNS, else WIDTH."""
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
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > width() and max(widths) > _NARROWEST:  # narrow the widest until all fit on a line
        widths[widths.index(max(widths))] -= 1
    lines = [sheet.title] if sheet.title else []
    for row in rows:
        cells = [textwrap.wrap(cell, room) or [""] for cell, room in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            left = [part.rjust(room) if sheet.numbers and index else part.ljust(room)
                    for index, (part, room) in enumerate(zip(parts, widths, strict=True))]  # fmt: skip
            lines.append("  ".join(left).rstrip())
    return lines + (textwrap.wrap(sheet.caption, width()) if sheet.caption else [])


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
    """Print a line that is not part of the result; with `--quiet` print nothing."""
    if not quiet():
        print(text, flush=True)


def drawn(path: Path, draw: Callable[..., object], *arguments: object) -> bool:
    """Call `draw` for a picture; if matplotlib is not installed, say so on stderr and return False."""
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


def print_json(value: object) -> None:
    """Print JSON on stdout, each value on one line if it fits, and each nested object of plain values, as rows of a table."""
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
    """Return bytes as text in MB (1e6), with three decimals below 10 MB, else one."""
    return f"{nbytes / 1e6:,.3f} MB" if nbytes < 1e7 else f"{nbytes / 1e6:,.1f} MB"


def gigabytes(nbytes: float) -> str:
    """Return bytes as text in GB (1e9)."""
    return f"{nbytes / 1e9:,.1f} GB"
