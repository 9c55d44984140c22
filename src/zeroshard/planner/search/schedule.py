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
from .layout import Bytes, Layout, Volumes
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


@dataclass(frozen=True)
class Stretch:
    """Neighbouring units that forward and backward compute in one task each. homes: the units of zs.shard gathered for them."""

    name: str
    units: tuple[UnitProfile, ...]
    homes: tuple[Home, ...]

    @property
    def block(self) -> bool:
        return self.units[0].block

    @property
    def is_head(self) -> bool:
        """True if it computes the loss; then tp sums the gradient of its input, and three numbers of each token's loss."""
        return self.units[0].saved_fp32 > 0 and not self.block


class Stage:
    """A stage of a pipeline; `step` writes the trace of one of its ranks."""

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
        self.last: tuple[int, ...] = ()  # the latest tasks in the program's own order
        self.gathers: dict[str, tuple[int, ...]] = {}  # tasks that a gathered home waits for, by home
        self.reduced: dict[str, tuple[int, ...]] = {}
        self.seen: set[str] = set()  # homes whose secondary shards are there
        self.starts: list[tuple[int, ...]] = []  # the task that ends each visit: fetches ahead start after an earlier one
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
        home = self.volumes.get(more.get("unit", ""))
        # each flat buffer travels by itself; published systems (rings) have one
        more.setdefault("messages", 1 if home is None or self.layout.rings else len(home.shards))
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

    def _forward(self, number: int) -> None:
        lay = self.layout
        if self.stage:
            self._add("receive", "forward", {}, self.last, chain=True, axis=PP, channel=f"f{number}.{self.stage}", peers=2)
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
            self._add("receive", "backward", {}, self.last, chain=True, axis=PP, channel=f"b{number}.{self.stage}", peers=2)
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
            given: dict[str, Any] = {"axis": TP, "peers": lay.tp, "messages": len(stretch.units)}
            needed = (*needed, self._add(name, "backward", self._tp_nbytes(sent), self.last, **given))
        flops = sum(unit.flops for unit in stretch.units)
        last = sum(unit.last_flops for unit in stretch.units) if lay.stops_early else 0.0
        self._compute(f"forward again {stretch.name}", "backward", stretch, (flops - last) / flops if flops else 1.0, needed)
        reduces = sum(max(unit.tp_reduces - lay.stops_early, 0) for unit in stretch.units)
        self._tp(stretch, "backward", reduces)
        return ()

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

    def _enter_root(self, phase: str, number: int) -> None:
        for home in (home for home in self.homes if home.held):
            self._gather(home, phase, self.last)
            self.last = tuple({*self.last, *self.gathers.pop(home.name, ())})

    def _ready(self, upcoming: list[Stretch], phase: str) -> None:
        """Gather the first stretch, and beside its computation those after it that the runtime would gather ahead."""
        if not self.sharded or (self.layout.shards == 1 and self.layout.parameter is Tier.DEVICE):
            return
        later = [home for stretch in upcoming[1 : LOOKAHEAD + 1] for home in stretch.homes]
        sizes = [self.volumes[home.name].numel * self.layout.itemsize for home in later]
        for home in (*upcoming[0].homes, *later[: count_ahead(sizes, self.layout.prefetch_nbytes)]):
            if home.name not in self.gathers:
                self._gather(home, phase, self.last)

    def _gather(self, home: Home, phase: str, after: tuple[int, ...]) -> None:
        if not self.sharded:
            return
        lay, volumes = self.layout, self.volumes[home.name]
        nbytes = sum(volumes.shards) * lay.itemsize
        if rests_away(lay.parameter, lay.separate):  # buffers let it start some visits ahead
            earlier = self.starts[-3] if len(self.starts) > 2 else ()
            if lay.parameter is Tier.DISK:
                earlier = (self._add(f"read {home.name}", phase, {Resource.READ: nbytes}, earlier, unit=home.name),)
            if lay.separate:
                earlier = (self._add(f"fetch {home.name}", phase, {Resource.UP: nbytes}, earlier, unit=home.name),)
            after = (*after, *earlier)
        first, packed = home.name not in self.seen, volumes.packed_weight_nbytes
        hops = volumes.gather(first=first)
        self.seen.add(home.name)
        if packed and hops and (first or lay.hpz == 1):  # a secondary shard rests packed
            after = (self._pack(f"pack {home.name}", phase, nbytes + sum(volumes.shards) * packed, after, home),)
        done = self._hops(f"gather {home.name}", phase, hops, after, peers=lay.shards, unit=home.name)
        if packed and hops:
            done = (self._pack(f"unpack {home.name}", phase, volumes.numel * (packed + lay.itemsize), done, home),)
        self.gathers[home.name] = done

    def _pack(self, name: str, phase: str, nbytes: float, after: tuple[int, ...], home: Home) -> int:
        """Add a kernel that packs or unpacks what is sent: it reads and writes each byte once (comm/codecs/triton_kernels.py)."""
        return self._add(name, phase, {Resource.DEVICE: nbytes}, after, kernels=1, unit=home.name)

    def _needed(self, stretch: Stretch) -> tuple[int, ...]:
        return tuple(number for home in stretch.homes for number in self.gathers.get(home.name, ()))

    def _release(self, stretch: Stretch) -> None:
        for home in stretch.homes:
            self.gathers.pop(home.name, None)

    def _reduce(self, home: Home) -> None:
        lay, volumes = self.layout, self.volumes[home.name]
        after, packed, hops = self.last, volumes.packed_gradient_nbytes, volumes.reduce()
        if packed and hops:
            nbytes = volumes.numel * (lay.itemsize + packed)
            after = self.last = (self._pack(f"pack {home.name}", "backward", nbytes, after, home),)
        done = self._hops(
            f"reduce {home.name}", "backward", hops, after, peers=lay.shards, unit=home.name, distinct=not lay.rings
        )
        nbytes = sum(volumes.shards)
        if packed and hops:
            read = volumes.numel * packed + nbytes * lay.gradient_itemsize
            done = (self._pack(f"unpack {home.name}", "backward", read, done, home),)
        if lay.prefetch_nbytes is None:
            self.last = tuple({*self.last, *done})
        if self.row.gradient is Placement.SHARDED and rests_away(lay.gradient, lay.separate):
            if lay.separate:
                done = (
                    self._add(f"leave {home.name}", "backward", {Resource.DOWN: nbytes * lay.itemsize}, done, unit=home.name),
                )
            if lay.gradient is Tier.DISK:
                written = {Resource.WRITE: nbytes * lay.gradient_itemsize}
                done = (self._add(f"write gradient {home.name}", "backward", written, done, unit=home.name),)
        self.reduced[home.name] = done

    # -- other axes ------------------------------------------------------------------------------------------

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
        told = stretch.is_head and phase == "forward"  # the loss sums the largest logit and the sum in fp32, the target's logit
        if lay.tp == 1 or not (reduces or told):
            return
        width = max(unit.boundary for unit in stretch.units) or max(unit.boundary for unit in self.units)
        sent = 2 * (lay.tp - 1) / lay.tp * self.tokens * ((8 + lay.itemsize) if told else reduces * width * lay.itemsize)
        self._add(
            f"sum {stretch.name}", phase, self._tp_nbytes(sent), self.last, chain=True, axis=TP, peers=lay.tp,
            messages=3 if told else reduces, unit=stretch.name,
        )  # fmt: skip

    def _boundary_before(self) -> int:
        """Return the elements per token that the stage receives from the one before."""
        return next((unit.boundary for unit in self.profile.stages(self.layout.pp)[self.stage - 1][::-1] if unit.boundary), 0)

    def _send(self, phase: str, channel: str, width: int) -> None:
        lay = self.layout
        link = Resource.BETWEEN if lay.dp * lay.tp >= lay.node_size else Resource.INSIDE
        self._add("send", phase, {link: self.tokens * width * lay.itemsize}, self.last, axis=PP, channel=channel, peers=2)

    # -- the optimizer ---------------------------------------------------------------------------------------

    def _read_ahead(self) -> None:
        """Add the read from disk of the first states to step, which runs beside forward and backward."""
        self.early: dict[str, tuple[int, ...]] = {}
        if self.layout.optimizer is Tier.DISK:
            home = self.homes[0]
            nbytes = sum(self.volumes[home.name].shards) * self._state_itemsize
            self.early[home.name] = (
                self._add(f"read states {home.name}", "forward", {Resource.READ: nbytes}, (), unit=home.name),
            )

    @property
    def _state_itemsize(self) -> int:
        """Bytes of an element's masters and optimizer states."""
        return self.layout.state_itemsize + 4 * self.layout.has_masters

    def _update(self) -> None:
        """Add the optimizer's step once all gradients are there (for the norm): each home's shard on its tier, then gathers."""
        lay = self.layout
        steps: list[int] = []
        if lay.pp > 1 and self.profile.tied and self.stage in (0, lay.pp - 1):
            self._sum_tied()
        begin = self.last = tuple({*self.last, *(number for done in self.reduced.values() for number in done)})
        for home in self.homes:
            volumes = self.volumes[home.name]
            numel = sum(volumes.shards) if self.row.optimizer is Placement.SHARDED else volumes.numel
            states = numel * self._state_itemsize
            own = numel * (lay.gradient_itemsize + lay.itemsize * (1 if lay.precision != "fp32" else 2))
            moved = 2 * states + own + _STEP_NBYTES * numel if lay.steps_on is Resource.DEVICE else states + own
            if lay.optimizer is Tier.DEVICE:
                work = {Resource.DEVICE: moved}
                number = self._add(
                    f"step {home.name}", "step", work, self.last, chain=True, kernels=1, numel=numel, unit=home.name
                )
            else:
                number = self._host_step(home, numel, states, moved, begin, steps)
            steps.append(number)
        ends = [(home, number) for home, number in zip(self.homes, steps, strict=True)]
        for home, number in ends:
            hops = self.volumes[home.name].publish()
            self._hops(f"publish {home.name}", "step", hops, (number,), peers=lay.shards, unit=home.name)

    def _sum_tied(self) -> None:
        """Add the sum over the first and the last stage of their gradients of tied parameters, in fp32 (parallel/tied.py)."""
        lay, volumes = self.layout, self.volumes[self.profile.tied]
        numel = volumes.numel if self.row.gradient is Placement.REPLICATED else sum(volumes.shards)
        link = Resource.BETWEEN if lay.dp * lay.tp >= lay.node_size else Resource.INSIDE
        done = self._add("sum tied", "step", {link: numel * 4}, self.reduced[self.profile.tied], axis=PP, peers=2)
        self.reduced[self.profile.tied] = (done,)

    def _host_step(self, home: Home, numel: int, states: float, moved: float, begin: tuple[int, ...], steps: list[int]) -> int:
        """Add reads, the step of the host's cores, writes and the parameters' way back; return the task to wait for."""
        lay, after = self.layout, list(begin)
        if lay.optimizer is Tier.DISK:
            read = self.early.get(home.name)
            if read is None:  # two stretches of buffers: one is read while the other is stepped
                nbytes = states + numel * lay.gradient_itemsize * (lay.gradient is Tier.DISK)
                read = (
                    self._add(
                        f"read states {home.name}", "step", {Resource.READ: nbytes}, (*begin, *steps[-2:-1]), unit=home.name
                    ),
                )
            after += read
        number = self._add(f"step {home.name}", "step", {lay.steps_on: moved}, tuple(after), numel=numel, unit=home.name)
        if lay.optimizer is Tier.DISK:
            self._add(f"write states {home.name}", "step", {Resource.WRITE: states}, (number,), unit=home.name)
        if lay.parameter is Tier.DISK:
            return self._add(f"write {home.name}", "step", {Resource.WRITE: numel * lay.itemsize}, (number,), unit=home.name)
        if lay.parameter is Tier.DEVICE and lay.separate:
            return self._add(f"up {home.name}", "step", {Resource.UP: numel * lay.itemsize}, (number,), unit=home.name)
        return number
