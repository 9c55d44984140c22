"""Diagnosis of a failed wait over gloo or NCCL: a peer has failed, a peer's process is gone, or the ranks have stalled.

c10d reports a broken connection or a timeout, but not which rank caused it; and ranks that end because another one failed
break connections as well. So this rank looks whether a peer has sent its failure, and whether all peers' desks answer.
"""

from __future__ import annotations

import time
from typing import Protocol

from ..errors import StallError, ZeroshardError
from .control import misuse
from .failure import GONE, Failure
from .flight_recorder import Progress, describe, places_of
from .status_server import Answers, Desk

_PATIENCE_S = 10.0  # time for peers to send the failure that broke a connection
_PAUSE_S = 0.1  # between two rounds of questions to the peers' desks


class Waiting(Protocol):
    """The part of a DistComm that `judge` reads."""

    rank: int
    world_size: int
    stall_timeout_s: float
    desk: Desk

    @property
    def ranks(self) -> list[int]: ...

    @property
    def progress(self) -> Progress: ...


def judge(comm: Waiting, label: str, error: RuntimeError) -> Failure | None:
    """Return why the group can not go on; None for an error that has nothing to do with the connections between ranks."""
    text = str(error)
    timed_out = "imed out" in text or "imeout" in text  # c10d has no classes of errors for these: match "Timed out", "timeout"
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
            # a killed rank is the cause: ranks that end because of another one exit by themselves
            first = min(gone, key=lambda peer: "killed by" not in ends[peer])
            return Failure(comm.ranks[first], ends[first])
        if timed_out:
            return stalled(answers, comm, label)
        if time.monotonic() > deadline:
            what = f"rank {comm.ranks[comm.rank]} lost a connection at '{label}', while all ranks' processes run (the network?): {text}"
            return Failure(comm.ranks[comm.rank], what, ZeroshardError(what))
        time.sleep(_PAUSE_S)
    return comm.desk.told


def stalled(answers: Answers, comm: Waiting, label: str) -> Failure:
    """Return the failure that all ranks raise for a stall, with the report of every rank. answers: the peers' reports."""
    reports = answers | {comm.rank: comm.progress.report()}
    hint = f"Did all ranks run the same modules and calls?{misuse(places_of(reports), comm.world_size)}"
    text = describe(comm.stall_timeout_s, {comm.ranks[rank]: report for rank, report in reports.items()}, hint)
    return Failure(comm.ranks[comm.rank], text, StallError(text))
