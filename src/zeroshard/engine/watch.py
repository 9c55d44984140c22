"""Watches: checks that a runtime calls. Those of this file check nothing; zs.shard gives the runtime those of guard/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .attendance import Attendance
from .comm.base import DirectComm
from .gradient_account import GradientAccount
from .unit import ParamGroup, Unit

if TYPE_CHECKING:
    from .runtime import Runtime

FAILURES = (RuntimeError, MemoryError)  # a failed allocation raises one of these, as other failures do


class ModelWatch:
    """A check that a model still has the parameters that zs.shard has installed."""

    def check(self, gathered: bool, thoroughly: bool = False) -> None:
        """Raise ModelChanged if the model has others. gathered: inside `zs.gathered`. thoroughly: may take milliseconds."""


class ValueWatch:
    """A check that ranks have written the same values to parameters at rest."""

    def __init__(self, comm: DirectComm, groups: list[ParamGroup]) -> None:
        """Note the groups whose values ranks compare."""

    def watches(self, group: ParamGroup) -> bool:
        """Return whether ranks compare what they write to the group's parameters and states."""
        return False

    def fingerprint(self) -> int:
        """Return a checksum of the parameters that this rank has written since the last `agree`; 0 if it has written none."""
        return 0

    def agree(self, fingerprints: list[int] | None = None) -> None:
        """Raise ModelMismatch on every rank if written values differ. fingerprints: of all ranks; None: exchanges them."""


def _silent(error: BaseException, runtime: Runtime, where: str) -> None:
    """Let the error pass as it is."""


@dataclass(frozen=True)
class Watches:
    """The watches of a runtime. values, attendance: make them. tell: gets errors of passes and gathers, may raise others."""

    values: Callable[[DirectComm, list[ParamGroup]], ValueWatch] = ValueWatch
    attendance: Callable[[DirectComm, list[Unit], GradientAccount], Attendance] = Attendance
    tell: Callable[[BaseException, Runtime, str], None] = _silent
