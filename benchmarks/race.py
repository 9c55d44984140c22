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
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from zeroshard.cli.sheets import say
from zeroshard.planner.simulator.disk_bandwidth import PHASES, DiskSpeed, bandwidth
from zeroshard.utils.host_memory import available_nbytes
from zeroshard.utils.sheets import BAD, GOOD, PLAIN, WARNING

from . import memory
from .overlap import Overlap
from .plan import Contender, ModelShape, Rounds, Workload
from .tables import BUSY_CORE_SHARE, MIB, Bound, Goal, Measured, Row, median_ratio
from .worker import Turn
from .worker_group import Team, Teams, turned

# Largest relative difference from the losses of the reference of the same precision, at any step. Measured over 11
# steps: fp32 contenders differ by 1e-7, bf16 ones by 4e-5 (autocast); a race condition between gradient buffers,
# which this check found, made 1e-4 to 7e-4.
LOSS_TOLERANCE = {"fp32": 2e-5, "bf16": 5e-4, "int8": 5e-3, "host8": 5e-3}  # with int8 states losses are others by design
SPARE_MEMORY_NBYTES = 1 << 30  # kept free when deciding whether one more contender fits
# Goal of a step with the optimizer on disk: the larger of these times its bound, and times the step in memory.
DISK_BOUND_FACTOR, DISK_MEMORY_FACTOR = 1.15, 1.10
DISK_LIMIT = f"max({DISK_BOUND_FACTOR:g} bound of opt. disk, {DISK_MEMORY_FACTOR:g} in memory)"
DDP, FSDP2, DS3, RSS, PSS_ALL = ("DDP",), ("FSDP2",), ("DeepSpeed 3",), "RSS MiB", "PSS MiB, all"
OURS, ON_HOST = "zeroshard 3", "zeroshard 3 all host"
BOUNDS = {
    "cpu": (
        Bound("stage 1 / DDP, step time", "zeroshard 1", DDP, 0.95),
        Bound("stage 2 / DDP, step time", "zeroshard 2", DDP, 0.95),
        Bound("stage 3 / DDP, step time", OURS, DDP, 1.00),
        Bound("stage 3 / FSDP2, step time", OURS, FSDP2, 0.70),
        Bound("stage 3 / DeepSpeed 3, step time", OURS, DS3, 0.45),
        Bound("stage 3 with int8 states / with fp32 states, step time", "zeroshard 3 int8 states", (OURS,), 1.05),
        Bound("stage 3 by zeroshard.deepspeed / by zs.shard, step time", "zeroshard.deepspeed 3", (OURS,), 1.05),
        Bound("stage 3 by zeroshard.deepspeed / DeepSpeed 3, step time", "zeroshard.deepspeed 3", DS3, 0.50),
        Bound("fully_shard by zeroshard.fsdp / FSDP2, step time", "zeroshard.fsdp", FSDP2, 0.70),
        Bound("fully_shard by zeroshard.fsdp / FSDP2, peak resident memory", "zeroshard.fsdp", FSDP2, 0.80, RSS),
        Bound("stage 3 / FSDP2, peak resident memory", OURS, FSDP2, 0.80, RSS),
        Bound("stage 3 / DeepSpeed 3, peak resident memory", OURS, DS3, 1.00, RSS),
    ),
    "cpu bf16": (Bound("stage 3 bf16 / FSDP2 bf16, step time", "zeroshard 3 bf16", ("FSDP2 bf16",), 0.75),),
    "tiers": (
        Bound("stage 3, everything on the host / DeepSpeed 3 offload, step time", ON_HOST, ("DeepSpeed 3 offload",), 0.6),
        Bound("stage 3, everything on the host / FSDP2 offload, step time", ON_HOST, ("FSDP2 offload",), 0.6),
        Bound(f"stage 3, optimizer on disk / {DISK_LIMIT}, step time", "zeroshard 3 opt. disk", (DISK_LIMIT,), 1.0),
    ),
    "parallel": tuple(
        Bound(f"stage {stage} / FSDP2, with tp and pp, {text}", f"zeroshard {stage}", FSDP2, limit, what)
        for stage in (1, 2)
        for text, limit, what in (("step time", 0.8, "time"), ("resident memory of all ranks", 0.9, PSS_ALL))
    ),
}


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
    losses: list[float] = field(default_factory=list)  # every step since the start, mean over ranks
    peak_rss: int | None = None  # largest rank, while stepping
    rss_before: int | None = None  # largest rank, before these steps
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
    def round_s(self) -> list[float]:
        """The median seconds of a step, by round."""
        return [median(steps) for steps in self.rounds_step_s]

    @property
    def bounds_s(self) -> list[float]:
        """By round: bytes moved between host and disk in a step, over the bandwidth that the disk had in that round."""
        return [
            speed.seconds(moved.get("disk -> host", 0.0), moved.get("host -> disk", 0.0))
            for moved, speed in zip(self.moved, self.disk, strict=False)
        ]

    @property
    def tolerance(self) -> float:
        """The largest relative difference of losses from those of another contender."""
        return LOSS_TOLERANCE.get(self.contender.offload, LOSS_TOLERANCE[self.contender.precision])

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
    say(f"{len(contenders)} contenders, {workload.ranks} ranks, {rounds.rounds} rounds of {rounds.steps} steps")
    outcomes = [
        Outcome(c, trains_together=c.kind != "local" or workload.ranks == 1, skipped=missing_reason(c, workload))
        for c in contenders
    ]
    with Teams() as teams:
        for outcome in outcomes:
            if outcome.skipped is None:
                _start(outcome, workload, rounds, log_dir, teams)
            say(f"  {outcome.contender.name:14s} {f'ready after {outcome.setup_s:.1f} s' if outcome.ran else outcome.status}")
        for index in range(rounds.rounds if teams else 0):
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
    if contender.kind in ("ds", "ulysses") and importlib.util.find_spec("deepspeed") is None:
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
        outcome.setup_s, outcome.settings, outcome.numel = team.ready[0]
        if rounds.warmup:
            outcome.record_losses(team.ask("turn", 0, rounds.warmup))

    teams.attempt(outcome, warm_up)


