"""Before a write to values, masters or optimizer states: who reads them, or has read them ahead, in one order.

moved      states that are away for a while (zs.offload_states) are refused
recover    a backward that failed is forgotten, with what it had gathered
outdate    units drop what was fetched or gathered ahead of use; no copy to the device reads their shards
delayed    the host's step of a delayed update is over
saver      a save in the background has copied
stepper    the host's step drops the states that it has read ahead
"""

from __future__ import annotations

from typing import Any

from .unit import Unit


class WriteGate:
    """What all writers pass. delayed, stepper: of the optimizer's core (optim/), where it has them."""

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        self.delayed: Any = None
        self.stepper: Any = None

    def wait(self, *units: Unit) -> None:
        """Return when masters and states (and the shards of `units`) are at rest and nobody's but ours."""
        self.runtime.moved.check()
        self.runtime.recover()
        for unit in units:
            unit.outdate()
        if self.delayed is not None:
            self.delayed.wait()
        if self.runtime.saver is not None:
            self.runtime.saver.await_copy()

    def before(self, *units: Unit) -> None:
        """Values of `units`, masters or states are about to be written other than by a step."""
        self.wait(*units)
        if self.stepper is not None:
            self.stepper.forget()
