"""A trace: the work of one rank in one step, as tasks that wait for each other. Only data; the simulator finds their times.

    chain     | forward 1 |--------| forward 2 |...      tasks of the program's own order: each after the one before
                    :             :
    inside           | gather 2  |                       started where the program starts it, waited for where it waits

A task occupies all its resources from its beginning to its end; each resource serves tasks in the order in which they can begin.
The program order, what is started ahead and where the rank waits are those of the runtime that was traced
(`planner/recorder.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from ...utils.axes import DP


class Resource(str, Enum):
    """A resource that a task occupies. Links, between ranks or to the host's memory and disks, work beside computation."""

    DEVICE = "device"  # computes
    HOST = "host"  # the host's cores: optimizer steps of offloaded states
    INSIDE = "inside"  # links between ranks of a node
    BETWEEN = "between"  # links between nodes
    DOWN = "down"  # device -> host
    UP = "up"  # host -> device
    READ = "read"  # disk -> host
    WRITE = "write"  # host -> disk
    CONTROL = "control"  # messages of the hosts by which ranks agree, over the links between nodes if there are several


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """The work of fused attention kernels in a task.

    flops: over the whole square of scores, as models count them; a backward's are 2.5 times a forward's. tokens: of a sequence.
    causal: whether the half above the diagonal is skipped. kernels: launches.
    """

    flops: float
    tokens: int
    causal: bool
    kernels: int

    def __add__(self, other: AttentionWork) -> AttentionWork:
        """Return the work of both, one after the other; tokens and causal are those of the one with more flops."""
        larger = max(self, other, key=lambda each: each.flops)
        return AttentionWork(self.flops + other.flops, larger.tokens, larger.causal, self.kernels + other.kernels)


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of one rank's work.

    name: "gather blocks.3", "forward blocks.3". phase: "forward", "backward", "step". nbytes: bytes by resource: what this rank
    sends over a link (INSIDE, BETWEEN), copies, reads or writes; on DEVICE and HOST what it moves between memory and cores.
    flops: on DEVICE or HOST; a multiplication and an addition are two. attention: those of fused attention among them. kernels:
    launches on the device. products: matrix products among them; nbytes of DEVICE are then those of the kernels that are neither
    products nor attention. 0: not told apart. peers: number of ranks that meet in a collective.
    numel: parameters that are stepped (HOST, DEVICE). after: numbers of the tasks that must be over before it begins; below 0:
    tasks of the step before, counted from its last (-1). channel: the name that joins a send with its receive in another stage,
    see `simulate.py`. distinct: whether a collective sends other bytes to each peer (an all-to-all), so that ranks cannot pass
    bytes on, as those of a ring do. messages: collectives or copies, one after the other, that the task stands for; on CONTROL hops,
    and nbytes are received.
    """

    name: str
    phase: str
    nbytes: Mapping[Resource, float]
    after: tuple[int, ...] = ()
    flops: float = 0.0
    kernels: int = 0
    peers: int = 1
    numel: int = 0
    axis: str = DP  # along which the ranks of a collective meet
    dtype: str = "fp32"  # of the computation: each dtype has its own peak flops
    unit: str = ""  # of the model, whose work it is
    channel: str = ""
    distinct: bool = False
    messages: int = 1
    products: int = 0
    attention: AttentionWork | None = None


@dataclass
class Trace:
    """The tasks of a rank's step in the order in which they were started; a task's number is its place.

    end: tasks that the rank has waited for when it goes on to the next step; empty: all. axes: number of ranks along each axis of
    the mesh. node_size: ranks of a node. model_flops: of the step on this rank, without recomputed forwards, as throughput is
    counted. tokens: those that this rank reads in the step.
    """

    tasks: list[Task] = field(default_factory=list)
    end: tuple[int, ...] = ()
    rank: int = 0
    axes: dict[str, int] = field(default_factory=lambda: {DP: 1})
    node_size: int = 1
    model_flops: float = 0.0
    tokens: int = 0

    def add(self, task: Task) -> int:
        """Append a task; return its number."""
        assert all(number < len(self.tasks) for number in task.after), f"{task.name} waits for a task to come"
        self.tasks.append(task)
        return len(self.tasks) - 1

    def repeated(self, times: int) -> Trace:
        """Return a trace of the same step several times, each begun where the rank goes on from the one before."""
        size, end, tasks = len(self.tasks), self.end or tuple(range(len(self.tasks))), []
        for first in range(0, times * size, size):
            for task in self.tasks:
                after = {first + number for number in task.after if first or number >= 0}
                if first and all(number < 0 for number in task.after):
                    after |= {first - size + number for number in end}
                tasks.append(replace(task, after=tuple(sorted(after))))
        return replace(self, tasks=tasks, end=tuple((times - 1) * size + number for number in end))

    def total(self, *resources: Resource, phases: Iterable[str] | None = None) -> float:
        """Return the bytes of these resources in a step. phases: only those of these phases."""
        chosen = None if phases is None else set(phases)
        tasks = [task for task in self.tasks if chosen is None or task.phase in chosen]
        return sum(task.nbytes.get(resource, 0.0) for task in tasks for resource in resources)

    @property
    def flops(self) -> float:
        """Floating-point operations of a step, with those of repeated forwards."""
        return sum(task.flops for task in self.tasks)