def _take_turn(outcome: Outcome, team: Team, rounds: Rounds, index: int) -> None:
    turns: list[Turn] = team.ask("turn", rounds.first_step(index), rounds.steps, rounds.lead_in)
    outcome.rounds_step_s.append(step_times(turns, rounds.steps))
    outcome.cpu_s.append(sum(turn.cpu_s for turn in turns) / rounds.steps)
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
    for name in ("peak_rss", "rss_before", "cuda_peak"):
        setattr(outcome, name, max((v for rank in ranks if (v := getattr(rank, name)) is not None), default=None))
    outcome.peak_pss, outcome.peak_pss_sum = (max(map(of, samples), default=None) for of in (max, sum))
    outcome.at_rest = ranks[0].at_rest
    outcome.record_losses(ranks)
    if on_cuda and outcome.contender.offload:
        outcome.overlap = team.ask("overlap", rounds.first_step(rounds.rounds) + rounds.memory_steps, rounds.memory_steps)[0]


def core_share(outcomes: list[Outcome], ranks: int) -> float | None:
    """Return processor time over wall time of a rank's steps, for the contender where it is largest. Waiting lowers it.

    Near 1 on a quiet machine with a core per rank; clearly less if other programs ran.
    """
    measured = [o for o in outcomes if o.ran and o.rounds_step_s]
    return max((median(o.cpu_s) / (ranks * median(o.round_s)) for o in measured), default=None)


def compared_losses(outcomes: list[Outcome]) -> list[tuple[Outcome, Outcome, float]]:
    """Return (outcome, its reference, largest relative difference of their losses) for all that can be compared.

    The reference is DDP, FSDP2, else the first outcome of the same precision, and is compared with none.
    """
    found, usable = [], [o for o in outcomes if o.ran and o.trains_together and o.losses]
    for outcome in usable:
        same = [o for o in usable if o.contender.precision == outcome.contender.precision]
        preferred = [o for kind in ("ddp", "fsdp2") for o in same if o.contender.kind == kind]
        reference = (preferred + same)[0]
        if reference is not outcome:
            pairs = zip(outcome.losses, reference.losses, strict=False)
            # a NaN loss differs from all
            difference = max(abs(a - b) / abs(b) if a == a else float("inf") for a, b in pairs)
            found.append((outcome, reference, difference))
    return found


def formula_difference(outcomes: list[Outcome]) -> float | None:
    """Return the largest relative difference of model-state bytes at rest from the stage's formula, over zeroshard's stages."""
    at_rest = [o.at_rest for o in outcomes if o.ran and o.contender.kind == "zs" and o.at_rest]
    sums = [(sum(states["measured"].values()), sum(states["formula"].values())) for states in at_rest]
    return max((abs(measured - formula) / formula for measured, formula in sums), default=None)


