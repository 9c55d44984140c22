"""The command `zeroshard simulate`: show how long a step takes, what bounds it, and how ranks, batch and links change it.

    zeroshard simulate llama-3-70b --ranks 64 --hardware h100-80gb --out runs/step
    zeroshard simulate gpt-100b --hardware v100-32gb --sweep ranks=64,128,256,512 --utilisation 0.5,0.75,1

The step is that of `zeroshard plan`: the runtime's work on imagined ranks, with the time that the hardware takes for it.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..planner import tables
from ..planner.request import Request, judge
from ..planner.simulator.simulate import SAYS
from ..planner.simulator.spread import rate_with_spread, said_of, seconds_with_spread, two_digits
from ..planner.simulator.sweep import Row, Sweep, sweep
from ..planner.simulator.trace import Trace
from ..utils.sheets import Sheet
from .arguments import UsageError
from .plan import draw, make_folder
from .plan_options import SimulateCommand, numbers
from .progress import working
from .sheets import drawn, print_json, show


def main(options: SimulateCommand, _: Sequence[str]) -> int:
    """Simulate, print and write; return the exit code. Raises ConfigError for the model, the hardware or options of zs.shard."""
    utilisations = numbers("utilisation", options.utilisation)
    latencies = [None] if options.latency is None else [each / 1e6 for each in numbers("latency", options.latency)]
    with working("the model is made"):
        request = options.request()
    if options.sweep is not None or len(utilisations) * len(latencies) > 1:
        swept = options.swept(request)
        with working("sweep"):
            pairs, axes = (swept.pop("ranks"), swept.pop("micro-batch")), list(swept)
            rows: list[Row] = []
            for sizes in itertools.product(*swept.values()):  # once, where no axis is varied
                mesh = dict(zip(axes, sizes, strict=True))
                done = sweep(functools.partial(_traces, request, mesh), request.hardware, *pairs, utilisations, latencies)
                text = ",".join(f"{axis}={size}" for axis, size in mesh.items())
                rows += [replace(row, setting=replace(row.setting, mesh=text)) for row in done.rows]
            done = Sweep(tuple(rows), request.hardware)
        return _told_sweep(done, request, options)
    return _told(request, utilisations[0], latencies[0], options)


def _traces(request: Request, mesh: Mapping[str, int], ranks: int, rows: int) -> list[Trace]:
    """Return the traces of the request with so many ranks along some axes, ranks in all, and sequences of a micro-batch."""
    axes = {**request.axes, **mesh}
    model = math.prod(axes.values()) // axes["dp"]
    if ranks % model:
        nearest = max(ranks // model, 1) * model
        names = " x ".join(axis for axis in ("pp", "tp", "ep", "sp") if axis in axes)
        raise UsageError(f"--sweep: expected multiples of {names} = {model} ranks, got {ranks}; the nearest: {nearest}")
    kept = {axis: size for axis, size in axes.items() if size > 1 or axis not in ("ep", "sp")}
    return replace(request, axes={**kept, "dp": ranks // model}, rows=rows).traces()


def _told(request: Request, utilisation: float, latency_s: float | None, options: SimulateCommand) -> int:
    """Simulate the request alone, print and write the result; return the exit code."""
    with working("dry run"):
        plans = request.plans()
        verdict = judge(plans, request.hardware)
        done = request.simulated(plans, utilisation, latency_s)
    rows = []
    for resource, seconds in sorted(done.busy.items(), key=lambda item: -item[1]):
        shares = (f"{part / done.step_s:.0%}" for part in (seconds, done.critical.get(resource, 0.0)))
        rows.append((SAYS[resource], two_digits(seconds), *shares))
    table = Sheet("What is busy in a step", ("", "seconds", "of the step", "of what it waits for"), rows)
    spread, what = request.hardware.spread, "tokens" if request.source.example is None else "samples"
    line = (
        f"{seconds_with_spread(done.step_s, spread)} s a step, {rate_with_spread(done.tflops, spread)} TFLOPS a device, "
        f"{two_digits(done.tokens_per_s)} {what}/s; {request.source.name} on {request.ranks:,} {request.hardware.name} is "
        f"{done.bound} ({said_of(spread)})"
    )
    messages, nbytes, seconds = done.control
    control = (
        f"control messages: {messages} in a step, {nbytes:,} bytes received, {two_digits(1e3 * seconds)} ms "
        f"({seconds / done.step_s if done.step_s else 0:.0%})"
    )
    if not options.json:  # print the verdict before drawing pictures
        print(line)
        print(control)
        if not verdict.fits:
            print(f"but it is {verdict}; `zeroshard plan` with the same options says what to change")
    if options.out is not None:
        from ..planner.pictures import write_page
        from ..planner.simulator.timeline import write_chrome_trace

        folder = Path(options.out)
        pictures = dict(reversed(draw(folder, request, verdict, done).items()))  # the step first
        write_chrome_trace(done, folder / "timeline.json")
        sheets = [table, tables.memory(verdict.plan), tables.communication(verdict.plan)]
        notes = [tables.headline(request, verdict), control]
        write_page(folder / "simulation.html", line, verdict, sheets, pictures, notes)
    if options.json:
        found = {name: getattr(done, name) for name in ("step_s", "tflops", "tokens_per_s", "exposed_s", "bound")}
        found["busy_s"] = {resource.value: seconds for resource, seconds in done.busy.items()}
        found["control"] = {"messages": messages, "nbytes": nbytes, "seconds": seconds}
        found["spread"] = list(request.hardware.spread)
        print_json(found | {"fits": verdict.fits, "verdict": str(verdict)})
        return 0
    show(table)
    _written(options)
    return 0


def _told_sweep(done: Sweep, request: Request, options: SimulateCommand) -> int:
    """Print and write the result of a sweep; return the exit code."""
    limits = [str(limit) for limit in done.limits]
    if options.out is not None:
        from ..planner.pictures import write_page

        make_folder(Path(options.out))
        heading, picture = f"{request.source.name} on {request.hardware.name}", Path(options.out) / "scaling.png"
        pictures = {"Throughput by ranks": picture} if drawn(picture, done.draw, picture, heading) else {}
        header = ("ranks", "micro-batch", "bandwidth", "seconds", "TFLOPS a device", "tokens/s", "")
        rows = []
        for row in done.rows:
            setting, numbers = row.setting, map(two_digits, (row.step_s, row.tflops, row.tokens_per_s))
            ranks = f"{row.ranks:,} {setting.mesh}".rstrip()
            rows.append((ranks, str(setting.micro_batch), f"{setting.utilisation:.0%}", *numbers, row.bound))
        table = Sheet("Steps", header, rows)
        write_page(Path(options.out) / "sweep.html", heading, None, [table], pictures, limits)
    if options.json:
        told = [{"ranks": row.ranks, "micro_batch": row.setting.micro_batch, "utilisation": row.setting.utilisation, "step_s": row.step_s,
                 "latency_s": row.setting.latency_s, **({"mesh": row.setting.mesh} if row.setting.mesh else {}), "tflops": row.tflops, "tokens_per_s": row.tokens_per_s, "bound": row.bound}
                for row in done.rows]  # fmt: skip
        print_json({"rows": told, "limits": limits})
        return 0
    names, cells = done.grid()
    show(Sheet(f"a step on {done.hardware.name}", names, cells, numbers=True))
    print("\n".join(limits))
    _written(options)
    return 0


def _written(options: SimulateCommand) -> None:
    if options.out is not None:
        print(f"written: {', '.join(str(path) for path in sorted(Path(options.out).iterdir()))}")
