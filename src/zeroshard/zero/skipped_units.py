"""Units that the batch of this rank does not use, where a gather needs every rank: it takes part in those gathers all the same.

    record     stem tower.0 tower.1 head | head' tower.1' tower.0' stem'
    rank 0     stem tower.0 tower.1 head | head' tower.1' tower.0' stem'      an image and a text
    rank 1     stem (     .      . ) head | head' (      .        . ) stem'   a text: it gathers where the record says, and goes on

What the record (zero/schedule.py) knows of is served so: it is the same on all ranks, whoever skips. A unit that the record does not
know, because no rank used it in the recorded step, can only be gathered if all ranks use it; otherwise they wait for one another
until the stall is found and told by name. Where gathers and reductions are matched by one order (NCCL) neither is served: what is
skipped has no reduction in its turn. Nor with `max_live_parameters`: how long a unit lives depends on what has come before it.
"""

from __future__ import annotations

from typing import Any

from .schedule import Visit


def take_part(runtime: Any, visit: Visit | None) -> None:
    """Gather what other ranks may gather before a visit (None: the end) of a training step; what stays gathered there stays so here."""
    if not runtime.attendance.gathers_meet or runtime.comm.ordered or runtime.config.max_live_parameters:
        return
    visits = runtime.schedule.skipped(visit)
    if not visits:
        return
    for visit in visits:
        unit = runtime.units[visit.unit]
        runtime.schedule.visit(visit, training=True)
        runtime.attendance.gather(unit)
        unit.ready()
        if unit.in_use:
            continue
        if unit.lends and not visit.backward:  # where it is used it stays gathered until the forward is over
            runtime.lend_out(unit)
        elif visit.backward or not runtime.prefetcher.lives_on(unit, True):
            unit.release()
    names = ", ".join(dict.fromkeys(runtime.units[visit.unit].name for visit in visits))
    runtime.tell(f"not used by this rank in a step, and gathered for those that may: {names}")
