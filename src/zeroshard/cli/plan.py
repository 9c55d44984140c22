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
from dataclasses import dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import zeroshard as zs

from ..activations.token_tiles import TILES
from ..config import Tier
from ..planner import tables
from ..planner.plan import Plan
from ..planner.remedies.remedy import Remedy, remedies
from ..planner.request import Request, Verdict, gib, judge
from ..planner.search.layout_file import write_config
from ..planner.search.search import Found, search
from ..planner.simulator.simulate import Simulation
from ..planner.simulator.spread import rate_with_spread, said_of, seconds_with_spread, two_digits
from ..utils.axes import DP, EP, SP
from ..utils.sheets import Sheet
from . import report_error
from .arguments import ExitCode, UsageError, quiet
from .options import option
from .plan_options import OUTPUT, PlanOptions, parse
from .progress import working
from .sheets import drawn, print_json, show

_SEARCH = "search for the fastest layout"


@dataclass(frozen=True, kw_only=True)
class Options(PlanOptions):
    """The options of `zeroshard plan`."""

    auto: bool = option(
        False, "search stage, tiers, mesh, batches and checkpointing for the fastest layout that fits", action="store_true",
        group=_SEARCH,
    )  # fmt: skip
    global_batch: int | None = option(
        None, "sequences of one optimizer step over all ranks, with --auto (default: those of the other options)", type=int,
        group=_SEARCH,
    )  # fmt: skip
    lossy: bool = option(
        False, "with --auto: also consider compression of parameters and gradients, which changes results", action="store_true",
        group=_SEARCH,
    )  # fmt: skip
    write_config: str | None = option(
        None, "with --auto: the file to write, for train --config, zs.shard(config=) and zeroshard.deepspeed", metavar="FILE",
        group=_SEARCH,
    )  # fmt: skip
    offload_path: str | None = option(
        None, "with --auto: folder on a local disk of the machines that will train, for nvme", group=_SEARCH
    )
    try_seconds: float = option(30.0, "seconds to search for changes that make it fit; 0: none", type=float, group=OUTPUT)
    brief: bool = option(False, "print one line", action="store_true", group=OUTPUT)
    full: bool = option(False, "print the tables with all numbers after the page", action="store_true", group=OUTPUT)
    json_full: bool = option(
        False, "print JSON with every task of the step and every moment of memory", action="store_true", group=OUTPUT
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect_positive("global_batch")
        if not self.try_seconds >= 0:  # also true for NaN
            raise UsageError(f"--try-seconds: expected seconds of at least 0, got {self.try_seconds:g}")
        for name in ("global_batch", "lossy", "write_config", "offload_path"):
            if getattr(self, name) and not self.auto:
                raise UsageError(f"--{name.replace('_', '-')}: expected only with --auto")
        for name in TILES:
            if getattr(self, name) and self.write_config is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')}: expected without --write-config, whose file has no place for it: pass it to zs.long_context"
                )
        path = self.write_config
        if path is not None and (not Path(path).parent.is_dir() or Path(path).is_dir()):  # before the search
            raise UsageError(f"--write-config: expected the name of a file in a folder that exists, got {path!r}")
        if self.auto and (self.offload_optimizer or self.offload_gradient or self.offload_param):
            raise UsageError("--auto searches where states are kept: leave out the --offload options")

    def fixed(self, request: Request) -> dict[str, Any]:
        """Return the settings that were given, which --auto does not search."""
        found: dict[str, Any] = {EP: 1, SP: 1, **request.axes} if self.mesh is not None else {}
        found |= {"stage": self.stage} if self.stage is not None else {}
        found |= {"hpz": self.hpz} if self.hpz > 1 else {}
        found |= {"shard_size": self.shard_size} if self.shard_size is not None else {}
        found |= {name: request.options[name] for name in ("optimizer_states", "master_weights") if name in request.options}
        found |= {"prefetch_nbytes": request.config.prefetch_limit_nbytes} if self.prefetch_bucket_size is not None else {}
        return found | ({"checkpointing": "blocks"} if self.checkpoint_activations else {})


def main(argv: Sequence[str]) -> int:
    """Plan and print; return the exit code."""
    options = parse(
        Options, "zeroshard plan", "Tell what a run will hold and send, and whether it fits, without running it.", argv,
        {"--config": "--write-config (--config is an input, of zeroshard train)"},
    )  # fmt: skip
    try:
        return _planned(options)
    except zs.ZeroshardError as error:
        return report_error(str(error))


def _planned(options: Options) -> int:
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
    options: Options, look: bool,
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
