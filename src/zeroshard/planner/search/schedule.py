"""The schedule of a step by formulas: traces in the runtime's own order (docs/design.md, "How a step runs").

link      |G1|G2|  |G3|  ...            |R3|G1|R2| ...   | publish |       G gather (stage 3), R reduce
device       | F1 | F2 | F3 | B3' B3 |  | B2' B2 |  ...  | step |          B' recomputation
up, host                                                  | S | S | S |    states off the device
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...config import STAGES, Placement, Tier
from ...memory.estimate import rests_away
from ...utils.axes import PP, TP
from ...zero.prefetch import LOOKAHEAD, count_ahead
from ..simulator.trace import AttentionWork, Resource, Task, Trace
from .layout import Bytes, Layout, comms_of, exchange, packed_nbytes
from .profile import BACKWARD_PASSES, Home, Profile, UnitProfile, homes_of

_BACKWARD_KERNELS = 3  # times the kernels of a forward, counted by dry runs of a GPT
# times the flops of a forward: five products of scores, not two (FlashAttention-2, arXiv 2307.08691, section 4.1)
_ATTENTION_BACKWARD = 2.5
_STEP_NBYTES = 36  # per element, which torch's AdamW moves beyond one pass over all that it steps: its kernels are not fused


def trace_of(profile: Profile, layout: Layout, *, groups: int | None = None) -> list[Trace]:
    """Return the traces of a step, of one rank of each stage of the pipeline, in the runtime's order.

    groups: the most stretches of blocks in a stage, each of which is one task: fewer tasks, and fewer places where communication
    can hide; None: each block is a task. The work is the same.
    """
    return [Stage(profile, layout, stage, groups).step() for stage in range(layout.pp)]


def attention_of(units: Sequence[UnitProfile], seq: int, tokens: float, backward: bool) -> AttentionWork | None:
    """Return the work of these units' fused attention for so many tokens in sequences of `seq`; None if they have none."""
    flops = sum(unit.attention for unit in units) * tokens * (_ATTENTION_BACKWARD if backward else 1.0)
    having = [unit for unit in units if unit.attention]
    return AttentionWork(flops, seq, all(unit.causal for unit in having), len(having)) if having else None


class Sizes:
    """The elements and bytes of homes of equal size that travel, on one rank of a layout.

    shards: elements of the shard of each flat buffer; own: of all. numel: of the whole buffers, with their padding. states: bytes of
    the shards' masters and optimizer states. gather, again,
    reduce: what is sent, hop after hop, by the first gather of a step, by later ones, and to reduce. packs_weights,
    packs_gradients: whether values are packed before; weight, gradient: bytes of an element then.
    """

    def __init__(self, layout: Layout, home: Home) -> None:
        self.shards = home.shards(layout.tp, layout.shards, layout.state_format)
        self.own = sum(self.shards)
        coded = [which for _, which in home.buffers(layout.tp, layout.state_format)]
        self.states = sum(size * layout.kept_itemsize(which) for size, which in zip(self.shards, coded, strict=True))
        self.numel = self.own * layout.shards
        comms, wholes = comms_of(layout), [numel * layout.shards for numel in self.shards]
        self.packs_weights = any(comms.values_of(home.packs, numel) is not comms.shards for numel in wholes)
        self.packs_gradients = any(comms.gradients_of(home.packs, numel) is not comms.shards for numel in wholes)
        self.weight = packed_nbytes(layout.quantized_weights if self.packs_weights else None, layout.itemsize)
        self.gradient = packed_nbytes(layout.quantized_gradients if self.packs_gradients else None, layout.itemsize)
        kinds = ("gather", "gather again", "reduce")
        self.gather, self.again, self.reduce = (
            exchange(layout, kind, self.shards, layout.compute_dtype, home.packs) for kind in kinds
        )
        if STAGES[layout.stage].gradient is Placement.REPLICATED:
            self.reduce += exchange(layout, "gather", self.shards, layout.gradient_dtype, packs=False)


@dataclass(frozen=True)
class Stretch:
    """Neighbouring units that forward and backward compute in one task each. homes: the units of zs.shard gathered for them.

    block: they are repeated blocks. head: it computes the loss; then tp sums the gradient of its input, and three numbers of each
    token's loss.
    """

    name: str
    units: tuple[UnitProfile, ...]
    homes: tuple[Home, ...]
    block: bool
    head: bool


