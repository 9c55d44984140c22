"""Steppers: objects that step the runs of a shard. Services give them to the optimizer's core (engine/optimizer.py).

runs with a tensor on the device                                 the core itself, all at once, by the optimizer's own class
runs that rest on the device in another form than is stepped     SlabStep        tiers/slab_step.py
runs whose states rest on the host or on disk                    HostStep        tiers/host_step.py
the same in a thread, beside the next forward and backward       DelayedUpdate   tiers/host_step.py
parameters that are stepped as a whole                           WholeStep       values/whole_step.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from .inner_optimizer import Options, State
from .rest import Rest
from .runs import Run


@dataclass(eq=False)
class Job:
    """The step of one run, slab by slab.

    options: those of the run's parameter group; attributes: numbers that the optimizer's class keeps as attributes; both with
    their values before the step. gradient: where the gradient rests; the step multiplies it by `factor`. publish: whether the
    step also writes the parameters. number: of the step, for stochastic rounding. after: the run's states after the step.
    """

    run: Run
    options: Options
    attributes: Options
    gradient: Rest
    factor: float = 1.0
    publish: bool = True
    number: int = 0
    after: State = field(default_factory=dict)

    @property
    def fresh(self) -> bool:
        """True in the first step of the run."""
        return self.run.states.entries is None


class SlabStep(ABC):
    """A stepper of runs slab by slab."""

    @abstractmethod
    def step(self, jobs: list[Job]) -> None:
        """Step all jobs, in this order."""


class HostStep(SlabStep):
    """The step on the host of runs whose states rest there or on disk."""

    @abstractmethod
    def read_ahead(self) -> None:
        """Continue to read the first slabs of the next step, while forward and backward run; waits for nothing."""

    @abstractmethod
    def drop_ahead(self) -> None:
        """Drop what was read ahead, since states or masters are about to be written."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what runs, and release all buffers."""


class DelayedUpdate(ABC):
    """A host's step in the background, while the next forward and backward run (ZeRO-Offload, arXiv 2101.06840, 4.3)."""

    unpublished: list[Job]  # jobs stepped, or being stepped, whose parameters are not written yet

    @property
    @abstractmethod
    def running(self) -> bool:
        """True while masters and states belong to the step's thread."""

    @abstractmethod
    def start(self, jobs: list[Job]) -> None:
        """Step the jobs in the background. The caller publishes the result (`take`) before it calls `start` again."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the running step is done; raise its error if it failed."""

    @abstractmethod
    def take(self) -> list[Job]:
        """Wait for the running step; return its jobs, whose masters the caller must now write into the parameters."""


class WholeStep(ABC):
    """A stepper of parameters that the optimizer's class must see as a whole (Muon's matrices)."""

    @abstractmethod
    def step(self, runs: list[tuple[Run, Options]]) -> list[tuple[Run, Options]]:
        """Step all runs, the same in the same order on all ranks (collective). Return (run, changed options) for each."""

    @abstractmethod
    def close(self) -> None:
        """Release all buffers."""


@dataclass(frozen=True)
class Steppers:
    """The steppers of one optimizer. host: None where no states are offloaded; delayed: None where no update is delayed.

    alone: ids of the parameters that `whole` steps.
    """

    alone: set[int]
    whole: WholeStep
    device: SlabStep
    host: HostStep | None
    delayed: DelayedUpdate | None
