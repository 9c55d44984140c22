"""The figures as PNG: printed beside computed values as bars; curves as lines."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..pictures import picture
from .table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PRINTED, _COMPUTED = "#8d99ae", "#1b7f79"
_LABELS = 150  # characters of labels that fit side by side below a figure; more are rotated


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
