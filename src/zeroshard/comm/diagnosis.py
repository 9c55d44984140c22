"""What it means that a wait over gloo or NCCL has failed: a peer's own failure, a peer that is gone, or a stall.

c10d tells that a connection broke or that time is over; whose fault that is, it does not know, and victims break
connections as well. So this rank looks around: has a peer told why, as it does before it goes? Do all desks still answer?
"""

from __future__ import annotations

import time
from typing import Protocol

from ..errors import StallError, ZeroshardError
from .base import misuse
from .failure import GONE, Failure
from .flight_recorder import Progress, describe, places_of
from .status_server import Answers, Desk

_PATIENCE_S = 10.0  # for peers to say why a connection broke
_PAUSE_S = 0.1


class Waiting(Protocol):
    """What is asked of a DistComm."""

    rank: int
    world_size: int
    stall_timeout_s: float
    desk: Desk

    @property
    def ranks(self) -> list[int]: ...

    @property
    def progress(self) -> Progress: ...


def judge(comm: Waiting, label: str, error: RuntimeError) -> Failure | None:
    """Why the group can not go on; None for an error that is not of the connections between ranks."""
    text = str(error)
    timed_out = "imed out" in text or "imeout" in text
    if not timed_out and "onnection" not in text and "gloo" not in text and "nccl" not in text.lower():
        return comm.desk.told
    deadline = time.monotonic() + _PATIENCE_S
    while comm.desk.told is None:
        peers = [peer for peer in range(comm.world_size) if peer != comm.rank]
        answers = comm.desk.ask(peers)
        gone = [peer for peer, answer in answers.items() if answer == GONE]
        if comm.desk.told is not None:
            break
        if gone:
            ends = {peer: comm.desk.how_it_ended(peer) for peer in gone}
            first = min(gone, key=lambda peer: "killed by" not in ends[peer])  # those did not go because of others
            return Failure(comm.ranks[first], ends[first])
        if timed_out:
            return stalled(answers, comm, label)
        if time.monotonic() > deadline:
            what = f"rank {comm.ranks[comm.rank]}: a connection broke at '{label}', though all ranks live: {text}"
            return Failure(comm.ranks[comm.rank], what, ZeroshardError(what))
        time.sleep(_PAUSE_S)
    return comm.desk.told


def stalled(answers: Answers, comm: Waiting, label: str) -> Failure:
    """The report of a stall, which all ranks raise. answers: of the peers."""
    reports = answers | {comm.rank: comm.progress.report()}
    hint = f"Did all ranks run the same modules and calls?{misuse(places_of(reports), comm.world_size)}"
    text = describe(comm.stall_timeout_s, {comm.ranks[rank]: report for rank, report in reports.items()}, hint)
    return Failure(comm.ranks[comm.rank], text, StallError(text))
