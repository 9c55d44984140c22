"""Figures as PNG: what was printed beside what was computed, as bars; curves as lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .table import Table

_PRINTED, _COMPUTED = "#8d99ae", "#1b7f79"


def draw(table: Table, path: Path) -> list[Path]:
    """Write the figure of a table that has one; its path, or nothing."""
    if not table.bars and table.curves is None:
        return []
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(10, 5))
    if table.curves is not None:
        _draw_curves(axis, table)
    else:
        _draw_bars(axis, table)
    axis.set_title(table.title, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return [path]


def _draw_curves(axis: Any, table: Table) -> None:
    assert table.curves is not None
    across, up, lines = table.curves
    for name, (xs, ys) in lines.items():
        style = {"parameters": "-", "states": "--"}.get(name.partition(",")[0], ":")
        axis.plot(xs, ys, style, label=name, linewidth=1.3)
    axis.set_xscale("log")
    axis.set_xlabel(across)
    axis.set_ylabel(up)


def _draw_bars(axis: Any, table: Table) -> None:
    """Of the columns that have printed values; of all, where nothing was printed."""
    shown = ({cell.column for cell in table.compared} or {cell.column for cell in table.cells}) - set(table.apart)
    cells = [cell for cell in table.cells if cell.column in shown and _number(cell.computed) is not None]
    labels = [f"{cell.row}\n{cell.column}" if len(shown) > 1 else cell.row for cell in cells]
    for shift, colour, name, texts in (
        (-0.2, _PRINTED, "printed", [cell.printed for cell in cells]),
        (0.2, _COMPUTED, "computed", [cell.computed for cell in cells]),
    ):
        values = [(place + shift, _number(text)) for place, text in enumerate(texts) if _number(text) is not None]
        if values:
            bars = axis.bar(*zip(*values, strict=True), 0.4, color=colour, label=name)
            axis.bar_label(bars, fmt="%.3g", fontsize=6, padding=1)
    axis.set_xticks(range(len(cells)), labels, fontsize=6, rotation=60 if len(cells) > 12 else 0)
    axis.set_ylabel(table.bars)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
