"""The figures as PNG: printed beside computed values as bars; curves as lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .table import Table

_PRINTED, _COMPUTED = "#8d99ae", "#1b7f79"
_LABELS = 150  # characters of labels that fit side by side below a figure; more are rotated


def draw(table: Table, path: Path) -> list[Path]:
    """Write the figure of a table, if it has one; return a list of its path, or an empty list."""
    if not table.bars and table.curves is None:
        return []
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(name.partition(",")[0] for name in table.curves[2])) if table.curves is not None else [""]
    figure, axes = plt.subplots(1, len(kinds), figsize=(10, 5), sharey=True, squeeze=False, layout="constrained")
    for axis, kind in zip(axes[0], kinds, strict=True):
        if table.curves is not None:
            _draw_curves(axis, table, kind)
        else:
            _draw_bars(axis, table)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.12)  # room for the legend above the bars
        axis.legend(fontsize=8, frameon=False)
    figure.suptitle(table.title, fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return [path]


def _draw_curves(axis: Any, table: Table, kind: str) -> None:
    """Draw the lines whose names begin with `kind`. Each kind has a panel, since lines of two kinds may coincide."""
    assert table.curves is not None
    across, up, lines = table.curves
    for name, (xs, ys) in lines.items():
        if name.partition(",")[0] == kind:
            axis.plot(xs, ys, label=name, linewidth=1.3)
    axis.set(xscale="log", xlabel=across, ylabel=up if kind == next(iter(lines)).partition(",")[0] else "")


def _draw_bars(axis: Any, table: Table) -> None:
    """Draw bars of the columns that have printed values; of all columns, if none has."""
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
    longest = max((len(line) for label in labels for line in label.splitlines()), default=0)
    crowded = len(cells) * longest > _LABELS
    axis.set_xticks(range(len(cells)), labels, fontsize=7, rotation=60 if crowded else 0, ha="right" if crowded else "center",
                    rotation_mode="anchor" if crowded else "default")  # fmt: skip
    axis.set_ylabel(table.bars)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
