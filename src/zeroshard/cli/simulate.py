"""The command `zeroshard simulate`: show how long a step takes, what bounds it, and how ranks, batch and links change it.

    zeroshard simulate llama-3-70b --ranks 64 --hardware h100-80gb --out runs/step
    zeroshard simulate gpt-100b --hardware v100-32gb --sweep ranks=64,128,256,512 --utilisation 0.5,0.75,1

The step is that of `zeroshard plan`: the runtime's work on imagined ranks, with the time that the hardware takes for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import zeroshard as zs

from ..planner import tables
from ..planner.request import Request, judge
from ..planner.simulator.simulate import SAYS, Simulation
from ..planner.simulator.spread import rate_with_spread, said_of, seconds_with_spread, two_digits
from ..planner.simulator.sweep import Sweep, sweep
from . import report_error
from .arguments import UsageError, closest
from .options import option
from .plan import make_folder
from .plan_options import PlanOptions, parse
from .sheets import Sheet, drawn, print_json, show
from .working import working

SWEPT = ("ranks", "micro-batch")
_SIMULATED = "simulation"


@dataclass(frozen=True, kw_only=True)
class Options(PlanOptions):
    """The options of `zeroshard simulate`."""

    utilisation: str = option(
        "1", "share of each link's bandwidth that is achieved; several with a comma, for a sweep", group=_SIMULATED
    )
    latency: str | None = option(
        None, "microseconds of a hop between ranks, in place of the hardware's; several with a comma", group=_SIMULATED
    )
    sweep: str | None = option(
        None, "simulate each: ranks=8,64,512 or micro-batch=1,2,4, or both: ranks=8,64;micro-batch=1,2", group=_SIMULATED
    )

    def swept(self, request: Request) -> dict[str, list[int]]:
        """Return the lists of numbers of ranks and of micro-batch sizes to simulate."""
        found = {"ranks": [request.ranks], "micro-batch": [request.rows]}
        seen: set[str] = set()
        for part in self.sweep.split(";") if self.sweep is not None else ():
            name, _, values = part.partition("=")
            if name.strip() in seen:
                raise UsageError(f"--sweep: expected each name once, got {name.strip()} twice in {self.sweep!r}")
            seen.add(name.strip())
            if name.strip() == "batch":
                raise UsageError("--sweep: batch is now micro-batch: sequences of one forward pass of one rank")
            if name.strip() not in SWEPT:
                raise UsageError(
                    f"--sweep: expected {' or '.join(f'{n}=8,16' for n in SWEPT)}, got {part!r}{closest(name, SWEPT)}"
                )
            found[name.strip()] = [int(each) for each in _numbers("sweep", values)]
        return found


def _numbers(name: str, text: str) -> list[float]:
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        found = []
    if (
        not found
        or min(found) < 0
        or not all(map(math.isfinite, found))
        or (name == "sweep" and any(each % 1 or each < 1 for each in found))
    ):
        raise UsageError(f"--{name}: expected positive numbers with commas between, got {text!r}")
    return found


def main(argv: Sequence[str]) -> int:
    """Simulate and print; return the exit code."""
    options = parse(
        Options,
        "zeroshard simulate",
        "Tell how long a step of a run will take, and what bounds it, without running it.",
        argv,
        {},
    )
    utilisations = _numbers("utilisation", options.utilisation)
    latencies = [None] if options.latency is None else [each / 1e6 for each in _numbers("latency", options.latency)]
    try:
        with working("the model is made"):
            request = options.request()
        if options.sweep is not None or len(utilisations) * len(latencies) > 1:
            swept = options.swept(request)
            with working("sweep"):
                done = sweep(_maker(request), request.hardware, swept["ranks"], swept["micro-batch"], utilisations, latencies)
            return _told_sweep(done, request, options)
        return _told(request, utilisations[0], latencies[0], options)
    except zs.ZeroshardError as error:
        return report_error(str(error))


def _maker(request: Request) -> Any:
    """Return a function: (ranks, rows) -> traces of the request with so many ranks in all, and sequences of a micro-batch."""
    model = request.axes["pp"] * request.axes["tp"]

    def make(ranks: int, rows: int) -> Any:
        if ranks % model:
            nearest = max(ranks // model, 1) * model
            raise UsageError(f"--sweep: expected multiples of pp x tp = {model} ranks, got {ranks}; the nearest: {nearest}")
        return replace(request, axes={**request.axes, "dp": ranks // model}, rows=rows).traces()

    return make


def _told(request: Request, utilisation: float, latency_s: float | None, options: Options) -> int:
    from ..planner.pictures import draw_memory, write_page
    from ..planner.simulator.timeline import draw_timeline, write_chrome_trace

    with working("dry run"):
        plans = request.plans()
        verdict = judge(plans, request.hardware)
        done = request.simulated(plans, utilisation, latency_s)
    table = _busy(done)
    if not options.json:  # print the verdict before drawing pictures
        print(_line(done, request))
        if not verdict.fits:
            print(f"but it is {verdict}; `zeroshard plan` with the same options says what to change")
    if options.out is not None:
        folder = Path(options.out)
        make_folder(folder)
        write_chrome_trace(done, folder / "timeline.json")
        memory, timeline, pictures = folder / "memory.png", folder / "timeline.png", {}
        if drawn(timeline, draw_timeline, done, timeline, verdict.plan.model):
            pictures["A step, simulated"] = timeline
        if drawn(memory, draw_memory, verdict.plan, request, memory):
            pictures["Memory over one step"] = memory
        sheets = [table, tables.memory(verdict.plan), tables.communication(verdict.plan)]
        write_page(
            folder / "simulation.html", _line(done, request), verdict, sheets, pictures, [tables.headline(request, verdict)]
        )
    if options.json:
        found = {name: getattr(done, name) for name in ("step_s", "tflops", "tokens_per_s", "exposed_s", "bound")}
        found["busy_s"] = {resource.value: seconds for resource, seconds in done.busy.items()}
        found["spread"] = list(request.hardware.spread)
        print_json(found | {"fits": verdict.fits, "verdict": str(verdict)})
        return 0
    show(Sheet(table.rows, table.header, table.title))
    _written(options)
    return 0


def _line(done: Simulation, request: Request) -> str:
    spread = request.hardware.spread
    what = "tokens" if request.source.example is None else "samples"
    return (
        f"{seconds_with_spread(done.step_s, spread)} s a step, {rate_with_spread(done.tflops, spread)} TFLOPS a device, "
        f"{two_digits(done.tokens_per_s)} {what}/s; {request.source.name} on {request.ranks:,} {request.hardware.name} is "
        f"{done.bound} ({said_of(spread)})"
    )


def _busy(done: Simulation) -> tables.Table:
    rows = tuple(
        (
            SAYS[resource],
            two_digits(seconds),
            f"{seconds / done.step_s:.0%}",
            f"{done.critical.get(resource, 0.0) / done.step_s:.0%}",
        )
        for resource, seconds in sorted(done.busy.items(), key=lambda item: -item[1])
    )
    return tables.Table("What is busy in a step", ("", "seconds", "of the step", "of what it waits for"), rows)


def _swept_rows(done: Sweep) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    header = ("ranks", "micro-batch", "bandwidth", "seconds", "TFLOPS a device", "tokens/s", "")
    return header, tuple(
        (f"{row.ranks:,}", str(row.setting.micro_batch), f"{row.setting.utilisation:.0%}", two_digits(row.step_s), two_digits(row.tflops),
         two_digits(row.tokens_per_s), row.bound) for row in done.rows
    )  # fmt: skip


def _told_sweep(done: Sweep, request: Request, options: Options) -> int:
    from ..planner.pictures import write_page

    if options.out is not None:
        make_folder(Path(options.out))
        heading, picture = f"{request.source.name} on {request.hardware.name}", Path(options.out) / "scaling.png"
        pictures = {"Throughput by ranks": picture} if drawn(picture, done.draw, picture, heading) else {}
        table = tables.Table("Steps", *_swept_rows(done))
        write_page(
            Path(options.out) / "sweep.html",
            heading,
            None,
            [table],
            pictures,
            [str(limit) for limit in done.limits],
        )
    if options.json:
        rows = [{"ranks": row.ranks, "micro_batch": row.setting.micro_batch, "utilisation": row.setting.utilisation, "step_s": row.step_s,
                 "latency_s": row.setting.latency_s, "tflops": row.tflops, "tokens_per_s": row.tokens_per_s, "bound": row.bound}
                for row in done.rows]  # fmt: skip
        print_json({"rows": rows, "limits": [str(limit) for limit in done.limits]})
        return 0
    header, cells = done.grid()
    show(Sheet(cells, header, f"a step on {done.hardware.name}", numbers=True))
    print("\n".join(map(str, done.limits)))
    _written(options)
    return 0


def _written(options: Options) -> None:
    if options.out is not None:
        print(f"written: {', '.join(str(path) for path in sorted(Path(options.out).iterdir()))}")
