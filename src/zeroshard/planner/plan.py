"""A plan: what one rank will hold, phase by phase and tier by tier, and what it will do in a step. Data alone, and its text.

`dry_run.py` makes it by running the runtime itself on imagined ranks; nothing in it is estimated but what a device's own
libraries take besides (`Hardware.overhead_nbytes`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..config import Config, Tier
from ..measure.report import Report
from ..simulator.trace import Trace

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
    """What the device (on a CPU: the host) holds at one moment of the second step, and where in the model it is."""

    phase: str
    unit: str
    held: Held


@dataclass(frozen=True)
class Plan:
    """Of one rank.

    axes: ranks along each axis of the mesh. trace: of the second step. report: the runtime's own, after it. sent: bytes that this
    rank sends in a step, by axis. activations: bytes that a micro-batch keeps for backward, by unit. units: elements of their parameters,
    each rounded up as it lies in a flat buffer, whatever the number of ranks; of the whole model, but for a stage of a pipeline.
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

    @property
    def ranks(self) -> int:
        size = 1
        for each in self.axes.values():
            size *= each
        return size

    def peak(self, tier: Tier, phases: Iterable[str] = PHASES) -> int:
        """Bytes at the fullest moment of these phases."""
        chosen = set(phases)
        return max((phase.nbytes(tier) for phase in self.phases if phase.name in chosen), default=0)
