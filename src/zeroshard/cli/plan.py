"""The command `zeroshard plan`: show what a rank of a run will hold and send, whether it fits, and changes that make it fit.

    zeroshard plan llama-3-70b --ranks 64 --hardware h100-80gb
    zeroshard plan gpt-1t --mesh dp=16,pp=8,tp=8 --checkpoint-activations --out runs/plan
    zeroshard plan mine:model --ranks 8 --hardware a100-40gb --brief
    zeroshard plan mine:vision --example mine:images --micro-batch 32
    zeroshard plan gpt-13b --ranks 64 --auto --global-batch 512 --write-config layout.json

`zeroshard train --config`, zs.shard(config=...) and zeroshard.deepspeed read the file that --auto writes.
Exit code 0: the run fits; 1: it does not; 2: a mistake in the call.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path

from ..config import Tier
from ..planner import tables
from ..planner.plan import Plan
from ..planner.remedies.remedy import Remedy, remedies
from ..planner.request import Request, Verdict, gib, judge
from ..planner.search.layout_file import write_config
from ..planner.search.search import Found, search
from ..planner.simulator.simulate import Simulation
from ..planner.simulator.spread import rate_with_spread, said_of, seconds_with_spread, two_digits
from ..utils.axes import DP, EP
from ..utils.sheets import Sheet
from .arguments import ExitCode, UsageError, quiet
from .plan_options import PlanCommand
from .progress import working
from .sheets import drawn, print_json, show


def main(options: PlanCommand, _: Sequence[str]) -> int:
    """Plan, print and write; return the exit code. Raises ConfigError for the model, the hardware or options of zs.shard."""
    layouts: Found | None = None
    with working("the model is made"):
        request = options.request()
        if options.auto:
            readers = request.axes[DP] * request.axes.get(EP, 1)
            batch = options.global_batch or readers * request.rows * request.micro_batches
            layouts = search(request, batch, fixed=options.fixed(request), lossy=options.lossy)
            request, plans = layouts.best.request, list(layouts.best.plans)
            if options.write_config is not None:
                write_config(layouts, options.write_config, offload_path=options.offload_path)
        else:
            plans = request.plans()
        verdict = judge(plans, request.hardware)
        notes = [*request.notes, *([layouts.reason] if layouts is not None else [])]
        sheets = [tables.memory(verdict.plan), tables.communication(verdict.plan), tables.activations(verdict.plan)]
        if options.out is not None:
            _write(Path(options.out), request, plans, verdict, [*([_layouts(layouts)] if layouts else []), *sheets], notes)
    text, brief = not (options.json or options.json_full), options.brief or quiet()
    if text:  # print the verdict before the search for remedies, which takes seconds
        print(tables.headline(request, verdict) if brief else tables.page(verdict.plan, verdict), flush=True)
    look = not (verdict.fits or brief or options.auto) and options.try_seconds > 0
    found: list[Remedy] = []
    if look:
        with working("looking for changes that make it fit"):
            found = remedies(request, plans, options.try_seconds)
    if not text:
        print_json(facts(request, verdict, found) if options.json_full else summary(request, verdict, found, layouts))
    elif not brief:
        _print(verdict, found, sheets if options.full else [], layouts, notes, options, look)
    written = [str(path) for path in sorted(Path(options.out).iterdir())] if options.out is not None else []
    written += [options.write_config] if options.write_config is not None else []
    if written and text:
        print(f"written: {', '.join(written)}")
    return ExitCode.DONE if verdict.fits else ExitCode.NO


def _print(
    verdict: Verdict, found: Sequence[Remedy], sheets: Sequence[Sheet], layouts: Found | None, notes: Sequence[str],
    options: PlanCommand, look: bool,
) -> None:  # fmt: skip
    """Print the lines below the page: remedies, tables and notes."""
    if layouts is not None:
        sheets = [_layouts(layouts), *sheets]
    if found:
        rows = tuple((each.flags, f"{gib(each.frees)} GiB", each.then, each.cost) for each in found)
        sheets = [Sheet("What would make it fit, the cheapest first", ("add", "frees", "then it", "cost"), rows), *sheets]
    for table in sheets:
        show(table)
    if look and not found:
        told = f"no change was found in {options.try_seconds:g} s that makes it fit"
        print(f"{told}: look for longer (--try-seconds), or take more ranks")
    print("\n".join(notes), end="\n" * bool(notes))
    if layouts is not None:
        print(f"Seconds: {said_of(layouts.hardware.spread)}")


def _layouts(found: Found) -> Sheet:
    """Return a table of the best layout and the runner-up."""
    rows, spread = [], found.hardware.spread
    for name, each in (("the fastest", found.best), ("runner-up", found.runner_up)):
        if each is not None:
            seconds, tflops = seconds_with_spread(each.step_s, spread), rate_with_spread(each.tflops, spread)
            rows.append((name, str(each.layout), seconds, tflops, two_digits(each.tokens_per_s), gib(each.nbytes())))
    counts = ", ".join(f"{number:,} {name}" for name, number in found.considered.items())
    header = ("", "layout", "s a step", "TFLOPS a device", "tokens/s", "GiB of a device")
    return Sheet(f"Layouts: {counts}", header, rows)


def _write(
    folder: Path, request: Request, plans: Sequence[Plan], verdict: Verdict, sheets: Sequence[Sheet], notes: list[str]
) -> None:
    """Write the pictures, the page and report.json into a folder. Raises UsageError."""
    from ..planner.pictures import write_page

    # simulating a pipeline needs plans of all stages, which `zeroshard simulate` makes
    done = request.simulated(plans) if request.axes["pp"] == 1 else None
    pictures = draw(folder, request, verdict, done)
    if done is not None:
        spread = request.hardware.spread
        seconds, tflops = seconds_with_spread(done.step_s, spread), rate_with_spread(done.tflops, spread)
        notes = [*notes, f"Simulated: {seconds} s a step, {tflops} TFLOPS a device ({said_of(spread)}); {done.bound}."]
    write_page(folder / "plan.html", tables.headline(request, verdict), verdict, sheets, pictures, notes)
    (folder / "report.json").write_text(json.dumps(facts(request, verdict, ()), indent=2) + "\n")


def draw(folder: Path, request: Request, verdict: Verdict, done: Simulation | None) -> dict[str, Path]:
    """Draw memory over a step and, if it was simulated, its timeline; return the pictures by title. Raises UsageError."""
    from ..planner.pictures import draw_memory
    from ..planner.simulator.timeline import draw_timeline

    make_folder(folder)
    memory, timeline, pictures = folder / "memory.png", folder / "timeline.png", {}
    if drawn(memory, draw_memory, verdict.plan, request, memory):
        pictures["Memory over one step"] = memory
    if done is not None and drawn(timeline, draw_timeline, done, timeline, verdict.plan.model):
        pictures["A step, simulated"] = timeline
    return pictures


def make_folder(folder: Path) -> None:
    """Make a folder. Raises UsageError if no file can be written in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"--out: cannot create {folder}: {error.strerror}; name another folder") from None