class Stage:
    """A stage of a pipeline; `step` writes the trace of one of its ranks."""

    def __init__(self, profile: Profile, layout: Layout, stage: int, groups: int | None = None) -> None:
        self.profile, self.layout, self.stage, self.row = profile, layout, stage, STAGES[layout.stage]
        self.units = profile.stages(layout.pp)[stage]
        self.homes = homes_of(self.units)
        # blocks are alike: their sizes are computed once
        alike = {(home.cut, home.whole, home.packs, home.matrices): home for home in self.homes}
        known = {shape: Sizes(layout, home) for shape, home in alike.items()}
        self.sizes = {home.name: known[home.cut, home.whole, home.packs, home.matrices] for home in self.homes}
        self.stretches = self._stretches(groups)
        self.tokens = layout.micro_batch * profile.seq
        self.trace = Trace(rank=stage * layout.dp * layout.tp, axes=layout.mesh, node_size=layout.node_size)
        self.trace.tokens = self.tokens * layout.micro_batches
        self.trace.model_flops = 3 * sum(unit.flops for unit in self.units) / layout.tp * self.trace.tokens
        self.last: tuple[int, ...] = ()  # the latest tasks in the program's own order
        self.gathers: dict[str, tuple[int, ...]] = {}  # tasks that a gathered home waits for, by home
        self.reduced: dict[str, tuple[int, ...]] = {}
        self.seen: set[str] = set()  # homes whose secondary shards are there
        self.starts: list[tuple[int, ...]] = []  # the task that ends each visit: fetches ahead start after an earlier one
        self.early: dict[str, tuple[int, ...]] = {}  # tasks that read states ahead, by home
        self.sharded = self.row.parameter is Placement.SHARDED
        self.to_stages = Resource.BETWEEN if layout.dp * layout.tp >= layout.node_size else Resource.INSIDE

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
        for units in found:
            homes = [by_name[unit.home or unit.name] for unit in units if (unit.home or unit.name) in by_name]
            gathered = tuple(home for home in dict.fromkeys(homes) if not home.held)
            first = units[0]
            head = first.saved_fp32 > 0 and not first.block
            stretches.append(Stretch(first.name, tuple(units), gathered, first.block, head))
        return stretches

    # -- one step --------------------------------------------------------------------------------------------

    def step(self) -> Trace:
        """Write the passes of all micro-batches in the order of 1F1B, then the optimizer's step; return the trace."""
        count, ahead = self.layout.micro_batches, self.layout.pp - 1 - self.stage
        warm = min(ahead, count)
        if self.layout.optimizer is Tier.DISK:  # the first states to step are read beside forward and backward
            name = self.homes[0].name
            read = {Resource.READ: self.sizes[name].states}
            self.early[name] = (self._add(f"read states {name}", "forward", read, (), unit=name),)
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
        """Add a task. chain: later ones of the program's own order wait for it. more: fields of Task."""
        sizes = self.sizes.get(more.get("unit", ""))
        # each flat buffer travels by itself; published systems (rings) have one
        more.setdefault("messages", 1 if sizes is None or self.layout.rings else len(sizes.shards))
        number = self.trace.add(Task(name, phase, nbytes, tuple(sorted(set(after))), **more))
        if chain:
            self.last = (number,)
        return number

    def _hops(self, name: str, phase: str, hops: list[Bytes], after: tuple[int, ...], **more: Any) -> tuple[int, ...]:
        """Add a collective, hop after hop; return the tasks to wait for."""
        for nbytes in hops:
            after = (self._add(name, phase, nbytes, after, **more),)
        return after

    # -- passes ----------------------------------------------------------------------------------------------

    def _begin(self, phase: str, number: int, receives: bool) -> None:
        """Wait for the message from the stage beside this one, then gather the root, which stays for the whole pass."""
        if receives:
            channel = f"{phase[0]}{number}.{self.stage}"
            self._add("receive", phase, {}, self.last, chain=True, axis=PP, channel=channel, peers=2)
        for home in (home for home in self.homes if home.held):
            self._gather(home, phase, self.last)
            self.last = tuple({*self.last, *self.gathers.pop(home.name, ())})

    def _forward(self, number: int) -> None:
        lay = self.layout
        self._begin("forward", number, self.stage > 0)
        for at, stretch in enumerate(self.stretches):
            needed = self._ready(self.stretches[at:], "forward")
            self._compute(f"forward {stretch.name}", "forward", stretch, 1.0, needed)
            self._tp(stretch, "forward", sum(unit.tp_reduces for unit in stretch.units))
            if lay.checkpointing == "host" and stretch.block:
                self._add(f"keep {stretch.name}", "forward", {Resource.DOWN: self._kept(stretch)}, self.last)
        if self.stage < lay.pp - 1:
            sent, channel = self.tokens * self.units[-1].boundary * lay.itemsize, f"f{number}.{self.stage + 1}"
            self._add("send", "forward", {self.to_stages: sent}, self.last, axis=PP, channel=channel, peers=2)

    def _backward(self, number: int) -> None:
        lay, sync = self.layout, number == self.layout.micro_batches - 1 or not self.layout.held
        self._begin("backward", number, self.stage < lay.pp - 1)
        backwards = self.stretches[::-1]
        for at, stretch in enumerate(backwards):
            needed = self._ready(backwards[at:], "backward")
            if stretch.block and lay.checkpointing != "none":
                self._recompute(stretch, needed)
                needed = ()
            self._compute(f"backward {stretch.name}", "backward", stretch, 2.0, needed)
            self._tp(stretch, "backward", sum(unit.tp_reduces for unit in stretch.units) if stretch.block else stretch.head)
            if sync:
                for home in stretch.homes:
                    if all(home not in other.homes for other in backwards[at + 1 :]):
                        self._reduce(home)
        if sync:
            for home in (home for home in self.homes if home.held):
                self._reduce(home)
        if self.stage:
            before = self.profile.stages(lay.pp)[self.stage - 1][::-1]
            width = next((unit.boundary for unit in before if unit.boundary), 0)  # of what came from the stage before
            sent, channel = self.tokens * width * lay.itemsize, f"b{number}.{self.stage - 1}"
            self._add("send", "backward", {self.to_stages: sent}, self.last, axis=PP, channel=channel, peers=2)

    def _recompute(self, stretch: Stretch, needed: tuple[int, ...]) -> None:
        """Add the repeated forward of a checkpointed stretch, and what brings its input back."""
        lay = self.layout
        if lay.checkpointing == "host":
            earlier = self.starts[-2] if len(self.starts) > 1 else ()
            needed = (*needed, self._add(f"fetch {stretch.name}", "backward", {Resource.UP: self._kept(stretch)}, earlier))
        if lay.checkpointing == "partitioned" and lay.tp > 1:
            sent = self._tp_nbytes(self._kept(stretch) * (lay.tp - 1))
            name, messages = f"gather input {stretch.name}", len(stretch.units)
            needed = (*needed, self._add(name, "backward", sent, self.last, axis=TP, peers=lay.tp, messages=messages))
        flops = sum(unit.flops for unit in stretch.units)
        last = sum(unit.last_flops for unit in stretch.units) if lay.stops_early else 0.0
        self._compute(f"forward again {stretch.name}", "backward", stretch, (flops - last) / flops if flops else 1.0, needed)
        self._tp(stretch, "backward", sum(max(unit.tp_reduces - lay.stops_early, 0) for unit in stretch.units))

    def _compute(self, name: str, phase: str, stretch: Stretch, factor: float, needed: tuple[int, ...]) -> None:
        """Add the computation of a stretch. factor: times a forward's flops; above 1: a backward."""
        lay, units = self.layout, stretch.units
        flops = factor * sum(unit.flops for unit in units) / lay.tp * self.tokens
        item = lay.itemsize
        weights = sum(sum(unit.cut) // lay.tp + sum(unit.whole) for unit in units) * item
        backward = factor > 1
        moved = self.tokens * sum(unit.moved_nbytes(item, lay.tp, backward) for unit in units)
        moved += weights * (BACKWARD_PASSES if backward else 1)
        kernels = round((_BACKWARD_KERNELS if backward else factor) * sum(unit.kernels for unit in units))
        products = (2 if backward else 1) * sum(unit.products for unit in units)
        attention = attention_of(units, self.profile.seq, self.tokens / lay.tp, backward)
        if attention is not None and backward:  # `factor` counts it as 2 forwards, but it is 2.5
            flops += attention.flops * (1 - factor / _ATTENTION_BACKWARD)
        self._add(
            name, phase, {Resource.DEVICE: min(factor, 1) * moved}, (*self.last, *needed), chain=True, flops=flops,
            kernels=kernels, products=products, attention=attention, dtype=lay.precision, unit=stretch.name,
        )  # fmt: skip
        self.starts.append(self.last)

    def _kept(self, stretch: Stretch) -> float:
        """Return the bytes of the inputs of a stretch's blocks that this rank keeps."""
        divided = self.layout.tp if self.layout.checkpointing == "partitioned" else 1
        return self.tokens * sum(unit.boundary for unit in stretch.units) * self.layout.itemsize / divided

    # -- gathers and reductions ------------------------------------------------------------------------------

    def _ready(self, upcoming: list[Stretch], phase: str) -> tuple[int, ...]:
        """Gather the first stretch, and beside its computation those after it that the runtime would gather ahead.

        Return the tasks that its computation waits for.
        """
        if not self.sharded or (self.layout.shards == 1 and self.layout.parameter is Tier.DEVICE):
            return ()
        later = [home for stretch in upcoming[1 : LOOKAHEAD + 1] for home in stretch.homes]
        sizes = [self.sizes[home.name].numel * self.layout.itemsize for home in later]
        for home in (*upcoming[0].homes, *later[: count_ahead(sizes, self.layout.prefetch_nbytes)]):
            if home.name not in self.gathers:
                self._gather(home, phase, self.last)
        return tuple(number for home in upcoming[0].homes for number in self.gathers.pop(home.name, ()))

    def _gather(self, home: Home, phase: str, after: tuple[int, ...]) -> None:
        if not self.sharded:
            return
        lay, sizes, name = self.layout, self.sizes[home.name], home.name
        nbytes = sizes.own * lay.itemsize
        if rests_away(lay.parameter, lay.separate):  # buffers let it start some visits ahead
            earlier = self.starts[-3] if len(self.starts) > 2 else ()
            if lay.parameter is Tier.DISK:
                earlier = (self._add(f"read {name}", phase, {Resource.READ: nbytes}, earlier, unit=name),)
            if lay.separate:
                earlier = (self._add(f"fetch {name}", phase, {Resource.UP: nbytes}, earlier, unit=name),)
            after = (*after, *earlier)
        first = name not in self.seen  # later gathers read secondary shards, if there are any
        self.seen.add(name)
        hops = sizes.gather if first else sizes.again
        # a kernel that packs or unpacks reads and writes each byte once (comm/codecs/triton_kernels.py)
        packed = sizes.packs_weights
        if packed and (first or lay.hpz == 1):  # a secondary shard rests packed
            work = {Resource.DEVICE: nbytes + sizes.own * sizes.weight}
            after = (self._add(f"pack {name}", phase, work, after, kernels=1, unit=name),)
        done = self._hops(f"gather {name}", phase, hops, after, peers=lay.shards, unit=name)
        if packed:
            work = {Resource.DEVICE: sizes.numel * (sizes.weight + lay.itemsize)}
            done = (self._add(f"unpack {name}", phase, work, done, kernels=1, unit=name),)
        self.gathers[name] = done

    def _reduce(self, home: Home) -> None:
        lay, sizes, name = self.layout, self.sizes[home.name], home.name
        packed, after = sizes.packs_gradients, self.last
        if packed:
            work = {Resource.DEVICE: sizes.numel * (lay.itemsize + sizes.gradient)}
            after = self.last = (self._add(f"pack {name}", "backward", work, after, kernels=1, unit=name),)
        done = self._hops(f"reduce {name}", "backward", sizes.reduce, after, peers=lay.shards, unit=name, distinct=not lay.rings)
        if packed:
            work = {Resource.DEVICE: sizes.numel * sizes.gradient + sizes.own * lay.gradient_itemsize}
            done = (self._add(f"unpack {name}", "backward", work, done, kernels=1, unit=name),)
        if lay.prefetch_nbytes is None:
            self.last = tuple({*self.last, *done})
        if self.row.gradient is Placement.SHARDED and rests_away(lay.gradient, lay.separate):
            if lay.separate:
                down = {Resource.DOWN: sizes.own * lay.itemsize}
                done = (self._add(f"leave {name}", "backward", down, done, unit=name),)
            if lay.gradient is Tier.DISK:
                written = {Resource.WRITE: sizes.own * lay.gradient_itemsize}
                done = (self._add(f"write gradient {name}", "backward", written, done, unit=name),)
        self.reduced[name] = done

    def _tp_nbytes(self, sent: float) -> Bytes:
        """Return by link the bytes `sent` to all of tp: inside the node, and between nodes if tp has more ranks than a node."""
        tp, node = self.layout.tp, self.layout.node_size
        if tp <= node:
            return {Resource.INSIDE: sent}
        shares = {Resource.INSIDE: (node - 1) / (tp - 1), Resource.BETWEEN: (tp - node) / (tp - 1)}
        return {link: sent * share for link, share in shares.items() if share}

    def _tp(self, stretch: Stretch, phase: str, reduces: int) -> None:
        """Add so many all-reduces over tp, for which computation waits; each sends 2 (tp - 1) / tp of its bytes."""
        lay = self.layout
        told = stretch.head and phase == "forward"  # the loss sums the largest logit and the sum in fp32, the target's logit
        if lay.tp == 1 or not (reduces or told):
            return
        width = max(unit.boundary for unit in stretch.units) or max(unit.boundary for unit in self.units)
        sent = 2 * (lay.tp - 1) / lay.tp * self.tokens * ((8 + lay.itemsize) if told else reduces * width * lay.itemsize)
        self._add(
            f"sum {stretch.name}", phase, self._tp_nbytes(sent), self.last, chain=True, axis=TP, peers=lay.tp,
            messages=3 if told else reduces, unit=stretch.name,
        )  # fmt: skip

    # -- the optimizer ---------------------------------------------------------------------------------------

    def _update(self) -> None:
        """Add the optimizer's step once all gradients are there (for the norm): each home's shard on its tier, then gathers."""
        lay, tied = self.layout, self.profile.tied
        if lay.pp > 1 and tied and self.stage in (0, lay.pp - 1):  # both add up their gradients in fp32 (parallel/tied.py)
            numel = self.sizes[tied].numel if self.row.gradient is Placement.REPLICATED else self.sizes[tied].own
            self.reduced[tied] = (
                self._add("sum tied", "step", {self.to_stages: numel * 4}, self.reduced[tied], axis=PP, peers=2),
            )
        begin = self.last = tuple({*self.last, *(number for done in self.reduced.values() for number in done)})
        steps: list[int] = []
        for home in self.homes:
            sizes = self.sizes[home.name]
            held = 1 if self.row.optimizer is Placement.SHARDED else lay.shards
            numel, states = sizes.own * held, sizes.states * held
            writes_only = lay.precision != "fp32" and lay.master_weights is True  # the step does not read the parameters
            own = numel * (lay.gradient_itemsize + lay.itemsize * (1 if writes_only else 2))
            moved = 2 * states + own + _STEP_NBYTES * numel if lay.steps_on is Resource.DEVICE else states + own
            if lay.optimizer is Tier.DEVICE:
                work, name = {Resource.DEVICE: moved}, home.name
                steps.append(self._add(f"step {name}", "step", work, self.last, chain=True, kernels=1, numel=numel, unit=name))
            else:
                steps.append(self._host_step(home.name, numel, states, moved, begin, steps))
        if not self.sharded and self.row.optimizer is Placement.SHARDED:
            for home, number in zip(self.homes, steps, strict=True):
                hops = self.sizes[home.name].gather
                self._hops(f"publish {home.name}", "step", hops, (number,), peers=lay.shards, unit=home.name)

    def _host_step(self, name: str, numel: int, states: float, moved: float, begin: tuple[int, ...], steps: list[int]) -> int:
        """Add reads, the step of the host's cores, writes and the parameters' way back; return the task to wait for."""
        lay, after = self.layout, begin
        if lay.optimizer is Tier.DISK:
            read = self.early.get(name)
            if read is None:  # two stretches of buffers: one is read while the other is stepped
                nbytes = {Resource.READ: states + numel * lay.gradient_itemsize * (lay.gradient is Tier.DISK)}
                read = (self._add(f"read states {name}", "step", nbytes, (*begin, *steps[-2:-1]), unit=name),)
            after = (*after, *read)
        number = self._add(f"step {name}", "step", {lay.steps_on: moved}, after, numel=numel, unit=name)
        if lay.optimizer is Tier.DISK:
            self._add(f"write states {name}", "step", {Resource.WRITE: states}, (number,), unit=name)
        if lay.parameter is Tier.DISK:
            return self._add(f"write {name}", "step", {Resource.WRITE: numel * lay.itemsize}, (number,), unit=name)
        if lay.parameter is Tier.DEVICE and lay.separate:
            return self._add(f"up {name}", "step", {Resource.UP: numel * lay.itemsize}, (number,), unit=name)
        return number
