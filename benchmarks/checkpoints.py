"""The section of checkpoints: zeroshard beside torch.distributed.checkpoint with FSDP2, and DeepSpeed, on one disk in one run.

    zeroshard bench --sections checkpoints --path /folder/on/a/local/disk

The time of a *save* is that of the library's call, from the first rank's begin to the last rank's end, plus a sync of the file
system. Before a load the page cache is dropped, as after a restart (where the kernel does not allow that, a note says so). With
a small model all contenders are alive and take turns; of large models no two fit in memory, so each contender runs alone. Before
each save zeroshard's ranks write about as many bytes in bulk with the file engine, and do so again after it. A sync and a pause
of half a second precede each of these, so that none waits for disk work of the one before. *stall* is the time for which a save
in the background holds training up, by its call and before the next step; a *memory copy* is one of a rank's states.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from zeroshard.cli.sheets import say
from zeroshard.planner.simulator.disk_bandwidth import bandwidth
from zeroshard.utils.sheets import PLAIN

from .plan import Contender, ModelShape, Workload
from .race import missing_reason
from .tables import SPEED, Bound, Measured, Row
from .worker import parameter_count
from .worker_group import Team, Teams, turned

CONTENDERS = (Contender("zs", 3), Contender("fsdp2"), Contender("ds", 3))
SIZES = {  # name -> shape, whether contenders take turns, rounds: short saves vary more, so they need more rounds
    "34M": (ModelShape(), True, 9),
    "500M": (ModelShape(dim=1536, layers=17, heads=12), False, 3),
}
OURS, BOTH = CONTENDERS[0].label, "save and load"
BOUNDS = (
    Bound("save throughput / file engine", f"{OURS}: save", (f"{OURS}: the file engine alone",), 0.9, SPEED),
    Bound("save and load / DCP with FSDP2, time", f"{OURS}: {BOTH}", (f"FSDP2: {BOTH}",), 0.8),
    Bound("save and load / DeepSpeed 3, time", f"{OURS}: {BOTH}", (f"DeepSpeed 3: {BOTH}",), 0.5),
    Bound("stall of a save in the background / one memory copy", f"{OURS}: stall", (f"{OURS}: memory copy",), 1.2),
)


@dataclass
class Kept:
    """The seconds of one contender by what was done, one for each round, of the slowest rank; skipped: why there are none."""

    contender: Contender
    skipped: str | None = None
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    nbytes: int = 0  # of a checkpoint

    def fail(self, why: str) -> None:
        self.skipped = f"failed: {why}"


def run(path: str, log_dir: Path, contenders: tuple[Contender, ...] = CONTENDERS) -> list[Measured]:
    """Measure all SIZES in a new folder below `path`, and remove it afterwards."""
    results = []
    for size, (shape, turns, rounds) in SIZES.items():
        workload = Workload(shape=shape, sequences=1, swap_path=path)
        nbytes = 12 * parameter_count(workload)  # parameters and two states of Adam, in fp32
        kepts = [Kept(c, f"skipped: {why}" if (why := missing_reason(c, workload)) else None) for c in contenders]
        say(f"checkpoints of {size}: {', '.join(k.contender.name for k in kepts)}, {rounds} rounds")
        with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=path, ignore_cleanup_errors=True) as folder:
            able = [k for k in kepts if k.skipped is None]
            for group in [able] if turns else [[k] for k in able]:
                with Teams() as teams:  # alive together
                    for kept in group:
                        teams[kept.contender.name] = Team(kept.contender, workload, log_dir / size)
                        teams.attempt(kept, Team.wait_ready)
                        teams.attempt(kept, lambda team: team.ask("turn", 0, 2))
                    for index in range(rounds):
                        for kept in turned(group, index):
                            teams.attempt(kept, partial(_take_turn, kept, Path(folder) / kept.contender.name, nbytes))
                        say(f"  round {index + 1} of {rounds} done")
        results.append(table(size, kepts, cold=drop_page_cache()))
    return results


def _take_turn(kept: Kept, folder: Path, nbytes: int, team: Team) -> None:
    """Run one round of a contender, and append its seconds to `kept`. nbytes: about the size of its checkpoint."""
    path, ours, round_s = str(folder), kept.contender.kind == "zs", {}

    def settle() -> None:
        """Sync all files to the disk, and give the disk time to finish what it does for removed ones."""
        os.sync()
        time.sleep(0.5)

    def bulk_s() -> float:
        settle()
        return nbytes / bandwidth(team.ask("write_bulk", nbytes // len(team.pids)))

    bulk = [bulk_s()] if ours else []
    settle()
    saved = team.ask("save", path)
    begin = time.monotonic()
    os.sync()
    round_s["save"] = max(end for _, end in saved) - min(begin for begin, _ in saved) + time.monotonic() - begin
    kept.nbytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if ours:  # the mean of before and after, for as many bytes as the checkpoint has
        round_s["the file engine alone"] = (bulk[0] + bulk_s()) / 2 * kept.nbytes / nbytes
    settle()
    drop_page_cache()
    begin = time.monotonic()
    team.ask("load", path)
    round_s["load"] = time.monotonic() - begin
    round_s[BOTH] = round_s["save"] + round_s["load"]
    shutil.rmtree(path)
    if kept.contender.kind != "ds":  # DeepSpeed's Keeper cannot save in the background
        for _ in range(2):  # the first makes the buffers, which a load frees where memory is short
            os.sync()
            round_s["stall"] = max(team.ask("save_in_background", path))
            shutil.rmtree(path)
    if ours:
        round_s["memory copy"] = max(team.ask("copy_states"))
    for what, seconds in round_s.items():
        kept.seconds[what].append(seconds)


def drop_page_cache() -> bool:
    """Drop the kernel's page cache; return whether the kernel allowed it."""
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def table(size: str, kepts: list[Kept], cold: bool) -> Measured:
    """Return the measurements with a model of one size. cold: loads came from the disk, not the page cache."""
    rows = [
        Row(f"{kept.contender.label}: {what}", seconds, None if what in ("stall", "memory copy", BOTH) else kept.nbytes)
        for kept in kepts
        for what, seconds in kept.seconds.items()
        if kept.skipped is None
    ]
    bounds = [Bound(f"{size}: {b.text}", b.ours, b.theirs, b.limit, b.what) for b in BOUNDS] if rows else []
    skipped = {kept.contender.label: kept.skipped for kept in kepts if kept.skipped}
    title = f"Checkpoints, {size} parameters with Adam states"
    note = f"save: until the bytes are on the disk; load: from the {'disk' if cold else 'page cache'}."
    failed = any(why.startswith("failed") for why in skipped.values())
    return Measured(title, rows, bounds, skipped=skipped, notes=[(note, PLAIN)], broken=failed)
