"""The gate before a write to values, masters or optimizer states: it waits for all readers and drops copies, in this order.

moved        raise if states are away (zs.offload_states)
recover      clear the state of a failed backward, and release the units that it had gathered
invalidate   units drop copies that they fetched or gathered ahead of use, and wait for copies to the device that read shards
delayed      wait for the host's step of a delayed update
saver        wait until a save in the background has copied what it saves
stepper      the host's step drops the states that it has read ahead
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..errors import ZeroshardError
from .unit import ParamGroup, Unit

if TYPE_CHECKING:
    from .parameter import ParamHome
    from .runtime import Runtime


class WriteGate:
    """The gate of one model. Who writes calls `before` first, a step `invalidate` and `refresh`; who reads states calls `wait`.

    delayed: the delayed update; steppers: those of steps on the host. The optimizers' cores add theirs, if used.
    saver: the background saver of checkpoints, from the first save on. unusable: why the values are not of one state (a load that
    failed half-way, a write to whole parameters that stays), which each use of the model raises. stale: parameters that are yet to be
    written anew before it may be used; empty where only zs.load ends that.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.delayed: Any = None
        self.steppers: list[Any] = []
        self.saver: Any = None
        self.unusable: ZeroshardError | None = None
        self.stale: set[ParamHome] = set()

    def wait(self, *units: Unit) -> None:
        """Wait until masters and states (and the shards of `units`) are at rest and nobody reads or writes them."""
        self.runtime.moved.check()
        self.runtime.recover()
        for unit in units:
            unit.invalidate()
        if self.delayed is not None:
            self.delayed.wait()
        if self.saver is not None:
            self.saver.await_copy()

    def invalidate(self) -> None:
        """Clear a failed backward; let all units drop gathered and fetched copies of shards, which are about to be written."""
        self.runtime.recover()
        for unit in self.runtime.units:
            unit.invalidate()

    def before(self, *units: Unit) -> None:
        """Prepare for a write, other than by a step, to values of `units`, to masters or to states."""
        self.wait(*units)
        self._drop_ahead()

    def refresh(self, groups: Iterable[ParamGroup]) -> None:
        """Wait as `wait` does, then copy what the program has written to parameters since the last step into their masters."""
        self.wait()
        for group in groups:
            if group.masters.outdated():
                self._drop_ahead()
                group.masters.follow()

    def mark(self, why: ZeroshardError | None, stale: Iterable[ParamHome] = ()) -> None:
        """Refuse the use of the model, or (None) let it be used again. stale: see the class."""
        stale = set(stale)
        if not stale or self.unusable is None or self.stale:  # else it is a load that failed half-way, which only zs.load ends
            self.unusable, self.stale = why, stale

    def renewed(self, home: ParamHome) -> None:
        """Note that this rank's slice of a parameter was, or is about to be, written anew as a whole, as every rank's is."""
        if home in self.stale:
            self.stale.remove(home)
            if not self.stale:
                self.unusable = None

    def read_ahead(self) -> None:
        """Continue to read the next step's states ahead; the runtime calls this during forward and backward."""
        if self.steppers and not (self.delayed is not None and self.delayed.running):
            for stepper in self.steppers:
                stepper.read_ahead()

    def _drop_ahead(self) -> None:
        for stepper in self.steppers:
            stepper.drop_ahead()
