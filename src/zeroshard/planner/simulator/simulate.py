"""The simulator: when each task of a step begins and ends, what bounds the step, and what is not hidden.

    device    | forward 1 | forward 2 |              | forward 3 |
    inside    | gather 2 |  gather 3                 |
                            ^ begins after gather 2  ^ exposed

A task is startable when all it waits for (`after`) is over and its message has come (`channel`); it begins when those that were
startable before it have left its resources.

Each resource serves tasks in the order in which they become startable, at the same moment in the order of the trace. A trace
expresses the order within a stream by `after`; across streams, a task that still waits holds up no other: the sum that ends a
reduction is started early and waits for its bytes, while computation goes on. Not modelled: NCCL runs the collectives of a group
in the order in which they were started. Each trace (of a stage of a pipeline) has its resources to itself.

The k-th receive on a channel, a task without resources, ends with the k-th send on it by another trace.

What a step starts and does not wait for (reads of the next step's states) goes on beside the next step. Then several steps in a
row are simulated, and the last is shown: from where its ranks begin it to where they go on, with what is left of the step before.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...errors import ConfigError
from ...utils.axes import role
from .hardware import Hardware, resource_seconds, seconds
from .spread import two_digits
from .trace import Resource, Task, Trace

COMPUTES = (Resource.DEVICE, Resource.HOST)
SAYS = {
    Resource.DEVICE: "computation", Resource.HOST: "the host's cores", Resource.INSIDE: "links inside nodes",
    Resource.BETWEEN: "links between nodes", Resource.DOWN: "copies to the host", Resource.UP: "copies to the device",
    Resource.READ: "reads from disk", Resource.WRITE: "writes to disk",
}  # fmt: skip
_REPEATED = 3  # steps in a row: the last one is as those that would follow
Span = tuple[int, int, float, float]  # trace, task, begin, end


@dataclass(frozen=True)
class Simulation:
    """One step of all stages. Times are in seconds from its beginning.

    busy: how long tasks occupy each resource, in the trace where it is longest. critical: seconds by resource on the critical
    path, whose tasks each began when the one before ended, up to the step's end; they add up to step_s. waits: the same by
    resource and kind of task ("gather"). exposed_s: seconds in which bytes move and nothing is computed, in the trace with most.
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
        """A sentence that says which resource bounds the step."""
        if not self.step_s:
            return "an empty step"
        resource = max(self.critical, key=self.critical.__getitem__)
        kinds = {kind: s for (of, kind), s in self.waits.items() if of is resource}
        most = max(kinds, key=kinds.__getitem__)
        all_of_it, by_most, exposed = (s / self.step_s for s in (self.critical[resource], kinds[most], self.exposed_s))
        return (
            f"bound by {SAYS[resource]}: {all_of_it:.0%} of the step, {by_most:.0%} by {most!r}; "
            f"{two_digits(1e3 * self.exposed_s)} ms ({exposed:.0%}) of communication and copies are not hidden"
        )


@dataclass
class _Graph:
    """The tasks of all traces, each with a number: which tasks each one waits for, and the queues of its resources."""

    tasks: list[Task]
    places: list[tuple[int, int]]  # trace and number of each
    before: list[list[int]]
    lines: list[list[deque[int]]]  # of each task: the queues of its resources


