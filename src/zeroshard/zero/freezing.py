"""Freezing for a phase: `requires_grad` of a parameter that is trained may be switched off and on between steps, as on one process.

    at zs.shard      who requires a gradient has a place in a gradient buffer, and optimizer states
    frozen later     keeps both; it gets no gradient, no unit waits for one, and it is not stepped: as one that took no part
    frozen before    has neither, and can not be trained: refused by name

All ranks freeze the same: they compare it where they agree on gradients at the end of backward, in the same message.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ModelChanged
from ..utils import torch_compat
from .unit import ParamGroup


class Freezing:
    """Which parameters are frozen for a phase; seen in microseconds where nothing has changed.

    numbers: of those parameters (ParamSpec.number).
    """

    def __init__(self, groups: list[ParamGroup]) -> None:
        self._places = [(group, index) for group in groups for index in range(len(group.specs))]
        self._params = [group.params[index] for group, index in self._places]
        self._names = {group.specs[index].number: group.specs[index].name for group, index in self._places}
        self._known = [group.trainable for group, _ in self._places]
        self.numbers: set[int] = set()

    def follow(self) -> None:
        """Let units and autograd go by `requires_grad` as it is now. Raises ModelChanged where that can not be."""
        with torch_compat.DisableTorchFunctionSubclass():  # looking at a sharded parameter takes microseconds otherwise
            now = [param.requires_grad for param in self._params]
            if now != self._known:
                self._change(now)

    def _change(self, now: list[bool]) -> None:
        for (group, index), required in zip(self._places, now, strict=True):
            if required and not group.trainable:
                raise ModelChanged(
                    f"requires_grad of parameter {group.specs[index].name} was switched on, but it was frozen at zs.shard(): it has "
                    "no place for a gradient and no optimizer states. Let it require a gradient at zs.shard() and freeze it "
                    "afterwards, which may be done at any time; or zs.close(model) first, unfreeze it, and zs.shard() again."
                )
        for (group, index), required in zip(self._places, now, strict=True):
            group.compute[index].requires_grad_(required)
        self._known = now
        changed = zip(self._places, now, strict=True)
        self.numbers = {group.specs[i].number for (group, i), required in changed if group.trainable and not required}
        for unit in {id(group.unit): group.unit for group, _ in self._places}.values():
            unit.expect()

    def check_same(self, everyone: Mapping[int, set[int]]) -> None:
        """everyone: `numbers` by rank. Raises ModelChanged where they differ."""
        numbers = list(everyone.values()) or [set()]
        differing = set[int]().union(*numbers) - numbers[0].intersection(*numbers)
        if not differing:
            return
        texts = []
        for number in sorted(differing)[:3]:
            ranks = [rank for rank, numbers in everyone.items() if number in numbers]
            texts.append(f"{self._names[number]} is frozen (requires_grad=False) on ranks {ranks} alone")
        raise ModelChanged(
            f"{'; '.join(texts)}: its gradient would be the mean over the others. Freeze and unfreeze the same parameters on every "
            "rank. The gradients since the last zero_grad are dropped."
        )