def facts(request: Request, verdict: Verdict, found: Sequence[Remedy]) -> dict[str, object]:
    """Return the whole plan of the fullest rank, the verdict and the remedies, in types that JSON has."""
    plan = {name: plain(getattr(verdict.plan, name)) for name in verdict.plan.__dataclass_fields__ if name != "hardware"}
    told = [_remedy(each) for each in found]
    return {"plan": plan, "hardware": request.hardware.name, "verdict": _verdict(verdict), "remedies": told}


def summary(request: Request, verdict: Verdict, found: Sequence[Remedy], layouts: Found | None) -> dict[str, object]:
    """Return the content of the page in types that JSON has: at most 100 lines."""
    plan, config = verdict.plan, verdict.plan.config
    run = {"model": plan.model, "num_parameters": plan.num_parameters, "hardware": request.hardware.name, "mesh": dict(plan.axes),
           "stage": config.stage, "precision": config.precision, "micro_batch": request.rows, "seq": request.seq,
           "accumulate": plan.micro_batches}  # fmt: skip
    peaks = {tier.value: plan.peak(tier) for tier in Tier if plan.peak(tier)}
    told = {"verdict": _verdict(verdict), "run": run, "rank": plan.rank, "held_at_the_fullest": dict(verdict.held),
            "peak_nbytes": peaks, "sent_nbytes": dict(plan.sent), "remedies": [_remedy(each) for each in found]}  # fmt: skip
    if layouts is not None:
        best = layouts.best
        told["auto"] = {"reason": layouts.reason, "layout": str(best.layout), "step_s": best.step_s, "tflops": best.tflops,
                        "tokens_per_s": best.tokens_per_s, "spread": list(layouts.hardware.spread)}  # fmt: skip
    return told


def _verdict(verdict: Verdict) -> dict[str, object]:
    return {
        "fits": verdict.fits, "text": str(verdict), "tier": verdict.tier.value, "phase": verdict.phase,
        "used_nbytes": verdict.used, "capacity_nbytes": verdict.capacity, "overhead_nbytes": verdict.overhead,
    }  # fmt: skip


def _remedy(each: Remedy) -> dict[str, object]:
    return {
        "flags": each.flags, "frees_nbytes": each.frees, "cost": each.cost, "verdict": each.then, "tried": each.verdict is not None
    }  # fmt: skip


def plain(value: object) -> object:
    """Return a value in types that JSON has: enums as their values, dtypes and other objects as text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(plain(key)): plain(each) for key, each in value.items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
