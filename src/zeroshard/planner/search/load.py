"""The load of a step by formulas: its tasks without their order, each distinct one with the number of times that a rank does it.

    forward of a block, 40 times | gather of a block, 81 times | ...        of each micro-batch
    reduction of a block, 40 times | step of a shard | ...                  of a step

The search excludes layouts that cannot be fast by these sums. Published runs of systems other than this library are timed by them
(benchmarks/papers). The seconds of a step of this library are those of a dry run, in the runtime's own order (`Request.simulated`).

Words, from profile.py: a *layer* is a part of the model that a forward computes; its *bucket* has its parameters, gathered and reduced
together. Several layers may have one bucket (tied weights, norms outside of blocks); a forward comes to it once for each, a
*visit*.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ...config import STAGES, Placement, Tier
from ...seam import ROOT, rests_away
from ...utils.axes import DP, EP, PP, SP, TP
from ..simulator.hardware import Hardware, resource_seconds, seconds
from ..simulator.simulate import kind_of
from ..simulator.trace import AttentionWork, Resource, Task, Trace
from .layout import Bytes, Hop, Layout, comms_of, exchange, packed_nbytes
from .profile import BACKWARD_PASSES, Bucket, LayerProfile, Profile, buckets_of

_SWAP_KERNELS = 18  # of the two all-to-alls of an attention along sp, which copy each tensor twice, counted by dry runs
_BACKWARD_KERNELS = 3  # times the kernels of a forward, counted by dry runs of a GPT
# times the flops of a forward: five products of scores, not two (FlashAttention-2, arXiv 2307.08691, section 4.1)
_ATTENTION_BACKWARD = 2.5
_STEP_NBYTES = 36  # per element, which torch's AdamW moves beyond one pass over all that it steps: its kernels are not fused
# the fields of a layout that determine what a micro-batch computes
_COMPUTED = (
    DP, PP, TP, EP, SP, "micro_batch", "checkpointing", "mlp_tokens", "loss_tokens", "precision", "node_size", "stops_early",
)  # fmt: skip
Part = tuple[Task, int]  # a task, and how often it is done


@dataclass(frozen=True)
class Load:
    """The work of one rank of a stage of the pipeline. each: tasks of every micro-batch. once: tasks of a step besides these.

    trace: a trace without tasks, which determines the ranks of a node.
    """

    each: tuple[Part, ...]
    once: tuple[Part, ...]
    micro_batches: int
    trace: Trace

    @property
    def parts(self) -> Iterator[Part]:
        """All tasks of a step."""
        yield from ((task, times * self.micro_batches) for task, times in self.each)
        yield from self.once

    def total(self, *resources: Resource) -> float:
        """Return the bytes of these resources in a step."""
        return sum(times * task.nbytes.get(resource, 0.0) for task, times in self.parts for resource in resources)

    @property
    def flops(self) -> float:
        """Floating-point operations of a step, with those of repeated forwards."""
        return sum(times * task.flops for task, times in self.parts)


def step_seconds(
    profile: Profile, layout: Layout, hardware: Hardware, beside: bool = True, loads: list[Load] | None = None
) -> tuple[float, Resource]:
    """Return the seconds of a step, and the resource that takes most of them.

    beside: whether links work while the device computes; then forward and backward take the time of the busiest link, or of the
    computation if that is longer. Else all tasks follow one another. loads: in place of those of `loads_of`. The bubble of a pipeline
    is the time of one micro-batch in all other stages. If nothing is sent beside computation, it includes the reduction of a stage's
    gradients, which precedes the last message to the next stage.
    """
    beside = beside and layout.prefetch_nbytes is not None
    passes, each, tails, slowest = [], [], [], Resource.DEVICE
    for load in loads or loads_of(profile, layout):
        found = _seconds_beside(load, hardware) if beside else _seconds_in_turn(load, hardware)
        worst = max(found.lanes, key=found.lanes.__getitem__, default=Resource.DEVICE)
        total = load.micro_batches * found.micro_batch + found.once
        slowest = worst if found.lanes.get(worst, 0.0) > total else Resource.DEVICE
        passes.append(max(total, found.lanes.get(worst, 0.0)))
        each.append(found.micro_batch if beside else found.micro_batch + found.once)
        tails.append(found.step)
    between = max(layout.pp - 3, 0) * each[len(each) // 2]  # stages in the middle are alike: one stands for all
    return max(passes) + sum(each) + between - max(each) + max(tails), slowest


class _Seconds(NamedTuple):
    """Seconds of a load's tasks: of a micro-batch; of what else forward and backward do, once a step; of the optimizer's step.

    The first two are of tasks for which the program waits. lanes: of all tasks of forward and backward, by the resource that does them.
    """

    micro_batch: float
    once: float
    step: float
    lanes: dict[Resource, float]


def _seconds_in_turn(load: Load, hardware: Hardware) -> _Seconds:
    """Add up the seconds of tasks of which each begins when the one before it has ended."""

    def total(parts: tuple[Part, ...], of_step: bool) -> float:
        chosen = ((task, times) for task, times in parts if (task.phase == "step") == of_step)
        return sum(times * seconds(task, hardware, load.trace) for task, times in chosen)

    return _Seconds(total(load.each, False), total(load.once, False), total(load.each, True) + total(load.once, True), {})


def _seconds_beside(load: Load, hardware: Hardware) -> _Seconds:
    """Add up the seconds of tasks on resources that work at the same time, each resource by itself.

    The program waits for computation, and for messages of tp, ep and sp. The optimizer's step takes the time of its busiest resource;
    before it, ends of a pipeline add up the gradients of tied weights, and this takes the time of the busiest resource likewise.
    """
    waited = {"each": 0.0, "once": 0.0}
    lanes, sums, steps = (defaultdict[Resource, float](float) for _ in range(3))
    for kind, parts, repeated in (("each", load.each, load.micro_batches), ("once", load.once, 1)):
        for task, times in parts:
            for resource, time in resource_seconds(task, hardware, load.trace).items():
                lane = hardware.lane(resource)
                if task.phase == "step" and kind_of(task) != "publish":  # that runs beside the next forward
                    (sums if kind_of(task) == "sum" else steps)[lane] += times * time
                    continue
                lanes[lane] += repeated * times * time
                if resource is Resource.DEVICE or task.axis in (TP, EP, SP):  # computation waits for it
                    waited[kind] += times * time
    tail = max(sums.values(), default=0.0) + max(steps.values(), default=0.0)
    return _Seconds(waited["each"], waited["once"], tail, lanes)


def loads_of(profile: Profile, layout: Layout) -> list[Load]:
    """Return the loads of a rank of the first stage of the pipeline, of the middle one with most to compute, and of the last."""
    stages = profile.stages(layout.pp)
    middle = max(range(layout.pp)[1:-1], key=lambda stage: sum(layer.flops for layer in stages[stage]), default=0)
    return [load_of(profile, layout, stage) for stage in sorted({0, middle, layout.pp - 1})]


def load_of(profile: Profile, layout: Layout, stage: int = 0) -> Load:
    """Return the load of a rank of a stage of the pipeline."""
    profile = profile.over(layout.ep)
    # layouts of a search that differ in other fields share these
    computed = _computed(profile, Layout(**{name: getattr(layout, name) for name in _COMPUTED}), stage)
    held = layout.held
    few: dict[str, Any] = {"micro_batch": 1, "micro_batches": 1 + held, "hold": held, "mlp_tokens": None, "loss_tokens": None}
    sent = _sent(profile, replace(layout, **few, checkpointing="none"), stage)
    trace = Trace(rank=stage * layout.dp * layout.tp, axes=layout.mesh, node_size=layout.node_size)
    return Load((*computed, *sent[0]), sent[1], layout.micro_batches, trace)


@functools.lru_cache(maxsize=4096)
def _computed(profile: Profile, layout: Layout, stage: int) -> tuple[Part, ...]:
    """Return what a micro-batch computes, and sends over tp and pp, by the fields of a layout that are in `_COMPUTED`."""
    work = _Computation(profile, layout, stage)
    for layer, times in _alike(profile, layout.pp, stage, layout.ep)[0].items():
        work.add(layer, times)
    work.add_messages()
    return tuple(work.parts)


@functools.lru_cache(maxsize=4096)
def _sent(profile: Profile, layout: Layout, stage: int) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Return what a micro-batch, and what a step has to gather, reduce and update, whatever it computes."""
    work = _Sharding(profile, layout, stage)
    for bucket, times, visits in _alike(profile, layout.pp, stage, layout.ep)[1]:
        work.add(bucket, times, visits)
    return tuple(work.each), tuple(work.once)


