"""Freezing: `requires_grad` of a trained parameter may be switched off and on between steps, as on one process."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ModelChanged
from ..utils import torch_compat
from .unit import ParamGroup


class Freezing:
    """Record of the trained parameters that are frozen for now; following a switch takes microseconds if there was none.

        trained at zs.shard   has a place in a gradient buffer, and optimizer states
        frozen later          keeps both; like an unused parameter it gets no gradient, no unit waits for one, no step changes it
        frozen at zs.shard    has neither, and can not be trained: switching it on raises ModelChanged with its name

    What is switched while gradients are off, and switched back before they are on again (PEFT's adapters of a reference model),
    is no change: only forwards with gradients and backwards look at `requires_grad`.

    All ranks must freeze the same parameters: they compare them in the message by which they agree on gradients after a backward.

    numbers: the frozen parameters, by ParamSpec.number.
    """

    def __init__(self, groups: list[ParamGroup]) -> None:
        self._places = [(group, index) for group in groups for index in range(len(group.specs))]
        self._params = [group.params[index] for group, index in self._places]
        self._names = {group.specs[index].number: group.specs[index].name for group, index in self._places}
        self._known = [group.trainable for group, _ in self._places]
        self.numbers: set[int] = set()

    def follow(self) -> None:
        """Apply the present `requires_grad` to units and compute parameters. Raise ModelChanged for one frozen at zs.shard."""
        with torch_compat.DisableTorchFunctionSubclass():  # looking at a sharded parameter takes microseconds otherwise
            now = [param.requires_grad for param in self._params]
            if now == self._known:
                return
            for (group, index), required in zip(self._places, now, strict=True):
                if required and not group.trainable:
                    when, how = "zs.shard()", "; or zs.close(model) first, unfreeze it, and zs.shard() again"
                    if group.runtime.shows_masters:  # zeroshard.fsdp
                        when, how = "the model's first use", ": make the optimizer, or call model.state_dict(), before"
                    raise ModelChanged(
                        f"requires_grad of parameter {group.specs[index].name} was switched on, but it was frozen at {when}: it has no buffer for a "
                        f"gradient and no optimizer states. Let it require a gradient there, and freeze it afterwards, at any time{how}."
                    )
            for (group, index), required in zip(self._places, now, strict=True):
                group.compute[index].requires_grad_(required)
            self._known = now
            changed = zip(self._places, now, strict=True)
            self.numbers = {group.specs[i].number for (group, i), required in changed if group.trainable and not required}
            for unit in {id(group.unit): group.unit for group, _ in self._places}.values():
                unit.expect()

    def check_same(self, everyone: Mapping[int, set[int]]) -> None:
        """Raise ModelChanged if ranks have frozen different parameters. everyone: rank -> its `numbers`."""
        numbers = list(everyone.values()) or [set()]  # no rank has data any more: nothing differs
        differing = set[int]().union(*numbers) - numbers[0].intersection(*numbers)
        if not differing:
            return
        texts = []
        for number in sorted(differing)[:3]:
            ranks = [rank for rank, numbers in everyone.items() if number in numbers]
            texts.append(f"{self._names[number]} is frozen (requires_grad=False) on ranks {ranks} alone")
        raise ModelChanged(
            f"{'; '.join(texts)}: its gradient would be the mean over the other ranks alone. Freeze and unfreeze the same parameters on "
            "every rank, and run the batches since the last zero_grad again: their gradients are dropped."
        )
