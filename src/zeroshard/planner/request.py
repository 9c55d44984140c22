"""The request: a run's model, hardware, mesh, batch and options; its plans; and the verdict, whether it fits.

A plan is of one rank. Of a pipeline the ranks that may be fullest are planned: those of the first stage, which has the most
micro-batches under way, and of the last, which has the logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..config import Config, Tier
from ..errors import ConfigError
from ..utils.axes import PP, SP, TP
from .model_source import ModelSource, example_loss
from .plan import Held, Plan, memories
from .simulator.hardware import Hardware
from .simulator.simulate import Simulation, simulate
from .simulator.trace import Trace

GIB = 1 << 30
WHERE = {Tier.DEVICE: "", Tier.HOST: " of a node's host memory", Tier.DISK: " of a node's disk"}  # after bytes, in a sentence
_ALIKE = 0.98  # phases with at least this share of the fullest one's bytes count as equally full


@dataclass(frozen=True)
class Request:
    """A run to plan. axes: ranks along "pp", "dp", "tp" and, if any, "ep" or "sp". rows: sequences of a rank's micro-batch, of `seq` tokens. options: of
    zs.shard; parallel: further ones of zs.parallelize. checkpointing: False, True, or options of zs.checkpoint_activations. tiles:
    tokens that MLPs and the loss compute at a time, see zs.plan."""

    source: ModelSource
    hardware: Hardware
    axes: Mapping[str, int]
    rows: int
    seq: int
    micro_batches: int = 1
    node_size: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    checkpointing: bool | Mapping[str, Any] = False
    parallel: Mapping[str, Any] = field(default_factory=dict)
    tiles: Mapping[str, int] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return math.prod(self.axes.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions of the request's plans."""
        context = self.source.context
        if context is None or self.seq <= context:
            return self.source.notes
        return (
            *self.source.notes,
            f"{self.source.name} is published for {context:,} tokens: longer sequences need positions scaled in its configuration, "
            "which costs no memory.",
        )

    @property
    def ranks_of_node(self) -> int:
        return min(self.ranks, self.node_size or self.hardware.devices_per_node)

    @property
    def config(self) -> Config:
        return Config.build(None, **self.options)

    def plan(self, stage: int = 0) -> Plan:
        """Return the plan of one rank of a stage of the pipeline. Raises ConfigError."""
        from .dry_run import plan

        heads, layers, tp, pp = self.source.heads, self.source.layers, self.axes[TP], self.axes[PP]
        if heads and heads % tp:
            near = [n for n in range(1, heads + 1) if heads % n == 0]
            best = min(near, key=lambda n: abs(n - tp))
            raise ConfigError(
                f"mesh: expected tp to divide the {heads} heads of {self.source.name}, got tp={tp}; the nearest: tp={best}."
            )
        along = self.axes.get(SP, 1)
        if self.seq % along:
            raise ConfigError(f"mesh: expected sp to divide the {self.seq:,} tokens of a sequence, got sp={along}.")
        if layers and pp > layers:
            raise ConfigError(
                f"mesh: expected at most {layers} stages, as {self.source.name} has layers, got pp={pp}; the nearest: pp={layers}."
            )
        example, loss = self.source.example, None
        batch: object = (self.rows, self.seq)
        if example is not None:
            batch, loss = (lambda: example(self.rows)), example_loss
        elif self.source.max_seq is not None and self.seq > self.source.max_seq:
            raise ConfigError(
                f"seq: expected at most the {self.source.max_seq:,} tokens that {self.source.name} can read, got {self.seq:,}."
            )
        made = plan(
            self.source.build, axes=self.axes, batch=batch, loss=loss, micro_batches=self.micro_batches, name=self.source.name,
            rank=self._rank(stage), node_size=self.ranks_of_node,
            hardware=self.hardware, checkpointing=self.checkpointing, parallel=self.parallel, tiles=self.tiles, **self.options,
        )  # fmt: skip
        if example is not None:  # here `tokens` counts samples, from which throughput is computed
            made.trace.tokens = self.rows * self.micro_batches
            made = replace(made, tokens=made.trace.tokens)
        return made

    def plans(self) -> list[Plan]:
        """Return the plans of the ranks that may be fullest."""
        return [self.plan(stage) for stage in sorted({0, self.axes[PP] - 1})]

    def traces(self, known: Iterable[Plan] = ()) -> list[Trace]:
        """Return the trace of one rank of each stage. known: plans that were made already."""
        made = {plan.rank: plan.trace for plan in known}
        return [made.get(self._rank(stage)) or self.plan(stage).trace for stage in range(self.axes[PP])]

    def _rank(self, stage: int) -> int:
        """Return the rank that is planned for a stage: the first one, but the last along sp, which computes most in attention."""
        return stage * (self.ranks // self.axes[PP]) + self.axes.get(SP, 1) - 1

    def simulated(self, known: Iterable[Plan] = (), utilisation: float = 1.0, latency_s: float | None = None) -> Simulation:
        """Simulate a step on the hardware, as `zeroshard simulate` and `zeroshard plan --auto` do. known: as of `traces`."""
        return simulate(self.traces(known), self.hardware, utilisation, latency_s)


@dataclass(frozen=True)
class Verdict:
    """The answer whether a run fits, by the memory that is fullest relative to its capacity.

    plan: of the fullest rank. tier, phase, held: of its fullest moment. used, capacity: bytes of a device, with `overhead` (its
    context and libraries); of the host and the disk those of a whole node.
    """

    plan: Plan
    tier: Tier
    phase: str
    held: Held
    used: int
    capacity: int
    overhead: int

    @property
    def fits(self) -> bool:
        return self.used <= self.capacity

    @property
    def short(self) -> int:
        """The bytes that are missing, 0 if the run fits."""
        return max(self.used - self.capacity, 0)

    def __str__(self) -> str:
        where = WHERE[self.tier]
        counted = f" (device overhead {gib(self.overhead)} counted)" if self.overhead else ""
        if self.fits:
            return f"fits: {gib(self.used)} of {gib(self.capacity)} GiB{where}{counted}, fullest in {self.phase}"
        largest = sorted(self.held.items(), key=lambda item: -item[1])[:3]
        why = ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in largest)
        rank = f"rank {self.plan.rank}" if self.tier is Tier.DEVICE else "each rank"
        return f"short by {gib(self.short)} GiB of {gib(self.capacity)}{where}{counted}: {self.phase} holds {why} on {rank}"


