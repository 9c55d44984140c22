"""The optimizers of a model, as the engine asks for them. assembly/late_optimizer.py has the class that knows of later ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError, ZeroshardError
from .inner_optimizer import members_of

if TYPE_CHECKING:
    from .runtime import Runtime


class ModelOptimizers:
    """The optimizers of one model, in the order of their first parameters.

    sharded: those that step the model now. waiting: those made after zs.shard and not used yet, of which this class knows none.
    """

    waiting: Collection[Any] = ()

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.sharded: list[Any] = []
        self.after_step: OrderedDict[int, Callable[[], object]] = OrderedDict()  # by number of a handle; for all cores

    def __iter__(self) -> Iterator[Any]:
        """Iterate over all optimizers of the model; those that wait are taken over first (`LateOptimizer.take_over`)."""
        return iter(self.sharded)

    @property
    def settled(self) -> list[Any]:
        """The optimizers that are surely the model's: those in `sharded`; if there are none, the only one that waits, taken over now.
        Of several that wait, each may be that of a hook that steps in backward."""
        return self.sharded

    @property
    def one(self) -> Any:
        """The only optimizer of the model, or None. Raise ConfigError if there are several."""
        if len(found := list(self)) > 1:
            names = ", ".join(type(each).__name__ for each in found)
            raise ConfigError(
                f"this model is stepped by {len(found)} optimizers ({names}), and what was called serves one. Give zs.shard "
                "one optimizer with a parameter group for each set of options (for Muon beside AdamW: zs.Muon)."
            )
        return found[0] if found else None

    @property
    def core(self) -> Any:
        """The core of the only optimizer. Raise ZeroshardError if there is none, ConfigError if there are several."""
        if (optimizer := self.one) is None:
            raise ZeroshardError(self.text_without_one())
        return optimizer.core

    @property
    def cores(self) -> list[Any]:
        """The cores of all optimizers. Raise ZeroshardError if there is none."""
        if not (found := [each.core for each in self]):
            raise ZeroshardError(self.text_without_one())
        return found

    @property
    def holding(self) -> list[torch.optim.Optimizer]:
        """The optimizers that may step: all but those that wait and were not taken over, since they do not suit the others."""
        return self.sharded

    def left_alone(self, optimizer: torch.optim.Optimizer) -> set[int]:
        """Return the ids of the trained parameters whose gradients an optimizer leaves alone, in zero_grad, norm, clip and skip.

        They are those that other optimizers hold; under FSDP2's door, as in FSDP2, all that this one does not hold.
        """
        if self.runtime.shows_masters:
            return self.runtime.trained - members_of(optimizer)
        others = [each for each in self.holding if each is not optimizer]
        return members_of(*others) - members_of(optimizer) if others else set()

    def text_without_one(self) -> str:
        """Return the text of the error of a verb that needs an optimizer, where the model has none."""
        made = ", ".join(sorted(type(each).__name__ for each in self.waiting)) or "none"
        return (
            f"this model has no optimizer: expected one of its parameters, got {made}. Give zs.shard one, or make one after it, and delete "
            "others of the same parameters."
        )

    def take(self, given: Collection[object]) -> None:
        """Take over those of `given` that wait (collective). Raise ConfigError if the model can not have one beside the others."""

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Add a sharded optimizer of some of the parameters."""
        self.sharded.append(optimizer)
        self.sort()

    def sort(self) -> None:
        """Sort the optimizers anew, after a parameter group was added to one."""
        self.sharded.sort(key=lambda each: each.core.place)
