"""Counts of what one rank sends, receives and computes for control messages, as a function of the number of ranks.

    python -m benchmarks.ranks [--few | --real]

One process is rank 0 of N ranks over torch.distributed: its collectives of tensors end at once, and each control message is fed
with the frames of N ranks that say what this rank says (with --few as up to MANY ranks do, whose messages are always of all), so
that what it does in Python is what it would do among N. Counted, after a first step: messages, bytes received, and calls of
functions. The exponent is that of the last two columns: 0 does not grow with N, 1 grows with it. --real: beside the counts of fed
ranks those of rank 0 among real ones, processes over gloo, which also call what sends tensors.

Saves and loads are of tables of 16 rows for each rank, whose other ranks' parts, places of tensors and data files are rank 0's,
moved on. A second table has the files of a checkpoint, and rank 0's memory and seconds of processor time for it, without those of feeding.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint import heartbeat
from zeroshard.comm.fake import FakeComm
from zeroshard.comm.launch import run_processes
from zeroshard.engine.comm import process_group
from zeroshard.seam import decode, encode
from zeroshard.utils.one_thread import Turn
from zeroshard.utils.sheets import markdown

from . import memory
from .tables import MIB

RANKS = (2, 8, 64, 256, 1024, 4096)
ROWS, FILE = 16, "rank-{:05d}"  # of a table for each rank; the name of a rank's files


class Counting(process_group.DistComm):
    """Counts the control messages of a rank over torch.distributed, and the bytes that it receives for them."""

    messages = received = 0

    def _all_gather_bytes(self, body: bytes, nbytes: int, label: str) -> list[bytes]:
        self.messages, self.received = self.messages + 1, self.received + nbytes * self.world_size
        return super()._all_gather_bytes(body, nbytes, label)

    def _add_up(self, told: torch.Tensor, label: str) -> torch.Tensor:
        ((nbytes, _),) = process_group.collectives_of(0, self.world_size)
        self.messages, self.received = self.messages + 1, self.received + nbytes
        return super()._add_up(told, label)


class Fed(FakeComm, process_group.DistComm):
    """Rank 0 of many, which all say the same. Collectives of tensors are FakeComm's, control messages DistComm's."""

    imagined = False
    alone, compare = process_group.DistComm.alone, process_group.DistComm.compare

    def __init__(self, world_size: int, folder: str = "") -> None:
        """folder: where saves go."""
        super().__init__(0, world_size)
        self.turn, self.beside, self.stall_timeout_s = Turn("fed"), [], 60.0
        self.messages = self.received = 0
        self.told_nbytes = process_group.collectives_of(0, world_size)[0][0]
        self.folder, self.feeding_s = Path(folder), 0.0  # seconds that feeding took

    def _all_gather_bytes(self, body: bytes, nbytes: int, label: str) -> list[bytes]:
        self.messages, self.received = self.messages + 1, self.received + nbytes * self.world_size
        return [bytes(bytearray(body.ljust(nbytes, b"\0"))) for _ in self.ranks]

    def exchange(self, payload: bytes, label: str) -> list[bytes]:
        if label == "zs.save: telling what is in the files":
            with self.feeding():
                self._tell_tensors()
        return process_group.DistComm.exchange(self, payload, label)

    def _sums(self, payload: bytes, label: str, numbers: Sequence[float]) -> list[float] | None:
        sums = super()._sums(payload, label, numbers)
        # only rank 0 knows these folders, and each rank writes a file of its own
        differs = label in ("zs.save: folder", "zs.load: which") or FILE.format(0).encode() in payload
        return None if differs else sums

    def _everyone(self, payload: bytes, label: str) -> list[bytes]:
        told = super()._everyone(payload, label)
        if FILE.format(0).encode() in payload:
            with self.feeding():
                ((opened, part), *ended) = decode(payload)
                words = json.loads(part)
                place = words["objects"]["zeroshard.rng.0"]
                for rank in range(1, self.world_size):
                    words["file"][0], words["objects"] = f"{FILE.format(rank)}.distcp", {f"zeroshard.rng.{rank}": place}
                    told[rank] = encode(((opened, json.dumps(words, separators=(",", ":")).encode()), *ended))
        return told

    def _tell_tensors(self) -> None:
        """Write the other ranks' places of tensors to the draft: rank 0's, of rows further on, without single numbers."""
        (mine,) = self.folder.glob(f".*/{FILE.format(0)}.tensors.json")
        tensors = {name: at for name, at in json.loads(mine.read_bytes()).items() if at["shape"]}
        for rank in range(1, self.world_size):
            for at in tensors.values():
                ((_, *where, _, size),) = at["boxes"]
                at["boxes"] = [(rank, *where, (ROWS * rank, 0), size)]
            mine.with_name(f"{FILE.format(rank)}.tensors.json").write_text(json.dumps(tensors, separators=(",", ":")))

    @contextmanager
    def feeding(self) -> Iterator[None]:
        """Context in which nothing is counted."""
        profile, begin = sys.getprofile(), time.process_time()
        sys.setprofile(None)
        try:
            yield
        finally:
            self.feeding_s += time.process_time() - begin
            sys.setprofile(profile)

    def _add_up(self, told: torch.Tensor, label: str) -> torch.Tensor:
        self.messages, self.received = self.messages + 1, self.received + self.told_nbytes
        return told * self.world_size


def counted(comm: Fed | Counting, what: Callable[[], object]) -> tuple[int, int, int]:
    """Return messages, bytes received and calls of functions while `what` runs."""
    calls = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = comm.messages, comm.received
    threading.setprofile(profile)  # of threads that begin meanwhile
    sys.setprofile(profile)
    try:
        what()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return comm.messages - before[0], comm.received - before[1], calls


def layers() -> nn.Module:
    """Return the model of `phases`."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def phases(comm: Fed | Counting, stage: int = 2) -> dict[str, tuple[int, int, int]]:
    """Return what each phase of a training takes of a rank."""
    found = {}
    model: Any = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    found["start"] = counted(comm, lambda: zs.shard(model, optimizer, stage=stage, comm=comm))
    losses: list[torch.Tensor] = []
    for _ in range(2):  # the first step makes what the second one finds
        found["forward"] = counted(comm, lambda: losses.append(model(torch.ones(1, 8)).sum()))
        found["backward"] = counted(comm, losses.pop().backward)
        found["step"] = counted(comm, optimizer.step)
        optimizer.zero_grad()
    found["close"] = counted(comm, lambda: zs.close(model))
    return found