def judge(plans: Sequence[Plan], hardware: Hardware) -> Verdict:
    """Return the verdict on the rank and the memory that are fullest, relative to the capacity."""
    return max((each for plan in plans for each in verdicts(plan, hardware)), key=lambda each: each.used / each.capacity)


def verdicts(plan: Plan, hardware: Hardware) -> Iterable[Verdict]:
    """Yield a verdict on each memory that one rank uses."""
    phases = {phase.name: memories(phase.held, plan.separate) for phase in plan.phases}
    for tier in memories({}, plan.separate):
        sums = {name: sum(found[tier].values()) for name, found in phases.items()}
        most = max(sums.values())
        # of equally full phases rather not "first step", where states that are being made may still count as activations
        name = max((each for each in sums if sums[each] >= _ALIKE * most), key=lambda each: (each != "first step", sums[each]))
        if most or tier is Tier.DEVICE:
            used = round(hardware.used(tier, most, min(plan.ranks, plan.trace.node_size)))
            overhead = hardware.overhead_nbytes if tier is Tier.DEVICE else 0
            yield Verdict(plan, tier, name, phases[name][tier], used, hardware.capacity(tier), overhead)


def gib(nbytes: float) -> str:
    """Return bytes in GiB, as text with as many digits as matter."""
    amount = nbytes / GIB
    return f"{amount:,.1f}" if amount >= 1 else f"{amount:.3g}"


def gb(nbytes: float) -> str:
    """Return bytes in GB, as text with three digits or more."""
    return f"{nbytes / 1e9:,.0f}" if nbytes >= 1e12 else f"{nbytes / 1e9:.3g}"
