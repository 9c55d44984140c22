"""Watches of a runtime, and its optimizers. These notice nothing; zs.shard gives it those of guard/ and assembly/."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError, ZeroshardError
from .attendance import Attendance
from .comm.base import DirectComm
from .gradient_account import GradientAccount
from .inner_optimizer import members_of
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


class ModelOptimizers:
    """The sharded optimizers of a model, in the order of their first parameters. This class has those that zs.shard was given.

    sharded: without those in `waiting`, which were made since zs.shard and not used yet.
    """

    waiting: Collection[Any] = ()

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.sharded: list[Any] = []
        self.after_step: OrderedDict[int, Callable[[], object]] = OrderedDict()  # by number of a handle; for all cores

    def __iter__(self) -> Iterator[Any]:
        """Iterate over all; those that wait are taken over now."""
        return iter(self.sharded)

    @property
    def known(self) -> list[Any]:
        """All without those that wait, each of which may be a hook's own; if all wait: the only one."""
        return self.sharded

    @property
    def one(self) -> Any:
        """The only one, or None. Raise ConfigError if there are several."""
        if len(found := list(self)) > 1:
            names = ", ".join(type(each).__name__ for each in found)
            raise ConfigError(
                f"this model is stepped by {len(found)} optimizers ({names}), and what was called serves one. Give zs.shard "
                "one optimizer with a parameter group for each set of options (for Muon beside AdamW: zs.Muon)."
            )
        return found[0] if found else None

    @property
    def core(self) -> Any:
        """The core of the only one. Raise ZeroshardError if there is none, ConfigError if there are several."""
        if (optimizer := self.one) is None:
            raise ZeroshardError(self.expected())
        return optimizer.core

    @property
    def cores(self) -> list[Any]:
        """The cores of all. Raise ZeroshardError if there is none."""
        if not (found := [each.core for each in self]):
            raise ZeroshardError(self.expected())
        return found

    @property
    def holding(self) -> list[torch.optim.Optimizer]:
        """The optimizers that may step: all but those that wait and were left, since they do not suit the others."""
        return self.sharded

    def left_alone(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """Return the ids of the trained parameters whose gradients an optimizer leaves alone, in zero_grad, norm, clip and skip.

        They are those of the others. Under FSDP2's door, as there: all that are not its own.
        """
        if self.runtime.shows_masters:
            return self.runtime.trained - members_of(optimizer)
        others = [each for each in self.holding if each is not optimizer]
        return members_of(*others) - members_of(optimizer) if others else set()

    def expected(self) -> str:
        """Return the text of the error of a verb that needs an optimizer, where the model has none."""
        made = ", ".join(sorted(type(each).__name__ for each in self.waiting)) or "none"
        return (
            f"this model has no optimizer: expected one of its parameters, got {made}. Give zs.shard one, or make one after it, and delete "
            "others of the same parameters."
        )

    def take(self, given: Collection[object]) -> None:
        """Take over those of these that wait (collective). Raise ConfigError if one can not be the model's beside the others."""

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Add a sharded optimizer of some of the parameters."""
        self.sharded.append(optimizer)
        self.sort()

    def sort(self) -> None:
        """Bring the optimizers in order again: one has got a parameter."""
        self.sharded.sort(key=lambda each: each.core.place)


def _silent(error: BaseException, runtime: Runtime, where: str) -> None:
    """Let the error pass as it is."""


@dataclass(frozen=True)
class Watches:
    """The watches of a runtime. values: makes a ValueWatch, attendance an Attendance, optimizers a ModelOptimizers. tell: gets the error
    of a failed pass or gather; may raise one that says more."""

    values: Callable[[DirectComm, list[ParamGroup]], ValueWatch] = ValueWatch
    attendance: Callable[[DirectComm, list[Unit], GradientAccount], Attendance] = Attendance
    tell: Callable[[BaseException, Runtime, str], None] = _silent
    optimizers: Callable[[Runtime], ModelOptimizers] = ModelOptimizers