class Tables(nn.Module):
    """Tables of which each rank has ROWS rows: one box of each, so that a rank's places are another's, moved on."""

    def __init__(self, count: int, world_size: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS * world_size, 8) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(table(x) for table in self.tables).sum()  # type: ignore[union-attr,return-value]


def saves(
    comm: Fed | Counting,
    folder: str,
    measure: Callable[[Any, Callable[[], object]], tuple] = counted,
    tables: int = 4,
    stage: int = 2,
) -> tuple[dict[str, tuple], list[int]]:
    """Return what `measure` finds of two saves to a folder and a load of a rank; and number of files, bytes of the manifest and of
    `.metadata`."""
    model: Any = Tables(tables, comm.world_size)
    optimizer = torch.optim.AdamW(model.parameters())
    zs.shard(model, optimizer, stage=stage, comm=comm)
    model(torch.zeros(1, dtype=torch.long)).backward()
    optimizer.step()
    heartbeat._BEAT_S = 3600.0  # else a message for each second that this machine takes
    names = ("save", "save again")
    found = {name: measure(comm, lambda name=name: zs.save(folder, model, optimizer, name=name)) for name in names}
    saved = Path(folder) / names[-1]
    for rank in range(1, comm.world_size if isinstance(comm, Fed) else 1):
        os.link(saved / f"{FILE.format(0)}.distcp", saved / f"{FILE.format(rank)}.distcp")
    found["load"] = measure(comm, lambda: zs.load(folder, model, optimizer, rng=False))
    zs.close(model)
    sizes = [(saved / name).stat().st_size for name in ("manifest.json", ".metadata")]
    return found, [len(list(saved.iterdir())), *sizes]


