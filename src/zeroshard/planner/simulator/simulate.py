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
    Resource.READ: "reads from disk", Resource.WRITE: "writes to disk", Resource.CONTROL: "control messages",
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
    def control(self) -> tuple[int, int, float]:
        """Number, received bytes and seconds of the control messages of a step, in the trace where they take longest."""
        found = []
        for place, trace in enumerate(self.traces):
            nbytes = [task.nbytes[Resource.CONTROL] for task in trace.tasks if Resource.CONTROL in task.nbytes]
            spans = (span for span in self.spans if span[0] == place and Resource.CONTROL in trace.tasks[span[1]].nbytes)
            found.append((len(nbytes), round(sum(nbytes)), sum(end - begin for *_, begin, end in spans)))
        return max(found, key=lambda each: each[2])

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
    flow = _Flow(traces, 1, hardware, utilisation, latency_s)
    tasks = (task for trace in traces for task in trace.tasks)
    if flow.end < max(flow.ends, default=0.0) or any(number < 0 for task in tasks for number in task.after):
        flow = _Flow(traces, _REPEATED, hardware, utilisation, latency_s)  # its tasks still run beside the next step
    spans = flow.spans()
    critical: dict[Resource, float] = defaultdict(float)
    waits: dict[tuple[Resource, str], float] = defaultdict(float)
    for number, time in flow.path():
        task = flow.tasks[number]
        slowest = resource_seconds(task, hardware, traces[flow.places[number][0]], utilisation, latency_s)
        resource = max(slowest, key=slowest.__getitem__)
        critical[resource] += time
        waits[resource, kind_of(task)] += time
    step_s = flow.end - flow.begin
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


class _Flow:
    """Steps of all traces in a row: when each task begins and ends.

    tasks: of all traces and steps; places: trace and number of each; before: the tasks that each waits for; lines: the queues of
    its resources; times: its seconds. waited: the task whose end let it begin. goals: the tasks that end the last step, which
    takes from `begin` to `end`.
    """

    def __init__(
        self, traces: Sequence[Trace], steps: int, hardware: Hardware, utilisation: float, latency_s: float | None
    ) -> None:  # fmt: skip
        self.tasks: list[Task] = []
        self.places: list[tuple[int, int]] = []
        self.before: list[list[int]] = []
        self.lines: list[list[deque[int]]] = []
        ends: list[list[int]] = [[] for _ in range(steps)]  # by step: the tasks after which ranks go on to the next
        for place, trace in enumerate(traces):
            first, size = len(self.tasks), len(trace.tasks)
            for number, step in enumerate(ends):
                step += [first + number * size + each for each in trace.end or range(size)]
            lines: dict[Resource, deque[int]] = defaultdict(deque)
            for number, task in enumerate((trace.repeated(steps) if steps > 1 else trace).tasks):
                self.tasks.append(task)
                self.places.append((place, number % size))
                self.before.append([first + each for each in task.after if each >= 0])
                self.lines.append([lines[lane] for lane in {hardware.lane(resource) for resource in task.nbytes}])
        sends: dict[str, deque[int]] = defaultdict(deque)  # a receive waits for its send: the k-th on a channel for the k-th
        for number, task in enumerate(self.tasks):
            if task.channel and task.nbytes:
                sends[task.channel].append(number)
        for number, task in enumerate(self.tasks):
            if task.channel and not task.nbytes:
                if not sends[task.channel]:
                    raise ConfigError(
                        f"{task.name!r} of trace {self.places[number][0]} waits for a message on channel {task.channel!r} that nobody "
                        "sends. Simulate the traces of all stages together."
                    )
                self.before[number].append(sends[task.channel].popleft())
        self.times = [
            seconds(task, hardware, traces[place], utilisation, latency_s)
            for task, (place, _) in zip(self.tasks, self.places, strict=True)
        ]
        self._run()
        self.goals = ends[-1]
        self.begin, self.end = ([0.0] + [max((self.ends[n] for n in goals), default=0.0) for goals in ends])[-2:]

    def _run(self) -> None:
        """Find begins, ends, and the task whose end let each begin.

        A task joins the queues of all its resources when it becomes startable; at the head of all of them it runs, and it leaves
        them when it is over.
        """
        lines, times, total = self.lines, self.times, len(self.times)
        begins, ends = [0.0] * total, [0.0] * total
        waited: list[int | None] = [None] * total
        behind: list[list[int]] = [[] for _ in range(total)]
        left = [len(before) for before in self.before]
        for number, before in enumerate(self.before):
            for other in before:
                behind[other].append(number)
        running: list[tuple[float, int]] = []  # a heap of ends
        done = 0

        def begin(number: int, now: float, by: int | None) -> None:
            if all(line[0] == number for line in lines[number]):
                begins[number], ends[number], waited[number] = now, now + times[number], by
                heapq.heappush(running, (ends[number], number))

        def arrive(number: int, now: float, by: int | None) -> None:
            for line in lines[number]:
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
                for line in lines[number]:
                    line.popleft()
                for other in behind[number]:
                    left[other] -= 1
                    if not left[other]:
                        startable.append((other, number))
            heads = {line[0]: number for number in over for line in lines[number] if line}
            for head, by in heads.items():
                begin(head, now, by)
            for number, by in sorted(startable):
                arrive(number, now, by)
        self.begins, self.ends, self.waited = begins, ends, waited
        if done < total:  # tasks wait for each other in a circle
            stuck, path = {number for number, count in enumerate(left) if count}, list[int]()
            number = min(stuck)
            while number not in path:
                path.append(number)
                number = next(other for other in self.before[number] if other in stuck)
            path = [*path[path.index(number) :], number]
            said = " waits for ".join(f"{self.tasks[n].name!r} (trace {self.places[n][0]})" for n in path)
            raise ConfigError(f"this schedule never ends: {said}. Start what others wait for before what waits for them.")

    def spans(self) -> list[Span]:
        """Return all that runs during the last step, also of the steps before it; times are from the last one's beginning."""
        begin, end = self.begin, self.end
        return [
            (*place, max(b - begin, 0.0), min(e, end) - begin)
            for place, b, e in zip(self.places, self.begins, self.ends, strict=True)
            if (b < end or b == e <= end) and (e > begin or b == e >= begin)
        ]

    def path(self) -> Iterator[tuple[int, float]]:
        """Yield (task, seconds) backwards from the task that ends the last step; each began when the one yielded next ended."""
        number = max(self.goals, key=self.ends.__getitem__, default=None)
        while number is not None and self.ends[number] > self.begin:
            if self.times[number]:
                yield number, min(self.times[number], self.ends[number] - self.begin)
            number = self.waited[number]


def kind_of(task: Task) -> str:
    """Return the first word of a task's name: "gather", "forward"."""
    return task.name.partition(" ")[0]


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
