"""The pictures, as PNG: step time and peak memory of a race's contenders as bars, and the figures of published tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import statistics
from .race import Outcome
from .tables import MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "zs": "#1b7f79", "engine": "#4fb3a5", "ddp": "#8d99ae", "ddp+zero": "#8d99ae", "replicate": "#8d99ae",
    "fsdp2": "#d98324", "ds": "#a44a3f", "local": "#cccccc",
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


def draw(outcomes: list[Outcome], title: str, path: Path) -> bool:
    """Draw the contenders that were measured; return False, and write no file, if there are none."""
    shown = [o for o in outcomes if o.ran and o.rounds_step_s]
    if not shown:
        return False
    colours = [COLOURS[o.contender.kind] for o in shown]
    spreads = [statistics.step_spread(o) for o in shown]

    def bars(axis: Axes, values: list[float], label: str, **look: Any) -> None:
        drawn = axis.barh(range(len(shown)), values, color=colours, **look)
        axis.bar_label(drawn, fmt="%.0f", padding=4, fontsize=8)
        axis.set_xlabel(label)
        axis.margins(x=0.12)

    def times(axis: Axes) -> None:
        errors = [[1e3 * (s.median - s.q1) for s in spreads], [1e3 * (s.q3 - s.median) for s in spreads]]
        values = [1e3 * s.median for s in spreads]
        bars(axis, values, "step time, ms (median and quartiles)", xerr=errors, error_kw={"lw": 1, "capsize": 2})
        axis.set_yticks(range(len(shown)), [o.contender.label for o in shown])
        axis.invert_yaxis()

    def memory(axis: Axes) -> None:
        """Draw bars of GPU memory where it was measured, else of RSS, with PSS as a darker bar inside."""
        if any(o.cuda_peak for o in shown):
            bars(axis, [(o.cuda_peak or 0) / MIB for o in shown], "peak allocated GPU memory, MiB")
            return
        label = "peak resident memory per rank, MiB (thick: RSS, thin: PSS)"
        bars(axis, [(o.peak_rss or 0) / MIB for o in shown], label, alpha=0.45)
        axis.barh(range(len(shown)), [(o.peak_pss or 0) / MIB for o in shown], color=colours, height=0.45)

    picture(path, title, [times, memory], (13, 1.6 + 0.42 * len(shown)))
    return True
