"""`zeroshard papers`: the published tables and figures of ZeRO, computed by this library beside what was printed.

zeroshard papers                                  all of them
zeroshard papers zero-table1 zero-fig2 --out DIR  two, also as markdown, CSV and PNG
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import zeroshard as zs
from zeroshard.cli import report_error
from zeroshard.cli.arguments import Parser
from zeroshard.cli.exit_codes import ExitCode
from zeroshard.cli.sheets import Sheet, drawn, say, show

from .table import Table
from .tables import TABLES, check_names, write


def main(argv: Sequence[str]) -> int:
    """Print the tables; return the exit code: `ExitCode.NO` if a computed value differs from the printed one without a note."""
    options = parser().parse(argv)
    try:
        names = check_names(options.names)
    except zs.ZeroshardError as error:
        return report_error(str(error))
    if options.list:
        print("\n".join(names))
        return ExitCode.DONE
    unexplained = []
    for name in names:
        table = TABLES[name]()
        _show(table)
        unexplained += [(name, cell) for cell in table.unexplained]
        if options.out is not None:
            try:
                print("written: " + ", ".join(map(str, _written(table, options.out))))
            except OSError as error:
                return report_error(f"--out {options.out}: {error.strerror}; name a folder that can be written")
        say()
    for name, cell in unexplained:
        where = f"{name}, {cell.row}, {cell.column}".rstrip(", ")
        print(f"zeroshard: error: {where}: expected {cell.printed}, got {cell.computed}", file=sys.stderr)
    return ExitCode.NO if unexplained else ExitCode.DONE


def _written(table: Table, folder: Path) -> list[Path]:
    """Write the files of a table, and return their paths. Prints a line if matplotlib is not installed. Raises OSError."""
    drawn(folder / f"{table.name}.png", write, table, folder)
    return sorted(folder.glob(f"{table.name}.*"))


def _show(table: Table) -> None:
    header, rows = table.grid()
    show(Sheet(rows, header, title=f"{table.name}: {table.title}"))
    say("\n".join(table.below()))


def parser() -> Parser:
    """Return the parser of `zeroshard papers`."""
    made = Parser(
        prog="zeroshard papers",
        usage="%(prog)s [options] [NAME ...]",
        description="Compute the published tables and figures of ZeRO and its successors, and show them beside what was printed.",
    )
    made.add_argument("names", nargs="*", help=f"some of {', '.join(TABLES)} (default: all)", metavar="NAME")
    made.add_argument("--out", type=Path, help="also write markdown, CSV and figures (PNG) into this folder", metavar="DIR")
    made.add_argument("--list", action="store_true", help="print the names alone")
    return made
