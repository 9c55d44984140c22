"""Units that this rank's batch does not use: where gathers need every rank, this rank takes part in their gathers.

    record     stem tower.0 tower.1 head | head' tower.1' tower.0' stem'
    rank 0     stem tower.0 tower.1 head | head' tower.1' tower.0' stem'      an image and a text
    rank 1     stem (     .      . ) head | head' (      .        . ) stem'   a text: it gathers where the record says, and goes on

This works for units in the record (zero/schedule.py), which is the same on all ranks, whichever rank skips. A unit that no rank
used in the recorded step can only be gathered if all ranks use it; otherwise ranks wait for one another until a StallError names
it. It does not work for communicators that match gathers and reductions by one order (NCCL), since a skipped unit has no
reduction in its turn, nor with `max_live_parameters`, since a unit's release then depends on the units gathered before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .schedule import Visit

if TYPE_CHECKING:
    from .runtime import Runtime


def take_part(runtime: Runtime, visit: Visit | None) -> None:
    """Gather and release, as other ranks may do, the recorded units before `visit` (None: before the end of the step)."""
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
        if unit.in_use:  # a recorded visit inside a forward that still runs
            continue
        if unit.lends and not visit.backward:  # ranks that use it keep it until the forward is over
            runtime.lend_out(unit)
        elif visit.backward or not runtime.prefetcher.lives_on(unit, True):
            unit.release()
    names = ", ".join(dict.fromkeys(runtime.units[visit.unit].name for visit in visits))
    runtime.schedule.note(f"not used by this rank in a step, and gathered because other ranks may use them: {names}")