def table(section: str, title: str, workload: Workload, outcomes: list[Outcome]) -> Measured:
    """Return the table of one race, all contenders in one precision. section: key of BOUNDS, or another name, without goals."""
    shape, numel, rows = workload.shape, max((o.numel for o in outcomes), default=0), []
    for outcome in (o for o in outcomes if o.ran and o.rounds_step_s):
        facts: dict[str, float | None] = {"cpu s": round(median(outcome.cpu_s), 3)}
        peaks = {RSS: outcome.peak_rss, "PSS MiB": outcome.peak_pss, PSS_ALL: outcome.peak_pss_sum if workload.mesh else None}
        if workload.device == "cuda":
            peaks = {"GPU MiB": outcome.cuda_peak}
        facts |= {name: round(nbytes / MIB, 1) for name, nbytes in peaks.items() if nbytes is not None}
        if outcome.at_rest:
            facts["states MiB"] = round(sum(outcome.at_rest["measured"].values()) / MIB, 1)
        if outcome.disk:
            facts["moved MB"] = round(median(sum(of.values()) for of in outcome.moved) / 1e6, 1)
            facts["bound ms"] = round(1e3 * median(outcome.bounds_s), 1)
            facts["/ bound"] = round(median_ratio(outcome.round_s, outcome.bounds_s), 2)
            facts |= {f"disk {phase} GB/s": round(median(getattr(d, phase) for d in outcome.disk) / 1e9, 2) for phase in PHASES}
        facts["loss"] = outcome.losses[-1]
        rows.append(Row(outcome.contender.label, outcome.round_s, facts={k: v for k, v in facts.items() if v is not None}))
    suffix = f" {outcomes[0].contender.suffix}".rstrip() if outcomes else ""
    ranks = " x ".join(map(str, workload.mesh or (workload.ranks,)))
    title = (
        f"{title}{suffix and ','}{suffix}: GPT of {numel / 1e6:.1f}M parameters (dim {shape.dim}, {shape.layers} layers), {ranks} "
        f"ranks on {workload.device}, {workload.sequences} x {shape.seq_len} tokens a "
        f"{'place of data parallelism' if workload.mesh else 'rank'}, fused AdamW"
    )
    peers = {"/ zs3": OURS} if section == "tiers" else {f"/ {name}": f"{name}{suffix}" for (name,) in (DDP, FSDP2, DS3)}
    skipped = {o.contender.label: o.status for o in outcomes if not o.ran}
    found = Measured(title, rows, BOUNDS.get(section + suffix, ()), peers, skipped)
    found.details = {o.contender.label: asdict(o) for o in outcomes}
    by_label = {o.contender.label: o for o in outcomes if o.ran and o.disk}
    on_disk, memory_row = by_label.get("zeroshard 3 opt. disk"), found.row(OURS)
    if section == "tiers" and on_disk is not None and memory_row is not None:
        pairs = zip(on_disk.bounds_s, memory_row.seconds, strict=True)
        rows.append(Row(DISK_LIMIT, [max(DISK_BOUND_FACTOR * bound, DISK_MEMORY_FACTOR * held) for bound, held in pairs]))
    if section == "cpu" and not suffix:
        found.more.append(Goal("model states at rest, difference from the formula", formula_difference(outcomes), 0.01))
    found.notes.append(
        ("ms: median step. cpu s: of all ranks, a step. RSS, PSS: peak of the largest rank while stepping.", PLAIN)
    )
    share = None if workload.mesh or workload.device == "cuda" else core_share(outcomes, workload.ranks)
    if share is not None and share < BUSY_CORE_SHARE:
        found.notes.append(
            (f"The machine was busy: a rank got {share:.0%} of a core. Do not trust step times; run again.", WARNING)
        )
    if found.bounds and not workload.mesh and (shape, workload.ranks) != (ModelShape(), 2):
        found.notes.append(("The goals are set for the default model on 2 ranks; this run had others.", WARNING))
    compared = compared_losses(outcomes)
    wrong = [each for each in compared if each[2] > each[0].tolerance]
    for outcome, reference, difference in wrong:
        names = outcome.contender.label, reference.contender.label
        found.notes.append((f"losses of {names[0]} differ from {names[1]}'s by {difference:.1e}", BAD))
    if compared and not wrong:
        found.notes.append((f"losses: all contenders agree (to {max(d for *_, d in compared):.0e})", GOOD))
    found.broken = bool(wrong) or any(o.failed for o in outcomes)
    return found