@dataclass
class _Flow:
    """Steps in a row: when each task begins and ends. waited: whose end let it begin. goals: the tasks that end each step."""

    graph: _Graph
    times: list[float]
    begins: list[float]
    ends: list[float]
    waited: list[int | None]
    goals: list[list[int]]

    @property
    def leaves_something(self) -> bool:
        """True if tasks of the last step still run when its ranks go on to the next."""
        return self.step[1] < max(self.ends, default=0.0)

    @property
    def step(self) -> tuple[float, float]:
        """The seconds at which the last step begins and ends."""
        before, last = ([0.0] + [max((self.ends[n] for n in goals), default=0.0) for goals in self.goals])[-2:]
        return before, last

    def spans(self) -> list[Span]:
        """Return all that runs during the last step, also of the steps before it; times are from the last one's beginning."""
        begin, end = self.step
        return [
            (*place, max(b - begin, 0.0), min(e, end) - begin)
            for place, b, e in zip(self.graph.places, self.begins, self.ends, strict=True)
            if (b < end or b == e <= end) and (e > begin or b == e >= begin)
        ]

    def path(self) -> Iterator[tuple[int, float]]:
        """Yield (task, seconds) backwards from the task that ends the last step; each began when the one yielded next ended."""
        begin, _ = self.step
        number = max(self.goals[-1], key=self.ends.__getitem__, default=None)
        while number is not None and self.ends[number] > begin:
            if self.times[number]:
                yield number, min(self.times[number], self.ends[number] - begin)
            number = self.waited[number]


def simulate(
    traces: Trace | Sequence[Trace], hardware: Hardware, utilisation: float = 1.0, latency_s: float | None = None
) -> Simulation:
    """Simulate the step that these traces are of.

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
    settings = hardware, utilisation, latency_s
    flow = _flow(traces, 1, *settings)
    if flow.leaves_something or any(number < 0 for trace in traces for task in trace.tasks for number in task.after):
        flow = _flow(traces, _REPEATED, *settings)
    begin, end = flow.step
    spans = flow.spans()
    critical: dict[Resource, float] = defaultdict(float)
    waits: dict[tuple[Resource, str], float] = defaultdict(float)
    for number, time in flow.path():
        task = flow.graph.tasks[number]
        slowest = resource_seconds(task, hardware, traces[flow.graph.places[number][0]], utilisation, latency_s)
        resource = max(slowest, key=slowest.__getitem__)
        critical[resource] += time
        waits[resource, kind_of(task)] += time
    step_s = end - begin
    readers = math.prod(size for axis, size in traces[0].axes.items() if role(axis).cuts_batch)
    flops, tokens = sum(t.model_flops for t in traces) / len(traces), max(t.tokens for t in traces)
    return Simulation(
        step_s=step_s,
        busy=_busy(spans, traces, hardware),
        critical=dict(critical),
        waits=dict(waits),
        exposed_s=max(_exposed(traces[n], [s for s in spans if s[0] == n]) for n in range(len(traces))),
        tflops=flops / step_s / 1e12 if step_s else 0.0,
        tokens_per_s=tokens * readers / step_s if step_s else 0.0,
        spans=spans,
        traces=traces,
        hardware=hardware,
    )


def _flow(traces: Sequence[Trace], steps: int, hardware: Hardware, utilisation: float, latency_s: float | None) -> _Flow:
    repeated = [trace.repeated(steps) for trace in traces] if steps > 1 else traces
    graph = _graph(repeated, [len(trace.tasks) for trace in traces], hardware)
    times = [seconds(t, hardware, traces[p[0]], utilisation, latency_s) for t, p in zip(graph.tasks, graph.places, strict=True)]
    goals: list[list[int]] = [[] for _ in range(steps)]
    first = 0
    for trace in traces:
        for step in goals:
            step += [first + number for number in trace.end or range(len(trace.tasks))]
            first += len(trace.tasks)
    return _Flow(graph, times, *_run(graph, times), goals)


def kind_of(task: Task) -> str:
    """Return the first word of a task's name: "gather", "forward"."""
    return task.name.partition(" ")[0]


