"""Hardware: what devices, links, hosts and disks can do, from `hardware.toml` or a file like it, and how long a task takes.

Words: a *device* computes; on a CPU it is the cores of one rank. A *link* is one device's share of a connection that all devices
of its node use at the same time. *Fraction*: the part of the device's peak that kernels achieve.

    a file:  name, devices_per_node, ...    [device]  [device.peak_flops]  [device.efficiency]    [links.inside] ...    [source]

Each number of `hardware.toml` has a line in `source` of its table; `zeroshard calibrate` writes a machine's own file.
"""

from __future__ import annotations

import bisect
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from ...config import PRECISIONS, Tier
from ...errors import ConfigError, did_you_mean
from ...utils.axes import TP
from .trace import Resource, Task, Trace

_FILE = Path(__file__).with_name("hardware.toml")
# type of a field -> Python types that a file may have there, and how an error names them
_OTHERS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "str": (str, "a text"),
    "Mapping": (Mapping, "a table"),
    "tuple": ((list, tuple), "a list of numbers"),
    "Attention": (Mapping, "a table"),
}
NETWORK = (Resource.INSIDE, Resource.BETWEEN)  # links whose latency a simulation may replace


@dataclass(frozen=True)
class Curve:
    """The fraction of the peak that a kernel achieves, by its floating-point operations: small matrices do not fill a device.

    flops: of one kernel, ascending (of a task, the mean over its `products`, or else all its kernels). fraction: at these flops.
    Between two points it is linear in the logarithm of flops, beyond the ends it is constant.
    """

    flops: tuple[float, ...]
    fraction: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops", tuple(self.flops))
        object.__setattr__(self, "fraction", tuple(self.fraction))
        if any(isinstance(each, bool) or not isinstance(each, (int, float)) for each in (*self.flops, *self.fraction)):
            raise ConfigError(f"efficiency: expected lists of numbers, got {self.fraction} at {self.flops}")
        if not self.flops or len(self.flops) != len(self.fraction) or list(self.flops) != sorted(set(self.flops)):
            raise ConfigError(f"efficiency: expected as many fractions as ascending flops, got {self.fraction} at {self.flops}")
        if self.flops[0] <= 0 or not all(0 < each <= 1 for each in self.fraction):
            raise ConfigError(
                f"efficiency: expected flops above 0 and fractions above 0 and up to 1, got {self.fraction} at {self.flops}"
            )

    def at(self, flops: float) -> float:
        """Return the fraction that a kernel of so many flops achieves."""
        place = bisect.bisect_left(self.flops, flops)
        if place in (0, len(self.flops)):
            return self.fraction[min(place, len(self.flops) - 1)]
        low, high = self.flops[place - 1 : place + 1]
        share = math.log(flops / low) / math.log(high / low)
        return (1 - share) * self.fraction[place - 1] + share * self.fraction[place]


