"""The plan: the bytes that one rank will hold in each phase and tier, and the tasks that it will do in a step. Data and its text.

`dry_run.py` makes it by running the runtime itself on imagined ranks; only the memory that a device's own libraries take is an
estimate (`Hardware.overhead_nbytes`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module

from ..config import Config, Tier
from ..errors import ConfigError, did_you_mean
from ..public import Report
from .simulator.hardware import Hardware
from .simulator.trace import Trace

PHASES = ("load", "first step", "forward", "backward", "step", "save")
ACTIVATIONS = "activations"  # and all else that operators allocate: inputs, logits, temporaries
KEPT = "kept by the C library"  # only on CPUs: holes that other phases have left in the heap, see utils/host_memory.py

Held = dict[str, int]  # bytes by category: those of engine/ledger.py, and ACTIVATIONS


def memories(held: Mapping[Tier, Held], separate: bool) -> dict[Tier, Held]:
    """Return the bytes of each memory by category. Where device and host are one memory (not `separate`), it counts as the device."""
    found = {tier: Counter(held.get(tier, {})) for tier in Tier}
    if not separate:
        found[Tier.DEVICE].update(found.pop(Tier.HOST))
    return {tier: dict(each) for tier, each in found.items()}


def fullest(moments: Sequence[Mapping[Tier, Held]]) -> dict[Tier, Held]:
    """Return for each memory what it holds at that of these moments at which it is fullest."""
    return {tier: max((each[tier] for each in moments), key=lambda held: sum(held.values())) for tier in moments[0]}


@dataclass(frozen=True)
class Phase:
    """The bytes held at the fullest moment of a phase, found for each tier by itself (on CPUs for device and host together)."""

    name: str
    held: dict[Tier, Held]

    def nbytes(self, tier: Tier) -> int:
        """Return the bytes that a tier holds at its fullest moment of this phase."""
        return sum(self.held.get(tier, {}).values())


@dataclass(frozen=True)
class Moment:
    """A visit of the rank to one unit of the model, in forward or backward of the second step.

    held: bytes by category when the device is fullest during the visit, of device and host together where they are one memory.
    left: bytes by category that the device holds when the visit ends.
    """

    phase: str
    unit: str
    held: Held
    left: Held = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class Plan:
    """The memory that one rank of a run will hold and the work that it will do. `print(plan)` shows the verdict and a page of
    numbers, `print(plan.table())` all numbers.

    Attributes:
        axes: number of ranks along each axis of the mesh.
        trace: the second step, as tasks of the simulator.
        report: the runtime's own report after that step.
        sent: bytes that this rank sends in a step, by axis.
        activations: bytes that a micro-batch keeps for backward, by unit.
        units: number of elements of each unit's parameters, rounded up as in its flat buffer; on a mesh with pp or tp only this
            rank's part of them.
        hardware: the devices and hosts that the plan is judged by; None: no hardware was named.
        batch: (rows, seq) of a micro-batch; None: a function made it.
    """

    model: str
    rank: int
    axes: dict[str, int]
    config: Config
    micro_batches: int
    tokens: int  # that this rank reads in a step
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
        """Return the most bytes that a tier holds at any moment of these phases.

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
        """Return all numbers as text: memory by category and phase, what is sent, and what each unit keeps for backward."""
        tables = import_module(".tables", __package__)  # it imports this module, so it is imported here
        return "\n\n".join(map(str, (tables.memory(self), tables.communication(self), tables.activations(self))))

    def __str__(self) -> str:
        return import_module(".tables", __package__).page(self)

    def __repr__(self) -> str:
        return f"<Plan of {self.model}, rank {self.rank} of {self.ranks:,}: {self.peak(Tier.DEVICE):,} bytes of the device; print it for more>"
