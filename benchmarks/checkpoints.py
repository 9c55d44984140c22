"""A benchmark of checkpoints: zeroshard beside torch.distributed.checkpoint with FSDP2, and DeepSpeed, on one disk in one run.

    zeroshard bench --sections checkpoints --path /folder/on/a/local/disk

The time of a *save* is that of the library's call, from the first rank's begin to the last rank's end, plus a sync of the file
system. Before a load the page cache is dropped, as after a restart (`cold` is false where the kernel does not allow that). With
a small model all contenders are alive and take turns; of large models no two fit in memory, so each contender runs alone. Before
each save the contender's ranks write about as many bytes in bulk with zeroshard's file engine; zeroshard's ranks do so again
after the save. A sync and a pause of half a second precede each of these, so that none waits for disk work of the one before. In
each round zeroshard and FSDP2 also save in the background, and zeroshard's ranks copy their states once in memory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import median

from zeroshard.cli.sheets import say
from zeroshard.planner.simulator.disk_bandwidth import bandwidth
from zeroshard.utils.sheets import PLAIN, WARNING, Sheet

from .micro_benchmark import median_ratio
from .plan import Contender, ModelShape, Workload
from .race import missing_reason
from .tables import GB, MIB, Column, Goal, sheet_of
from .worker import parameter_count
from .worker_group import Team, Teams, turned

CONTENDERS = (Contender("zs", 3), Contender("fsdp2"), Contender("ds", 3))
SIZES = {  # name -> shape, whether contenders take turns, rounds: short saves vary more, so they need more rounds
    "34M": (ModelShape(), True, 9),
    "500M": (ModelShape(dim=1536, layers=17, heads=12), False, 3),
}


@dataclass
class Kept:
    """The measurements of one contender. Lists have one element per round; times are seconds of the slowest rank."""

    contender: Contender
    skipped: str | None = None
    save_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)  # training held up by the second background save of each round
    lost_s: list[float] = field(default_factory=list)  # time of such a save and the next step, less the time of a step
    first_stall_s: float = 0.0  # stall of the very first background save, whose buffers are still untouched memory
    copy_s: list[float] = field(default_factory=list)  # one memory copy of a rank's states
    engine_nbytes_per_s: list[float] = field(default_factory=list)  # all ranks together; mean of before and after the save
    nbytes: int = 0
    extra_nbytes: int = 0  # resident memory during the save beyond that before it; the largest of all ranks

    @property
    def ran(self) -> bool:
        return bool(self.load_s)

    def fail(self, why: str) -> None:
        self.skipped = f"failed: {why}"

    @property
    def total_s(self) -> float:
        """The seconds of a save and a load together, median of rounds."""
        return median(a + b for a, b in zip(self.save_s, self.load_s, strict=True))


@dataclass(frozen=True)
class Kepts:
    """The measurements of all contenders with a model of one size. cold: loads came from the disk, not the page cache."""

    size: str
    shape: ModelShape
    kept: list[Kept]
    cold: bool

    def of(self, kind: str) -> Kept | None:
        return next((k for k in self.kept if k.contender.kind == kind and k.ran), None)

    @property
    def goals(self) -> list[Goal]:
        """The goals of zeroshard with their measured values; none where it did not run."""
        ours = self.of("zs")
        if ours is None:
            return []
        speeds = [ours.nbytes / seconds for seconds in ours.save_s]
        rows = (
            ("save throughput / file engine", median_ratio(speeds, ours.engine_nbytes_per_s), 0.9, True),
            ("save and load / DCP with FSDP2, time", self.to_peer(ours, "fsdp2"), 0.8, False),
            ("save and load / DeepSpeed 3, time", self.to_peer(ours, "ds"), 0.5, False),
            ("stall of a save in the background / one memory copy", median_ratio(ours.stall_s, ours.copy_s), 1.2, False),
        )
        return [Goal(f"{self.size}: {text}", value, limit, "checkpoints", at_least) for text, value, limit, at_least in rows]

    def to_peer(self, kept: Kept, kind: str) -> float | None:
        """Return the time of a save and a load over that of the peer `kind`; None where the peer did not run."""
        peer = self.of(kind)
        return None if peer is None else kept.total_s / peer.total_s


def run(path: str, log_dir: Path, contenders: tuple[Contender, ...] = CONTENDERS) -> list[Kepts]:
    """Measure all SIZES in a new folder below `path`, and remove it afterwards."""
    results = []
    for size, (shape, turns, rounds) in SIZES.items():
        workload = Workload(shape=shape, sequences=1, swap_path=path)
        kepts = [Kept(c, missing_reason(c, workload)) for c in contenders]
        say(f"checkpoints of {size}: {', '.join(k.contender.name for k in kepts)}, {rounds} rounds")
        with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=path, ignore_cleanup_errors=True) as folder:
            for group in [kepts] if turns else [[k] for k in kepts]:
                _measure([k for k in group if k.skipped is None], workload, rounds, Path(folder), log_dir / size)
        results.append(Kepts(size, shape, kepts, drop_page_cache()))
    return results


def _measure(group: list[Kept], workload: Workload, rounds: int, folder: Path, log_dir: Path) -> None:
    """Let contenders that are alive together take turns."""
    nbytes = 12 * parameter_count(workload)  # parameters and two states of Adam, in fp32
    with Teams() as teams:
        for kept in group:
            teams[kept.contender.name] = Team(kept.contender, workload, log_dir)
            teams.attempt(kept, Team.wait_ready)
            teams.attempt(kept, lambda team: team.ask("turn", 0, 2))
        for index in range(rounds):
            for kept in turned(group, index):
                teams.attempt(kept, partial(_take_turn, kept, folder=folder / kept.contender.name, nbytes=nbytes))
            say(f"  round {index + 1} of {rounds} done")


def _take_turn(kept: Kept, team: Team, folder: Path, nbytes: int) -> None:
    """Run one round of a contender, and append what was measured to `kept`. nbytes: about the size of its checkpoint."""
    path = str(folder)
    _settle()
    before = bandwidth(team.ask("write_bulk", nbytes // len(team.pids)))
    _settle()
    saved = team.ask("save", path)
    begin = time.monotonic()
    os.sync()
    kept.save_s.append(max(s.end for s in saved) - min(s.begin for s in saved) + time.monotonic() - begin)
    kept.nbytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    kept.extra_nbytes = max(kept.extra_nbytes, *(s.extra_nbytes for s in saved))
    if kept.contender.kind == "zs":
        _settle()
        after = bandwidth(team.ask("write_bulk", nbytes // len(team.pids)))
        kept.engine_nbytes_per_s.append((before + after) / 2)
    _settle()
    drop_page_cache()
    begin = time.monotonic()
    team.ask("load", path)
    kept.load_s.append(time.monotonic() - begin)
    shutil.rmtree(path)
    if kept.contender.kind != "ds":  # DeepSpeed's Keeper cannot save in the background
        os.sync()
        first, _ = max(team.ask("save_in_background", path))  # makes the buffers, which a load frees where memory is short
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
    """Sync all files to the disk, and give the disk time to finish what it does for removed ones."""
    os.sync()
    time.sleep(0.5)


def drop_page_cache() -> bool:
    """Drop the kernel's page cache; return whether the kernel allowed it."""
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def sheet(result: Kepts) -> Sheet:
    """Return the results of one size as a table."""

    def middle(heading: str, name: str, scale: float = 1.0, form: str = ".2f") -> Column:
        """Return the column of the median of an attribute's values."""
        return Column(heading, lambda kept: median(getattr(kept, name)) if getattr(kept, name) else None, form, scale)

    columns = (
        Column("", lambda kept: kept.contender.label),
        middle("save s", "save_s"),
        middle("load s", "load_s"),
        Column("first s", lambda kept: kept.load_s[0], ".2f"),
        Column("/DCP", lambda kept: result.to_peer(kept, "fsdp2"), ".2f"),
        Column("/DS3", lambda kept: result.to_peer(kept, "ds"), ".2f"),
        Column("GB", attrgetter("nbytes"), ".2f", 1 / GB),
        Column("GB/s", lambda kept: kept.nbytes / median(kept.save_s), ".2f", 1 / GB),
        middle("engine GB/s", "engine_nbytes_per_s", 1 / GB),
        middle("stall ms", "stall_s", 1e3, ".0f"),
        middle("lost ms", "lost_s", 1e3, ".0f"),
        middle("copy ms", "copy_s", 1e3, ".0f"),
        Column("extra MiB", attrgetter("extra_nbytes"), ".0f", 1 / MIB),
    )
    notes = [
        ("save: until the bytes are on the disk; load: " + ("from the disk." if result.cold else "from the page cache."), PLAIN),
        ("first: the first load, for which there are no buffers yet that saves in the background have touched.", PLAIN),
        ("/DCP, /DS3: save and load together. extra: resident memory of the largest rank beyond that before the save.", PLAIN),
        ("stall: training held up by a save in the background; lost: by which it and the next step exceed a step.", PLAIN),
    ]
    notes += [(f"{k.contender.label}: {k.skipped}", WARNING) for k in result.kept if k.skipped]
    title = f"Checkpoints, {result.size} parameters with Adam states"
    return sheet_of(title, columns, [kept for kept in result.kept if kept.ran], notes)
