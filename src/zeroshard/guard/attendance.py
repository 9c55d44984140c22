"""Attendance: which ranks still have data. A rank whose data has ended joins each collective of the others (uneven.py).

    end of backward    every rank sends a header ahead of its masks: whether its data has ended, how often it has called backward
                       and zero_grad, and a digest of its calls that every rank must make
    a rank has ended   the ranks with data announce each gather, reduction, clip and step before it; the ranks without data then
                       do the same, with gradients of zero

As long as no rank's data has ended this costs fifteen bytes in a message that is sent in any case. Where a gather needs every
rank, ranks inside `zs.join` send one message more in each forward: before its first gather they must know who has data.
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from typing import Any

from ..engine.attendance import Attendance
from ..engine.comm.base import DirectComm
from ..engine.gradient_account import GradientAccount
from ..engine.unit import Phase, Unit
from ..errors import CollectiveMismatch, ZeroshardError

_HEADER = struct.Struct("<BIHHHI")  # flags; backwards; calls of zero_grad, to None and to zeros; `calls`: number and digest
_ENDED, _LAST = 1, 2  # flags: this rank's data has ended; it computes with its last batch (zs.stop_together)
_MOST_CALLS = 32  # a rank with more calls than this since its last backward does not compare them
_NEXT = "what comes next"  # label of the message by which ranks with data announce an event


class AttendanceRecord(Attendance):
    """One rank's view of which ranks still have data (see `Attendance`)."""

    def __init__(self, comm: DirectComm, units: list[Unit], account: GradientAccount) -> None:
        super().__init__(comm, units, account)
        self.together = not comm.alone
        self.latest: frozenset[int] = frozenset()  # ranks whose data ended at the last exchange
        self.leader = 0  # lowest rank that had data at the last exchange; if none had, lowest of `latest`
        self.last = False  # this rank computes with its last batch (zs.stop_together)
        self.lasts: frozenset[int] = frozenset()  # ranks that computed with their last batch in the newest backward
        self.meetings = 0  # number of backwards that have ended
        self.zeroed = [0, 0]  # calls of zero_grad since the last exchange: to None, to zeros
        self.behind = [0, 0]  # calls of zero_grad that the leader has made and this rank has not: to None, to zeros
        self.unasked = True  # no exchange since the present forward began: one must come before its first gather
        self.calls: list[str] = []  # the calls that every rank must make and this rank has made since the last backward
        self.compared = True  # False once a difference was printed

    @property
    def everyone_ended(self) -> bool:
        return len(self.ended) == self.comm.world_size

    def remark(self) -> str:
        return super().remark() if not self.serving else f" [its data ended after step {self.steps}]"

    def begin_forward(self) -> None:
        self.unasked = True  # some rank's data may have ended since the last forward

    def zero_grad(self, to_zeros: bool) -> None:
        self.zeroed[to_zeros] += 1

    # -- the end of a backward -------------------------------------------------------------------------------

    def header(self) -> bytes:
        flags = _ENDED * self.serving | _LAST * self.last
        zeroed = (n & 0xFFFF for n in self.zeroed)
        return _HEADER.pack(flags, self.account.plain, *zeroed, len(self.calls), _digest(self.calls))

    def meet(self, headers: list[bytes] | None) -> None:
        """Update this view with the headers of all ranks, in rank order, at the end of a backward; None: all are equal."""
        self.meetings += 1
        if headers is None and not (self.serving or self.last or self.ended):
            self.lasts = self.latest = frozenset()
            self.leader, self.share = 0, 1.0
            self.behind, self.zeroed, self.unasked = [0, 0], [0, 0], True
            self.calls.clear()
            return
        rows = [_HEADER.unpack(header) for header in headers or [self.header()] * self.comm.world_size]
        self.lasts = frozenset(rank for rank, row in enumerate(rows) if row[0] & _LAST)
        ended = frozenset(rank for rank, row in enumerate(rows) if row[0] & _ENDED)
        self._note(ended, [list(row[2:4]) for row in rows])
        dropped = sum(rows[self.leader][2:4])  # a rank that called zero_grad less often drops its gradients next: not counted
        backwards = [row[1] if sum(row[2:4]) >= dropped else 0 for row in rows]
        self.share = sum(backwards) / (max(backwards) * len(rows)) if ended and any(backwards) else 1.0

        if self.compared and not ended:
            self._compare([row[4:] for row in rows])
        self.calls.clear()

    def _compare(self, calls: list[tuple[int, int]]) -> None:
        """Print, once, which calls this rank has made and others have not. calls: number and digest of each rank.

        Said here since ranks that share memory do not stall in such a call: the program would first stall on a cluster.
        """
        fewer = [rank for rank, (number, _) in enumerate(calls) if number < len(self.calls)]
        if not fewer or len(self.calls) > _MOST_CALLS:
            return
        number, digest = calls[fewer[0]]
        extra = len(self.calls) - number
        for start in range(number + 1):
            if _digest(self.calls[:start] + self.calls[start + extra :]) == digest:
                what = " and ".join(dict.fromkeys(self.calls[start : start + extra]))
                others = f"rank{'s' * (len(fewer) > 1)} {', '.join(map(str, fewer))}"
                print(
                    f"zeroshard: rank {self.comm.rank} called {what} before the backward of step {self.steps + 1}, and {others} did not. "
                    "Call it on all ranks: over torch.distributed a rank that gathers alone waits for the others, until a StallError.",
                    file=sys.stderr,
                )
                self.compared = False
                return

    def _note(self, ended: frozenset[int], zeroed: list[list[int]]) -> None:
        """Update `ended`, `latest`, `leader` and `behind`. zeroed: calls of zero_grad by rank since the last exchange."""
        going_on = [rank for rank in range(len(zeroed)) if rank not in ended]
        if going_on:
            self.leader = going_on[0]
        elif self.leader in self.ended:  # no rank has data, and the leader's ended before: those ending now took more steps
            self.leader = min(ended - self.ended)
        self.latest = ended - self.ended
        self.behind = [theirs - mine for theirs, mine in zip(zeroed[self.leader], zeroed[self.comm.rank], strict=True)]
        self.ended, self.zeroed, self.unasked = ended, [0, 0], True

    # -- events, once a rank has ended -----------------------------------------------------------------------

    def tell(self, event: str, values: object = None) -> None:
        if self.ended and not self.serving:
            self.ask(event, values)

    def gather(self, unit: Unit) -> None:
        meets = self.joined and self.gathers_meet and not self.serving and unit.phase in (Phase.SHARDED, Phase.FETCHING)
        if meets and (self.ended or self.unasked):
            self.ask("gather", unit.number, unit.name)
            self.unasked = False
        unit.unshard()

    def ask(self, event: str | None, values: object = None, name: str = "") -> tuple[str, Any] | None:
        """Exchange the next event (collective; None: this rank's data has ended). Return the leader's event and values.

        Return None if the data of all ranks has ended. Raise CollectiveMismatch if ranks with data announce different events.
        """
        mine = json.dumps([event, values, self.zeroed, name]).encode()
        everyone = [json.loads(part) for part in self.comm.exchange(mine, _NEXT + self.remark())]
        ended = frozenset(rank for rank, told in enumerate(everyone) if told[0] is None)
        told = {rank: f"{what} {name}".strip() for rank, (what, _, _, name) in enumerate(everyone) if rank not in ended}
        if len(set(told.values())) > 1:
            places = "; ".join(f"rank {rank}: {what}" for rank, what in told.items())
            raise CollectiveMismatch(
                f"the data of rank {', '.join(map(str, sorted(ended)))} has ended, and the ranks that go on do different "
                f"things ({places}). Inside zs.join they must use the same units and make the same calls."
            )
        self._note(ended, [zeroed for _, _, zeroed, _ in everyone])
        return None if self.everyone_ended else tuple(everyone[self.leader][:2])

    def note(self, what: str) -> None:
        if self.together and not self.joined:
            self.comm.progress.note_call(what)
            if len(self.calls) <= _MOST_CALLS:  # bounded, since a server runs forwards and no backward, which clears it
                self.calls.append(what)

    def refuse(self, what: str) -> None:
        if self.ended and not self.serving:
            ranks = ", ".join(map(str, sorted(self.ended)))
            raise ZeroshardError(
                f"{what} inside zs.join(model), where the data of rank {ranks} has ended: it needs every rank, and theirs are past the "
                "loop. Do it after the `with` block, or use zs.stop_together(model, loader)."
            )


def _digest(calls: list[str]) -> int:
    return zlib.crc32("\n".join(calls).encode())