@dataclass(frozen=True)
class Attention:
    """The fraction of the peak that fused attention achieves by the tokens of a sequence, forward and backward together.

    tokens: ascending. full: the fraction over all scores. causal: over those below the diagonal, where only these are computed.
    Points are joined as in `Curve`. A backward counts as 2.5 forwards: five products, not two.
    """

    tokens: tuple[float, ...]
    full: tuple[float, ...]
    causal: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("tokens", "full", "causal"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        Curve(self.tokens, self.full), Curve(self.tokens, self.causal)  # they raise ConfigError for wrong numbers


@dataclass(frozen=True)
class Link:
    """A link. bandwidth: bytes/s of one device, in one direction, while all of its node send. latency_s: of a hop or request.

    alone: bytes/s of one device while those beside it are idle; None: the same. group: bytes/s with which one all-reduce over tp
    enters a node, however many of its ranks take part, since its trees use only some ports; None: the sum of the ranks' rates.
    trees: `group` holds for dp's collectives too; else these go around rings, over all ports.
    """

    bandwidth: float
    latency_s: float
    alone: float | None = None
    group: float | None = None
    trees: bool = False

    def rate(self, ranks: int, devices: int) -> float:
        """Return the bytes/s of each of the `ranks` that use the link on a node with so many devices."""
        return min(self.alone or self.bandwidth, self.bandwidth * max(1.0, devices / ranks))


@dataclass(frozen=True)
class Device:
    """A device. memory_bandwidth: bytes/s. peak_flops: dense flops/s by dtype ("fp32", "bf16"). kernel_latency_s: of a launch.

    efficiency: of matrix products. attention: of fused attention; None: it counts as matrix products.
    """

    name: str
    memory_nbytes: int
    memory_bandwidth: float
    kernel_latency_s: float
    peak_flops: Mapping[str, float]
    efficiency: Curve
    attention: Attention | None = None

    def peak(self, dtype: str) -> float:
        """Return the peak flops/s in a dtype. Raises ConfigError if this device has no number for it."""
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise ConfigError(f"{self.name}: no peak_flops for {dtype!r} (known: {known}).{did_you_mean(dtype, self.peak_flops)}")
        return self.peak_flops[dtype]


@dataclass(frozen=True)
class Hardware:
    """Nodes of equal devices.

    host_memory_nbytes, disk_nbytes, host_memory_bandwidth (bytes/s), host_step_rate (parameters/s of an optimizer such as Adam,
    states in fp32): of a node, shared by its ranks. overhead_nbytes: of each device's memory, taken by its context and libraries.
    separate: the device has a memory of its own. shared_cores: the same cores of a rank compute, copy and communicate, so that
    none of these runs beside another (all but disks is one resource). shared_disk: reads and writes at the same time are no
    faster than one after the other. spread: two ratios of a step's real seconds to simulated ones, between which eight in ten
    published runs lie; (): none were compared. source: where each number is from.
    """

    name: str
    device: Device
    devices_per_node: int
    links: Mapping[Resource, Link]
    host_memory_nbytes: int
    disk_nbytes: int
    host_step_rate: float
    host_memory_bandwidth: float
    overhead_nbytes: int = 0
    separate: bool = True
    shared_cores: bool = False
    shared_disk: bool = False
    spread: tuple[float, ...] = ()
    source: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spread", tuple(self.spread))
        if self.spread and not (len(self.spread) == 2 and 0 < self.spread[0] <= self.spread[1]):
            raise ConfigError(f"{self.name}: spread: expected two numbers above 0, the lower one first, got {self.spread}")

    @staticmethod
    def named(name: str) -> Hardware:
        """Return one of NAMES, or the hardware in the .toml file of that path. Raises ConfigError."""
        if name.endswith(".toml"):
            return Hardware.load(name)
        if name not in NAMES:
            raise ConfigError(
                f"hardware: expected one of {', '.join(NAMES)}, or a file .toml, got {name!r}.{did_you_mean(name, NAMES)}"
            )
        return _of_table({"name": name} | _tables()[name], f"{_FILE.name}: {name}")

    @staticmethod
    def load(path: str | Path) -> Hardware:
        """Read a file such as `save` and `zeroshard calibrate` write. Raises ConfigError, which names the key."""
        return _of_table(_read(Path(path)), str(path))

    def save(self, path: str | Path) -> None:
        """Write a file that `load` reads."""
        lines: list[str] = []
        _write_table(lines, "", {f.name: getattr(self, f.name) for f in fields(self)})
        Path(path).write_text("\n".join(lines).lstrip("\n") + "\n")

    def capacity(self, tier: Tier) -> int:
        """Return the bytes of a device's memory, or of the host's or the disk's of a node."""
        sizes = {Tier.DEVICE: self.device.memory_nbytes, Tier.HOST: self.host_memory_nbytes, Tier.DISK: self.disk_nbytes}
        return max(sizes[tier], 1)

    def used(self, tier: Tier, nbytes: float, ranks: int) -> float:
        """Return the bytes of `capacity` that are used where each of the `ranks` of a node holds so many bytes of the tier."""
        return nbytes + self.overhead_nbytes if tier is Tier.DEVICE else nbytes * ranks

    def link(self, resource: Resource) -> Link:
        """Return the link of a resource. Raises ConfigError if there is none."""
        if resource not in self.links:
            known = ", ".join(each.value for each in self.links)
            raise ConfigError(
                f"{self.name}: a task needs the link {resource.value!r}, of which there is none (known: {known}). Add it to "
                "a file of your own, which Hardware.load reads."
            )
        return self.links[resource]

    def lane(self, resource: Resource) -> Resource:
        """Return the resource in whose queue a task waits for `resource`: HOST if cores are shared, READ for a shared disk."""
        if resource in (Resource.READ, Resource.WRITE):
            return Resource.READ if self.shared_disk else resource
        return Resource.HOST if self.shared_cores else resource


def seconds(task: Task, hardware: Hardware, trace: Trace, utilisation: float = 1.0, latency: float | None = None) -> float:
    """Return the seconds that a task takes once it has all its resources.

    They are those of its slowest resource, or the sum over those that are the same cores. utilisation: the share of each link's
    bandwidth that is achieved. latency: seconds of a hop between ranks in place of the hardware's.
    """
    times = resource_seconds(task, hardware, trace, utilisation, latency)
    if not hardware.shared_cores:
        return max(times.values(), default=0.0)
    lanes: dict[Resource, float] = {}
    for resource, each in times.items():
        lanes[hardware.lane(resource)] = lanes.get(hardware.lane(resource), 0.0) + each
    return max(lanes.values(), default=0.0)


def resource_seconds(
    task: Task, hardware: Hardware, trace: Trace, utilisation: float = 1.0, latency: float | None = None
) -> dict[Resource, float]:
    """Return the seconds for which a task keeps each of its resources at work; arguments as of `seconds`."""
    ranks = max(1, min(trace.node_size, hardware.devices_per_node))
    times: dict[Resource, float] = {}
    for resource, nbytes in task.nbytes.items():
        if resource is Resource.DEVICE:
            times[resource] = _compute_seconds(task, nbytes, hardware.device)
        elif resource is Resource.HOST:
            times[resource] = max(task.numel * ranks / hardware.host_step_rate, nbytes * ranks / hardware.host_memory_bandwidth)
        elif resource is Resource.CONTROL:
            several = math.prod(trace.axes.values()) > ranks
            link = hardware.link(Resource.BETWEEN if several else Resource.INSIDE)
            hop = link.latency_s if latency is None else latency
            times[resource] = nbytes / (link.bandwidth * utilisation) + hop * task.messages
        else:
            link = hardware.link(resource)
            hop = link.latency_s if latency is None or resource not in NETWORK else latency
            moved, members = _crossing(task, resource, nbytes)
            rate = link.rate(ranks, hardware.devices_per_node)
            if link.group is not None and members > 1 and (link.trees or task.axis == TP):
                rate = min(rate, link.group / members)
            # messages that follow one another: the depth of a tree. NCCL sends what is small by trees or its logarithmic algorithm
            # (PAT); what is large goes around a ring, where the latency is hidden behind the bytes of other chunks
            hops = max(1, math.ceil(math.log2(max(1, task.peers))))
            times[resource] = moved / (rate * utilisation) + hop * hops * task.messages * (nbytes > 0)
    return times


def _compute_seconds(task: Task, nbytes: float, device: Device) -> float:
    """Return the seconds of a task's kernels: of one, its arithmetic or its memory, whichever is slower (the roofline); of many,
    one after the other, the arithmetic of those with flops and the memory of the others. Launches come on top."""
    launches = task.kernels * device.kernel_latency_s
    memory = nbytes / device.memory_bandwidth
    if not task.flops:
        return memory + launches
    peak, flops, products, arithmetic = device.peak(task.dtype), task.flops, task.products, 0.0
    if task.attention is not None and device.attention is not None:
        work, curves = task.attention, device.attention
        fraction = Curve(curves.tokens, curves.causal if work.causal else curves.full).at(work.tokens)
        flops, arithmetic = flops - work.flops, (0.5 if work.causal else 1.0) * work.flops / (peak * fraction)
    elif task.attention is not None and products:
        products += task.attention.kernels
    if flops > 0:
        arithmetic += flops / (peak * device.efficiency.at(flops / max(1, products or task.kernels)))
    return (max(arithmetic, memory) if task.kernels <= 1 else arithmetic + memory) + launches


def _crossing(task: Task, resource: Resource, nbytes: float) -> tuple[float, float]:
    """Return the bytes that one device's link carries, and how many devices of the node share the transfer.

    A trace counts bytes as if a rank sent to each peer directly. Gathers and reductions of n ranks, r of them on a node, go
    around rings instead: bytes enter a node once, over the links of all r, and are passed on inside. In an exchange of
    different bytes with every peer (`Task.distinct`) nothing can be passed on.
    """
    inside, between = task.nbytes.get(Resource.INSIDE, 0.0), task.nbytes.get(Resource.BETWEEN, 0.0)
    if resource not in NETWORK or task.distinct or not (inside and between):
        return nbytes, 1
    if resource is Resource.INSIDE:
        return inside + between, 1
    members = 1 + inside / (inside + between) * (task.peers - 1)  # r: inside = (r - 1) parts, between = n - r parts
    return between / members, members


# ------------------------------------------------------------------------------------------------------- files


def _read(path: Path) -> dict[str, Any]:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib  # type: ignore[no-redef]
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"hardware file {path}: can not be read: {error}. `zeroshard calibrate` writes one.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"hardware file {path}: not TOML: {error}") from None


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    return _read(_FILE)


def _of_table(table: Mapping[str, Any], where: str) -> Hardware:
    given = dict(_checked(table, Hardware, where))
    device = dict(_checked(given["device"], Device, f"{where}: device"))
    device["efficiency"] = Curve(**_checked(device["efficiency"], Curve, f"{where}: device.efficiency"))
    if "attention" in device:
        device["attention"] = Attention(**_checked(device["attention"], Attention, f"{where}: device.attention"))
    links = {}
    for name, link in given["links"].items():
        if name not in (known := [each.value for each in Resource if each not in (Resource.DEVICE, Resource.HOST)]):
            raise ConfigError(f"{where}: links: expected some of {', '.join(known)}, got {name!r}.{did_you_mean(name, known)}")
        links[Resource(name)] = Link(**_checked(link, Link, f"{where}: links.{name}"))
    return Hardware(**given | {"device": Device(**device), "links": links})


def _checked(table: object, kind: type, where: str) -> dict[str, Any]:
    """Check that a table has the needed keys of a dataclass, no unknown ones, and values of their types; return it as a dict."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: expected a table, got {table!r}")
    known = {f.name: f for f in fields(kind)}
    if unknown := [key for key in table if key not in known]:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}.{did_you_mean(unknown[0], known)} Known: {', '.join(known)}.")
    needed = [n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in needed if name not in table]:
        raise ConfigError(f"{where}: no {missing[0]!r}. Needed: {', '.join(needed)}.")
    for key, value in table.items():
        expected, words = _OTHERS.get(known[key].type.partition("[")[0], (object, ""))
        if not isinstance(value, expected):
            raise ConfigError(f"{where}: {key}: expected {words}, got {value!r}")
    if unknown := [key for key in table.get("peak_flops", {}) if key not in PRECISIONS]:
        raise ConfigError(
            f"{where}: peak_flops: expected some of {', '.join(PRECISIONS)}, got {unknown[0]!r}.{did_you_mean(unknown[0], PRECISIONS)}"
        )
    numbers = dict(table) | {f"peak_flops.{k}": v for k, v in table.get("peak_flops", {}).items()}
    for key, value in numbers.items():
        may_be_zero = key in ("disk_nbytes", "overhead_nbytes", "latency_s", "kernel_latency_s")
        kinds = known[key].type if key in known else "float"
        if kinds.split(" ")[0] in ("int", "float") and (
            isinstance(value, bool) or not isinstance(value, (int, float)) or not (value > 0 or (may_be_zero and value == 0))
        ):
            raise ConfigError(f"{where}: {key}: expected a number above 0, got {value!r}")
        if kinds == "int" and value != int(value):
            raise ConfigError(f"{where}: {key}: expected a whole number, got {value!r}")
        if kinds == "bool" and not isinstance(value, bool):
            raise ConfigError(f"{where}: {key}: expected true or false, got {value!r}")
    return dict(table)


def _write_table(lines: list[str], name: str, table: Mapping[str, object]) -> None:
    """Append a table's values, then its inner tables. JSON's strings, numbers and lists of numbers are valid TOML."""
    values: dict[str, object] = {}
    inner: dict[str, Mapping[str, object]] = {}
    for key, value in table.items():
        if is_dataclass(value) and not isinstance(value, type):
            inner[key] = {f.name: getattr(value, f.name) for f in fields(value)}
        elif isinstance(value, Mapping):
            inner[key] = {k.value if isinstance(k, Resource) else k: v for k, v in value.items()}
        elif value is not None:
            values[key] = list(value) if isinstance(value, tuple) else value
    if name and values:
        lines += ["", f"[{name}]"]
    lines += [f"{json.dumps(key) if '.' in key else key} = {json.dumps(value)}" for key, value in values.items()]
    for key, value in inner.items():
        _write_table(lines, f"{name}.{key}" if name else key, value)


NAMES = tuple(_tables())
