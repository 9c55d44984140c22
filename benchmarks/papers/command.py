"""`zeroshard papers`: the published tables and figures of ZeRO, computed by this library beside what was printed.

zeroshard papers                                  all of them
zeroshard papers zero-table1 zero-fig2 --out DIR  two, also as markdown, CSV and PNG
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from zeroshard.cli import report_error
from zeroshard.cli.arguments import ExitCode, Parser
from zeroshard.cli.sheets import drawn, say, show
from zeroshard.errors import did_you_mean
from zeroshard.utils.sheets import Sheet

from ..pictures import picture
from .table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PRINTED, _COMPUTED = "#8d99ae", "#1b7f79"
_LABELS = 150  # characters of labels that fit side by side below a figure; more are rotated
TABLES = {  # name -> the module and function that compute it, which are imported when it is asked for
    "zero-table1": "zero.table1",
    "zero-table2": "zero.table2",
    "zero-volumes": "zero.volumes",
    "zero-r": "zero.zero_r",
    "zero-fig2": "throughput.fig2",
    "zero-fig3": "throughput.fig3",
    "zero-fig6": "sizes.zero_fig6",
    "zero-cached": "sizes.zero_cached",
    "zero-fig7": "throughput.fig7",
    "zero-fig8": "throughput.fig8",
    "infinity-fig2a": "infinity.fig2a",
    "infinity-fig2b": "sizes.fig2b",
    "infinity-fig5": "throughput.infinity_fig5",
    "throughput-others": "others.throughput_others",
    "infinity-efficiency": "infinity.requirements",
    "infinity-fig6a": "sizes.infinity_fig6a",
    "infinity-fig6b": "infinity.fig6b",
    "infinity-shapes": "sizes.shapes",
    "offload-table4": "sizes.adam_rates",
    "offload-fig7": "sizes.offload_fig7",
    "zeropp-volumes": "successors.zeropp_volumes",
    "zeropp-memory": "successors.zeropp_memory",
    "deepspeed-estimators": "successors.estimators",
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
        module, _, function = TABLES[name].partition(".")
        table: Table = getattr(import_module(f".{module}", __package__), function)()
        header, rows = table.grid()
        show(Sheet(f"{table.name}: {table.title}", header, rows))
        say("\n".join(table.below()))
        unexplained += [(name, cell) for cell in table.unexplained]
        if options.out is not None:
            try:
                options.out.mkdir(parents=True, exist_ok=True)
                (options.out / f"{name}.md").write_text(table.markdown())
                (options.out / f"{name}.csv").write_text(table.csv())
                drawn(options.out / f"{name}.png", draw, table, options.out / f"{name}.png")
            except OSError as error:
                return report_error(f"--out {options.out}: {error.strerror}; name a folder that can be written")
            print("written: " + ", ".join(map(str, sorted(options.out.glob(f"{name}.*")))))
        say()
    for name, cell in unexplained:
        where = f"{name}, {cell.row}, {cell.column}".rstrip(", ")
        print(f"zeroshard: error: {where}: expected {cell.printed}, got {cell.computed}", file=sys.stderr)
    return ExitCode.NO if unexplained else ExitCode.DONE


# ------------------------------------------------------------------------------------- figures: bars and curves, as PNG


def draw(table: Table, path: Path) -> None:
    """Write the figure of a table, if it has one."""
    if table.curves is not None:  # a panel for each kind of lines, since lines of two kinds may coincide
        kinds = list(dict.fromkeys(name.partition(",")[0] for name in table.curves[2]))
        panels = [partial(_draw_curves, table.curves, kind, ylabel=kind == kinds[0]) for kind in kinds]
        picture(path, table.title, panels, (10, 5))
    elif table.bars:
        picture(path, table.title, [partial(_draw_bars, table)], (10, 5))


def _draw_curves(
    curves: tuple[str, str, dict[str, tuple[list[float], list[float]]]], kind: str, axis: Axes, *, ylabel: bool
) -> None:
    """Draw the lines whose names begin with `kind`."""
    across, up, lines = curves
    for name, (xs, ys) in lines.items():
        if name.partition(",")[0] == kind:
            axis.plot(xs, ys, label=name, linewidth=1.3)
    axis.set(xscale="log", xlabel=across, ylabel=up if ylabel else "")
    axis.legend(fontsize=8, frameon=False)


def _draw_bars(table: Table, axis: Axes) -> None:
    """Draw bars of the columns that have printed values; of all columns, if none has."""
    shown = ({cell.column for cell in table.compared} or {cell.column for cell in table.cells}) - set(table.apart)
    cells = [cell for cell in table.cells if cell.column in shown and _number(cell.computed) is not None]
    labels = [f"{cell.row}\n{cell.column}" if len(shown) > 1 else cell.row for cell in cells]
    for shift, colour, name, texts in (
        (-0.2, _PRINTED, "printed", [cell.printed for cell in cells]),
        (0.2, _COMPUTED, "computed", [cell.computed for cell in cells]),
    ):
        values = [(place + shift, number) for place, text in enumerate(texts) if (number := _number(text)) is not None]
        if values:
            bars = axis.bar(*zip(*values, strict=True), 0.4, color=colour, label=name)
            axis.bar_label(bars, fmt="%.3g", fontsize=6, padding=1)
    crowded = len(cells) * max((len(line) for label in labels for line in label.splitlines()), default=0) > _LABELS
    turned = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
    axis.set_xticks(range(len(cells)), labels, fontsize=7, **turned)
    axis.set_ylabel(table.bars)
    axis.margins(y=0.12)  # room for the legend above the bars
    axis.legend(fontsize=8, frameon=False)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
