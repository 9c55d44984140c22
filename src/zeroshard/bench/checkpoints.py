"""Checkpoints: saving and loading beside torch.distributed.checkpoint with FSDP2 and DeepSpeed, to the same disk in one run.

    python -m zeroshard.bench.checkpoints --path /folder/on/a/local/disk [--sizes 34M,500M] [--rounds N]

A *save* is timed until the bytes are on the disk: the library's call, from the first rank's begin to the last one's end (as the
engine is timed), and then the file system is synced. Before a load the page cache is dropped, as after a restart (where the
kernel lets us: else `cold` is false). Small models: all contenders are alive and take turns; large ones, of which two would not
fit side by side: one contender after the other. Before each save its ranks write about as many bytes with the file engine, in
bulk; ours do it again after the save. The disk has half a second before each of these, so that none waits for what it still has
to do for the one before (as after a file has been removed). In each round all ranks also save in the background, and copy their
states once in memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

from .checkpoint_contenders import written_nbytes
from .disk_bandwidth import bandwidth
from .plan import Contender, ModelShape, Workload
from .race import missing_reason
from .statistics import Goal
from .tables import PLAIN, WARNING, Sheet, number
from .worker_group import Team, TeamFailed

CONTENDERS = (Contender("zs", 3), Contender("fsdp2"), Contender("ds", 3))
SIZES = {  # name -> shape, whether contenders take turns, rounds: the less there is to do the more a moment's trouble weighs
    "34M": (ModelShape(), True, 9),
    "500M": (ModelShape(dim=1536, layers=17, heads=12), False, 3),
}
_SETTLE_S = 0.5
ENGINE_GOAL, DCP_GOAL, DEEPSPEED_GOAL, STALL_GOAL = 0.9, 0.8, 0.5, 1.2


@dataclass
class Kept:
    """What was measured of one contender: lists by round, seconds of the slowest rank."""

    contender: Contender
    skipped: str | None = None
    save_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)  # of saves in the background, but for the first of a round
    lost_s: list[float] = field(default_factory=list)  # by which such a save and the step after it are longer than a step
    first_stall_s: float = 0.0  # of the very first, whose buffers nobody has touched
    copy_s: list[float] = field(default_factory=list)  # one memory copy of a rank's states
    engine_nbytes_per_s: list[float] = field(default_factory=list)  # of all ranks, mean of before and after the save
    nbytes: int = 0
    extra_nbytes: int = 0  # resident memory beyond that before the save, of the largest rank

    @property
    def ran(self) -> bool:
        return bool(self.load_s)

    @property
    def total_s(self) -> float:
        """Save and load, median of rounds."""
        return statistics.median(a + b for a, b in zip(self.save_s, self.load_s, strict=True))

    @property
    def nbytes_per_s(self) -> float:
        """Of saves."""
        return self.nbytes / statistics.median(self.save_s)


@dataclass(frozen=True)
class Kepts:
    """One size. cold: loads came from the disk."""

    size: str
    shape: ModelShape
    kept: list[Kept]
    cold: bool

    def of(self, kind: str) -> Kept | None:
        return next((k for k in self.kept if k.contender.kind == kind and k.ran), None)

    @property
    def goals(self) -> list[Goal]:
        """Ratios of medians."""
        ours, goals = self.of("zs"), []
        if ours is None:
            return []
        engine = statistics.median(s / r for s, r in zip([ours.nbytes / t for t in ours.save_s], ours.engine_nbytes_per_s, strict=True))
        goals.append(Goal(f"{self.size}: save throughput / file engine", engine, ENGINE_GOAL, "checkpoints", True))
        for kind, label, limit in (("fsdp2", "DCP with FSDP2", DCP_GOAL), ("ds", "DeepSpeed 3", DEEPSPEED_GOAL)):
            theirs = self.of(kind)
            ratio = None if theirs is None else ours.total_s / theirs.total_s
            goals.append(Goal(f"{self.size}: save and load / {label}, time", ratio, limit, "checkpoints"))
        stall = statistics.median(a / b for a, b in zip(ours.stall_s, ours.copy_s, strict=True))
        goals.append(Goal(f"{self.size}: stall of a save in the background / one memory copy", stall, STALL_GOAL, "checkpoints"))
        return goals


def run(
    path: str, sizes: tuple[str, ...] = tuple(SIZES), rounds: int | None = None, log_dir: Path | None = None,
    say: Callable[[str], None] = print, only: tuple[str, ...] = (),
) -> list[Kepts]:  # fmt: skip
    """Measure in a folder of `path`, which is removed afterwards. rounds: None: as many as each size wants."""
    results = []
    log_dir = log_dir or Path(tempfile.mkdtemp(prefix="zeroshard-bench-"))
    for size in sizes:
        shape, turns, usual = SIZES[size]
        workload = Workload(shape=shape, sequences=1, swap_path=path)
        kept = [Kept(c, missing_reason(c, workload)) for c in CONTENDERS if not only or c.name in only]
        say(f"checkpoints of {size}: {', '.join(k.contender.name for k in kept)}, {rounds or usual} rounds")
        with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=path, ignore_cleanup_errors=True) as folder:
            groups = [kept] if turns else [[k] for k in kept]
            for group in groups:
                _measure([k for k in group if k.skipped is None], workload, rounds or usual, Path(folder), log_dir / size, say)
        results.append(Kepts(size, shape, kept, drop_page_cache()))
    return results


def _measure(group: list[Kept], workload: Workload, rounds: int, folder: Path, log_dir: Path, say: Callable[[str], None]) -> None:
    teams: dict[str, Team] = {}
    try:
        for kept in group:
            teams[kept.contender.name] = Team(kept.contender, workload, log_dir)
            _guarded(kept, teams, lambda team: (team.wait_ready(), team.ask("turn", 0, 2)))
        nbytes = states_nbytes(workload)
        for index in range(rounds):
            for kept in group[index % len(group) :] + group[: index % len(group)]:
                _guarded(kept, teams, lambda team: _take_turn(kept, team, folder / kept.contender.name, nbytes))
            say(f"  round {index + 1} of {rounds} done")
    finally:
        for team in teams.values():
            team.close()


def _guarded(kept: Kept, teams: dict[str, Team], action: Callable[[Team], object]) -> None:
    if kept.contender.name not in teams:
        return
    try:
        action(teams[kept.contender.name])
    except TeamFailed as error:
        kept.skipped = f"failed: {error}"
        teams.pop(kept.contender.name)


def states_nbytes(workload: Workload) -> int:
    """Of parameters and two states of Adam, in fp32."""
    from .workload import build_model

    model = build_model(dataclasses.replace(workload, meta=True))
    return 12 * sum(param.numel() for param in model.parameters())


def _take_turn(kept: Kept, team: Team, folder: Path, nbytes: int) -> None:
    """Save, load, save in the background, and (zeroshard) what memory and disk give by themselves. nbytes: about those saved."""
    path = str(folder)
    _settle()
    before = bandwidth(team.ask("write_bulk", nbytes // team_size(team)))
    _settle()
    saved = team.ask("save", path)
    begin = time.monotonic()
    os.sync()
    kept.save_s.append(max(s.end for s in saved) - min(s.begin for s in saved) + time.monotonic() - begin)
    kept.nbytes, kept.extra_nbytes = written_nbytes(path), max(kept.extra_nbytes, *(s.extra_nbytes for s in saved))
    if kept.contender.kind == "zs":
        _settle()
        after = bandwidth(team.ask("write_bulk", nbytes // team_size(team)))
        kept.engine_nbytes_per_s.append((before + after) / 2)
    _settle()
    drop_page_cache()
    begin = time.monotonic()
    team.ask("load", path)
    kept.load_s.append(time.monotonic() - begin)
    shutil.rmtree(path)
    if kept.contender.kind != "ds":  # whose keeper has no such save
        os.sync()
        first, _ = max(team.ask("save_in_background", path))  # makes the buffers, which a load takes back where memory is short
        if not kept.stall_s:
            kept.first_stall_s = first
        stall_s, lost_s = zip(*team.ask("save_in_background", path), strict=True)
        kept.stall_s.append(max(stall_s))
        kept.lost_s.append(max(lost_s))
        shutil.rmtree(path)
        os.sync()
    if kept.contender.kind == "zs":
        kept.copy_s.append(max(team.ask("copy_states")))


def _settle() -> None:
    """What was written is on the disk, and what was removed is forgotten."""
    os.sync()
    time.sleep(_SETTLE_S)


def team_size(team: Team) -> int:
    """Ranks of a team."""
    return len(team.pids)


def drop_page_cache() -> bool:
    """Forget what the kernel keeps of files; whether it let us."""
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def sheet(result: Kepts) -> Sheet:
    """One size as a table."""
    rows = []
    for kept in result.kept:
        if not kept.ran:
            continue
        theirs = [result.of(kind) for kind in ("fsdp2", "ds")]
        rows.append(
            [
                kept.contender.label,
                f"{statistics.median(kept.save_s):.2f}",
                f"{statistics.median(kept.load_s):.2f}",
                f"{kept.load_s[0]:.2f}",
                *(number(t and kept.total_s / t.total_s, "{:.2f}") for t in theirs),
                f"{kept.nbytes / 1e9:.2f}",
                f"{kept.nbytes_per_s / 1e9:.2f}",
                number(statistics.median(kept.engine_nbytes_per_s) / 1e9 if kept.engine_nbytes_per_s else None, "{:.2f}"),
                number(statistics.median(kept.stall_s) * 1e3 if kept.stall_s else None, "{:.0f}"),
                number(statistics.median(kept.lost_s) * 1e3 if kept.lost_s else None, "{:.0f}"),
                number(statistics.median(kept.copy_s) * 1e3 if kept.copy_s else None, "{:.0f}"),
                f"{kept.extra_nbytes / 2**20:.0f}",
            ]
        )
    headings = ("save s", "load s", "first s", "/DCP", "/DS3", "GB", "GB/s", "engine GB/s", "stall ms", "lost ms", "copy ms", "extra MiB")
    notes = [
        ("save: until the bytes are on the disk; load: " + ("from the disk." if result.cold else "from the page cache."), PLAIN),
        ("first: the first load, for which there are no buffers yet that saves in the background have touched.", PLAIN),
        ("/DCP, /DS3: save and load together. extra: resident memory of the largest rank beyond that before the save.", PLAIN),
        ("stall: training held up by a save in the background; lost: by which it and the next step exceed a step.", PLAIN),
    ]
    notes += [(f"{k.contender.label}: {k.skipped}", WARNING) for k in result.kept if k.skipped]
    return Sheet(f"Checkpoints, {result.size} parameters with Adam states", headings, rows, notes)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zeroshard.bench.checkpoints", description=__doc__.splitlines()[0])
    parser.add_argument("--path", required=True, help="folder on a local disk")
    parser.add_argument("--sizes", default=",".join(SIZES), help=f"of {', '.join(SIZES)}")
    parser.add_argument("--rounds", type=int, help="default: " + ", ".join(f"{size}: {usual}" for size, (*_, usual) in SIZES.items()))
    parser.add_argument("--only", default="", help="contenders, separated by commas")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    given = parser.parse_args(argv)
    only = tuple(name for name in given.only.split(",") if name)
    sizes = tuple(given.sizes.split(","))
    for option, wanted, known in (("--sizes", sizes, list(SIZES)), ("--only", only, [c.name for c in CONTENDERS])):
        if unknown := [name for name in wanted if name not in known]:
            parser.error(f"{option}: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    Path(given.path).mkdir(parents=True, exist_ok=True)
    results = run(given.path, sizes, given.rounds, only=only)
    from rich.console import Console

    console = Console(width=135)
    for result in results:
        sheet(result).show(console)
        for goal in result.goals:
            sign = ">=" if goal.at_least else "<="
            console.print(f"{goal.text}: {number(goal.value, '{:.3f}')} ({sign} {goal.limit:g}) {goal.verdict}", markup=False)
    if given.json:
        given.json.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