@functools.lru_cache(maxsize=256)
def _alike(profile: Profile, pp: int, stage: int, ep: int) -> tuple[dict[LayerProfile, int], list[tuple[Bucket, int, int]]]:
    """Return the distinct layers of a stage with their counts; and its distinct buckets: (bucket, count, visits of a forward)."""
    layers = profile.stages(pp)[stage]
    visits = Counter(layer.bucket or layer.name for layer in layers)
    names = (ROOT, profile.tied)  # others may be alike
    buckets = [
        (replace(bucket, name=bucket.name if bucket.name in names else ""), visits[bucket.name])
        for bucket in buckets_of(layers, ep=ep)
    ]
    found = [(bucket, times, 1 if bucket.held else visited) for (bucket, visited), times in Counter(buckets).items()]
    return Counter(replace(layer, name="", bucket="") for layer in layers), found


class Sizes:
    """The elements and bytes of a bucket that one rank of a layout holds and sends.

    ranks: over which it is sharded. shards: elements of the shard of each flat buffer; own: of all. numel: of the whole buffers,
    with their padding. states: bytes of the shards' masters and optimizer states. gather, again, reduce: what is sent, hop after hop, by the first gather of a step, by
    later ones, and to reduce. packs_weights, packs_gradients: whether values are packed before; weight, gradient: bytes of an
    element then.
    """

    def __init__(self, layout: Layout, bucket: Bucket) -> None:
        self.ranks = layout.shards(bucket.divided)
        self.shards = bucket.shards(layout.tp, self.ranks, layout.state_format)
        self.own = sum(self.shards)
        coded = [which for _, which in bucket.buffers(layout.tp, layout.state_format)]
        self.states = sum(size * layout.kept_itemsize(which) for size, which in zip(self.shards, coded, strict=True))
        self.numel = self.own * self.ranks
        comms, wholes = comms_of(layout, bucket.divided), [numel * self.ranks for numel in self.shards]
        self.packs_weights = any(comms.values_of(bucket.packs, numel) is not comms.shards for numel in wholes)
        self.packs_gradients = any(comms.gradients_of(bucket.packs, numel) is not comms.shards for numel in wholes)
        self.weight = packed_nbytes(layout.quantized_weights if self.packs_weights else None, layout.itemsize)
        self.gradient = packed_nbytes(layout.quantized_gradients if self.packs_gradients else None, layout.itemsize)
        kinds = {"gather": layout.compute_dtype, "gather again": layout.compute_dtype, "reduce": layout.sent_dtype}
        self.gather, self.again, self.reduce = (
            exchange(layout, kind, self.shards, dtype, bucket.packs, bucket.divided) for kind, dtype in kinds.items()
        )
        if STAGES[layout.stage].gradient is Placement.REPLICATED:
            self.reduce += exchange(layout, "gather", self.shards, layout.gradient_dtype, False, bucket.divided)


