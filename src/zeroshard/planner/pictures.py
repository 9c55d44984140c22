"""A plan as pictures: memory over a step by category, and one HTML page with everything, which needs no other file.

memory    |        ___ activations        stacked by category, from moment to moment; a line where the device ends
          |   ____/   \\___
          |__/ states      \\__
"""

from __future__ import annotations

import base64
import html
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..activations.storage import CHECKPOINTS
from ..config import Tier
from ..seam import AVERAGES, GATHERED, GRADIENTS, MASTERS, OPTIMIZER, PARAMETERS, PARTIAL, RESIDUALS, SECONDARY, STAGING
from ..utils.sheets import Sheet
from .plan import ACTIVATIONS, Moment, Plan, memories
from .request import Request, Verdict
from .tables import scale_of

# from the bottom: what rests, then what comes and goes
COLOURS = {
    OPTIMIZER: "#5c677d", MASTERS: "#8d99ae", PARAMETERS: "#2f5d8a", GRADIENTS: "#a44a3f", AVERAGES: "#b7b7a4", SECONDARY: "#6b9ac4",
    RESIDUALS: "#c08497", STAGING: "#c9a227", PARTIAL: "#d8846f", GATHERED: "#d98324", CHECKPOINTS: "#7fb8b2", ACTIVATIONS: "#1b7f79",
}  # fmt: skip
OTHER = "#bbbbbb"
# phases without visits of units, and what is at work in them
_BESIDE = {"load": "", "first step": "", "step": "optimizer", "save": ""}
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; color: #222; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .4rem; }
.verdict { padding: .6rem 1rem; border-left: .4rem solid #a44a3f; background: #f7f3f2; } .fits { border-color: #1b7f79; background: #f1f6f5; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } th, td { padding: .15rem .8rem .15rem 0; text-align: right; }
th { border-bottom: 1px solid #999; font-weight: 600; } th:first-child, td:first-child { text-align: left; }
tr.total td { border-top: 1px solid #ccc; font-weight: 600; } img { max-width: 100%; }
@media print { body { margin: 0; max-width: none; font-size: 11px; } h2, table, img { break-inside: avoid; } }
"""


def draw_memory(plan: Plan, request: Request, path: str | Path) -> None:
    """Draw a PNG of the device's memory by category over a step and the phases around it, with the capacity if that is near.

    Each visit of a unit is shown at its fullest moment, so that the picture's top is the plan's peak.
    """
    from matplotlib.figure import Figure

    beside = {phase.name: [Moment(phase.name, _BESIDE[phase.name], memories(phase.held, plan.separate)[Tier.DEVICE])] * 2 for phase in plan.phases
              if phase.name in _BESIDE}  # fmt: skip  # twice: as wide as a unit
    ahead, behind = (
        [each for name in names for each in beside.get(name, [])] for names in (("load", "first step"), ("step", "save"))
    )
    moments = [*ahead, *plan.moments, *behind]
    names = [name for name in COLOURS if any(name in moment.held for moment in moments)]
    names += sorted({name for moment in moments for name in moment.held} - set(COLOURS))
    peak = max((sum(moment.held.values()) for moment in moments), default=0) + request.hardware.overhead_nbytes
    unit, unit_name = scale_of(peak)
    figure = Figure(figsize=(13, 5), layout="constrained")
    axis: Any = figure.subplots()
    places = range(len(moments))
    held = [[moment.held.get(name, 0) / unit for moment in moments] for name in names]
    overhead, labels = request.hardware.overhead_nbytes / unit, names
    if overhead:
        held, labels = [[overhead] * len(moments), *held], ["the device's overhead", *names]
    axis.stackplot(places, held, labels=labels, colors=[COLOURS.get(name, OTHER) for name in labels], step="post", alpha=0.9)
    capacity = request.hardware.device.memory_nbytes
    if capacity < 2 * peak:
        label = f"{request.hardware.device.name}: {capacity / unit:,.4g} {unit_name}"
        axis.axhline(capacity / unit, color="black", lw=1.2, ls="--", label=label)
    _mark_phases(axis, moments)
    axis.set(
        xlim=(0, max(len(moments) - 1, 1)), ylim=(0, None), ylabel=f"{unit_name} of rank {plan.rank}", xlabel="where the step is"
    )
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False, reverse=True)
    figure.savefig(path, dpi=110)


def _mark_phases(axis: Any, moments: Sequence[Moment]) -> None:
    """Draw a line where each phase begins, and write the names of as many units as can be read."""
    places = list(enumerate(moments))
    for phase, group in itertools.groupby(places, key=lambda each: each[1].phase):
        first = next(group)[0]
        axis.axvline(first, color="black", lw=0.5, alpha=0.5)
        axis.annotate(
            phase, (first, 1), xycoords=("data", "axes fraction"), xytext=(3, 2), textcoords="offset points", fontsize=8
        )
    every = max(len(places) // 24, 1)
    names = [moment.unit for _, moment in places[::every]]
    axis.set_xticks([place for place, _ in places[::every]], names, rotation=60, ha="right", fontsize=7)


def write_page(
    path: str | Path,
    heading: str,
    verdict: Verdict | None,
    tables: Sequence[Sheet],
    pictures: Mapping[str, Path],
    notes: Sequence[str] = (),
) -> None:
    """Write one HTML file with the verdict, notes, pictures and tables. pictures: PNG files by title, which become part of it."""
    said = html.escape(heading)
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{said}</title><style>{_STYLE}</style>", f"<h1>{said}</h1>",
        f'<p class="verdict{" fits" if verdict.fits else ""}">{html.escape(str(verdict))}</p>' if verdict is not None else "",
        *(f"<p>{html.escape(note)}</p>" for note in notes),
    ]  # fmt: skip
    for title, file in pictures.items():
        data = base64.b64encode(Path(file).read_bytes()).decode()
        parts.append(f'<h2>{html.escape(title)}</h2><img alt="{html.escape(title)}" src="data:image/png;base64,{data}">')
    for table in tables:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in table.header)
        rows = []
        for row in table.rows:
            kind = ' class="total"' if row[0].endswith("total") or "all" in row[:2] else ""
            rows.append(f"<tr{kind}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>")
        parts.append(f"<h2>{html.escape(table.title)}</h2><table><tr>{head}</tr>{''.join(rows)}</table>")
    Path(path).write_text("\n".join([*parts, "</html>", ""]), encoding="utf-8")
