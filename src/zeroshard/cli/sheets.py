"""The tables of text on the terminal: drawn by rich if it is installed, else in plain columns.

With `--quiet` they are not printed.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..utils.sheets import Sheet
from .arguments import how_to_install, quiet

WIDTH = 160  # characters of a line in a file or a pipe
VERDICTS = {"met": "green", "missed": "red", "not measured": "yellow"}  # cells in colours


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
        from rich.text import Text
    except ModuleNotFoundError:
        print(sheet.text(width()))
        return
    colours = None if sys.stdout.isatty() else False  # none in a file, even with FORCE_COLOR
    # no markup: a cell may hold a path with brackets
    console = Console(highlight=False, markup=False, width=width(), force_terminal=colours)
    if sheet.rows:
        title = sheet.title or None
        table = Table(show_header=bool(sheet.header), title=title, title_justify="left", title_style="bold")
        for column in range(len(sheet.rows[0])):
            heading = sheet.header[column] if sheet.header else ""
            table.add_column(heading, justify="right" if sheet.to_the_right(column) else "left", overflow="fold")
        for index, row in enumerate(sheet.rows):
            cells = [Text(cell, style=VERDICTS.get(cell, "")) for cell in row]
            table.add_row(*cells, end_section=index == len(sheet.rows) - sheet.total - 1)
        console.print(table)
    for text, style in sheet.notes:
        console.print(text, style=style)


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
