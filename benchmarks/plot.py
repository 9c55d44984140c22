"""The plots of races: step time (median, quartiles) and peak memory of every contender, as bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import statistics
from .race import Outcome
from .tables import MIB

COLOURS = {
    "zs": "#1b7f79", "engine": "#4fb3a5", "ddp": "#8d99ae", "ddp+zero": "#8d99ae", "replicate": "#8d99ae",
    "fsdp2": "#d98324", "ds": "#a44a3f", "local": "#cccccc",
}  # fmt: skip


def draw(outcomes: list[Outcome], title: str, path: Path) -> bool:
    """Draw the contenders that were measured into a PNG file; return False, and write no file, if there are none."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [o for o in outcomes if o.ran and o.rounds_step_s]
    if not shown:
        return False
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 1.6 + 0.42 * len(shown)), sharey=True)
    _draw_times(left, shown)
    _draw_memory(right, shown)
    left.set_yticks(range(len(shown)), [o.contender.label for o in shown])
    left.invert_yaxis()
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def _draw_times(axis: Any, shown: list[Outcome]) -> None:
    spreads = [statistics.step_spread(o) for o in shown]
    medians = [1e3 * s.median for s in spreads]
    errors = [[1e3 * (s.median - s.q1) for s in spreads], [1e3 * (s.q3 - s.median) for s in spreads]]
    colours = [COLOURS[o.contender.kind] for o in shown]
    bars = axis.barh(range(len(shown)), medians, xerr=errors, color=colours, error_kw={"lw": 1, "capsize": 2})
    axis.bar_label(bars, fmt="%.0f", padding=4, fontsize=8)
    axis.set_xlabel("step time, ms (median and quartiles)")


def _draw_memory(axis: Any, shown: list[Outcome]) -> None:
    """Draw bars of GPU memory where it was measured, else of RSS, with PSS as a darker bar inside."""
    rows, colours = range(len(shown)), [COLOURS[o.contender.kind] for o in shown]
    if any(o.cuda_peak for o in shown):
        bars = axis.barh(rows, [(o.cuda_peak or 0) / MIB for o in shown], color=colours)
        axis.set_xlabel("peak allocated GPU memory, MiB")
    else:
        bars = axis.barh(rows, [(o.peak_rss or 0) / MIB for o in shown], color=colours, alpha=0.45)
        axis.barh(rows, [(o.peak_pss or 0) / MIB for o in shown], color=colours, height=0.45)
        axis.set_xlabel("peak resident memory per rank, MiB (thick: RSS, thin: PSS)")
    axis.bar_label(bars, fmt="%.0f", padding=4, fontsize=8)
