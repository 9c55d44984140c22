"""The verdict on a wait that has failed: which rank caused it, found by questions to the desks of all ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..engine.comm.control import misuse
from ..engine.comm.desk import GONE, Failure
from ..errors import StallError, ZeroshardError
from .flight_recorder import describe, places_of

if TYPE_CHECKING:
    from ..engine.comm.base import DirectComm

_PATIENCE_S = 10.0  # time for peers to send the failure that broke a connection
_ASK_AGAIN_S = 0.1  # between two rounds of questions to the peers' desks


def judge(comm: DirectComm, label: str, error: RuntimeError) -> Failure | None:
    """Return why the group can not go on; None for an error that has nothing to do with the connections between ranks."""
    text = str(error)
    timed_out = "imed out" in text or "imeout" in text  # c10d has no classes of errors for these: match "Timed out", "timeout"
    if not timed_out and "onnection" not in text and "gloo" not in text and "nccl" not in text.lower():
        return comm.desk.told
    deadline = time.monotonic() + _PATIENCE_S
    while comm.desk.told is None:
        answers = comm.desk.ask([peer for peer in range(comm.world_size) if peer != comm.rank])
        gone = [peer for peer, answer in answers.items() if answer == GONE]
        if comm.desk.told is not None:
            break
        if gone:
            ends = {peer: comm.desk.how_it_ended(peer) for peer in gone}
            # a killed rank is the cause: ranks that end because of another one exit by themselves
            first = min(gone, key=lambda peer: "killed by" not in ends[peer])
            return Failure(comm.ranks[first], ends[first])
        if timed_out:
            reports = answers | {comm.rank: comm.progress.report()}
            hint = misuse(places_of(reports), comm.world_size)
            text = describe(comm.stall_timeout_s, {comm.ranks[rank]: report for rank, report in reports.items()}, hint)
            return Failure(comm.ranks[comm.rank], text, StallError(text))
        if time.monotonic() > deadline:
            what = f"rank {comm.ranks[comm.rank]} lost a connection at '{label}', while all ranks' processes run (the network?): {text}"
            return Failure(comm.ranks[comm.rank], what, ZeroshardError(what))
        time.sleep(_ASK_AGAIN_S)
    return comm.desk.told
