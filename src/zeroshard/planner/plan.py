"""A plan: what one rank will hold, phase by phase and tier by tier, and what it will do in a step. Data alone, and its text.

`dry_run.py` makes it by running the runtime itself on imagined ranks; nothing in it is estimated but what a device's own
libraries take besides (`Hardware.overhead_nbytes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module

from ..config import Config, Tier
from ..errors import ConfigError, did_you_mean
from .measure.report import Report
from .simulator.hardware import Hardware
from .simulator.trace import Trace

PHASES = ("load", "first step", "forward", "backward", "step", "save")
ACTIVATIONS = "activations"  # and all else that computation holds: inputs, logits, temporaries
KEPT = "kept by the C library"  # CPUs: holes in the heap that other phases have left, see memory/host_memory.py

Held = dict[str, int]  # bytes by category: those of memory/ledger.py, and ACTIVATIONS


@dataclass(frozen=True)
class Phase:
    """The fullest moment of a phase, of each tier by itself; of device and host together where they are one memory."""

    name: str
    held: dict[Tier, Held]

    def nbytes(self, tier: Tier) -> int:
        """At that tier's fullest moment."""
        return sum(self.held.get(tier, {}).values())


@dataclass(frozen=True)
class Moment:
    """The visit of one unit of the model in the second step.

    held: bytes by category when the device is fullest during the visit, of device and host together where they are one memory.
    left: bytes by category of the device when the visit ends.
    """

    phase: str
    unit: str
    held: Held
    left: Held = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class Plan:
    """What one rank of a run will hold and do. `print(plan)` shows the verdict and a page of numbers, `print(plan.table())` all
    of them.

    Attributes:
        axes: ranks along each axis of the mesh.
        trace: the second step, as tasks of the simulator.
        report: the runtime's own report after it.
        sent: bytes that this rank sends in a step, by axis.
        activations: bytes that a micro-batch keeps for backward, by unit.
        units: elements of each unit's parameters, rounded up as in its flat buffer; of the whole model, or of a stage of a
            pipeline.
        hardware: what the plan is judged by; None: no hardware was named.
        batch: (rows, seq) of a micro-batch; None: a function made it.
    """

    model: str
    rank: int
    axes: dict[str, int]
    config: Config
    micro_batches: int
    tokens: int  # of a step, of this rank
    num_parameters: int  # of the whole model
    separate: bool  # the device has a memory of its own
    phases: tuple[Phase, ...]
    moments: tuple[Moment, ...]
    trace: Trace
    report: Report
    sent: dict[str, int]
    activations: dict[str, int] = field(default_factory=dict)
    units: dict[str, int] = field(default_factory=dict)
    hardware: Hardware | None = None
    batch: tuple[int, int] | None = None

    @property
    def ranks(self) -> int:
        return math.prod(self.axes.values())

    def peak(self, tier: Tier | str, phases: Iterable[str] = PHASES) -> int:
        """Bytes at the fullest moment of these phases.

        tier: one of zs.Tier, or its value: "device", "host", "disk". phases: of PHASES. Raises ConfigError for anything else.
        """
        tiers, chosen = [each.value for each in Tier], {phases} if isinstance(phases, str) else set(phases)
        if not isinstance(tier, Tier):
            if tier not in tiers:
                raise ConfigError(
                    f"tier: expected one of {', '.join(tiers)}, or a zs.Tier, got {tier!r}.{did_you_mean(str(tier), tiers)}"
                )
            tier = Tier(tier)
        if unknown := chosen - set(PHASES):
            name = min(map(str, unknown))
            raise ConfigError(f"phases: expected some of {', '.join(PHASES)}, got {name!r}.{did_you_mean(name, PHASES)}")
        return max((phase.nbytes(tier) for phase in self.phases if phase.name in chosen), default=0)

    def table(self) -> str:
        """All numbers as text: memory by category and phase, what is sent, and what each unit keeps for backward."""
        return import_module(".tables", __package__).full(self)  # which is made of plans: imported when one is printed

    def __str__(self) -> str:
        return import_module(".tables", __package__).page(self)

    def __repr__(self) -> str:
        return f"<Plan of {self.model}, rank {self.rank} of {self.ranks:,}: {self.peak(Tier.DEVICE):,} bytes of the device; print it for more>"
