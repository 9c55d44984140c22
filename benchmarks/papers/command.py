"""`zeroshard papers`: the published tables and figures of ZeRO, computed by this library beside what was printed.

zeroshard papers                                  all of them
zeroshard papers zero-table1 zero-fig2 --out DIR  two, also as markdown, CSV and PNG
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from zeroshard.cli import report_error
from zeroshard.cli.arguments import ExitCode, Parser
from zeroshard.cli.sheets import drawn, say, show
from zeroshard.errors import did_you_mean
from zeroshard.utils.sheets import Sheet

from . import figures, infinity, others, sizes, successors, throughput, zero
from .table import Table

TABLES: dict[str, Callable[[], Table]] = {
    "zero-table1": zero.table1,
    "zero-table2": zero.table2,
    "zero-volumes": zero.volumes,
    "zero-r": zero.zero_r,
    "zero-fig2": throughput.fig2,
    "zero-fig3": throughput.fig3,
    "zero-fig6": sizes.zero_fig6,
    "zero-cached": sizes.zero_cached,
    "zero-fig7": throughput.fig7,
    "zero-fig8": throughput.fig8,
    "infinity-fig2a": infinity.fig2a,
    "infinity-fig2b": sizes.fig2b,
    "infinity-fig5": throughput.infinity_fig5,
    "throughput-others": others.throughput_others,
    "infinity-efficiency": infinity.requirements,
    "infinity-fig6a": sizes.infinity_fig6a,
    "infinity-fig6b": infinity.fig6b,
    "infinity-shapes": sizes.shapes,
    "offload-table4": sizes.adam_rates,
    "offload-fig7": sizes.offload_fig7,
    "zeropp-volumes": successors.zeropp_volumes,
    "zeropp-memory": successors.zeropp_memory,
    "deepspeed-estimators": successors.estimators,
}


def main(argv: Sequence[str]) -> int:
    """Print the tables; return the exit code: `ExitCode.NO` if a computed value differs from the printed one without a note."""
    parser = Parser(
        prog="zeroshard papers", usage="%(prog)s [options] [NAME ...]",
        description="Compute the published tables and figures of ZeRO and its successors, and show them beside what was printed.",
    )  # fmt: skip
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(TABLES)} (default: all)", metavar="NAME")
    parser.add_argument("--out", type=Path, help="also write markdown, CSV and figures (PNG) into this folder", metavar="DIR")
    parser.add_argument("--list", action="store_true", help="print the names alone")
    options = parser.parse(argv)
    for name in options.names:
        if name not in TABLES:
            return report_error(f"papers: unknown table {name!r}.{did_you_mean(name, TABLES)} Known: {', '.join(TABLES)}.")
    names = list(dict.fromkeys(options.names)) or list(TABLES)
    if options.list:
        print("\n".join(names))
        return ExitCode.DONE
    unexplained = []
    for name in names:
        table = TABLES[name]()
        header, rows = table.grid()
        show(Sheet(f"{table.name}: {table.title}", header, rows))
        say("\n".join(table.below()))
        unexplained += [(name, cell) for cell in table.unexplained]
        if options.out is not None:
            try:
                _write(table, options.out)
            except OSError as error:
                return report_error(f"--out {options.out}: {error.strerror}; name a folder that can be written")
        say()
    for name, cell in unexplained:
        where = f"{name}, {cell.row}, {cell.column}".rstrip(", ")
        print(f"zeroshard: error: {where}: expected {cell.printed}, got {cell.computed}", file=sys.stderr)
    return ExitCode.NO if unexplained else ExitCode.DONE


def _write(table: Table, folder: Path) -> None:
    """Write <name>.md, <name>.csv and, if the table has a figure and matplotlib is installed, <name>.png. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{table.name}.md").write_text(table.markdown())
    (folder / f"{table.name}.csv").write_text(table.csv())
    picture = folder / f"{table.name}.png"
    drawn(picture, figures.draw, table, picture)
    print("written: " + ", ".join(map(str, sorted(folder.glob(f"{table.name}.*")))))
