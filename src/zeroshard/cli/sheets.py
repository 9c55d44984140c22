"""Tables of text on the terminal: drawn by rich where that is installed, in plain columns where it is not.

For commands that need no library beside torch.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 160  # characters, in a file or a pipe


@dataclass(frozen=True)
class Sheet:
    """Rows of cells. header: names of the columns, or none."""

    rows: Sequence[Sequence[str]]
    header: Sequence[str] = ()
    title: str = ""


def show(sheet: Sheet) -> None:
    """Print a sheet on stdout."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        print("\n".join(_plain(sheet)))
        return
    table = Table(*sheet.header, show_header=bool(sheet.header), title=sheet.title or None, title_justify="left")
    for row in sheet.rows:
        table.add_row(*row)
    # no markup: a cell may hold a path with brackets
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDTH).print(table)


def _plain(sheet: Sheet) -> list[str]:
    rows = [tuple(sheet.header), *map(tuple, sheet.rows)] if sheet.header else [tuple(row) for row in sheet.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [sheet.title, *lines] if sheet.title else lines


def megabytes(nbytes: float) -> str:
    """Bytes in MB (1e6), in as many digits as tell something."""
    return f"{nbytes / 1e6:,.3f} MB" if nbytes < 1e7 else f"{nbytes / 1e6:,.1f} MB"


def gigabytes(nbytes: float) -> str:
    """Bytes in GB (1e9)."""
    return f"{nbytes / 1e9:,.1f} GB"
