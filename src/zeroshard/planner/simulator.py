"""The simulator: when each task of a step begins and ends, what bounds the step, and what is not hidden.

    device    | forward 1 | forward 2 |              | forward 3 |        a task begins when all it waits for (`after`) is over,
    inside    | gather 2 |  gather 3                 |                    its message has come (`channel`), and the tasks that were
                            ^ begins after gather 2  ^ exposed            started before it on any of its resources are over

Resources serve tasks in the order in which they were started, that is in the trace's: a CUDA stream, NCCL's communicator and a
rank's thread do so, and one that waits holds up those behind it. A trace (a stage of a pipeline) has its resources to itself.
So nothing has to be queued: every task begins at the latest of the ends of a few others, and times follow in one pass over this
graph. Tasks that are in a circle can never begin.

The k-th receive on a channel, a task without resources, ends with the k-th send on it by another trace.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import ConfigError
from .hardware import Hardware, resource_seconds, seconds
from .trace import Resource, Task, Trace

COMPUTES = (Resource.DEVICE, Resource.HOST)
_SAYS = {
    Resource.DEVICE: "computation", Resource.HOST: "the host's cores", Resource.INSIDE: "links inside nodes",
    Resource.BETWEEN: "links between nodes", Resource.DOWN: "copies to the host", Resource.UP: "copies to the device",
    Resource.READ: "reads from disk", Resource.WRITE: "writes to disk",
}  # fmt: skip
Span = tuple[int, int, float, float]  # trace, task, begin, end


@dataclass(frozen=True)
class Simulation:
    """One step of all stages. Times are in seconds from its beginning.

    busy: how long each resource works, in the trace in which it works longest. critical: of the tasks of which each began when
    the one before it ended, the last of them ending the step: seconds by resource; they add up to step_s. waits: the same by
    resource and kind of task ("gather"). exposed_s: how long nothing is computed while bytes move, of the trace with most.
    """

    step_s: float
    busy: dict[Resource, float]
    critical: dict[Resource, float]
    waits: dict[tuple[Resource, str], float]
    exposed_s: float
    tflops: float  # of a device
    tokens_per_s: float  # of all ranks
    spans: list[Span] = field(repr=False)
    traces: tuple[Trace, ...] = field(repr=False)
    hardware: Hardware = field(repr=False)

    @property
    def bound(self) -> str:
        """What bounds the step, a sentence."""
        if not self.step_s:
            return "an empty step"
        resource = max(self.critical, key=self.critical.__getitem__)
        kinds = {kind: s for (of, kind), s in self.waits.items() if of is resource}
        share = round(100 * self.critical[resource] / self.step_s)
        most = max(kinds, key=kinds.__getitem__)
        return (
            f"bound by {_SAYS[resource]}: {share}% of the step, {round(100 * kinds[most] / self.step_s)}% by {most!r}; "
            f"{1e3 * self.exposed_s:.3g} ms ({round(100 * self.exposed_s / self.step_s)}%) of communication and copies are not hidden"
        )


@dataclass
class _Graph:
    """Tasks of all traces by one number each, and what they wait for."""

    tasks: list[Task]
    places: list[tuple[int, int]]  # trace and number of each
    before: list[list[int]]


def simulate(
    traces: Trace | Sequence[Trace], hardware: Hardware, utilisation: float = 1.0, latency_s: float | None = None
) -> Simulation:
    """The step that these traces are.

    Args:
        traces: of one rank, or of one rank of each stage of a pipeline, joined by their tasks' channels.
        utilisation: the share of each link's bandwidth that is achieved, above 0 and up to 1.
        latency_s: of a hop between ranks, in place of the hardware's.

    Raises:
        ConfigError: a value outside its range; a receive without a send; tasks that wait for each other in a circle, named.
    """
    traces = (traces,) if isinstance(traces, Trace) else tuple(traces)
    if not traces:
        raise ConfigError("simulate: expected at least one trace, got none")
    if not 0 < utilisation <= 1:
        raise ConfigError(f"utilisation: expected a share of the bandwidth above 0 and up to 1, got {utilisation!r}")
    if latency_s is not None and not 0 <= latency_s < math.inf:
        raise ConfigError(f"latency_s: expected seconds of at least 0, got {latency_s!r}")
    graph = _graph(traces, hardware)
    times = [seconds(t, hardware, traces[p[0]], utilisation, latency_s) for t, p in zip(graph.tasks, graph.places, strict=True)]
    begins, ends, waited = _run(graph, times)
    step_s = max(ends, default=0.0)
    spans = [(*place, begin, end) for place, begin, end in zip(graph.places, begins, ends, strict=True)]
    critical: dict[Resource, float] = defaultdict(float)
    waits: dict[tuple[Resource, str], float] = defaultdict(float)
    number = max(range(len(ends)), key=ends.__getitem__) if ends else None
    while number is not None:
        task = graph.tasks[number]
        if times[number]:
            slowest = resource_seconds(task, hardware, traces[graph.places[number][0]], utilisation, latency_s)
            resource = max(slowest, key=slowest.__getitem__)
            critical[resource] += times[number]
            waits[resource, kind_of(task)] += times[number]
        number = waited[number]
    flops, tokens = sum(t.model_flops for t in traces) / len(traces), max(t.tokens for t in traces)
    return Simulation(
        step_s=step_s,
        busy=_busy(graph, times, hardware),
        critical=dict(critical),
        waits=dict(waits),
        exposed_s=max(_exposed(traces[n], [s for s in spans if s[0] == n]) for n in range(len(traces))),
        tflops=flops / step_s / 1e12 if step_s else 0.0,
        tokens_per_s=tokens * traces[0].axes.get("dp", 1) / step_s if step_s else 0.0,
        spans=spans,
        traces=traces,
        hardware=hardware,
    )


def kind_of(task: Task) -> str:
    """The first word of its name: "gather", "forward"."""
    return task.name.partition(" ")[0]


def _graph(traces: Sequence[Trace], hardware: Hardware) -> _Graph:
    graph = _Graph([], [], [])
    sends: dict[str, list[int]] = defaultdict(list)
    receives: list[tuple[str, int]] = []
    for place, trace in enumerate(traces):
        first, last = len(graph.tasks), {}
        for number, task in enumerate(trace.tasks):
            own = first + number
            before = [first + each for each in task.after]
            for lane in {hardware.lane(resource) for resource in task.nbytes}:
                if lane in last:
                    before.append(last[lane])
                last[lane] = own
            if task.channel and task.nbytes:
                sends[task.channel].append(own)
            elif task.channel:
                receives.append((task.channel, own))
            graph.tasks.append(task)
            graph.places.append((place, number))
            graph.before.append(before)
    taken: dict[str, int] = defaultdict(int)
    for channel, number in receives:
        if taken[channel] == len(sends[channel]):
            name, stage = graph.tasks[number].name, graph.places[number][0]
            raise ConfigError(f"{name!r} of trace {stage} waits for a message on channel {channel!r} that nobody sends. Simulate the "
                              "traces of all stages together.")  # fmt: skip
        graph.before[number].append(sends[channel][taken[channel]])
        taken[channel] += 1
    return graph


def _run(graph: _Graph, times: Sequence[float]) -> tuple[list[float], list[float], list[int | None]]:
    """Begins, ends, and for which task each waited last."""
    total = len(times)
    begins, ends = [0.0] * total, [0.0] * total
    waited: list[int | None] = [None] * total
    behind: list[list[int]] = [[] for _ in range(total)]
    open_ = [len(before) for before in graph.before]
    for number, before in enumerate(graph.before):
        for other in before:
            behind[other].append(number)
    ready = [number for number, count in enumerate(open_) if not count]
    for number in ready:  # grows on the way
        before = graph.before[number]
        if before:
            waited[number] = max(before, key=ends.__getitem__)
            begins[number] = ends[waited[number]]
        ends[number] = begins[number] + times[number]
        for other in behind[number]:
            open_[other] -= 1
            if not open_[other]:
                ready.append(other)
    if len(ready) < total:
        raise ConfigError(_circle(graph, set(range(total)) - set(ready)))
    return begins, ends, waited


def _circle(graph: _Graph, stuck: set[int]) -> str:
    """Who waits for whom."""
    path: list[int] = []
    number = min(stuck)
    while number not in path:
        path.append(number)
        number = next(other for other in graph.before[number] if other in stuck)
    path = path[path.index(number) :] + [number]
    said = " waits for ".join(f"{graph.tasks[n].name!r} (trace {graph.places[n][0]})" for n in path)
    return f"this schedule never ends: {said}. Start what others wait for before what waits for them."


def _busy(graph: _Graph, times: Sequence[float], hardware: Hardware) -> dict[Resource, float]:
    by_trace: dict[tuple[int, Resource], float] = defaultdict(float)
    for task, (place, _), time in zip(graph.tasks, graph.places, times, strict=True):
        for lane in {hardware.lane(resource) for resource in task.nbytes}:
            by_trace[place, lane] += time
    return {r: max(s for (_, of), s in by_trace.items() if of is r) for r in Resource if any(of is r for _, of in by_trace)}


def _exposed(trace: Trace, spans: Sequence[Span]) -> float:
    """Seconds in which links are busy and nothing is computed."""
    changes: list[tuple[float, int, int]] = []
    for _, number, begin, end in spans:
        task = trace.tasks[number]
        if task.nbytes and end > begin:
            which = 0 if any(resource in COMPUTES for resource in task.nbytes) else 1
            changes += [(begin, which, 1), (end, which, -1)]
    running, exposed, since = [0, 0], 0.0, 0.0
    for at, which, change in sorted(changes):
        if running[1] and not running[0]:
            exposed += at - since
        running[which] += change
        since = at
    return exposed
