"""The recorder, which writes a trace of what an imagined rank does and knows where in the step and in the model the rank is.

    computation    of operators (`operators.py`): flops and bytes, one task between two others      -> the device
    collectives    FakeComm and tensor parallelism's functional ones                                -> tasks on links
    copies, files  Watcher.copy, ImaginedRest                                                       -> tasks between tiers

The rank's own tasks follow one another; what it starts (a gather, a copy) runs beside them until it waits for its `Ticket`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from ..comm.fake import Ticket, Watcher
from ..config import Tier
from ..seam import Sent, operation
from ..utils.axes import DP, EP, SP
from .faults import OutOfTime
from .meter import Meter
from .plan import Moment
from .simulator.trace import AttentionWork, Resource, Task, Trace

_LINKS = {
    (Tier.DEVICE, Tier.HOST): Resource.DOWN, (Tier.HOST, Tier.DEVICE): Resource.UP,
    (Tier.DISK, Tier.HOST): Resource.READ, (Tier.HOST, Tier.DISK): Resource.WRITE,
}  # fmt: skip
# the value of time.monotonic() after which a dry run raises OutOfTime
deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)
# a function that shows a line of progress: where a dry run, a search or a simulation is
telling: ContextVar[Callable[[str], None] | None] = ContextVar("telling", default=None)


def tell(text: str) -> None:
    """Show a line of progress, if somebody listens."""
    if (show := telling.get()) is not None:
        show(text)


class Recorder(Watcher):
    """A watcher of one rank that writes its trace; `begin` starts a new one. meter: measures what the rank holds meanwhile.

    phase: of the step, set by `enter`. unit, backward: the unit at work, and whether its backward is, set by `at`.
    """

    def __init__(self, separate: bool = True) -> None:
        """separate: see Meter."""
        self.meter = Meter(separate)
        self.trace = Trace()
        self.phase, self.unit, self.backward = "load", "", False
        self.moments: list[Moment] = []
        self.forward_flops = 0.0
        self._last: Ticket = ()
        self._joined: set[int] = set()  # tasks that were waited for: all later ones come after them anyway
        self._before: list[Task] = []  # tasks of the trace before this one
        self._flops: dict[str, float] = {}
        self._nbytes, self._kernels, self._products = 0.0, 0, 0
        self._attention: AttentionWork | None = None
        self._began = 0
        self._deadline = deadline.get()
        self._paused = False

    # -- where the rank is -----------------------------------------------------------------------------------

    def enter(self, phase: str) -> None:
        """Begin another phase, one of `plan.PHASES`."""
        self.flush()
        self.phase, self.backward = phase, False
        self.meter.enter(phase)

    def at(self, unit: str, backward: bool) -> None:
        """Note that the rank has come to a unit of the model ("": to none), in its forward or backward."""
        if (unit, backward) != (self.unit, self.backward):
            self.flush()
            self.moments.append(Moment(self.meter.phase, self.unit, self.meter.stretch(), self.meter.held(Tier.DEVICE)))
            self.unit, self.backward = unit, backward
            tell(f"dry run of rank {self.trace.rank}: {self.meter.phase}, {unit or 'whole model'}")
            self.meter.phase = "backward" if backward and self.phase == "forward" else self.phase

    def computed(self) -> None:
        """Note that forward and backward are over."""
        self.at("", False)
        self.meter.optimizing = True
        if self.phase == "forward":
            self.enter("step")

    # -- the trace -------------------------------------------------------------------------------------------

    def begin(self, trace: Trace) -> None:
        """Write all that follows to a new trace, whose first task waits for nothing."""
        self.flush()
        self._before = self.trace.tasks
        self.trace, self._last, self._joined, self.moments, self.forward_flops = trace, (), set(), [], 0.0
        self.meter.begin()
        self.meter.stretch()
        self._began += 1

    def end(self) -> None:
        """End the step, which the next one would repeat. A wait for a task of the step before is kept only where this step has an
        equal task as far from its end, for which the next step would wait."""
        self.flush()
        tasks, before = self.trace.tasks, self._before
        for number, task in enumerate(tasks):
            if any(n < 0 for n in task.after):
                after = tuple(
                    n for n in task.after
                    if n >= 0 or (-n <= len(tasks) and (tasks[n].name, tasks[n].nbytes) == (before[n].name, before[n].nbytes))
                )  # fmt: skip
                tasks[number] = replace(task, after=after)
        self.trace.end = tuple(number for number in self._last if number >= 0)

    def compute(self, flops: float, nbytes: float, dtype: str, attention: AttentionWork | None = None) -> None:
        """Add one kernel to what the device computed since the last task. attention: its work, if it is fused attention."""
        if self._paused:
            return
        self._flops[dtype] = self._flops.get(dtype, 0.0) + flops
        self._kernels += 1
        if attention is not None:
            self._attention = attention if self._attention is None else self._attention + attention
        elif flops:
            self._products += 1
        else:  # bytes of products and attention do not count, see Task.products
            self._nbytes += nbytes

    def packed(self, nbytes: int) -> None:
        """Add a kernel that packs or unpacks what a collective sends, in order with the device's other kernels."""
        dtype = max(self._flops, key=lambda name: self._flops[name], default="fp32")
        self.compute(0.0, nbytes, dtype)

    def flush(self) -> None:
        """Make one task of all that was computed since the last task."""
        if not self._kernels:
            return
        dtype = max(self._flops, key=lambda name: self._flops[name])
        flops = sum(self._flops.values())
        if self.meter.phase == "forward":
            self.forward_flops += flops
        name = f"{self.meter.phase} {self.unit}".strip()
        self._add(Task(
            name, self.meter.phase, {Resource.DEVICE: self._nbytes}, flops=flops, kernels=self._kernels, dtype=dtype, unit=self.unit,
            after=self._last, products=self._products, attention=self._attention,
        ), last=True)  # fmt: skip
        self._flops, self._nbytes, self._kernels, self._products, self._attention = {}, 0.0, 0, 0, None

    def _add(self, task: Task, last: bool = False) -> Ticket:
        if time.monotonic() > self._deadline:
            raise OutOfTime("the dry run takes longer than the time it was given")
        number = self.trace.add(task)
        if last:
            self._last = (number,)
        return (number,)

    def start(
        self, name: str, nbytes: dict[Resource, float], peers: int = 1, axis: str = DP, channel: str = "", distinct: bool = False
    ) -> Ticket:
        """Start a task that runs beside the rank's own ones, after those so far; return the ticket to wait for."""
        self.flush()
        task = Task(
            name, self.meter.phase, nbytes, self._last, unit=self.unit, peers=peers, axis=axis, channel=channel, distinct=distinct
        )  # fmt: skip
        return (*self._add(task), -self._began)

    def sent(self, label: str, sent: Sent, peers: int, distinct: bool = False) -> Ticket:
        nbytes = {Resource.INSIDE: float(sent.inside), Resource.BETWEEN: float(sent.between)}
        moved = {resource: amount for resource, amount in nbytes.items() if amount}
        axis = {SP: SP, "experts": EP}.get(label.partition(" ")[0], DP)  # ulysses.py, experts.py
        return self.start(label, moved, peers, axis, distinct=distinct) if moved else ()

    def agreed(self, label: str, nbytes: int, peers: int, hops: int) -> None:
        self.flush()  # the host waits before it starts anything else; what a device still computes then is not told apart
        name, control = f"control {operation(label)}", {Resource.CONTROL: float(nbytes)}
        self._add(Task(name, self.meter.phase, control, self._last, peers=peers, messages=hops), last=True)

    def moved(self, source: Tier, target: Tier, nbytes: int) -> Ticket:
        link = _LINKS[source, target]
        return self.start(f"{source.value} -> {target.value}", {link: float(nbytes)}) if nbytes else ()

    def join(self, ticket: Ticket | None) -> None:
        ticket = ticket or ()
        numbers = tuple(number for number in ticket if number >= 0)
        if -self._began not in ticket:  # it was started in the step before, or earlier
            numbers = tuple(n - len(self._before) for n in numbers) if 1 - self._began in ticket else ()  # below 0: Task.after
        new = [number for number in dict.fromkeys(numbers) if number not in self._last and number not in self._joined]
        if new:
            self.flush()
            self._last = (*self._last, *new)
            self._joined.update(new)

    def run_beside(self, work: Callable[[], Any]) -> tuple[Any, Ticket]:
        self.flush()
        before, joined, self._joined = self._last, self._joined, set()
        result = work()
        self.flush()
        after, self._last, self._joined = self._last, before, joined
        return result, (*(number for number in after if number >= 0), -self._began)

    @contextlib.contextmanager
    def stepping(self, numel: int, nbytes: int) -> Iterator[None]:
        self.flush()
        paused, self._paused = self._paused, True  # these operators run on the host: one task stands for them
        with self.meter.looking_away():
            yield
        self._paused = paused
        self.meter.sample()
        if numel:
            self._add(Task("host step", self.phase, {Resource.HOST: float(nbytes)}, self._last, numel=numel), last=True)
