"""Draw the pictures of the documents: memory of one GPT at each ZeRO stage and on each tier, from plans by `zs.plan`, the race of
docs/benchmarks.md, and the loss of examples/fine_tune.py.

    PYTHONPATH=src python scripts/make_pictures.py            # about five minutes on one core; needs no GPU
    PYTHONPATH=src python scripts/make_pictures.py --draw     # from memory.json and fine-tune.json as they are

Writes docs/learn/memory.json (bytes by configuration, tier and category), the pictures stages.svg, steps.png and tiers.svg beside it,
docs/race.svg, docs/how-to/fine-tune.json and its picture, and the two tables between the marks of zero.md. tests/test_site.py compares the tables with memory.json, memory.json
with the formulas of the stages, and the numbers of race.svg and stages.svg with their sources. These two, which the first page
shows, are as wide as a telephone.
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import zeroshard as zs
from zeroshard.config import Tier
from zeroshard.planner.model_source import source_of
from zeroshard.planner.pictures import COLOURS, OTHER

DOCS = Path(__file__).parents[1] / "docs"
FOLDER = DOCS / "learn"
NARROW = 4.2  # inches: a picture of this width, whose text has 9 points, is read on a telephone as it is on a page
RACERS = {"zeroshard 3": "#1b7f79", "zeroshard 2": "#1b7f79", "DDP": "#8d99ae", "FSDP2": "#d98324", "DeepSpeed 3": "#a44a3f"}
MODEL, RANKS, SEQUENCE, CAPACITY_GIB = "gpt-8b", 8, 1024, 80
STAGES = {f"stage {stage}": {"stage": stage} for stage in range(4)}
TIERS = {
    "stage 2, states on the host": {"stage": 2, "offload_optimizer": "cpu"},
    "stage 3": {"stage": 3},
    "stage 3, states on the host": {"stage": 3, "offload_optimizer": "cpu"},
    "stage 3, all on the host": {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"},
    "stage 3, all on disk": {"stage": 3, "preset": "zero-infinity", "offload_path": "/nvme"},
    "stage 3, all on disk, activations checkpointed": {
        "stage": 3, "preset": "zero-infinity", "offload_path": "/nvme", "checkpointing": True,
    },
}  # fmt: skip


def measure() -> dict:
    """Bytes of rank 0 at the fullest moment of a step: configuration -> tier -> category; moments of the device for the stages."""
    source = source_of(MODEL)
    found: dict = {"parameters": 0, "ranks": RANKS, "peak": {}, "moments": {}}
    for name, options in {**STAGES, **TIERS}.items():
        print(name, file=sys.stderr, flush=True)
        plan = zs.plan(source.make, ranks=RANKS, batch=(1, SEQUENCE), precision="bf16", **options)
        found["parameters"] = plan.num_parameters
        running = [phase for phase in plan.phases if phase.name in ("forward", "backward", "step")]
        found["peak"][name] = {
            tier.value: dict(max((phase.held.get(tier, {}) for phase in running), key=lambda held: sum(held.values())))
            for tier in Tier
        }
        if name in STAGES:
            found["moments"][name] = [[moment.phase, *moment_mib(moment.held)] for moment in plan.moments]
    return found


def moment_mib(held: dict[str, int]) -> list[int]:
    """MiB by category, in the order of the colours."""
    return [round(held.get(category, 0) / 2**20) for category in COLOURS]


def gib(nbytes: float) -> float:
    return nbytes / 2**30


def draw_bars(peaks: dict, tiers: list[str], path: Path, size: tuple[float, float], beside: bool = True) -> None:
    """For each tier a row of stacked bars, one for each configuration, beside the memory of a device; the legend beside or below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    for axis, tier in zip(figure.subplots(len(tiers), squeeze=False)[:, 0], tiers, strict=True):
        floor = dict.fromkeys(peaks, 0.0)
        for category in [*COLOURS, None]:
            held = {
                name: sum(n for key, n in peak[tier].items() if key == category or (category is None and key not in COLOURS))
                for name, peak in peaks.items()
            }
            if any(held.values()):
                colour = COLOURS.get(category, OTHER) if category else OTHER
                axis.bar(
                    range(len(peaks)), [gib(n) for n in held.values()], bottom=list(floor.values()), color=colour,
                    label=category or "other",
                )  # fmt: skip
            floor = {name: floor[name] + gib(held[name]) for name in peaks}
        for place, total in enumerate(floor.values()):
            axis.annotate(f"{total:.1f}", (place, total), ha="center", va="bottom", fontsize=9)
        if tier == "device" and max(floor.values()) > CAPACITY_GIB / 2:
            axis.axhline(CAPACITY_GIB, color="black", lw=1, ls="--", label=f"a device of {CAPACITY_GIB} GiB")
        names = [name.replace(", ", ",\n") for name in peaks]
        axis.set_xticks(range(len(peaks)), names, fontsize=8 if beside else 9)
        axis.set(ylabel=f"GiB of the {tier}, one rank of {RANKS}", ylim=(0, 1.12 * max(*floor.values(), 1)))
        axis.spines[["top", "right"]].set_visible(False)
    legend(figure, beside)
    figure.savefig(path, metadata={"Date": None})