def _hops(name: str, phase: str, hops: list[Hop], times: int, more: Mapping[str, Any]) -> list[Part]:
    return [(Task(name, phase, nbytes, peers=peers, **more), times) for nbytes, peers in hops]


class _Computation:
    """Lists what a rank of a stage computes for a micro-batch, and what ranks of tp and stages send each other meanwhile."""

    def __init__(self, profile: Profile, layout: Layout, stage: int) -> None:
        self.profile, self.layout, self.stage = profile, layout, stage
        self.layers = profile.stages(layout.pp)[stage]
        self.tokens = layout.micro_batch * profile.seq // layout.sp
        self.parts: list[Part] = []

    def add(self, layer: LayerProfile, times: int) -> None:
        """Add forward, backward and repeated forward of a layer, what they sum over tp, and copies of their inputs."""
        lay, head = self.layout, layer.saved_fp32 > 0 and not layer.block  # the head computes the loss
        self.parts += [(self._task("forward", layer, 1.0), times), (self._task("backward", layer, 2.0), times)]
        # the loss sums the largest logit and the sum in fp32, and the target's logit; backward, the gradient of the head's input
        self._sum("forward", layer, times, layer.tp_reduces, head)
        self._sum("backward", layer, times, layer.tp_reduces if layer.block else int(head))
        self._exchange("forward", layer, times)
        self._exchange("backward", layer, times)
        self._tiles(layer, times)
        if not layer.block or lay.checkpointing == "none":
            return
        last = layer.last_flops if lay.stops_early else 0.0
        again = (layer.flops - last) / layer.flops if layer.flops else 1.0
        self.parts.append((self._task("forward again", layer, again), times))
        self._sum("backward", layer, times, max(layer.tp_reduces - lay.stops_early, 0))
        self._exchange("backward", layer, times)
        kept = self.tokens * layer.boundary * lay.itemsize / (lay.tp if lay.checkpointing == "partitioned" else 1)
        if lay.checkpointing == "host":
            self.parts.append((Task("keep", "forward", {Resource.DOWN: kept}), times))
            self.parts.append((Task("fetch", "backward", {Resource.UP: kept}), times))
        if lay.checkpointing == "partitioned" and lay.tp > 1:
            sent = self._nbytes(lay.tp, kept * (lay.tp - 1))
            self.parts.append((Task("gather input", "backward", sent, axis=TP, peers=lay.tp), times))

    def _task(self, name: str, layer: LayerProfile, factor: float) -> Task:
        """Return the computation of a layer. factor: times a forward's flops; above 1: a backward."""
        lay, item, backward = self.layout, self.layout.itemsize, factor > 1
        flops = factor * layer.flops / lay.tp * self.tokens
        weights = (sum(layer.cut) // lay.tp + sum(layer.whole) - sum(layer.experts) * (lay.ep - 1) // lay.ep) * item
        moved = self.tokens * layer.moved_nbytes(item, lay.tp, backward) + weights * (BACKWARD_PASSES if backward else 1)
        attention = None
        if layer.attention:
            work = layer.attention * self.tokens / lay.tp * (_ATTENTION_BACKWARD if backward else 1.0)
            attention = AttentionWork(work, self.profile.seq, layer.causal, 1)
            if backward:  # `factor` counts it as 2 forwards, but it is 2.5
                flops += work * (1 - factor / _ATTENTION_BACKWARD)
        kernels = round((_BACKWARD_KERNELS if backward else factor) * layer.kernels)
        return Task(
            name, "backward" if name == "forward again" else name, {Resource.DEVICE: min(factor, 1) * moved}, flops=flops, kernels=kernels,
            products=(2 if backward else 1) * layer.products, attention=attention, dtype=lay.precision,
        )  # fmt: skip

    def _sum(self, phase: str, layer: LayerProfile, times: int, reduces: int, told: bool = False) -> None:
        """Add all-reduces over tp, for which computation waits; each sends 2 (tp - 1) / tp of its bytes. told: those of the loss."""
        lay = self.layout
        if lay.tp == 1 or not (reduces or told):
            return
        width = layer.boundary or max(each.boundary for each in self.layers)
        sent = 2 * (lay.tp - 1) / lay.tp * self.tokens * ((8 + lay.itemsize) if told else reduces * width * lay.itemsize)
        messages = 3 if told else reduces
        self.parts.append((Task("sum", phase, self._nbytes(lay.tp, sent), axis=TP, peers=lay.tp, messages=messages), times))

    def _tiles(self, layer: LayerProfile, times: int) -> None:
        """Add what backward computes again of MLPs, and of logits, that are computed in tiles of tokens."""
        lay, own = self.layout, self.profile.seq // self.layout.sp
        mlp, loss = (min(each or own, own) for each in (lay.mlp_tokens, lay.loss_tokens))
        if layer.mlp[1] and mlp < own:  # a tile skips its last map, or the repeated forward of a block the last tile
            skipped = layer.last_flops if lay.checkpointing == "none" else 2 * layer.mlp[1] * mlp / own
            flops = (2 * layer.mlp[1] - skipped * lay.stops_early) * self.tokens
            self.parts.append((Task("tiles again", "backward", {}, flops=flops, dtype=lay.precision), times))
        if layer.logits and loss < own:
            self.parts.append((self._task("forward again", layer, 1.0), times))

    def _exchange(self, phase: str, layer: LayerProfile, times: int) -> None:
        """Add the two all-to-alls of a forward, or of a backward: tokens to experts, or to heads, and back."""
        lay = self.layout
        heads = 2 * layer.exchanged[0] + 2 * layer.keys(lay.sp, self.profile.sp_heads[1])  # queries, keys, values; the output
        for axis, size, elements in ((EP, lay.ep, 2 * layer.routed), (SP, lay.sp, heads)):
            if size > 1 and elements:
                sent = self._nbytes(size, elements * self.tokens * lay.itemsize * (size - 1) / size)
                self.parts.append((Task("exchange", phase, sent, axis=axis, peers=size, messages=2, distinct=True), times))
                copies = Task("copies", phase, {Resource.DEVICE: 0.0}, kernels=_SWAP_KERNELS * (axis == SP), dtype=lay.precision)
                self.parts.append((copies, times))

    def _nbytes(self, size: int, sent: float) -> Bytes:
        """Return by link the bytes `sent` to all ranks along an axis of neighbours: inside the node, and between nodes."""
        node = self.layout.node_size
        if size <= node:
            return {Resource.INSIDE: sent}
        shares = {Resource.INSIDE: (node - 1) / (size - 1), Resource.BETWEEN: (size - node) / (size - 1)}
        return {link: sent * share for link, share in shares.items() if share}

    def add_messages(self) -> None:
        """Add what is sent to the stages beside this one."""
        lay, before = self.layout, self.profile.stages(self.layout.pp)[self.stage - 1][::-1] if self.stage else ()
        widths = {"forward": self.layers[-1].boundary if self.stage < lay.pp - 1 else 0,
                  "backward": next((layer.boundary for layer in before if layer.boundary), 0)}  # fmt: skip
        for phase, width in widths.items():
            nbytes = {_to_stages(lay): self.tokens * width * lay.itemsize}
            self.parts += [(Task("send", phase, nbytes, axis=PP, peers=2), 1)] if width else []


def _to_stages(layout: Layout) -> Resource:
    """Return the link to the stages beside a stage."""
    return Resource.BETWEEN if layout.dp * layout.tp >= layout.node_size else Resource.INSIDE


class _Sharding:
    """Lists what a rank of a stage gathers, reduces and steps: for each micro-batch, and once in a step."""

    def __init__(self, profile: Profile, layout: Layout, stage: int) -> None:
        self.layout, self.row = layout, STAGES[layout.stage]
        ends = layout.pp > 1 and stage in (0, layout.pp - 1)
        self.tied = profile.tied if ends else ""
        self.each: list[Part] = []
        self.once: list[Part] = []

    def add(self, bucket: Bucket, times: int, visits: int) -> None:
        """Add `times` buckets that are alike; a forward comes to each of them `visits` times."""
        lay, sizes = self.layout, Sizes(self.layout, bucket)
        # each flat buffer is gathered and reduced by itself; published systems (rings) have one buffer for a bucket
        more = {"messages": 1 if lay.rings else len(sizes.shards)}
        self._gather(sizes, times, visits, more)
        self._reduce(sizes, times, more)
        self._update(sizes, times, more)
        if bucket.name and bucket.name == self.tied:  # both ends add up its gradients in fp32 (parallel/tied.py)
            numel = sizes.numel if self.row.gradient is Placement.REPLICATED else sizes.own
            self.once.append((Task("sum tied", "step", {_to_stages(lay): numel * 4}, axis=PP, peers=2), 1))

    def _gather(self, sizes: Sizes, times: int, visits: int, more: Mapping[str, Any]) -> None:
        """Add the gathers of a bucket: one for each visit of a forward, and one in backward, which keeps it gathered between visits."""
        lay = self.layout
        if self.row.parameter is not Placement.SHARDED or (sizes.ranks == 1 and lay.parameter is Tier.DEVICE):
            return
        count, nbytes = times * (visits + 1), sizes.own * lay.itemsize
        if rests_away(lay.parameter, lay.separate):
            ways = {"read": Resource.READ} if lay.parameter is Tier.DISK else {}
            ways |= {"fetch": Resource.UP} if lay.separate else {}
            self.each += [(Task(name, "forward", {way: nbytes}, **more), count) for name, way in ways.items()]
        self.each += _hops("gather", "forward", sizes.again, count, more)
        if sizes.gather != sizes.again:  # later gathers of a step read secondary shards
            self.once += _hops("gather", "forward", sizes.gather, times, more)
            self.once += _hops("gather", "forward", sizes.again, -times, more)
        if sizes.packs_weights:
            # a kernel that packs or unpacks reads and writes each byte once (packing/codecs/triton_kernels.py); a secondary shard rests packed
            pack, unpack = nbytes + sizes.own * sizes.weight, sizes.numel * (sizes.weight + lay.itemsize)
            packed = Task("pack", "forward", {Resource.DEVICE: pack}, kernels=1)
            (self.each if lay.hpz == 1 else self.once).append((packed, count if lay.hpz == 1 else times))
            self.each.append((Task("unpack", "forward", {Resource.DEVICE: unpack}, kernels=1), count))

    def _reduce(self, sizes: Sizes, times: int, more: Mapping[str, Any]) -> None:
        """Add the reduction of a bucket's gradients, in each micro-batch or in the last, and their way to another tier."""
        lay = self.layout
        parts = self.once if lay.held else self.each
        if sizes.packs_gradients:
            nbytes = sizes.numel * (lay.itemsize + 2 * sizes.gradient) + sizes.own * lay.gradient_itemsize
            parts.append((Task("pack", "backward", {Resource.DEVICE: nbytes}, kernels=2), times))
        parts += _hops("reduce", "backward", sizes.reduce, times, {**more, "distinct": not (lay.rings or lay.by_backend)})
        if self.row.gradient is Placement.SHARDED and rests_away(lay.gradient, lay.separate):
            ways = {Resource.DOWN: lay.sent_dtype.itemsize} if lay.separate else {}
            ways |= {Resource.WRITE: lay.gradient_itemsize} if lay.gradient is Tier.DISK else {}
            parts += [(Task("leave", "backward", {way: sizes.own * size}, **more), times) for way, size in ways.items()]

    def _update(self, sizes: Sizes, times: int, more: Mapping[str, Any]) -> None:
        """Add the optimizer's step of a bucket's shard on its tier, and the gathers of parameters that rest whole."""
        lay = self.layout
        held = 1 if self.row.optimizer is Placement.SHARDED else sizes.ranks
        numel, states = sizes.own * held, sizes.states * held
        writes_only = lay.precision != "fp32" and lay.master_weights is True  # the step does not read the parameters
        own = numel * (lay.gradient_itemsize + lay.itemsize * (1 if writes_only else 2))
        moved = 2 * states + own + _STEP_NBYTES * numel if lay.steps_on is Resource.DEVICE else states + own
        kernels = int(lay.optimizer is Tier.DEVICE)
        self.once.append((Task("step", "step", {lay.steps_on: moved}, kernels=kernels, numel=numel, **more), times))
        ways: list[tuple[Resource, float]] = []
        if lay.optimizer is Tier.DISK:
            ways += [
                (Resource.READ, states + numel * lay.gradient_itemsize * (lay.gradient is Tier.DISK)),
                (Resource.WRITE, states),
            ]
        if lay.optimizer is not Tier.DEVICE and (lay.parameter is Tier.DISK or (lay.parameter is Tier.DEVICE and lay.separate)):
            ways.append((Resource.WRITE if lay.parameter is Tier.DISK else Resource.UP, numel * lay.itemsize))
        self.once += [(Task("move states", "step", {way: nbytes}, **more), times) for way, nbytes in ways]
        if self.row.parameter is not Placement.SHARDED and self.row.optimizer is Placement.SHARDED:
            self.once += _hops("publish", "step", sizes.gather, times, more)
