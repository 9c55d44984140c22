"""Masters: what the optimizer steps in place of values of low precision (or out of its reach), and how they follow writes.

the user writes w1      values  w0 [w1] w2      `dirty`: w1
follow                  masters w0 [w1] w2      before each step and wherever masters are looked at
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..offload.storage import Rest
from ..tensor.flat_layout import ALIGNMENT, round_up
from ..utils import torch_compat


class Masters:
    """Of one group. rest: the shard's or (whole) the whole buffer's masters; None where the values themselves are stepped.

    dirty: parameters written since masters last followed. versions: of replicated parameters, as last seen.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rest: Rest | None = None
        self.whole = False  # what is stepped is the whole buffer: the optimizer is replicated
        self.dirty: set[int] = set()
        self.versions: list[int] = []

    @property
    def stepped(self) -> Rest:
        """Masters where there are any, else the values at rest."""
        return self.rest if self.rest is not None else self.group.values.rest

    def precise(self) -> Tensor | None:
        """The shard (shard_numel,) as exactly as it is held, where that is more than its values, and on the device."""
        rest, runtime = self.rest, self.group.runtime
        if rest is None or self.whole or not rest.resident or runtime is None or runtime.config.delayed_update is not None:
            return None
        return None if self.outdated() else rest.load(0, rest.numel)

    def range(self, index: int) -> tuple[int, int]:
        """[start, stop) of a parameter in what is stepped, with the padding that follows it."""
        layout, slot = self.group.layout, self.group.layout.slots[index]
        stop = round_up(slot.stop, ALIGNMENT)
        if self.whole:
            return slot.offset, stop
        begin, end = layout.shard_range(self.group.comm.rank)
        start, stop = max(slot.offset, begin), min(stop, end)
        return (start - begin, stop - begin) if start < stop else (0, 0)

    def slice(self, index: int) -> tuple[Rest, int]:
        """Where this rank's slice of a parameter rests most exactly, and the first element there."""
        home = self.group.homes[index]
        at_offset = self.whole and self.rest is not None
        return self.stepped, self.group.layout.slots[index].offset + home.start if at_offset else home.begin

    def unseen(self) -> list[int]:
        """Replicated parameters that were written past zeroshard and not `seen` yet."""
        if self.group.unit.pinned:  # inside zs.gathered parameters count other writes
            return []
        pairs = zip(self.group.params, self.versions, strict=False)  # of sharded ones no versions are kept
        return [index for index, (param, version) in enumerate(pairs) if torch_compat.version(param) != version]

    def seen(self, index: int) -> None:
        """A parameter was written: its master is to follow."""
        self.versions[index] = torch_compat.version(self.group.params[index])
        self.dirty.add(index)

    def outdated(self) -> bool:
        """Whether anything was written since masters last followed."""
        for index in self.unseen():
            self.seen(index)
        return bool(self.dirty)

    def follow(self) -> None:
        """Take over what was written into values."""
        values, rest = self.group.values, self.rest
        for index in self.dirty:
            if rest is None:
                break
            start, stop = self.range(index)
            rest.store(start, values.full[start:stop] if self.whole else values.rest.load(start, stop))
        self.dirty.clear()

    def written(self, index: int) -> None:
        """A parameter and its master have been written alike."""
        if self.versions:
            self.versions[index] = torch_compat.version(self.group.params[index])
        self.dirty.discard(index)
