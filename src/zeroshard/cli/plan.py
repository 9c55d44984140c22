"""`zeroshard plan`: know before you run. What a rank will hold and send, whether it fits, and what would make it fit.

    zeroshard plan llama-3-70b --ranks 64 --device h100-80gb
    zeroshard plan gpt-1t --mesh dp=16,pp=8,tp=8 --checkpoint-activations --out runs/plan
    zeroshard plan mine:model --ranks 8 --device a100-40gb --brief
    zeroshard plan gpt-13b --ranks 64 --auto --global-batch 512 --config plan.json

Exit code 0: it fits; 1: it does not; 2: a mistake in the call.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import zeroshard as zs

from ..planner import tables
from ..planner.plan import Plan
from ..planner.request import Request, Verdict, gib, judge
from ..remedies.remedy import Remedy, remedies
from . import auto, report_error
from .arguments import UsageError
from .plan_options import PlanOptions, _option, parse
from .sheets import Sheet, show

SHORT = 1


@dataclass(frozen=True)
class Options(PlanOptions):
    """Of `zeroshard plan`."""

    auto: bool = _option(
        False, "search stage, tiers, mesh, batches and checkpointing for the fastest layout that fits", action="store_true"
    )
    global_batch: int | None = _option(
        None, "sequences of a step over all ranks, with --auto (default: of these options)", type=int
    )
    lossy: bool = _option(
        False, "with --auto: also what changes results, parameters and gradients that travel packed", action="store_true"
    )
    config: str | None = _option(
        None, "with --auto: the file to write, for train --config, zs.shard(config=) and zeroshard.deepspeed"
    )
    offload_path: str | None = _option(
        None, "with --auto: folder on a local disk of the machines that will train, for what rests there"
    )
    try_seconds: float = _option(30.0, "to look for changes that would make it fit; 0: none", type=float)
    brief: bool = _option(False, "print one line", action="store_true")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.global_batch is not None and self.global_batch < 1:
            raise UsageError(f"--global-batch: expected a positive integer, got {self.global_batch}")
        if not self.try_seconds >= 0:  # not a number is none, too
            raise UsageError(f"--try-seconds: expected seconds of at least 0, got {self.try_seconds:g}")
        for name in ("global_batch", "lossy", "config", "offload_path"):
            if getattr(self, name) and not self.auto:
                raise UsageError(f"--{name.replace('_', '-')}: expected none without --auto")
        if self.config is not None and (not Path(self.config).parent.is_dir() or Path(self.config).is_dir()):  # before the search
            raise UsageError(f"--config: expected the name of a file in a folder that there is, got {self.config!r}")
        if self.auto and (self.offload_optimizer or self.offload_gradient or self.offload_param):
            raise UsageError("--auto: expected no --offload option: where states rest is searched")

    def fixed(self, request: Request) -> dict[str, Any]:
        """What --auto leaves as it is given."""
        found: dict[str, Any] = dict(request.axes) if self.mesh is not None else {}
        found |= {"stage": self.stage} if self.stage is not None else {}
        found |= {"hpz": self.hpz} if self.hpz > 1 else {}
        found |= {"shard_size": self.shard_size} if self.shard_size is not None else {}
        return found | ({"checkpointing": "blocks"} if self.checkpoint_activations else {})


def main(argv: Sequence[str]) -> int:
    """Plan and print; returns the exit code."""
    options = parse(
        Options, "zeroshard plan", "Tell what a run will hold and send, and whether it fits, without running it.", argv
    )
    try:
        request, layouts = options.request(), None
        if options.auto:
            batch = options.global_batch or request.axes["dp"] * request.rows * request.micro_batches
            request, plans, layouts = auto.choose(request, batch, options.fixed(request), options.lossy)
            if options.config is not None:
                auto.write(layouts, options.config, options.offload_path)
        else:
            plans = request.plans()
        verdict = judge(plans, request)
        look = not (verdict.fits or options.brief or options.auto) and options.try_seconds > 0
        found = remedies(request, plans, options.try_seconds) if look else []
        sheets = [*([auto.table(layouts)] if layouts is not None else []), *_sheets(request, verdict, found)]
        notes = [*request.source.notes, *([layouts.reason] if layouts is not None else [])]
        if options.out is not None:
            _write(Path(options.out), request, plans, verdict, sheets, notes)
    except zs.ZeroshardError as error:
        return report_error(str(error))
    if options.json:
        print(json.dumps(facts(request, verdict, found) | ({"reason": layouts.reason} if layouts is not None else {}), indent=2))
    else:
        _print(request, verdict, sheets, notes, options)
        if look and not found:
            print(
                f"no change was found in {options.try_seconds:g} s that makes it fit: look for longer (--try-seconds), or take more ranks"
            )
    return 0 if verdict.fits else SHORT


def _print(request: Request, verdict: Verdict, sheets: Sequence[tables.Table], notes: Sequence[str], options: Options) -> None:
    if not options.brief:
        for table in sheets:
            show(Sheet(table.rows, table.header, table.title))
        print("\n".join(notes), end="\n" * bool(notes))
    print(tables.headline(request, verdict))
    written = [str(path) for path in sorted(Path(options.out).iterdir())] if options.out is not None else []
    written += [options.config] if options.config is not None else []
    if written:
        print(f"written: {', '.join(written)}")


def _sheets(request: Request, verdict: Verdict, found: Sequence[Remedy]) -> list[tables.Table]:
    plan = verdict.plan
    made = [tables.memory(plan, request), tables.communication(plan), tables.activations(plan)]
    rows = tuple((each.flags, f"{gib(each.frees)} GiB", each.then, each.cost) for each in found)
    return made + (
        [tables.Table("What would make it fit, the cheapest first", ("add", "frees", "then it", "cost"), rows)] if rows else []
    )


def _write(
    folder: Path, request: Request, plans: Sequence[Plan], verdict: Verdict, sheets: Sequence[tables.Table], notes: list[str]
) -> None:
    """The pictures, the page and report.json. Raises UsageError."""
    from ..planner.pictures import draw_memory, write_page
    from ..simulator.simulate import simulate
    from ..simulator.timeline import draw_timeline

    # of a pipeline the other stages would have to be planned too: `zeroshard simulate` does
    done = simulate(plans[0].trace, request.hardware) if request.axes["pp"] == 1 else None
    make_folder(folder)
    draw_memory(verdict.plan, request, folder / "memory.png")
    pictures = {"Memory over one step": folder / "memory.png"}
    if done is not None:
        draw_timeline(done, folder / "timeline.png", verdict.plan.model)
        pictures["A step, simulated"] = folder / "timeline.png"
        notes = [*notes, f"Simulated: {done.step_s:.3g} s a step, {done.tflops:.3g} TFLOPS a device, {done.bound}."]
    write_page(folder / "plan.html", tables.headline(request, verdict), verdict, sheets, pictures, notes)
    (folder / "report.json").write_text(json.dumps(facts(request, verdict, ()), indent=2) + "\n")


def make_folder(folder: Path) -> None:
    """Raise UsageError for a folder in which nothing can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(f"--out: cannot create {folder}: {error.strerror}; name another folder") from None


def facts(request: Request, verdict: Verdict, found: Sequence[Remedy]) -> dict[str, Any]:
    """The plan of the fullest rank, the verdict and what would make it fit, in plain types."""
    return {
        "plan": plain(verdict.plan),
        "hardware": request.hardware.name,
        "verdict": {
            "fits": verdict.fits, "text": str(verdict), "tier": verdict.tier.value, "phase": verdict.phase,
            "used_nbytes": verdict.used, "capacity_nbytes": verdict.capacity, "overhead_nbytes": verdict.overhead,
        },
        "remedies": [{"flags": r.flags, "frees_nbytes": r.frees, "cost": r.cost, "verdict": r.then, "tried": r.verdict is not None} for r in found],
    }  # fmt: skip


def plain(value: Any) -> Any:
    """For JSON: enums as their values, dtypes and other objects as their text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, dict) or hasattr(value, "items"):
        return {str(plain(key)): plain(each) for key, each in value.items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
