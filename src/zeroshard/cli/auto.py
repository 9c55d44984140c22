"""The search of `zeroshard plan --auto`: the fastest layout that fits into memory, and its configuration file.

    zeroshard plan gpt-13b --ranks 64 --hardware a100-80gb --auto --global-batch 512 --write-config layout.json

`zeroshard train --config`, zs.shard(config=...) and zeroshard.deepspeed read this file.
"""

from collections.abc import Sequence
from typing import Any

from ..planner.plan import Plan
from ..planner.request import Request, gib, judge
from ..planner.search.layout import Layout
from ..planner.search.requested import of_layout, profile_of
from ..planner.search.search import Candidate, Found, search
from ..planner.simulator.simulate import Simulation
from ..planner.simulator.spread import rate_with_spread, seconds_with_spread, two_digits
from ..planner.tables import Table


def choose(request: Request, global_batch: int, fixed: dict[str, Any], lossy: bool) -> tuple[Request, list[Plan], Found]:
    """Search for the fastest layout of a request; return its request, its plans, and the search's result. Raises ConfigError."""
    made: dict[Layout, tuple[Request, list[Plan]]] = {}

    def verify(layout: Layout) -> Plan:
        chosen = of_layout(request, layout)
        made[layout] = chosen, chosen.plans()
        return judge(made[layout][1], request.hardware).plan

    def simulated(layout: Layout) -> Simulation:
        chosen, plans = made[layout]
        return chosen.simulated(plans)

    fixed = {"node_size": request.ranks_of_node, **fixed}
    found = search(
        profile_of(request), request.hardware, request.ranks, global_batch, precision=request.config.precision, fixed=fixed, lossy=lossy,
        verify=verify, simulated=simulated,
    )  # fmt: skip
    return *made[found.best.layout], found


def table(found: Found) -> Table:
    """Return a table of the best layout and the runner-up."""
    shown = {"the fastest": found.best, "runner-up": found.runner_up}
    rows = [_row(name, each, found.hardware.spread) for name, each in shown.items() if each is not None]
    counts = ", ".join(f"{number:,} {name}" for name, number in found.considered.items())
    header = ("", "layout", "s a step", "TFLOPS a device", "tokens/s", "GiB of a device")
    return Table(f"Layouts: {counts}", header, tuple(rows))


def _row(name: str, each: Candidate, spread: Sequence[float]) -> tuple[str, ...]:
    return (
        name, str(each.layout), seconds_with_spread(each.step_s, spread), rate_with_spread(each.tflops, spread),
        two_digits(each.tokens_per_s), gib(each.nbytes()),
    )  # fmt: skip
