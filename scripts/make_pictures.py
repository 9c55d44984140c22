"""Draw the memory of one GPT at each ZeRO stage and on each tier, as docs/learn/zero.md shows it, from plans by `zs.plan`.

    PYTHONPATH=src python scripts/make_pictures.py            # about five minutes on one core; needs no GPU
    PYTHONPATH=src python scripts/make_pictures.py --draw     # from memory.json as it is

Writes docs/learn/memory.json (bytes by configuration, tier and category), the pictures stages.svg, steps.png and tiers.svg beside it,
and the two tables between the marks of zero.md. tests/test_site.py compares the tables with memory.json, and memory.json with the
formulas of the stages.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import zeroshard as zs
from zeroshard.config import Tier
from zeroshard.planner.model_source import source_of
from zeroshard.planner.pictures import COLOURS, OTHER

FOLDER = Path(__file__).parents[1] / "docs" / "learn"
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


def draw_stages(found: dict, path: Path) -> None:
    """A bar for each stage: what the device holds at the fullest moment, by category, beside the memory of one device."""
    draw_bars({name: found["peak"][name] for name in STAGES}, ["device"], path)


def draw_bars(peaks: dict, tiers: list[str], path: Path) -> None:
    """For each tier a row of stacked bars, one for each configuration."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4 * len(tiers)), layout="constrained")
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
        axis.set_xticks(range(len(peaks)), names, fontsize=8)
        axis.set(ylabel=f"GiB of the {tier}, one rank of {RANKS}", ylim=(0, 1.12 * max(*floor.values(), 1)))
        axis.spines[["top", "right"]].set_visible(False)
    legend(figure)
    figure.savefig(path, metadata={"Date": None})


def legend(figure: Any) -> None:
    """One for all panels, beside them; the order is that of the stacks."""
    handles: dict = {}
    for axis in figure.axes:
        found, labels = axis.get_legend_handles_labels()
        handles.update(zip(labels, found, strict=True))
    known = [name for name in COLOURS if name in handles]
    names = [*(name for name in handles if name not in COLOURS), *reversed(known)]
    figure.legend([handles[name] for name in names], names, loc="outside right upper", fontsize=8, frameon=False)


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
    draw_stages(found, FOLDER / "stages.svg")
    draw_steps(found, FOLDER / "steps.png")
    draw_bars({name: found["peak"][name] for name in TIERS}, ["device", "host", "disk"], FOLDER / "tiers.svg")
    page.write_text(with_tables(page.read_text(), found))


if __name__ == "__main__":
    main()
