"""Attendance: which ranks still have data. Here all of them have; guard/attendance.py has the record that `zs.join` needs."""

from __future__ import annotations

from .comm.base import DirectComm
from .gradient_account import GradientAccount
from .unit import Unit


class Attendance:
    """A record of which ranks have data, as the engine asks and tells it; each method here does what suits ranks that all have data.

    ended: ranks whose data has ended, as far as all ranks know. serving: this rank is one of them, and follows the others. joined: it
    is inside `zs.join`. share: batches of this step / batches if every rank still had data. Reductions take the mean over all ranks, so
    the runtime divides it by `share`: if rank 0 has gradient 6 and rank 1 no data, the mean is (6 + 0) / 2 = 3, `share` 0.5, and
    3 / 0.5 = 6. steps: number of optimizer steps of all ranks; labels of operations show the next number.
    """

    ended: frozenset[int] = frozenset()
    serving = joined = False
    share = 1.0

    def __init__(self, comm: DirectComm, units: list[Unit], account: GradientAccount) -> None:
        self.comm, self.account, self.steps = comm, account, 0
        self.gathers = any(unit.sharded for unit in units)
        self.gathers_meet = not comm.alone and self.gathers and any(unit.meets or unit.staged for unit in units)

    def remark(self) -> str:
        """Return the remark " [step 3]" for the end of a label, in which ranks may differ (engine/comm/control.py: operation)."""
        return f" [step {self.steps + 1}]"

    def header(self) -> bytes:
        """Return this rank's bytes for the exchange at the end of a backward; the same number on every rank."""
        return b""

    def meet(self, headers: list[bytes] | None) -> None:
        """Take the headers of all ranks, in rank order, at the end of a backward; None: all are equal."""

    def begin_forward(self) -> None:
        """Note that a forward of the model begins."""

    def zero_grad(self, to_zeros: bool) -> None:
        """Note a call of zero_grad: to None, or to zeros."""

    def tell(self, event: str, values: object = None) -> None:
        """Announce an event in which all ranks with data take part now; ranks without data then take part, too (collective)."""

    def gather(self, unit: Unit) -> None:
        """Start to gather a unit; announce that first to ranks whose data has ended, if the gather needs them."""
        unit.unshard()

    def call(self, what: str) -> None:
        """Note a call that every rank must make. Raise ZeroshardError if the data of some rank has ended (see `refuse`)."""
        self.refuse(what)
        self.note(what)

    def note(self, what: str) -> None:
        """Record a call that every rank must make, so that reports of stalls can tell which rank lacks it."""

    def refuse(self, what: str) -> None:
        """Raise ZeroshardError if the data of some rank has ended: `what` needs every rank, and is not announced to it."""
