"""Master weights: a copy of the values, which the optimizer steps where the values are rounded or out of its reach.

the user writes w1      values  w0 [w1] w2      `dirty` has the index of w1; its master is out of date
follow                  masters w0 [w1] w2      copies w1 from the values, before each step and each read of masters
"""

from __future__ import annotations

import zlib
from contextvars import ContextVar
from typing import TYPE_CHECKING

from torch import Tensor

from ..config import Placement
from ..utils import torch_compat
from .flat_layout import round_up
from .parameter import gather_flat
from .rest import Rest

if TYPE_CHECKING:
    from .unit import ParamGroup


# set around a zs.shard after which parameters at rest are slices for the program at every stage, and of the fp32 masters where
# there are any (`ParamHome.shows_master`)
masters_shown: ContextVar[bool] = ContextVar("masters shown", default=False)


class Masters:
    """Master weights of one group, and a record of the parameters that were written since the masters last followed.

    rest: masters of the shard or, if `whole`, of the whole buffer; None if the optimizer steps the values themselves.
    dirty: parameters written since the last `follow`. versions: last known version counters of replicated parameters.
    traces: (parameter's index, "value", "states" or "average N") -> checksum of how the program has computed what it wrote there
    since ranks last compared these.
    """

    def __init__(self, group: ParamGroup, rest: Rest | None) -> None:
        self.group, self.rest = group, rest
        # the optimizer is replicated, and steps the whole buffer
        self.whole = group.runtime.config.row.optimizer is Placement.REPLICATED
        self.dirty: set[int] = set()
        self.versions: list[int] = []
        self.traces: dict[tuple[int, str], int] = {}

    @property
    def stepped(self) -> Rest:
        """Tensor at rest that the optimizer steps: masters if there are any, else the values."""
        return self.rest if self.rest is not None else self.group.values.rest

    @property
    def of_runs(self) -> Rest:
        """Tensor at rest that is divided into runs: `stepped`; where each rank steps all (stage 0), all values, not a shard."""
        values = self.group.values
        return values.tiers.over(values.full) if self.whole and self.rest is None else self.stepped

    @property
    def halves(self) -> tuple[Rest, Rest] | None:
        """The resting places of the upper and the lower halves, if they are split."""
        return None if self.rest is None else self.rest.halves

    @property
    def split(self) -> bool:
        """True where the values are the upper half of the masters, so that a step writes both at once."""
        return self.halves is not None

    def precise(self) -> Tensor | None:
        """Return the shard's masters (shard_numel,) for gathers that compress; None: none, whole, off the device or outdated."""
        rest = self.rest
        if rest is None or self.whole or not rest.resident or self.group.runtime.config.delayed_update is not None:
            return None
        return None if self.outdated() else rest.load(0, rest.numel)

    def range(self, index: int) -> tuple[int, int]:
        """Return [start, stop) of a parameter in `stepped`, with the padding that follows it."""
        layout, slot = self.group.layout, self.group.layout.slots[index]
        stop = round_up(slot.stop, layout.alignment)
        if self.whole:
            return slot.offset, stop
        begin, end = layout.shard_range(self.group.comm.rank)
        start, stop = max(slot.offset, begin), min(stop, end)
        return (start - begin, stop - begin) if start < stop else (0, 0)

    def slice(self, index: int) -> tuple[Rest, int]:
        """Return `stepped` and the position in it of this rank's slice of a parameter."""
        home = self.group.homes[index]
        at_offset = self.whole and self.rest is not None
        return self.stepped, self.group.layout.slots[index].offset + home.start if at_offset else home.begin

    def unseen(self) -> list[int]:
        """Return indices of replicated parameters that the program has written and for which `seen` was not called yet."""
        if self.group.unit.pinned:  # inside zs.gathered version counters are those of the copies
            return []
        pairs = zip(self.group.params, self.versions, strict=False)  # `versions` is empty for a sharded group
        return [index for index, (param, version) in enumerate(pairs) if torch_compat.version(param) != version]

    def note(self, index: int, trace: int, anew: bool, what: str = "value") -> None:
        """Add a write to `traces`; anew: it wrote every element, so that earlier ones no longer matter."""
        self.traces[index, what] = zlib.crc32(f"{0 if anew else self.traces.get((index, what), 0)} {trace}".encode())

    def seen(self, index: int) -> None:
        """Mark a parameter as written, so that the next `follow` updates its master."""
        self.versions[index] = torch_compat.version(self.group.params[index])
        self.dirty.add(index)

    def outdated(self) -> bool:
        """Return whether any parameter was written since the last `follow`."""
        for index in self.unseen():
            self.seen(index)
        return bool(self.dirty)

    def complete(self) -> None:
        """Copy each rank's slice of whole masters, where the program has written, to all others (collective)."""
        if self.rest is not None:
            begin, end = self.group.layout.shard_range(self.group.comm.rank)
            self.rest.store(0, gather_flat(self.group.comm, self.rest.load(begin, end), f"masters of {self.group.unit.name}"))

    def follow(self) -> None:
        """Copy written parameters from the values into the masters."""
        values, rest = self.group.values, self.rest
        for index in self.dirty:
            if rest is None:  # no masters: the optimizer steps the values that were written
                break
            start, stop = self.range(index)
            rest.store(start, values.full[start:stop] if self.whole else values.rest.load(start, stop))
        self.dirty.clear()

    def written(self, index: int) -> None:
        """Record that a parameter and its master have been written with the same value, on all ranks."""
        self.traces.pop((index, "value"), None)
        if self.versions:
            self.versions[index] = torch_compat.version(self.group.params[index])
        self.dirty.discard(index)
