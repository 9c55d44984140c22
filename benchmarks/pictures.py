"""The pictures, as PNG: step time and peak memory of a race's contenders as bars, and the figures of published tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from .tables import Measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {  # by the beginning of a contender's label
    "zeroshard.deepspeed": "#4fb3a5", "zeroshard": "#1b7f79", "FSDP2": "#d98324", "DeepSpeed": "#a44a3f",
    "no exchange": "#cccccc", "": "#8d99ae",
}  # fmt: skip


def picture(path: Path, title: str, panels: Sequence[Callable[[Axes], object]], size: tuple[float, float]) -> None:
    """Draw panels side by side, with one y axis, into a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    for axis, panel in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        panel(axis)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)


def draw(tables: list[Measured], title: str, path: Path) -> bool:
    """Draw the contenders of a race's tables; return False, and write no file, if there are none."""
    shown = [row for measured in tables for row in measured.rows if row.seconds and {"GPU MiB", "RSS MiB"} & row.facts.keys()]
    if not shown:
        return False
    colours = [next(colour for name, colour in COLOURS.items() if row.name.startswith(name)) for row in shown]
    spreads = [quantiles(row.seconds, n=4, method="inclusive") if len(row.seconds) > 1 else row.seconds * 3 for row in shown]

    def bars(axis: Axes, values: list[float], label: str, **look: Any) -> None:
        drawn = axis.barh(range(len(shown)), values, color=colours, **look)
        axis.bar_label(drawn, fmt="%.0f", padding=4, fontsize=8)
        axis.set_xlabel(label)
        axis.margins(x=0.12)

    def times(axis: Axes) -> None:
        errors = [[1e3 * (middle - q1) for q1, middle, _ in spreads], [1e3 * (q3 - middle) for _, middle, q3 in spreads]]
        values = [1e3 * middle for _, middle, _ in spreads]
        bars(axis, values, "step time, ms (median and quartiles)", xerr=errors, error_kw={"lw": 1, "capsize": 2})
        axis.set_yticks(range(len(shown)), [row.name for row in shown])
        axis.invert_yaxis()

    def memory(axis: Axes) -> None:
        """Draw bars of GPU memory where it was measured, else of RSS, with PSS as a darker bar inside."""
        if any("GPU MiB" in row.facts for row in shown):
            bars(axis, [row.facts.get("GPU MiB", 0) for row in shown], "peak allocated GPU memory, MiB")
            return
        label = "peak memory per rank, MiB (pale: RSS; dark: PSS, shared pages in parts)"
        bars(axis, [row.facts["RSS MiB"] for row in shown], label, alpha=0.45)
        axis.barh(range(len(shown)), [row.facts.get("PSS MiB", 0) for row in shown], color=colours, height=0.45)

    picture(path, title, [times, memory], (13, 1.6 + 0.42 * len(shown)))
    return True
