"""Hardware of one byte, operation and parameter a second, and short ways to write traces for it."""

from zeroshard.planner.simulator.hardware import Curve, Device, Hardware, Link
from zeroshard.planner.simulator.trace import Resource, Task, Trace

DEVICE, INSIDE, BETWEEN, READ = Resource.DEVICE, Resource.INSIDE, Resource.BETWEEN, Resource.READ
LINKS = {r: Link(1.0, 0.0) for r in Resource if r not in (Resource.DEVICE, Resource.HOST)}
DEV = Device("unit", 100, memory_bandwidth=1e9, kernel_latency_s=0.0, peak_flops={"fp32": 1.0}, efficiency=Curve((1.0,), (1.0,)))
UNIT = Hardware(
    "unit", DEV, 4, LINKS, 1000, 1000, host_step_rate=1.0, host_memory_bandwidth=1e9
)  # 1 flop, byte, parameter a second
SHARED = Hardware("cores", DEV, 4, LINKS, 1000, 1000, 1.0, 1e9, shared_cores=True)


def compute(name, s, after=(), **more):
    return Task(name, "forward", {DEVICE: 0.0}, tuple(after), flops=s, **more)


def move(name, s, after=(), resource=INSIDE, **more):
    return Task(name, "forward", {resource: s}, tuple(after), **more)


def trace(*tasks, **more):
    made = Trace(**more)
    for task in tasks:
        made.add(task)
    return made


def spans(result):
    return [(begin, end) for _, _, begin, end in result.spans]
