"""The interleaved race: every contender has a turn in every round, while the others sleep.

    start     zs3 warm up    ddp warm up    fsdp2 warm up
    round 0   zs3 k steps    ddp k steps    fsdp2 k steps
    round 1   ddp k steps    fsdp2 k steps  zs3 k steps       (the order rotates)
    ...
    memory    zs3, ddp, fsdp2: a few untimed steps with PSS sampled from outside

A machine that is slow for a minute slows all contenders of that round, so ratios are taken per round. After the turn of
a contender that uses a disk, its ranks measure the bandwidth of that disk in this round.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from zeroshard.cli.sheets import say
from zeroshard.memory.host_memory import available_nbytes
from zeroshard.planner.simulator.disk_bandwidth import PHASES, DiskSpeed, bandwidth

from . import memory
from .overlap import Overlap
from .plan import Contender, Rounds, Workload
from .worker import Turn
from .worker_group import Team, Teams, turned

SPARE_MEMORY_NBYTES = 1 << 30  # kept free when deciding whether one more contender fits


@dataclass
class Outcome:
    """The measurements of one contender. skipped: reason why it was not started; failed: error that ended it."""

    contender: Contender
    trains_together: bool = True  # False if ranks exchange no gradients, so that each has losses of its own
    skipped: str | None = None
    failed: str | None = None
    settings: dict[str, object] = field(default_factory=dict)
    setup_s: float = 0.0
    rounds_step_s: list[list[float]] = field(default_factory=list)  # [round][step] seconds, see step_times
    cpu_s: list[float] = field(default_factory=list)  # processor seconds a step by round, all ranks together
    system_s: list[float] = field(default_factory=list)
    minor_faults: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # every step since the start, mean over ranks
    peak_rss: int | None = None  # largest rank, while stepping
    life_peak_rss: int | None = None  # largest rank, since its process began
    baseline_rss: int | None = None
    peak_pss: int | None = None  # largest rank, sampled
    peak_pss_sum: int | None = None  # all ranks at one moment, sampled
    cuda_peak: int | None = None
    at_rest: dict[str, dict[str, int]] | None = None
    numel: int = 0
    moved: list[dict[str, float]] = field(default_factory=list)  # by round: bytes a step by link, all ranks together
    disk: list[DiskSpeed] = field(default_factory=list)  # by round, where states rest on disk
    overlap: Overlap | None = None

    @property
    def ran(self) -> bool:
        return self.skipped is None and self.failed is None

    @property
    def status(self) -> str:
        if self.ran:
            return "ran"
        return f"skipped: {self.skipped}" if self.skipped else f"failed: {self.failed}"

    def fail(self, why: str) -> None:
        self.failed = why

    def record_losses(self, ranks: list[Any]) -> None:
        self.losses += [sum(losses) / len(ranks) for losses in zip(*(r.losses for r in ranks), strict=False)]


def race(contenders: list[Contender], workload: Workload, rounds: Rounds, log_dir: Path) -> list[Outcome]:
    """Run all contenders; return one outcome for each, also for those that fail. All processes have ended afterwards."""
    outcomes = [
        Outcome(c, trains_together=c.kind != "local" or workload.ranks == 1, skipped=missing_reason(c, workload))
        for c in contenders
    ]
    with Teams() as teams:
        for outcome in outcomes:
            if outcome.skipped is None:
                _start(outcome, workload, rounds, log_dir, teams)
            say(f"  {outcome.contender.name:14s} {f'ready after {outcome.setup_s:.1f} s' if outcome.ran else outcome.status}")
        for index in range(rounds.rounds):
            for outcome in turned([o for o in outcomes if o.contender.name in teams], index):
                teams.attempt(outcome, partial(_take_turn, outcome, rounds=rounds, index=index))
            say(f"  round {index + 1} of {rounds.rounds} done")
        for outcome in outcomes:
            teams.attempt(outcome, partial(_measure_at_the_end, outcome, rounds=rounds, on_cuda=workload.device == "cuda"))
    return outcomes


def missing_reason(contender: Contender, workload: Workload) -> str | None:
    """Return the reason why a contender cannot run on this machine; None if it can."""
    if contender.on_disk and workload.swap_path is None:
        return "no folder on a local disk; name one with --path"
    if contender.kind == "ds" and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed (pip install -e '.[bench]')"
    return None


def _start(outcome: Outcome, workload: Workload, rounds: Rounds, log_dir: Path, teams: Teams) -> None:
    available = available_nbytes()
    running = (sum(memory.pss_nbytes(pid) or 0 for pid in team.pids) for team in teams.values())  # PSS adds up over ranks
    needed = max(running, default=0) + SPARE_MEMORY_NBYTES
    if available is not None and available < needed:
        outcome.skipped = f"{available / 2**30:.1f} GiB of memory left, {needed / 2**30:.1f} wanted"
        return
    teams[outcome.contender.name] = Team(outcome.contender, workload, log_dir)

    def warm_up(team: Team) -> None:
        team.wait_ready()
        first = team.ready[0]
        outcome.settings, outcome.setup_s, outcome.numel = first.settings, first.setup_s, first.numel
        if rounds.warmup:
            outcome.record_losses(team.ask("turn", 0, rounds.warmup))

    teams.attempt(outcome, warm_up)


def _take_turn(outcome: Outcome, team: Team, rounds: Rounds, index: int) -> None:
    turns: list[Turn] = team.ask("turn", rounds.first_step(index), rounds.steps, rounds.lead_in)
    outcome.rounds_step_s.append(step_times(turns, rounds.steps))
    for samples, name in ((outcome.cpu_s, "cpu_s"), (outcome.system_s, "system_s"), (outcome.minor_faults, "minor_faults")):
        samples.append(sum(getattr(turn, name) for turn in turns) / rounds.steps)
    outcome.moved.append({link: sum(t.moved.get(link, 0.0) for t in turns) for link in turns[0].moved})
    outcome.record_losses(turns)
    if outcome.contender.on_disk:
        outcome.disk.append(DiskSpeed(**{phase: bandwidth(team.ask("disk", phase)) for phase in PHASES}))


def step_times(turns: list[Turn], steps: int) -> list[float]:
    """Return the seconds of each step of a turn: from the last rank's end of one step to the last rank's end of the next.

    The longest time of any rank would be too long: if rank 0 is late in one step and rank 1 in the next, a delay
    counts twice. On CUDA a turn has one end, and each of its steps gets the mean.
    """
    ends = [max(column) for column in zip(*(t.ends for t in turns), strict=False)]
    starts = [min(t.start for t in turns), *ends[:-1]]
    times = [end - start for start, end in zip(starts, ends, strict=False)]
    return times if len(times) == steps else [times[0] / steps] * steps


def _measure_at_the_end(outcome: Outcome, team: Team, rounds: Rounds, on_cuda: bool) -> None:
    """Measure memory and, on CUDA, the overlap of copies with computation, in untimed steps."""
    samples: list[list[int]] = []  # [sample][rank] PSS

    def sample() -> None:
        values = [memory.pss_nbytes(pid) for pid in team.pids]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            samples.append(known)

    ranks = team.ask("memory", rounds.first_step(rounds.rounds), rounds.memory_steps, meanwhile=sample)
    for name in ("peak_rss", "life_peak_rss", "baseline_rss", "cuda_peak"):
        setattr(outcome, name, max((v for rank in ranks if (v := getattr(rank, name)) is not None), default=None))
    outcome.peak_pss, outcome.peak_pss_sum = (max(map(of, samples), default=None) for of in (max, sum))
    outcome.at_rest = ranks[0].at_rest
    outcome.record_losses(ranks)
    if on_cuda and outcome.contender.offload:  # a Recorder sees its copies
        outcome.overlap = team.ask("overlap", rounds.first_step(rounds.rounds) + rounds.memory_steps, rounds.memory_steps)[0]