def race() -> dict[str, tuple[float, float]]:
    """Of the first race of docs/benchmarks.md: contender -> milliseconds of a step, MiB of peak RSS of a rank."""
    page = (DOCS / "benchmarks.md").read_text().partition("## Step time and memory on CPU")[2]
    head, _, *rows = [
        [cell.strip(" *") for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")
    ]
    step, memory = head.index("ms a step"), head.index("peak RSS MiB")
    found: dict[str, tuple[float, float]] = {}
    for row in rows:
        if row[0] in RACERS and row[0] not in found:  # later tables are of other days
            found[row[0]] = float(row[step]), float(row[memory])
    return {name: found[name] for name in RACERS}


def draw_race(found: dict[str, tuple[float, float]], path: Path) -> None:
    """Two panels, one below the other: the time of a step, and the memory of a rank; a bar for each contender."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(NARROW, 4.2), layout="constrained")
    titles = ("milliseconds of a step", "peak memory of a rank, MiB (resident set)")
    for part, (axis, title) in enumerate(zip(figure.subplots(2), titles, strict=True)):
        bars = axis.barh(range(len(found)), [each[part] for each in found.values()], color=[RACERS[name] for name in found])
        axis.bar_label(bars, fmt="%.0f", padding=3, fontsize=9)
        axis.set_yticks(range(len(found)), list(found), fontsize=9)
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_xticks([])
        axis.invert_yaxis()
        axis.margins(x=0.12)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def draw_fine_tuning(losses: Path, again: bool) -> None:
    """The curve that examples/fine_tune.py draws. again: run it on two ranks first."""
    program = DOCS.parent / "examples" / "fine_tune.py"
    if again:
        with tempfile.TemporaryDirectory() as folder:
            start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
            subprocess.run([*start, str(program), "--out", folder], check=True)
            shutil.copy(Path(folder) / "losses.json", losses)
    found = json.loads(losses.read_text())
    runpy.run_path(str(program))["draw"](found["losses"], found["held_out"], losses.with_suffix(".svg"))


def legend(figure: Any, beside: bool = True) -> None:
    """One for all panels, beside or below them; the order is that of the stacks."""
    handles: dict = {}
    for axis in figure.axes:
        found, labels = axis.get_legend_handles_labels()
        handles.update(zip(labels, found, strict=True))
    known = [name for name in COLOURS if name in handles]
    names = [*(name for name in handles if name not in COLOURS), *reversed(known)]
    place: dict = (
        {"loc": "outside right upper", "fontsize": 8} if beside else {"loc": "outside lower center", "ncols": 2, "fontsize": 9}
    )
    figure.legend([handles[name] for name in names], names, frameon=False, **place)


def draw_steps(found: dict, path: Path) -> None:
    """The device's memory along one forward and backward, a panel for each stage."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    for axis, (name, moments) in zip(figure.subplots(2, 2, sharey=True).flat, found["moments"].items(), strict=True):
        stacked = {name: [moment[1 + place] / 1024 for moment in moments] for place, name in enumerate(COLOURS)}
        shown = {name: held for name, held in stacked.items() if any(held)}
        axis.stackplot(range(len(moments)), list(shown.values()), labels=list(shown), colors=[COLOURS[each] for each in shown])
        axis.axhline(CAPACITY_GIB, color="black", lw=1, ls="--", label=f"a device of {CAPACITY_GIB} GiB")
        turn = next(place for place, moment in enumerate(moments) if moment[0] == "backward")
        axis.axvline(turn, color="black", lw=0.5)
        axis.set_xticks([turn / 2, (turn + len(moments)) / 2], ["forward", "backward"])
        axis.set(title=name, xlim=(0, len(moments) - 1), ylim=(0, None), ylabel="GiB")
        axis.spines[["top", "right"]].set_visible(False)
    legend(figure)
    figure.savefig(path, dpi=110)


def table(found: dict, names: list[str]) -> str:
    """Markdown: a row for each configuration, GiB of one rank by tier, and what of the device's is parameters, and so on."""
    categories = ["parameters", "gradients", "master weights", "optimizer states", "activations"]
    head = ["", *categories, "gathered, buffers", "device in all", "host", "disk"]
    rows = [head, ["---"] * len(head)]
    for name in names:
        peak = found["peak"][name]
        cells = [peak["device"].get(each, 0) for each in categories]
        total = sum(peak["device"].values())
        every = [*cells, total - sum(cells), total, sum(peak["host"].values()), sum(peak["disk"].values())]
        rows.append([name, *(f"{gib(each):.1f}" if each >= 2**30 / 20 else "" for each in every)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def with_tables(page: str, found: dict) -> str:
    """The page with its tables, which stand between `<!-- made: NAME -->` and `<!-- end -->`."""
    for name, names in {"stages": list(STAGES), "tiers": list(TIERS)}.items():
        block = f"<!-- made: {name} -->\n{table(found, names)}\n<!-- end -->"
        page = re.sub(rf"<!-- made: {name} -->\n.*?<!-- end -->", lambda _, block=block: block, page, flags=re.S)
    return page


def main() -> None:
    import matplotlib

    matplotlib.rcParams.update({"svg.hashsalt": "zeroshard", "svg.fonttype": "none"})
    numbers, page = FOLDER / "memory.json", FOLDER / "zero.md"
    found = json.loads(numbers.read_text()) if "--draw" in sys.argv else measure()
    numbers.write_text(json.dumps(found) + "\n")
    draw_bars({name: found["peak"][name] for name in STAGES}, ["device"], FOLDER / "stages.svg", (NARROW, 4.2), beside=False)
    draw_race(race(), DOCS / "race.svg")
    draw_fine_tuning(DOCS / "how-to" / "fine-tune.json", again="--draw" not in sys.argv)
    draw_steps(found, FOLDER / "steps.png")
    draw_bars({name: found["peak"][name] for name in TIERS}, ["device", "host", "disk"], FOLDER / "tiers.svg", (9, 10.2))
    page.write_text(with_tables(page.read_text(), found))


if __name__ == "__main__":
    main()
