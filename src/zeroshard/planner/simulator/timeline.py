"""The timeline of a simulated step: a Chrome trace (chrome://tracing, ui.perfetto.dev) and a picture.

stage 0  computation         | forward | forward |   | backward |        a lane for each resource of each trace; colours by
         links inside nodes  |gather|gather|             |reduce|        the kind of task, or by phase where that says more
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from ...utils.axes import EP, TP
from .hardware import Hardware
from .simulate import COMPUTES, SAYS, Simulation, kind_of
from .trace import Resource, Task

COLOURS = {
    "forward": "#1b7f79", "backward": "#2f5d8a", "recompute": "#7fb8b2", "step": "#8a6d3b", "gather": "#d98324",
    "reduce": "#a44a3f", TP: "#c9a227", EP: "#e0b1cb", "send": "#7a5195", "device": "#b5838d", "host": "#6d6875",
    "disk": "#8d99ae", "read": "#8d99ae", "write": "#5c677d", "control": "#3d405b",
}  # fmt: skip
OTHER = "#bbbbbb"
_WIDTH_IN, _LANE_IN, _MOST_IN = 16.0, 0.45, 45.0
_LETTERS_IN, _EDGED = 17, 0.003  # letters an inch; the share of the step from which on a bar has an edge


def write_chrome_trace(simulation: Simulation, path: str | Path) -> None:
    """Write a Chrome trace: a process per trace, a thread per resource; times in microseconds, bytes and flops as arguments."""
    resources, several = list(Resource), len(simulation.traces) > 1
    names = [f"stage {number}" if several else f"rank {trace.rank}" for number, trace in enumerate(simulation.traces)]
    events: list[dict] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}} for number, name in enumerate(names)
    ]
    for number, lane in _lanes(simulation):
        thread = {"pid": number, "tid": resources.index(lane)}
        events.append({"ph": "M", "name": "thread_name", **thread, "args": {"name": SAYS[lane]}})
        events.append({"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": thread["tid"]}})
    for number, place, begin, end in simulation.spans:
        task = simulation.traces[number].tasks[place]
        found: dict[str, object] = {f"{resource.value} bytes": nbytes for resource, nbytes in task.nbytes.items()}
        found |= {name: getattr(task, name) for name in ("unit", "flops", "kernels")}
        found |= {"parameters": task.numel, "channel": task.channel}
        if task.peers > 1:
            found |= {"ranks": task.peers, "axis": task.axis}
        events += [
            {
                "ph": "X", "name": task.name, "cat": task.phase, "pid": number, "tid": resources.index(lane), "ts": 1e6 * begin,
                "dur": 1e6 * (end - begin), "args": {name: value for name, value in found.items() if value},
            }
            for lane in _lanes_of(task, simulation.hardware)
        ]  # fmt: skip
    about = {"hardware": simulation.hardware.name, "step_s": simulation.step_s, "bound": simulation.bound}
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}))


def draw_timeline(simulation: Simulation, path: str | Path, title: str = "") -> None:
    """Draw a PNG with all lanes in which something is done."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    lanes = _lanes(simulation)
    rows = {lane: row for row, lane in enumerate(lanes)}
    bars: dict[tuple[int, str, str], list[tuple[float, float]]] = defaultdict(list)  # by row, colour and that of the edge
    kinds: dict[str, str] = {}
    height = min(_MOST_IN, 1.8 + _LANE_IN * len(lanes))
    figure = Figure(figsize=(_WIDTH_IN, height), layout="constrained")
    axis = figure.subplots()
    room = simulation.step_s / (_WIDTH_IN * _LETTERS_IN)  # of a letter
    for number, place, begin, end in simulation.spans:
        task = simulation.traces[number].tasks[place]
        if not task.nbytes:  # a receive: its send is drawn
            continue
        kind = kind_of(task)
        if kind not in COLOURS and any(resource in COMPUTES for resource in task.nbytes):
            kind = task.phase
        kinds[kind] = COLOURS.get(kind, OTHER)
        for lane in _lanes_of(task, simulation.hardware):
            row = rows[number, lane]
            edge = "white" if end - begin > _EDGED * simulation.step_s else kinds[kind]
            bars[row, kinds[kind], edge].append((1e3 * begin, 1e3 * (end - begin)))
            if end - begin > room * len(task.name):
                axis.text(
                    500 * (begin + end), row, task.name, ha="center", va="center", fontsize=6.5, color="white", clip_on=True
                )
    for (row, colour, edge), spans in bars.items():
        axis.broken_barh(spans, (row - 0.4, 0.8), facecolors=colour, edgecolor=edge, linewidth=0.4)
    several = len(simulation.traces) > 1
    axis.set_yticks(range(len(lanes)), [f"stage {n}: {SAYS[r]}" if several else SAYS[r] for n, r in lanes], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1e3 * simulation.step_s or 1)
    axis.set_xlabel("ms")
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(
        "\n".join(filter(None, (title, f"{1e3 * simulation.step_s:.4g} ms a step, {simulation.bound}"))), fontsize=9, loc="left"
    )
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in kinds.values()]
    figure.legend(handles, list(kinds), loc="outside lower center", ncols=max(1, len(kinds)), fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def _lanes_of(task: Task, hardware: Hardware) -> list[Resource]:
    return list(dict.fromkeys(hardware.lane(resource) for resource in task.nbytes))


def _lanes(simulation: Simulation) -> list[tuple[int, Resource]]:
    """Return trace and resource of each lane, from top to bottom."""
    used = {
        (n, lane) for n, trace in enumerate(simulation.traces) for t in trace.tasks for lane in _lanes_of(t, simulation.hardware)
    }
    order = list(Resource)
    return sorted(used, key=lambda each: (each[0], order.index(each[1])))