def _graph(traces: Sequence[Trace], sizes: Sequence[int], hardware: Hardware) -> _Graph:
    """Number the tasks of all traces, and join receives with their sends. sizes: number of tasks in one step of each trace."""
    graph = _Graph([], [], [], [])
    sends: dict[str, list[int]] = defaultdict(list)
    receives: list[tuple[str, int]] = []
    for place, trace in enumerate(traces):
        first = len(graph.tasks)
        lines: dict[Resource, deque[int]] = defaultdict(deque)
        for number, task in enumerate(trace.tasks):
            own = first + number
            if task.channel and task.nbytes:
                sends[task.channel].append(own)
            elif task.channel:
                receives.append((task.channel, own))
            graph.tasks.append(task)
            graph.places.append((place, number % sizes[place]))
            graph.before.append([first + each for each in task.after if each >= 0])
            graph.lines.append([lines[lane] for lane in {hardware.lane(resource) for resource in task.nbytes}])
    taken: dict[str, int] = defaultdict(int)
    for channel, number in receives:
        if taken[channel] == len(sends[channel]):
            name, stage = graph.tasks[number].name, graph.places[number][0]
            raise ConfigError(
                f"{name!r} of trace {stage} waits for a message on channel {channel!r} that nobody sends. Simulate the "
                "traces of all stages together."
            )
        graph.before[number].append(sends[channel][taken[channel]])
        taken[channel] += 1
    return graph


def _run(graph: _Graph, times: Sequence[float]) -> tuple[list[float], list[float], list[int | None]]:
    """Return begins, ends, and the task whose end let each begin.

    A task joins the queues of all its resources when it becomes startable; at the head of all of them it runs, and it leaves them
    when it is over.
    """
    total = len(times)
    begins, ends = [0.0] * total, [0.0] * total
    waited: list[int | None] = [None] * total
    behind: list[list[int]] = [[] for _ in range(total)]
    left = [len(before) for before in graph.before]
    for number, before in enumerate(graph.before):
        for other in before:
            behind[other].append(number)
    running: list[tuple[float, int]] = []  # a heap of ends
    done = 0

    def begin(number: int, now: float, by: int | None) -> None:
        if all(line[0] == number for line in graph.lines[number]):
            begins[number], ends[number], waited[number] = now, now + times[number], by
            heapq.heappush(running, (ends[number], number))

    def arrive(number: int, now: float, by: int | None) -> None:
        for line in graph.lines[number]:
            line.append(number)
        begin(number, now, by)

    for number in [number for number, count in enumerate(left) if not count]:
        arrive(number, 0.0, None)
    while running:
        now, over = running[0][0], []
        while running and running[0][0] == now:
            over.append(heapq.heappop(running)[1])
        done += len(over)
        startable = []
        for number in over:
            for line in graph.lines[number]:
                line.popleft()
            for other in behind[number]:
                left[other] -= 1
                if not left[other]:
                    startable.append((other, number))
        heads = {line[0]: number for number in over for line in graph.lines[number] if line}
        for head, by in heads.items():
            begin(head, now, by)
        for number, by in sorted(startable):
            arrive(number, now, by)
    if done < total:
        raise ConfigError(_circle(graph, {number for number, count in enumerate(left) if count}))
    return begins, ends, waited


def _circle(graph: _Graph, stuck: set[int]) -> str:
    """Name tasks that wait for each other in a circle, for an error message."""
    path: list[int] = []
    number = min(stuck)
    while number not in path:
        path.append(number)
        number = next(other for other in graph.before[number] if other in stuck)
    path = [*path[path.index(number) :], number]
    said = " waits for ".join(f"{graph.tasks[n].name!r} (trace {graph.places[n][0]})" for n in path)
    return f"this schedule never ends: {said}. Start what others wait for before what waits for them."


def _busy(spans: Sequence[Span], traces: Sequence[Trace], hardware: Hardware) -> dict[Resource, float]:
    by_trace: dict[tuple[int, Resource], float] = defaultdict(float)
    for place, number, begin, end in spans:
        for lane in {hardware.lane(resource) for resource in traces[place].tasks[number].nbytes}:
            by_trace[place, lane] += end - begin
    return {r: max(s for (_, of), s in by_trace.items() if of is r) for r in Resource if any(of is r for _, of in by_trace)}


def _exposed(trace: Trace, spans: Sequence[Span]) -> float:
    """Return the seconds in which links are busy and nothing is computed."""
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
