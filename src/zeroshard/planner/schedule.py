"""A layout: how a step of a model is spread over ranks and tiers. What each rank of it holds, and does, by formulas.

    Profile x Layout --memory_of--> bytes by tier and category, at the fullest moment
                     --trace_of---> tasks of a step, one trace a pipeline stage        (docs/design.md, "How a step runs")

    link      |G1|G2|  |G3|  ...            |R3|G1|R2| ...   | publish |       G gather (stage 3), R reduce
    device       | F1 | F2 | F3 | B3' B3 |  | B2' B2 |  ...  | step |          B' recomputation
    up, host                                                  | S | S | S |    states off the device

Ranks are numbered pp outermost, tp innermost, as `zeroshard train --mesh` numbers them: tp stays inside of a node where it can.
Volumes are those of docs/communication.md, memory that of docs/tiers.md. R nodes, S ranks of a node, of those along dp.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import PRECISIONS, STAGES, Config, Offload, Placement, Row, Tier
from ..errors import ConfigError, did_you_mean
from ..memory.ledger import GATHERED, GRADIENTS, MASTERS, OPTIMIZER, PARAMETERS, PARTIAL, SECONDARY, STAGING
from .plan import ACTIVATIONS
from .profile import Home, Profile, UnitProfile, homes_of
from .trace import Resource, Task, Trace

CHECKPOINTS = ("none", "blocks", "partitioned", "host")
_CHECKPOINT_WORDS = {
    "none": (), "blocks": ("activations checkpointed",), "partitioned": ("activations checkpointed, in parts over tp",),
    "host": ("activations checkpointed on the host",),
}  # fmt: skip
HOPS = ("one", "two")
_PACKED = {"int8": 1.0, "fp8": 1.0, "int4": 0.5}  # bytes a value, to which comes a step of 4 bytes a block of 256
_STEP_NBYTES = 4 / 256
_BUFFERS = 2  # of gradients on their way (zero/shard_model.py)
_LOOKAHEAD = 8  # visits (zero/prefetch.py)
_DEVICE_NAMES = {Tier.DEVICE: "none", Tier.HOST: "cpu", Tier.DISK: "nvme"}

Bytes = dict[Resource, float]


@dataclass(frozen=True)
class Layout:
    """dp, pp, tp: ranks along each axis. stage: of ZeRO, over dp. optimizer, gradient, parameter: where these states rest.

    micro_batch: sequences of one forward of one rank. micro_batches: of a step. hold: zs.accumulate around all but the last, as in
        zs.parallelize; else each is reduced.
    checkpointing: of activations: "none"; "blocks" keep their inputs; "partitioned": a part of them on each rank of tp; "host": there.
    shard_size (HSDP, MiCS), hpz, quantized_weights, quantized_gradients, prefetch_nbytes, max_unit_numel: see Config. node_size: ranks of a node.
    hops: of what crosses nodes: "one" (counted to each rank alike; NCCL's rings are the simulator's), "two" (hierarchical=True).
    gradient_itemsize: bytes in which gradients rest. state_itemsize: bytes an element of optimizer states, masters apart.
    separate: the device has a memory of its own.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    stage: int = 3
    optimizer: Tier = Tier.DEVICE
    gradient: Tier = Tier.DEVICE
    parameter: Tier = Tier.DEVICE
    micro_batch: int = 1
    micro_batches: int = 1
    hold: bool = False
    checkpointing: str = "none"
    precision: str = "bf16"
    shard_size: int | None = None
    hpz: int = 1
    quantized_weights: str | None = None
    quantized_gradients: str | None = None
    node_size: int = 8
    hops: str = "one"
    prefetch_nbytes: int = 64 << 20
    max_unit_numel: int | None = None
    gradient_itemsize: int = 4
    state_itemsize: int = 8
    separate: bool = True

    def __post_init__(self) -> None:
        choices = {"checkpointing": CHECKPOINTS, "hops": HOPS, "stage": tuple(STAGES), "precision": tuple(PRECISIONS)}
        for name, known in choices.items():
            value, words = getattr(self, name), list(map(str, known))
            if value not in known:
                raise ConfigError(f"{name}: expected one of {', '.join(words)}, got {value!r}.{did_you_mean(str(value), words)}")
        for name in ("dp", "pp", "tp", "micro_batch", "micro_batches", "node_size", "hpz"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}: expected a whole number of at least 1, got {value!r}.")
        for size, name in ((self.shard_size, "shard_size"), (self.hpz, "hpz")):
            if size is not None and self.dp % size:
                raise ConfigError(f"{name}: expected a divisor of the {self.dp} ranks of dp, got {size}.")

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.tp

    @property
    def itemsize(self) -> int:
        """Bytes of a parameter, and of an element of activations."""
        return 4 if self.precision == "fp32" else 2

    @property
    def shards(self) -> int:
        """Ranks that share a parameter's elements."""
        return self.shard_size or self.dp

    @property
    def held(self) -> bool:
        """Gradients of all micro-batches but the last are added up on the rank."""
        return self.micro_batches > 1 and (self.hold or self.pp * self.tp > 1)

    @property
    def sequences(self) -> int:
        """Of a step, over all ranks."""
        return self.dp * self.micro_batch * self.micro_batches

    def place(self, ranks: int | None = None) -> tuple[int, int]:
        """(R, S): nodes, and ranks of each, of `ranks` neighbours along dp (all of them)."""
        ranks = self.dp if ranks is None else ranks
        inside = min(ranks, max(self.node_size // self.tp, 1))
        return (ranks // inside, inside) if ranks % inside == 0 else (ranks, 1)

    def options(self, path: str | None = None) -> dict[str, Any]:
        """Of zs.shard. path: the folder of what rests on disk."""
        found: dict[str, Any] = {"stage": self.stage, "precision": self.precision}
        for name in ("optimizer", "gradient", "parameter"):
            if getattr(self, name) is not Tier.DEVICE:
                found["offload_param" if name == "parameter" else f"offload_{name}"] = _DEVICE_NAMES[getattr(self, name)]
        if Tier.DISK in (self.optimizer, self.gradient, self.parameter) and path is not None:
            found["offload_path"] = path
        named = {"shard_size": self.shard_size, "zero_hpz_partition_size": self.hpz if self.hpz > 1 else None}
        named |= {"max_unit_numel": self.max_unit_numel}
        named |= {"zero_quantized_weights": self.quantized_weights, "zero_quantized_gradients": self.quantized_gradients}
        if self.prefetch_nbytes != Config.prefetch_nbytes:
            named["prefetch_nbytes"] = self.prefetch_nbytes
        if self.hops == "two" and self.hpz == 1:
            named["hierarchical"] = True
        return found | {name: value for name, value in named.items() if value is not None}

    @property
    def mesh(self) -> dict[str, int]:
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp}

    def __str__(self) -> str:
        words = [f"ZeRO-{self.stage}" if self.stage else "plain data parallelism"]
        if self.pp * self.tp > 1:
            words.append(f"dp={self.dp},pp={self.pp},tp={self.tp}")
        words += [f"{name} on {getattr(self, name).value}" for name in ("optimizer", "gradient", "parameter")
                  if getattr(self, name) is not Tier.DEVICE]  # fmt: skip
        words += [f"groups of {self.shard_size}"] * (self.shard_size is not None) + [f"hpZ {self.hpz}"] * (self.hpz > 1)
        packed = {"weights": self.quantized_weights, "gradients": self.quantized_gradients}
        words += [f"{what} in {codec}" for what, codec in packed.items() if codec]
        words.append(f"{self.micro_batches} x {self.micro_batch} sequences a rank")
        return ", ".join([*words, *_CHECKPOINT_WORDS[self.checkpointing]])


# -- volumes -------------------------------------------------------------------------------------------------------


def exchange(layout: Layout, nbytes: float, ranks: int, reduce: bool = False, inside_only: bool = False) -> list[Bytes]:
    """What one rank sends, hop after hop, to gather (or reduce-scatter) `nbytes` among `ranks` neighbours along dp."""
    nodes, inside = layout.place(ranks)
    if inside_only:
        nodes, ranks = 1, inside
    if ranks == 1:
        return []
    if nodes == 1:
        return [{_near(layout): nbytes * (ranks - 1) / ranks}]
    if inside == 1:
        return [{Resource.BETWEEN: nbytes * (nodes - 1) / nodes}]
    if layout.hops == "two":
        hops: list[Bytes] = [{Resource.BETWEEN: nbytes * (nodes - 1) / ranks}, {Resource.INSIDE: nbytes * (inside - 1) / inside}]
        return hops[::-1] if reduce else hops
    return [{Resource.BETWEEN: nbytes * (nodes - 1) / nodes, Resource.INSIDE: nbytes * (inside - 1) / ranks}]


def _near(layout: Layout) -> Resource:
    """The link between neighbours along dp that are one node."""
    return Resource.INSIDE if layout.tp < layout.node_size else Resource.BETWEEN


def _packed(codec: str | None, itemsize: int) -> float:
    """Bytes an element that travels."""
    return itemsize if codec is None else _PACKED[codec] + _STEP_NBYTES


class Volumes:
    """What a home's collectives send, hop by hop, on one rank of a layout."""

    def __init__(self, layout: Layout, home: Home) -> None:
        self.layout, self.row = layout, STAGES[layout.stage]
        self.shards = home.shards(layout.tp, layout.shards)
        self.numel = sum(self.shards) * layout.shards  # of the buffers, padding counted
        self._weight, self._grad = self.weight_nbytes(layout, home.packs), self.gradient_nbytes(layout, home.packs)

    @staticmethod
    def weight_nbytes(layout: Layout, packs: bool = True) -> float:
        """Bytes an element of parameters on their way."""
        return _packed(layout.quantized_weights if packs else None, layout.itemsize)

    @staticmethod
    def gradient_nbytes(layout: Layout, packs: bool = True) -> float:
        """Bytes an element of gradients on their way."""
        return _packed(layout.quantized_gradients if packs else None, layout.itemsize)

    def gather(self, first: bool) -> list[Bytes]:
        """Before a pass (stage 3). first: of the step; later ones are served by secondary shards where there are any."""
        lay = self.layout
        return exchange(lay, self.numel * self._weight, lay.shards, inside_only=lay.hpz > 1 and not first)

    def reduce(self) -> list[Bytes]:
        """Of one backward: between groups the shards are added up; at stage 0 sums are gathered."""
        lay, groups = self.layout, self.layout.dp // self.layout.shards
        hops = exchange(lay, self.numel * self._grad, lay.shards, reduce=True)
        if groups > 1:
            sent = self.numel / lay.shards * (self._grad + lay.itemsize)  # a sum, and plain what it comes to
            link = Resource.BETWEEN if lay.dp > lay.place()[1] else _near(lay)
            hops = [*hops, {link: sent * (groups - 1) / groups}]
        if self.row.gradient is Placement.REPLICATED:
            hops = hops + exchange(lay, self.numel * lay.gradient_itemsize, lay.shards)
        return hops

    def publish(self) -> list[Bytes]:
        """After the step (stages 1 and 2)."""
        lay = self.layout
        if self.row.parameter is Placement.SHARDED or self.row.optimizer is not Placement.SHARDED:
            return []
        return exchange(lay, self.numel * self._weight, lay.shards)


# -- memory --------------------------------------------------------------------------------------------------------


def memory_of(profile: Profile, layout: Layout, stage: int = 0) -> dict[Tier, dict[str, int]]:
    """Bytes that a rank of a pipeline's stage holds, by tier and category of memory/ledger.py, at the fullest moment of the device.

    Model states are those of the runtime to the byte (on disk: to the page). Activations are estimates: without the allocator's
    holes, and with what the model's formulas leave out (buffers, masks). The context of the device is `Hardware.overhead_nbytes`.
    """
    row, sizes = STAGES[layout.stage], Sizes.of(profile, layout.pp, stage, layout.tp, layout.shards, layout.max_unit_numel)
    own, whole = sizes.own, sizes.own * layout.shards
    held: dict[Tier, dict[str, int]] = {tier: defaultdict(int) for tier in Tier}

    def add(category: str, tier: Tier, nbytes: float) -> None:
        if nbytes:
            held[tier][category] += round(nbytes)

    sharded = row.parameter is Placement.SHARDED
    replicated = row.optimizer is not Placement.SHARDED
    states = whole if replicated else own
    add(PARAMETERS, layout.parameter if sharded else Tier.DEVICE, (own if sharded else whole) * layout.itemsize)
    spread = row.gradient is Placement.SHARDED
    add(GRADIENTS, layout.gradient if spread else Tier.DEVICE, (own if spread else whole) * layout.gradient_itemsize)
    add(MASTERS, layout.optimizer, states * 4 * (layout.precision != "fp32"))
    moments = sizes.stepped if replicated else own  # the end of a whole buffer is not stepped
    add(OPTIMIZER, layout.optimizer, moments * layout.state_itemsize)
    if sharded and layout.shards > 1:
        add(GATHERED, Tier.DEVICE, sizes.gathered(layout.prefetch_nbytes, layout.itemsize))
    if sharded and layout.hpz > 1:
        add(SECONDARY, Tier.DEVICE, whole / layout.hpz * _packed(layout.quantized_weights, layout.itemsize))
    if spread and layout.held:
        add(PARTIAL, Tier.DEVICE, whole * layout.gradient_itemsize)
    _add_buffers(layout, row, sizes.shards, add)
    tokens = layout.micro_batch * profile.seq
    kept, working = activations(profile, layout.pp, stage, layout.itemsize, layout.tp, layout.checkpointing)
    add(ACTIVATIONS, Tier.DEVICE, tokens * (kept[0] * in_flight(layout, stage) + working))
    add(ACTIVATIONS, Tier.HOST, tokens * kept[1] * in_flight(layout, stage))
    return {tier: dict(found) for tier, found in held.items()}


def in_flight(layout: Layout, stage: int) -> int:
    """Micro-batches of which a stage keeps activations at once, by the schedule 1F1B (Megatron-LM, arXiv 2104.04473, section 2.2)."""
    return min(layout.micro_batches, layout.pp - stage) if layout.pp > 1 else 1


@functools.lru_cache(maxsize=4096)
def activations(
    profile: Profile, pp: int, stage: int, itemsize: int, tp: int, checkpointing: str
) -> tuple[tuple[float, float], float]:  # fmt: skip
    """Bytes a token of a stage: ((kept on the device, on the host) of a micro-batch, what comes and goes in backward, at its fullest)."""
    device = host = working = 0.0
    boundary = 0
    for unit in profile.stages(pp)[stage]:
        saved = unit.saved_nbytes(itemsize, tp)
        if unit.block and checkpointing != "none":
            kept = (boundary or unit.boundary) * itemsize / (tp if checkpointing == "partitioned" else 1)
            host, device = (host + kept, device) if checkpointing == "host" else (host, device + kept)
            working = max(working, saved + unit.working_nbytes(itemsize, tp))
        else:
            device += saved
            working = max(working, unit.working_nbytes(itemsize, tp))
        boundary = unit.boundary or boundary
    return (device, host), working


@dataclass(frozen=True, eq=False)
class Sizes:
    """Of the flat buffers of one stage on one rank, in elements. shards: of each buffer. stepped: of whole buffers without their ends.

    whole: of the gathered homes by name; visits: their order in forward.
    """

    shards: tuple[int, ...]
    stepped: int
    whole: Mapping[str, int]
    visits: tuple[str, ...]

    @property
    def own(self) -> int:
        return sum(self.shards)

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def of(profile: Profile, pp: int, stage: int, tp: int, shards: int, max_unit_numel: int | None = None) -> Sizes:
        """shards: ranks over which a buffer is cut."""
        units = profile.stages(pp)[stage]
        homes = homes_of(units, max_unit_numel)
        each = [home.shards(tp, shards) for home in homes]
        return Sizes(
            tuple(size for sizes in each for size in sizes), sum(sum(home.shards(tp, 1)) for home in homes),
            {home.name: sum(sizes) * shards for home, sizes in zip(homes, each, strict=True)}, tuple(_visits(units, homes)),
        )  # fmt: skip

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def gathered(self, prefetch_nbytes: int, itemsize: int) -> int:
        """Bytes at the fullest moment of stage 3: of the root, the unit in use, and those gathered ahead of it."""
        nbytes = {name: numel * itemsize for name, numel in self.whole.items()}
        held, most = sum(nbytes[name] for name in nbytes.keys() - set(self.visits)), 0
        for order in (self.visits, self.visits[::-1]):
            for at, name in enumerate(order):
                ahead = 0
                for other in dict.fromkeys(each for each in order[at + 1 : at + 1 + _LOOKAHEAD] if each != name):
                    if ahead and ahead + nbytes[other] > prefetch_nbytes:
                        break
                    ahead += nbytes[other]
                most = max(most, nbytes[name] + ahead)
        return held + most


def _visits(units: Sequence[UnitProfile], homes: list[Home]) -> list[str]:
    """Names of the homes that forward gathers, in its order; of one that is split, its parts."""
    apart: dict[str, list[str]] = defaultdict(list)
    for home in (home for home in homes if not home.held):
        apart[home.origin or home.name].append(home.name)
    return [part for unit in units for part in apart.get(unit.home or unit.name, ())]


def _add_buffers(layout: Layout, row: Row, sizes: tuple[int, ...], add: Callable[[str, Tier, float], None]) -> None:
    """Of constant size: gradients that leave, shards that come to be gathered, what the host's step brings (zero/shard_model.py)."""
    resting = row.gradient is not Placement.SHARDED and layout.itemsize == layout.gradient_itemsize
    sent = [] if resting else [size * layout.shards * layout.itemsize for size in sizes]
    add(STAGING, Tier.DEVICE, max(sent, default=0) * min(_BUFFERS, len(sent)))
    largest = max(sizes)
    offload = Offload()
    if _away(layout.parameter, layout.separate):
        count = min(max(offload.buffer_count // 2, 2), len(sizes))
        add(STAGING, Tier.DEVICE, largest * layout.itemsize * count)
        add(STAGING, Tier.HOST, largest * layout.itemsize * count * layout.separate)
    if _away(layout.gradient, layout.separate):
        add(STAGING, Tier.DEVICE, largest * 4 * (_BUFFERS + 1))
        add(STAGING, Tier.HOST, largest * 4 * (_BUFFERS + 1))
    if Tier.DISK in (layout.optimizer, layout.gradient, layout.parameter) or (layout.separate and layout.optimizer is not Tier.DEVICE):
        add(STAGING, Tier.HOST, offload.buffer_count * offload.buffer_nbytes)


def _away(tier: Tier, separate: bool) -> bool:
    return tier is Tier.DISK or (tier is Tier.HOST and separate)


# -- the step ------------------------------------------------------------------------------------------------------


def trace_of(profile: Profile, layout: Layout, *, groups: int | None = None) -> list[Trace]:
    """What a rank of each stage of the pipeline does in a step, in the runtime's order.

    groups: at most so many stretches of blocks a stage, each as one task: fewer tasks, and fewer places where communication
    can hide; None: each block by itself. The work is the same.
    """
    return [Stage(profile, layout, stage, groups).step() for stage in range(layout.pp)]


@dataclass(frozen=True)
class Stretch:
    """Neighbouring visits of one kind: a task each of forward, backward and their collectives. homes: what is gathered for it."""

    name: str
    units: tuple[UnitProfile, ...]
    homes: tuple[Home, ...]

    @property
    def block(self) -> bool:
        return self.units[0].block

    @property
    def is_head(self) -> bool:
        """The loss is computed: over tp the gradient of what it reads is summed, and three numbers of each token's loss are."""
        return self.units[0].saved_fp32 > 0 and not self.block


class Stage:
    """Writes the trace of one rank of one stage of a pipeline."""

    def __init__(self, profile: Profile, layout: Layout, stage: int, groups: int | None = None) -> None:
        self.profile, self.layout, self.stage, self.row = profile, layout, stage, STAGES[layout.stage]
        self.units = profile.stages(layout.pp)[stage]
        self.homes = homes_of(self.units)
        self.volumes = {home.name: Volumes(layout, home) for home in self.homes}
        self.stretches = self._stretches(groups)
        self.tokens = layout.micro_batch * profile.seq
        self.trace = Trace(rank=stage * layout.dp * layout.tp, axes=layout.mesh, node_size=layout.node_size)
        self.trace.tokens = self.tokens * layout.micro_batches
        self.trace.model_flops = 3 * sum(unit.flops for unit in self.units) / layout.tp * self.trace.tokens
        self.last: tuple[int, ...] = ()  # of the program's own order
        self.gathers: dict[str, tuple[int, ...]] = {}  # under way or done, by home
        self.reduced: dict[str, tuple[int, ...]] = {}
        self.seen: set[str] = set()  # homes whose secondary shards are there
        self.starts: list[tuple[int, ...]] = []  # the end of each visit, for what is fetched ahead
        self.sharded = self.row.parameter is Placement.SHARDED

    def _stretches(self, groups: int | None) -> list[Stretch]:
        by_name = {home.name: home for home in self.homes}
        count = sum(unit.block for unit in self.units)
        size = 1 if groups is None else max(-(-count // groups), 1)
        found: list[list[UnitProfile]] = []
        for unit in self.units:
            if unit.block and found and found[-1][0].block and len(found[-1]) < size:
                found[-1].append(unit)
            else:
                found.append([unit])
        stretches = []
        for each in found:
            homes = [by_name[unit.home or unit.name] for unit in each if (unit.home or unit.name) in by_name]
            stretches.append(Stretch(each[0].name, tuple(each), tuple(home for home in dict.fromkeys(homes) if not home.held)))
        return stretches

    # -- one step --------------------------------------------------------------------------------------------

    def step(self) -> Trace:
        count, ahead = self.layout.micro_batches, self.layout.pp - 1 - self.stage
        warm = min(ahead, count)
        self._read_ahead()
        for number in range(warm):
            self._forward(number)
        for number in range(warm, count):
            self._forward(number)
            self._backward(number - warm)
        for number in range(count - warm, count):
            self._backward(number)
        self._update()
        return self.trace

    def _add(
        self, name: str, phase: str, nbytes: Mapping[Resource, float], after: tuple[int, ...], chain: bool = False, **more: Any
    ) -> int:  # fmt: skip
        number = self.trace.add(Task(name, phase, nbytes, tuple(sorted(set(after))), **more))
        if chain:
            self.last = (number,)
        return number

    def _hops(self, name: str, phase: str, hops: list[Bytes], after: tuple[int, ...], **more: Any) -> tuple[int, ...]:
        """A collective, hop after hop; what to wait for."""
        for nbytes in hops:
            after = (self._add(name, phase, nbytes, after, **more),)
        return after

    # -- passes ----------------------------------------------------------------------------------------------

    def _forward(self, number: int) -> None:
        lay = self.layout
        if self.stage:
            self._add("receive", "forward", {}, self.last, chain=True, axis="pp", channel=f"f{number}.{self.stage}", peers=2)
        self._enter_root("forward", number)
        for at, stretch in enumerate(self.stretches):
            self._ready(self.stretches[at:], "forward")
            self._compute(f"forward {stretch.name}", "forward", stretch, 1.0, self._needed(stretch))
            self._tp(stretch, "forward", sum(unit.tp_reduces for unit in stretch.units))
            self._release(stretch)
            if lay.checkpointing == "host" and stretch.block:
                self._add(f"keep {stretch.name}", "forward", {Resource.DOWN: self._kept(stretch)}, self.last)
        if self.stage < lay.pp - 1:
            self._send("forward", f"f{number}.{self.stage + 1}", self.units[-1].boundary)

    def _backward(self, number: int) -> None:
        lay, sync = self.layout, number == self.layout.micro_batches - 1 or not self.layout.held
        if self.stage < lay.pp - 1:
            self._add("receive", "backward", {}, self.last, chain=True, axis="pp", channel=f"b{number}.{self.stage}", peers=2)
        self._enter_root("backward", number)
        backwards = self.stretches[::-1]
        for at, stretch in enumerate(backwards):
            self._ready(backwards[at:], "backward")
            needed = self._needed(stretch)
            if stretch.block and lay.checkpointing != "none":
                needed = self._recompute(stretch, needed)
            self._compute(f"backward {stretch.name}", "backward", stretch, 2.0, needed)
            self._tp(stretch, "backward", sum(unit.tp_reduces for unit in stretch.units) if stretch.block else stretch.is_head)
            self._release(stretch)
            if sync:
                for home in stretch.homes:
                    if all(home not in other.homes for other in backwards[at + 1 :]):
                        self._reduce(home)
        if sync:
            for home in (home for home in self.homes if home.held):
                self._reduce(home)
        if self.stage:
            self._send("backward", f"b{number}.{self.stage - 1}", self._boundary_before())

    def _recompute(self, stretch: Stretch, needed: tuple[int, ...]) -> tuple[int, ...]:
        lay = self.layout
        if lay.checkpointing == "host":
            earlier = self.starts[-2] if len(self.starts) > 1 else ()
            needed = (*needed, self._add(f"fetch {stretch.name}", "backward", {Resource.UP: self._kept(stretch)}, earlier))
        if lay.checkpointing == "partitioned" and lay.tp > 1:
            sent = self._kept(stretch) * (lay.tp - 1)
            name = f"gather input {stretch.name}"
            needed = (*needed, self._add(name, "backward", {self._tp_link: sent}, self.last, axis="tp", peers=lay.tp))
        self._compute(f"forward again {stretch.name}", "backward", stretch, 1.0, needed)
        reduces = sum(max(unit.tp_reduces - 1, 0) for unit in stretch.units)  # it ends before the last one of each block
        self._tp(stretch, "backward", reduces)
        return ()

    def _compute(self, name: str, phase: str, stretch: Stretch, factor: float, needed: tuple[int, ...]) -> None:
        """factor: of a forward's flops."""
        lay, units = self.layout, stretch.units
        flops = factor * sum(unit.flops for unit in units) / lay.tp * self.tokens
        item = lay.itemsize
        weights = sum(sum(unit.cut) // lay.tp + sum(unit.whole) for unit in units) * item
        moved = factor * (weights + 2 * self.tokens * sum(unit.saved_nbytes(item, lay.tp) for unit in units))
        kernels = round(factor * sum(unit.kernels for unit in units))
        self._add(
            name, phase, {Resource.DEVICE: moved}, (*self.last, *needed), chain=True, flops=flops, kernels=kernels, dtype=lay.precision,
            unit=stretch.name,
        )  # fmt: skip
        self.starts.append(self.last)

    def _kept(self, stretch: Stretch) -> float:
        """Bytes of the inputs of a stretch's blocks, on this rank."""
        divided = self.layout.tp if self.layout.checkpointing == "partitioned" else 1
        return self.tokens * sum(unit.boundary for unit in stretch.units) * self.layout.itemsize / divided

    # -- gathers and reductions ------------------------------------------------------------------------------

    def _enter_root(self, phase: str, number: int) -> None:
        for home in (home for home in self.homes if home.held):
            self._gather(home, phase, self.last)
            self.last = tuple({*self.last, *self.gathers.pop(home.name, ())})

    def _ready(self, upcoming: list[Stretch], phase: str) -> None:
        """Gather the first, and those after it as far as is gathered ahead, now: beside the first one's computation."""
        if not self.sharded or self.layout.shards == 1 and self.layout.parameter is Tier.DEVICE:
            return
        ahead = 0.0
        for at, stretch in enumerate(upcoming[: _LOOKAHEAD + 1]):
            for home in stretch.homes:
                size = self.volumes[home.name].numel * self.layout.itemsize
                if at and ahead and ahead + size > self.layout.prefetch_nbytes:
                    return
                ahead += size * bool(at)
                if home.name not in self.gathers:
                    self._gather(home, phase, self.last)

    def _gather(self, home: Home, phase: str, after: tuple[int, ...]) -> None:
        if not self.sharded:
            return
        lay, volumes = self.layout, self.volumes[home.name]
        nbytes = sum(volumes.shards) * lay.itemsize
        if _away(lay.parameter, lay.separate):  # buffers let it come some visits ahead
            earlier = self.starts[-3] if len(self.starts) > 2 else ()
            if lay.parameter is Tier.DISK:
                earlier = (self._add(f"read {home.name}", phase, {Resource.READ: nbytes}, earlier, unit=home.name),)
            if lay.separate:
                earlier = (self._add(f"fetch {home.name}", phase, {Resource.UP: nbytes}, earlier, unit=home.name),)
            after = (*after, *earlier)
        hops = volumes.gather(first=home.name not in self.seen)
        self.seen.add(home.name)
        self.gathers[home.name] = self._hops(f"gather {home.name}", phase, hops, after, peers=lay.shards, unit=home.name)

    def _needed(self, stretch: Stretch) -> tuple[int, ...]:
        return tuple(number for home in stretch.homes for number in self.gathers.get(home.name, ()))

    def _release(self, stretch: Stretch) -> None:
        for home in stretch.homes:
            self.gathers.pop(home.name, None)

    def _reduce(self, home: Home) -> None:
        lay, volumes = self.layout, self.volumes[home.name]
        done = self._hops(f"reduce {home.name}", "backward", volumes.reduce(), self.last, peers=lay.dp, unit=home.name)
        nbytes = sum(volumes.shards)
        if self.row.gradient is Placement.SHARDED and _away(lay.gradient, lay.separate):
            if lay.separate:
                done = (self._add(f"leave {home.name}", "backward", {Resource.DOWN: nbytes * lay.itemsize}, done, unit=home.name),)
            if lay.gradient is Tier.DISK:
                written = {Resource.WRITE: nbytes * lay.gradient_itemsize}
                done = (self._add(f"write gradient {home.name}", "backward", written, done, unit=home.name),)
        self.reduced[home.name] = done

    # -- other axes ------------------------------------------------------------------------------------------

    @property
    def _tp_link(self) -> Resource:
        return Resource.INSIDE if self.layout.tp <= self.layout.node_size else Resource.BETWEEN

    def _tp(self, stretch: Stretch, phase: str, reduces: int) -> None:
        """All-reduces over tp, for which computation waits: 2 (t - 1) / t of the bytes each. kernels: how many they are."""
        lay = self.layout
        told = stretch.is_head and phase == "forward"  # of the loss: the largest logit and the sum in fp32, the target's logit
        if lay.tp == 1 or not (reduces or told):
            return
        width = max(unit.boundary for unit in stretch.units) or max(unit.boundary for unit in self.units)
        sent = 2 * (lay.tp - 1) / lay.tp * self.tokens * ((8 + lay.itemsize) if told else reduces * width * lay.itemsize)
        self._add(
            f"sum {stretch.name}", phase, {self._tp_link: sent}, self.last, chain=True, axis="tp", peers=lay.tp,
            kernels=3 if told else reduces, unit=stretch.name,
        )  # fmt: skip

    def _boundary_before(self) -> int:
        """Elements a token that the stage reads."""
        return next((unit.boundary for unit in self.profile.stages(self.layout.pp)[self.stage - 1][::-1] if unit.boundary), 0)

    def _send(self, phase: str, channel: str, width: int) -> None:
        lay = self.layout
        link = Resource.BETWEEN if lay.dp * lay.tp >= lay.node_size else Resource.INSIDE
        self._add("send", phase, {link: self.tokens * width * lay.itemsize}, self.last, axis="pp", channel=channel, peers=2)

    # -- the optimizer ---------------------------------------------------------------------------------------

    def _read_ahead(self) -> None:
        """What of the states is in buffers when the step begins has been read while forward and backward ran."""
        self.early: dict[str, tuple[int, ...]] = {}
        if self.layout.optimizer is Tier.DISK:
            home = self.homes[0]
            nbytes = sum(self.volumes[home.name].shards) * self._state_itemsize
            self.early[home.name] = (self._add(f"read states {home.name}", "forward", {Resource.READ: nbytes}, (), unit=home.name),)

    @property
    def _state_itemsize(self) -> int:
        """Bytes an element of masters and states."""
        return self.layout.state_itemsize + 4 * (self.layout.precision != "fp32")

    def _update(self) -> None:
        """After the norm, which needs all gradients: each home's shard, on its tier, and what follows from it."""
        lay = self.layout
        steps: list[int] = []
        if lay.pp > 1 and self.profile.tied and self.stage in (0, lay.pp - 1):
            self._sum_tied()
        begin = self.last = tuple({*self.last, *(number for done in self.reduced.values() for number in done)})
        for home in self.homes:
            volumes = self.volumes[home.name]
            numel = sum(volumes.shards) if self.row.optimizer is Placement.SHARDED else volumes.numel
            states = numel * self._state_itemsize
            moved = 2 * states + numel * (lay.gradient_itemsize + lay.itemsize * (1 if lay.precision != "fp32" else 2))
            if lay.optimizer is Tier.DEVICE:
                work = {Resource.DEVICE: moved}
                number = self._add(f"step {home.name}", "step", work, self.last, chain=True, kernels=1, numel=numel, unit=home.name)
            else:
                number = self._host_step(home, numel, states, moved, begin, steps)
            steps.append(number)
        ends = [(home, number) for home, number in zip(self.homes, steps, strict=True)]
        for home, number in ends:
            hops = self.volumes[home.name].publish()
            self._hops(f"publish {home.name}", "step", hops, (number,), peers=lay.shards, unit=home.name)

    def _sum_tied(self) -> None:
        """The first and the last stage add up their gradients of what both hold, in fp32 (parallel/tied.py)."""
        lay, volumes = self.layout, self.volumes[self.profile.tied]
        numel = volumes.numel if self.row.gradient is Placement.REPLICATED else sum(volumes.shards)
        link = Resource.BETWEEN if lay.dp * lay.tp >= lay.node_size else Resource.INSIDE
        done = self._add("sum tied", "step", {link: numel * 4}, self.reduced[self.profile.tied], axis="pp", peers=2)
        self.reduced[self.profile.tied] = (done,)

    def _host_step(self, home: Home, numel: int, states: float, moved: float, begin: tuple[int, ...], steps: list[int]) -> int:
        """Reads, the step of the host's cores, writes and the parameters' way back; the number of what is waited for."""
        lay, after = self.layout, list(begin)
        if lay.optimizer is Tier.DISK:
            read = self.early.get(home.name)
            if read is None:  # two stretches of buffers: one is read while the other is stepped
                nbytes = states + numel * lay.gradient_itemsize * (lay.gradient is Tier.DISK)
                read = (self._add(f"read states {home.name}", "step", {Resource.READ: nbytes}, (*begin, *steps[-2:-1]), unit=home.name),)
            after += read
        number = self._add(f"step {home.name}", "step", {Resource.HOST: moved}, tuple(after), numel=numel, unit=home.name)
        if lay.optimizer is Tier.DISK:
            self._add(f"write states {home.name}", "step", {Resource.WRITE: states}, (number,), unit=home.name)
        if lay.parameter is Tier.DISK:
            return self._add(f"write {home.name}", "step", {Resource.WRITE: numel * lay.itemsize}, (number,), unit=home.name)
        if lay.parameter is Tier.DEVICE and lay.separate:
            return self._add(f"up {home.name}", "step", {Resource.UP: numel * lay.itemsize}, (number,), unit=home.name)
        return number
