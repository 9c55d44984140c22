"""The search for the layout that trains fastest within memory: `zeroshard plan --auto`.

    all layouts --held_of--> those that fit --step_seconds, by formula--> the fastest kinds: dry runs, simulated --> the fastest

Formulas leave out what does not fit and what is slower. What is ranked and reported are dry runs: the seconds and bytes that
`zeroshard simulate` and `zeroshard plan` tell of the same layout. Among layouts within 2% of the fastest, the plainest is taken:
states on the device before offloaded ones, data parallelism before other axes, lower stages before higher.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from ...config import CHOICES, Tier
from ...errors import ConfigError, did_you_mean
from ...seam import GRADIENTS, MASTERS, OPTIMIZER, PARAMETERS
from ...utils.axes import DP, EP, PP, SP, TP
from ..plan import Plan, fullest, memories
from ..recorder import tell
from ..request import Request, gb
from ..simulator.hardware import Hardware
from ..simulator.spread import seconds_with_spread
from .layout import Layout
from .load import step_seconds
from .memory import held_of
from .profile import Profile
from .requested import of_layout, profile_of

MARGIN = 0.1  # share of the memory that is left for what the formulas do not count: holes between blocks, temporaries
_CONFIRMED = 2  # kinds of layouts whose dry runs are simulated: the fastest and the runner-up
_TRIED = 24  # dry runs at the most, each some seconds or, of a hundred blocks, half a minute
_LARGE_UNIT = 0.05  # share of the device's memory: blocks that take more when they are gathered may be split
_LONG = 16_384  # tokens of a sequence from which on axes sp are tried: a shorter one's activations are the smaller part
_EQUAL = 1.02  # times within this factor are taken to be the same

_T = TypeVar("_T")


@dataclass(frozen=True)
class Candidate:
    """A layout that fits by its dry run. request, plans: that run, of the ranks that may be fullest.

    step_s: seconds of a step of the whole batch, simulated. memory: bytes of each memory by category, on the rank and at the moment
    at which it is fullest.
    """

    layout: Layout
    request: Request
    plans: Sequence[Plan]
    step_s: float
    tflops: float  # of a device
    tokens_per_s: float  # of all devices
    bound: str  # what bounds the step, a sentence
    memory: Mapping[Tier, Mapping[str, int]]

    def nbytes(self, tier: Tier = Tier.DEVICE) -> int:
        return sum(self.memory.get(tier, {}).values())


@dataclass(frozen=True)
class Found:
    """The result of a search. considered: how many "layouts" there were; how many "fit" by formula, were "verified", "refused".

    runner_up: the fastest of another kind than `best`: with another stage, mesh, tier or way to keep activations.
    """

    best: Candidate
    runner_up: Candidate | None
    reason: str
    considered: Mapping[str, int]
    profile: Profile
    hardware: Hardware
    global_batch: int


def search(
    request: Request, global_batch: int, *, fixed: Mapping[str, Any] | None = None, lossy: bool = False, margin: float = MARGIN
) -> Found:  # fmt: skip
    """Find the fastest layout that fits, and the runner-up.

    Args:
        request: a run of the model on as many ranks; its layout does not matter.
        global_batch: sequences of a step, over all ranks.
        fixed: fields of Layout that are given, and not searched ({"tp": 1, "pp": 1}).
        lossy: whether layouts may change results: send parameters and gradients packed.
        margin: share of each memory that must stay free.

    Raises ConfigError if no layout divides the numbers evenly, or none fits; the message then says by how much.
    """
    profile, hardware, precision = profile_of(request), request.hardware, request.config.precision
    fixed = {"node_size": request.ranks_of_node, **request.tiles, **(fixed or {})}
    counts: Counter[str] = Counter()
    ranked = by_formula(profile, hardware, request.ranks, global_batch, precision, fixed, lossy, margin, counts)
    confirmed = _confirmed(ranked, request, _limits(hardware, request.ranks, margin), counts)
    best = confirmed[0]
    runner_up = next(iter(confirmed[1:]), None)
    reason = _reason(profile, hardware, best, runner_up, _limits(hardware, request.ranks, margin))
    return Found(best, runner_up, reason, dict(counts), profile, hardware, global_batch)


def by_formula(
    profile: Profile, hardware: Hardware, devices: int, global_batch: int, precision: str = "bf16",
    fixed: Mapping[str, Any] | None = None, lossy: bool = False, margin: float = MARGIN, counts: Counter[str] | None = None,
) -> list[Layout]:  # fmt: skip
    """Return the layouts that fit by formula, the fastest by formula first; arguments as of `search`. counts: gets `considered`."""
    fixed, counts = fixed or {}, Counter() if counts is None else counts
    _check(profile, devices, global_batch, fixed, margin)
    limits = _limits(hardware, devices, margin)
    fitting: list[tuple[float, Layout]] = []
    shortest: tuple[float, Layout | None] = (math.inf, None)
    for layout in _layouts(profile, hardware, devices, global_batch, precision, fixed, lossy):
        counts["layouts"] += 1
        if counts["layouts"] % 1000 == 0:
            tell(f"{counts['layouts']:,} layouts looked at, {counts['fit']:,} fit by formula")
        held = held_of(profile, layout)
        excess = max(sum(of_tier.values()) / limits[tier] for tier, of_tier in held.items())  # above 1 it does not fit
        if excess > 1:
            shortest = min(shortest, (excess, layout), key=lambda pair: pair[0])
            continue
        counts["fit"] += 1
        fitting.append((step_seconds(profile, layout, hardware)[0], layout))
    if not counts["layouts"]:
        near = [each for each in (global_batch // devices * devices, -(-global_batch // devices) * devices) if each]
        given = f" with {', '.join(f'{name}={value}' for name, value in fixed.items())}" if fixed else ""
        raise ConfigError(
            f"no layout of {devices} devices divides a batch of {global_batch} sequences{given}: expected a multiple of the ranks that share it; "
            f"the nearest: {' or '.join(map(str, dict.fromkeys(near)))}."
        )
    if not fitting:
        raise ConfigError(_too_large(profile, hardware, shortest, limits))
    return [layout for _, layout in in_order(fitting, lambda pair: pair)]


def _check(profile: Profile, devices: int, global_batch: int, fixed: Mapping[str, Any], margin: float) -> None:
    for name, value in (("devices", devices), ("global_batch", global_batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}: expected a whole number of at least 1, got {value!r}.")
    if not 0 <= margin < 1:
        raise ConfigError(f"margin: expected a share of the memory from 0 up to 1, got {margin!r}.")
    known = [field.name for field in fields(Layout)]
    for name in fixed:
        if name not in known:
            raise ConfigError(f"fixed: expected fields of Layout, got {name!r}.{did_you_mean(name, known)}")
    if fixed.get(TP, 1) > 1 and profile.heads % fixed[TP]:
        near = min(_divisors(profile.heads), key=lambda each: abs(each - fixed[TP]))
        raise ConfigError(
            f"{TP}={fixed[TP]}: expected a divisor of {profile.heads}, over which heads and vocabulary of {profile.name} are divided evenly; "
            f"the nearest: tp={near}."
        )
    Layout(**{axis: fixed.get(axis, 1) for axis in (PP, TP, EP, SP)})  # raises ConfigError for axes that do not go together
    profile.check(fixed.get(EP, 1), fixed.get(SP, 1))


# -- what there is to choose from --------------------------------------------------------------------------------------


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _layouts(
    profile: Profile, hardware: Hardware, devices: int, global_batch: int, precision: str, fixed: Mapping[str, Any], lossy: bool
) -> Iterator[Layout]:  # fmt: skip
    """Yield the layouts that divide heads, blocks, ranks and batch evenly."""
    node_size = min(fixed.get("node_size", hardware.devices_per_node), devices)
    checkpoints = ("none", "blocks", "host", "partitioned") if any(layer.boundary for layer in profile.blocks) else ("none",)
    for tp in _divisors(math.gcd(profile.heads, devices)):
        if tp > node_size:  # computation would wait for all-reduces between nodes
            continue
        for pp, ep, sp in _axes_beside(profile, devices // tp, tp, node_size, fixed):
            readers = devices // tp // pp // sp
            if pp > len(profile.blocks) or global_batch % readers or (pp > 1 and checkpoints == ("none",)):
                continue
            rows = global_batch // readers
            for micro_batch in _divisors(rows):
                if pp > 1 and rows // micro_batch < pp:  # stages would be idle most of the time
                    continue
                common = {DP: readers // ep, PP: pp, TP: tp, EP: ep, SP: sp, "micro_batch": micro_batch, "micro_batches": rows // micro_batch,
                          "precision": precision, "node_size": node_size, "separate": hardware.separate}  # fmt: skip
                for checkpointing in checkpoints:
                    large = 2 * max(layer.numel for layer in profile.blocks) // tp > hardware.device.memory_nbytes * _LARGE_UNIT
                    if (checkpointing == "partitioned" and tp == 1) or (checkpointing == "host" and not hardware.separate):
                        continue
                    split = max(layer.numel for layer in profile.blocks) // tp // 8 if large else None
                    yield from _variants(hardware, common | {"checkpointing": checkpointing}, fixed, lossy, split)


def _axes_beside(
    profile: Profile, devices: int, tp: int, node_size: int, fixed: Mapping[str, Any]
) -> Iterator[tuple[int, int, int]]:  # fmt: skip
    """Yield numbers of ranks along pp, ep and sp that divide what they share; ep and sp only beside dp, and sp inside of a node."""
    yield from ((pp, 1, 1) for pp in _divisors(devices))
    if tp > 1:
        return
    yield from ((1, ep, 1) for ep in _divisors(math.gcd(profile.experts, devices))[1:] if profile.experts)
    if profile.seq >= _LONG or fixed.get(SP, 1) > 1:
        shared = math.gcd(profile.sp_heads[0], profile.seq, devices)
        yield from ((1, 1, sp) for sp in _divisors(shared)[1:] if sp <= node_size or sp == fixed.get(SP))


def _variants(
    hardware: Hardware, common: dict[str, Any], fixed: Mapping[str, Any], lossy: bool, split: int | None
) -> Iterator[Layout]:  # fmt: skip
    """Yield a mesh and batch with all stages, tiers, ways to send between nodes and (split: at stage 3) sizes of units."""
    if any(name in common and common[name] != value for name, value in fixed.items()):
        return
    dp, inside = common[DP] * common[EP] * common[SP], max(common["node_size"] // common[TP], 1)
    grouped = common[DP] if common[EP] > 1 else dp  # groups are of ranks with the same experts, too
    several = dp > inside and dp % inside == 0 and inside > 1
    for stage, tiers in CHOICES:
        plain = all(tier is Tier.DEVICE for tier in tiers)
        if (dp == 1 and stage and plain and "stage" not in fixed) or (Tier.HOST in tiers[::2] and not hardware.separate):
            continue
        states = dict(zip(("stage", "optimizer", "gradient", "parameter"), (stage, *tiers), strict=True))
        extras: list[dict[str, Any]] = [{}]
        if several:
            extras.append({"hops": "one"})
        if several and stage == 3 and common[EP] == 1:
            extras += [{"hpz": inside}, {"shard_size": inside}]
        if several and lossy and stage:
            packed = {"quantized_weights": "int8", "quantized_gradients": "int4"}
            extras += [packed, {**packed, "hpz": inside}] if stage == 3 and common[EP] == 1 else [packed]
        for extra in extras + [{**extra, "max_unit_numel": split} for extra in extras if split and stage == 3]:
            given = {**common, **states, **extra, **fixed}
            # a fixed field may lead to what zs.shard refuses: secondary shards need two hops and no groups, both divide dp
            refused = given.get("hpz", 1) > 1 and (given.get("shard_size") is not None or given.get("hops") == "one")
            # split masters are the parameters, which packing would round
            refused = refused or (given.get("master_weights") == "split" and stage < 3 and "quantized_weights" in given)
            refused = refused or bool(grouped % given.get("hpz", 1) or grouped % (given.get("shard_size") or 1))
            if not refused and all(given[name] == value for name, value in (common | states).items()):
                yield Layout(**given)


# -- what fits ---------------------------------------------------------------------------------------------------------


def _limits(hardware: Hardware, devices: int, margin: float) -> dict[Tier, float]:
    """Return the bytes of each tier that one rank may take."""
    ranks = min(hardware.devices_per_node, devices)
    room = {tier: hardware.capacity(tier) * (1 - margin) / ranks for tier in Tier}
    return room | {Tier.DEVICE: (hardware.capacity(Tier.DEVICE) - hardware.overhead_nbytes) * (1 - margin)}


def in_order(found: Sequence[_T], of: Callable[[_T], tuple[float, Layout]]) -> list[_T]:
    """Return the fastest first; of those that are equally fast as the fastest, the plainest. of: a function -> (seconds, layout)."""
    best = min((of(each)[0] for each in found), default=0.0)

    def order(each: _T) -> tuple:
        seconds, lay = of(each)
        if seconds > best * _EQUAL:
            return True, (), seconds
        away = sum(tier is not Tier.DEVICE for tier in lay.tiers)
        packed = sum(codec is not None for codec in (lay.quantized_weights, lay.quantized_gradients))
        special = (lay.max_unit_numel is not None) + (lay.hpz > 1) + (lay.shard_size is not None) + (lay.hops != "two")
        axes, kept = sum(size > 1 for axis, size in lay.mesh.items() if axis != DP), lay.checkpointing != "none"
        return False, (away, packed, axes, kept, special, lay.stage, lay.micro_batches), seconds

    return sorted(found, key=order)


def _kind(layout: Layout) -> tuple:
    """Return the fields that make two layouts different in kind; layouts of one kind differ only in details (the micro-batch)."""
    lay = layout
    return lay.stage, lay.tiers, lay.pp, lay.tp, lay.ep, lay.sp, lay.checkpointing, lay.hpz, lay.shard_size, lay.quantized_weights


def _confirmed(ranked: Sequence[Layout], request: Request, limits: Mapping[Tier, float], counts: Counter[str]) -> list[Candidate]:
    """Return the fastest kinds that fit by dry runs, in the order of their simulated steps. Raises ConfigError if none fits."""
    found: list[Candidate] = []
    kinds: set[tuple] = set()
    full: dict[Layout, int] = {}  # a layout of one sequence at a time -> sequences of a micro-batch with which it does not fit
    refusal = ""
    for layout in ranked:
        if len(found) == _CONFIRMED or counts["verified"] == _TRIED:
            break
        if _kind(layout) in kinds:  # one of the same kind, faster by formula, fits
            continue
        alike = replace(layout, micro_batch=1, micro_batches=min(layout.micro_batches, 2))  # a single one holds other gradients
        if layout.micro_batch >= full.get(alike, math.inf):
            continue
        counts["verified"] += 1
        tell(f"{counts['fit']:,} of {counts['layouts']:,} layouts fit by formula; dry run of {layout}")
        chosen = of_layout(request, layout)
        try:
            plans = chosen.plans()
            held = fullest([memories(phase.held, plan.separate) for plan in plans for phase in plan.phases])
            if max(sum(of_tier.values()) / limits[tier] for tier, of_tier in held.items()) > 1:
                counts["refused"] += 1
                full[alike] = layout.micro_batch
                continue
            done = chosen.simulated(plans)
        except ConfigError as error:  # this model can not be divided so
            counts["refused"] += 1
            kinds.add(_kind(layout))
            refusal = f" The last was refused: {error}"
            continue
        kinds.add(_kind(layout))
        found.append(Candidate(layout, chosen, plans, done.step_s, done.tflops, done.tokens_per_s, done.bound, held))
    if not found:
        raise ConfigError(
            f"none of the {counts['verified']} fastest layouts fits by its dry run: use more devices, or a smaller batch.{refusal}"
        )
    return in_order(found, lambda each: (each.step_s, each.layout))


# -- what is said ------------------------------------------------------------------------------------------------------


def _reason(
    profile: Profile, hardware: Hardware, best: Candidate, runner_up: Candidate | None, limits: Mapping[Tier, float]
) -> str:
    """Explain the choice: what a plainer layout would take, what bounds this one, and what the runner-up takes."""
    layout = best.layout
    room = gb(limits[Tier.DEVICE])
    seconds = seconds_with_spread(best.step_s, hardware.spread)
    sentences = [f"{layout} takes {gb(best.nbytes())} GB of the {room} GB that a device has for it, {seconds} s a step."]
    lower: Layout | None = None  # the next plainer layout: with nothing offloaded, else one stage lower
    if any(tier is not Tier.DEVICE for tier in layout.tiers):
        lower = replace(layout, optimizer=Tier.DEVICE, gradient=Tier.DEVICE, parameter=Tier.DEVICE)
    elif layout.stage > 0:
        lower = replace(layout, stage=layout.stage - 1, hpz=1, shard_size=None, quantized_weights=None, quantized_gradients=None)
    if lower is not None:
        needed = sum(held_of(profile, lower)[Tier.DEVICE].values())
        what = f"ZeRO-{lower.stage}" if lower.stage != layout.stage else "Without offloading it"
        if needed > limits[Tier.DEVICE]:
            sentences.append(f"{what} would need {gb(needed)} GB.")
        else:
            slower = step_seconds(profile, lower, hardware)[0] / step_seconds(profile, layout, hardware)[0] - 1
            sentences.append(
                f"{what} would fit too, " + (f"and take {slower:.0%} longer." if slower > 0.005 else "and take as long.")
            )
    sentences.append(f"It is {best.bound.partition(';')[0]}.")
    if runner_up is not None:
        slower = runner_up.step_s / best.step_s - 1
        cost = f"takes {slower:.0%} longer" if slower >= 0.005 else "is as fast, but less simple"
        sentences.append(f"The runner-up, {runner_up.layout}, {cost}.")
    return " ".join(sentences)


def _too_large(profile: Profile, hardware: Hardware, shortest: tuple[float, Layout | None], limits: Mapping[Tier, float]) -> str:
    excess, layout = shortest
    assert layout is not None
    held = held_of(profile, layout)
    states = sum(found.get(name, 0) for found in held.values() for name in (PARAMETERS, GRADIENTS, MASTERS, OPTIMIZER))
    sizes = ", ".join(
        f"{gb(sum(held[tier].values()))} GB on {tier.value} ({gb(limits[tier])} GB available)" for tier in held if held[tier]
    )
    return (
        f"{profile.name} of {profile.numel / 1e9:.3g}B parameters does not fit {layout.ranks} x {hardware.name} in any layout. The nearest, "
        f"{layout}, takes {sizes}, model states {gb(states)} GB of it: {excess:.3g} times what there is. Use more devices, or a smaller batch."
    )
