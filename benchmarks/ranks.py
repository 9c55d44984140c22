"""Counts of what one rank sends, receives and computes for control messages, as a function of the number of ranks.

    python -m benchmarks.ranks [--few]

One process is rank 0 of N ranks over torch.distributed: its collectives of tensors end at once, and each control message is fed
with the frames of N ranks that say what this rank says (with --few as up to MANY ranks do, whose messages are always of all), so
that what it does in Python is what it would do among N. Counted, after a first step: messages, bytes received, and calls of
functions. The exponent is that of the last two columns: 0 does not grow with N, 1 grows with it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import zeroshard as zs
from zeroshard.comm import process_group
from zeroshard.comm.fake import FakeComm
from zeroshard.utils.one_thread import Turn

RANKS = (2, 8, 64, 256, 1024, 4096)


class Fed(FakeComm, process_group.DistComm):
    """Rank 0 of many, which all say the same. Collectives of tensors are FakeComm's, control messages DistComm's."""

    imagined = False
    exchange = process_group.DistComm.exchange
    compare = process_group.DistComm.compare

    def __init__(self, world_size: int) -> None:
        super().__init__(0, world_size)
        self.turn, self.beside, self.stall_timeout_s = Turn("fed"), [], 60.0
        self.messages = self.received = 0

    def _all_gather_bytes(self, body: bytes, nbytes: int, label: str) -> list[bytes]:
        self.messages, self.received = self.messages + 1, self.received + nbytes * self.world_size
        return [bytes(bytearray(body.ljust(nbytes, b"\0"))) for _ in self.ranks]

    def _reduce_numbers(self, told: torch.Tensor, label: str) -> None:
        self.messages, self.received = self.messages + 1, self.received + told.nbytes
        told.mul_(self.world_size)


def counted(comm: Fed, what: Callable[[], object]) -> tuple[int, int, int]:
    """Return messages, bytes received and calls of functions while `what` runs."""
    calls = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = comm.messages, comm.received
    sys.setprofile(profile)
    try:
        what()
    finally:
        sys.setprofile(None)
    return comm.messages - before[0], comm.received - before[1], calls


def phases(world_size: int) -> dict[str, tuple[int, int, int]]:
    """Return what each phase of a training takes of rank 0 of `world_size` ranks at stage 2."""
    comm, found = Fed(world_size), {}
    model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    found["start"] = counted(comm, lambda: zs.shard(model, optimizer, stage=2, comm=comm))
    losses: list[torch.Tensor] = []
    for _ in range(2):  # the first step makes what the second one finds
        found["forward"] = counted(comm, lambda: losses.append(model(torch.ones(1, 8)).sum()))
        found["backward"] = counted(comm, losses.pop().backward)
        found["step"] = counted(comm, optimizer.step)
        optimizer.zero_grad()
    found["close"] = counted(comm, lambda: zs.close(model))
    return found


def table(worlds: Sequence[int] = RANKS) -> list[tuple[str, ...]]:
    """Return the rows: phase and what is counted, a number for each number of ranks, the exponent."""
    measured = [phases(world_size) for world_size in worlds]
    rows = []
    for phase in measured[0]:
        for number, what in enumerate(("messages", "bytes received", "calls")):
            counts = [each[phase][number] for each in measured]
            grows = math.log(max(counts[-1], 1) / max(counts[-2], 1), worlds[-1] / worlds[-2])
            rows.append((f"{phase}: {what}", *(f"{count:,}" for count in counts), f"{grows:.2f}"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--few", action="store_true", help="each message is of all ranks, as among few")
    if parser.parse_args().few:
        process_group.MANY = max(RANKS)
    print("| |", " | ".join(f"{world_size:,} ranks" for world_size in RANKS), "| exponent |")
    print("|---" * (len(RANKS) + 2) + "|")
    for row in table():
        print("|", " | ".join(row), "|")


if __name__ == "__main__":
    main()