def fed(world_size: int, stage: int = 2) -> dict[str, tuple[int, int, int]]:
    """Return what each phase, and each save and load, takes of rank 0 of `world_size` ranks, the others fed."""
    with tempfile.TemporaryDirectory() as folder:
        return phases(Fed(world_size), stage) | saves(Fed(world_size, folder), folder)[0]


def real(rank: int, world_size: int, folder: str, many: int) -> dict[str, tuple[int, int, int]]:
    """Return the same of a rank among real ones, which run this, over gloo. many: in the place of MANY."""
    process_group.MANY = many
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    comm = Counting(None, torch.device("cpu"))
    found = phases(comm) | saves(comm, folder)[0]
    dist.destroy_process_group()
    return found


def taken(comm: Fed, what: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of processor time of `what`, and the MiB of memory that it takes at its peak."""
    memory.reset_peak_rss()
    before, begin, fed = memory.field_nbytes("VmRSS"), time.process_time(), comm.feeding_s
    what()
    seconds, peak = time.process_time() - begin - (comm.feeding_s - fed), memory.peak_rss_nbytes()
    assert before is not None and peak is not None, "this benchmark needs Linux"
    return seconds, (peak - before) / MIB


def table(worlds: Sequence[int] = RANKS) -> list[tuple[str, ...]]:
    """Return the rows: phase and what is counted, a number for each number of ranks, the exponent."""
    measured = [fed(world_size) for world_size in worlds]
    rows = []
    for phase in measured[0]:
        for number, what in enumerate(("messages", "bytes received", "calls")):
            counts = [each[phase][number] for each in measured]
            grows = math.log(max(counts[-1], 1) / max(counts[-2], 1), worlds[-1] / worlds[-2])
            rows.append((f"{phase}: {what}", *(f"{count:,}" for count in counts), f"{grows:.2f}"))
    return rows


def table_of_real() -> list[tuple[str, ...]]:
    """Return rows with two numbers for each number of ranks: of a fed rank and of a real one."""
    rows: dict[str, tuple[str, ...]] = {}
    for world_size, many in ((2, 32), (4, 32), (8, 32), (2, 1), (4, 1), (8, 1)):
        process_group.MANY = many
        with tempfile.TemporaryDirectory() as folder:
            one, other = fed(world_size), run_processes(real, world_size, folder, many, timeout_s=300.0)[0]
        for phase in one:
            for what, *counts in zip(("messages", "bytes received", "calls"), one[phase], other[phase], strict=True):
                name = f"{phase}: {what}"
                rows[name] = (*rows.get(name, (name,)), " / ".join(f"{count:,}" for count in counts))
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--few", action="store_true", help="each message is of all ranks, as among few")
    parser.add_argument("--real", action="store_true", help="compare fed ranks with processes over gloo")
    options = parser.parse_args()
    if options.real:
        print(markdown(("fed / real", *(f"{n} ranks{many}" for many in ("", ", as many") for n in (2, 4, 8))), table_of_real()))
        return
    if options.few:
        process_group.MANY = max(RANKS)
    print(markdown(("", *(f"{world_size:,} ranks" for world_size in RANKS), "exponent"), table()))
    rows = []
    for world_size, tables, stage in ((1024, 4, 2), (4096, 4, 2), (4096, 4, 3), (4096, 32, 3)):
        with tempfile.TemporaryDirectory() as folder:
            found, (files, *sizes) = saves(Fed(world_size, folder), folder, taken, tables, stage)
        shown = [f"{size / 1e6:.1f}" for size in sizes] + [f"{seconds:.1f} s, {mib:.0f} MiB" for seconds, mib in found.values()]
        rows.append((f"{world_size:,}", str(stage), str(tables), f"{files:,}", *shown))
    print()
    header = ("ranks", "stage", "tables", "files", "manifest, MB", ".metadata, MB", "save", "save again", "load")
    print(markdown(header, rows))


if __name__ == "__main__":
    main()
