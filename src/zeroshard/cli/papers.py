"""`zeroshard papers`: the published tables and figures of ZeRO, computed by this library beside what was printed.

zeroshard papers                                  all of them
zeroshard papers zero-table1 zero-fig2 --out DIR  two, also as markdown, CSV and PNG
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import zeroshard as zs

from ..papers.table import Table
from ..papers.tables import TABLES, check_names, write
from . import report_error
from .arguments import Parser
from .sheets import Sheet, show

DIFFERENT = 1


def main(argv: Sequence[str]) -> int:
    """Print; returns the exit code, `DIFFERENT` where a computed value differs from a printed one and nothing says why."""
    options = _parser().parse(argv)
    try:
        names = check_names(options.names)
    except zs.ZeroshardError as error:
        return report_error(str(error))
    if options.list:
        print("\n".join(names))
        return 0
    unexplained = []
    for name in names:
        table = TABLES[name]()
        _show(table)
        unexplained += [(name, cell) for cell in table.unexplained]
        if options.out is not None:
            try:
                print("written: " + ", ".join(map(str, write(table, options.out))))
            except OSError as error:
                return report_error(f"--out {options.out}: {error.strerror}; name a folder that can be written")
        print(flush=True)
    for name, cell in unexplained:
        where = f"{name}, {cell.row}, {cell.column}".rstrip(", ")
        print(f"zeroshard: error: {where}: expected {cell.printed}, got {cell.computed}", file=sys.stderr)
    return DIFFERENT if unexplained else 0


def _show(table: Table) -> None:
    header, rows = table.grid()
    show(Sheet(rows, header, title=f"{table.name}: {table.title}"))
    print("\n".join(table.below()))


def _parser() -> Parser:
    parser = Parser(
        prog="zeroshard papers",
        description="Compute the published tables and figures of ZeRO and its successors, and show them beside what was printed.",
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join(TABLES)} (default: all)", metavar="NAME")
    parser.add_argument("--out", type=Path, help="also write markdown, CSV and figures (PNG) into this folder", metavar="DIR")
    parser.add_argument("--list", action="store_true", help="print the names alone")
    return parser
