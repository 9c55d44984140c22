"""Which ranks still have data: what they tell each other so that those without can do as the others do (see data/uneven.py).

    end of backward    in front of the masks each rank tells: has its data ended, its backwards, how often it called zero_grad
    from then on       ranks that go on say before each event what it is; those that have ended do the same with zero weight

As long as no rank has ended this costs nine bytes in a message that is sent in any case. Where a gather needs every rank, ranks
inside `zs.join` must know before the first one of a forward: one message for each forward.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from ..comm.base import Comm
from ..errors import CollectiveMismatch, ZeroshardError
from .gradient_account import GradientAccount
from .unit import Phase, Unit

_HEADER = struct.Struct("<BIHH")  # flags, backwards, calls of zero_grad
_ENDED, _LAST = 1, 2
HEADER_NBYTES = _HEADER.size
_NEXT = "what comes next"


class Attendance:
    """One rank's view of who takes part.

    ended: ranks whose data has ended, as far as all ranks know. serving: this one is among them, and does as the others do.
    share: of the batches that this step would have if no rank had ended, how many there are; reductions take the mean over all ranks.
    """

    def __init__(self, comm: Comm, units: list[Unit], account: GradientAccount) -> None:
        self.comm, self.account = comm, account
        self.together = comm.world_size > 1 and not comm.imagined
        gathers = any(unit.sharded for unit in units)
        self.gathers_meet = self.together and gathers and any(unit.meets or unit.staged for unit in units)
        self.joined = self.serving = False
        self.ended: frozenset[int] = frozenset()
        self.latest: frozenset[int] = frozenset()  # of them, those that ended when ranks last met
        self.leader = 0  # the lowest rank that had data then, or else of the latest
        self.last = False  # this rank has the last of its batches (zs.stop_together)
        self.lasts: frozenset[int] = frozenset()  # ranks that had, when a backward last ended
        self.meetings = 0  # ends of backwards
        self.share = 1.0
        self.steps = 0  # in which all ranks were
        self.zeroed = [0, 0]  # calls of zero_grad since ranks last met: to None, to zeros
        self.behind = [0, 0]  # how many of them the leader is ahead of this rank
        self._unasked = True  # a forward has begun, and no rank has been asked whether its data has ended

    @property
    def everyone_ended(self) -> bool:
        return len(self.ended) == self.comm.world_size

    def remark(self) -> str:
        """What a label shows beside the operation (see `comm.base.operation`)."""
        return f" [step {self.steps + 1}]" if not self.serving else f" [its data ended after step {self.steps}]"

    # -- the end of a backward -------------------------------------------------------------------------------

    def header(self) -> bytes:
        """What this rank tells at the end of a backward."""
        return _HEADER.pack(_ENDED * self.serving | _LAST * self.last, self.account.plain, *(n & 0xFFFF for n in self.zeroed))

    def meet(self, headers: list[bytes]) -> None:
        """Take what all ranks told."""
        rows = [_HEADER.unpack(header) for header in headers]
        self.meetings += 1
        self.lasts = frozenset(rank for rank, row in enumerate(rows) if row[0] & _LAST)
        ended = frozenset(rank for rank, row in enumerate(rows) if row[0] & _ENDED)
        self._note(ended, [list(row[2:]) for row in rows])
        dropped = sum(rows[self.leader][2:])  # gradients of earlier steps that a rank still has, and is about to drop
        backwards = [row[1] if sum(row[2:]) >= dropped else 0 for row in rows]
        self.share = sum(backwards) / (max(backwards) * len(rows)) if ended and any(backwards) else 1.0

    def _note(self, ended: frozenset[int], zeroed: list[list[int]]) -> None:
        """Who has ended, and what this rank has missed of what the others did by themselves."""
        going_on = [rank for rank in range(len(zeroed)) if rank not in ended]
        if going_on:
            self.leader = going_on[0]
        elif self.leader in self.ended:  # it had ended before: those that end now are ahead
            self.leader = min(ended - self.ended)
        self.latest = ended - self.ended
        self.behind = [theirs - mine for theirs, mine in zip(zeroed[self.leader], zeroed[self.comm.rank], strict=True)]
        self.ended, self.zeroed, self._unasked = ended, [0, 0], True

    # -- events, once a rank has ended -----------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Ranks may have ended since they last met."""
        self._unasked = True

    def tell(self, event: str, values: Any = None) -> None:
        """All ranks that have data do this now: let the others do it, too."""
        if self.ended and not self.serving:
            self.ask(event, values)

    def gather(self, unit: Unit) -> None:
        """Start to gather a unit, on ranks whose data has ended as well."""
        meets = self.joined and self.gathers_meet and not self.serving and unit.phase in (Phase.SHARDED, Phase.FETCHING)
        if meets and (self.ended or self._unasked):
            self.ask("gather", unit.number, unit.name)
            self._unasked = False
        unit.gather()

    def ask(self, event: str | None, values: Any = None, name: str = "") -> tuple[str, Any] | None:
        """What comes next: every rank tells (None: its data has ended), and goes by the leader. None: all have ended."""
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

    def count_step(self) -> None:
        """All ranks are in an optimizer step: what they say from now on is of the next one."""
        self.steps += 1

    def refuse(self, what: str) -> None:
        """Raise where ranks whose data has ended would have to do what they can not know of."""
        if self.ended and not self.serving:
            ranks = ", ".join(map(str, sorted(self.ended)))
            raise ZeroshardError(
                f"{what} inside zs.join(model), where the data of rank {ranks} has ended: it needs every rank, and theirs are past the "
                "loop. Do it after the `with` block, or use zs.stop_together(model, loader)."
            )
