"""Averages of a sharded model's trained parameters: one value in fp32 or wider for each element of a rank's shard.

They rest on the tier of the optimizer's states, beside the masters, and `Engine.slices("average:NUMBER")` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from ..config import Tier
from ..engine.ledger import AVERAGES
from ..engine.rest import Rest
from ..engine.runtime import Runtime
from ..engine.unit import ParamGroup
from .tensor_stream import full_tensors, put_full_tensors

_CHUNK_NUMEL = 4 << 20  # elements copied at a time if source or target is offloaded


class Averages:
    """One average of each trained parameter of a model, and its exchange for the parameters. optim/averaged_model.py has the rule."""

    def __init__(self, runtime: Runtime) -> None:
        """Make the averages; they begin as copies of the parameters. number: counts the averages of this model."""
        self._runtime, self.number = runtime, max(len(group.averages) for group in runtime.groups)
        self._shards: list[tuple[ParamGroup, Rest]] = []
        for group in (group for group in runtime.groups if group.trainable):
            dtype = torch.promote_types(_source(group)[0].dtype, torch.float32)
            self._shards.append((group, runtime.tiers.rest(AVERAGES, group.offload, group.layout.shard_numel, dtype)))
        for group, rest in self._shards:  # all or, if memory has run out above, none
            group.averages.append(rest)
        self._aside: dict[int, Rest] = {}  # id of a group -> copy of its values, while they are lent
        self.take(None)

    @torch.no_grad()
    def take(self, decay: float | None) -> None:
        """Compute average = decay average + (1 - decay) parameters; with decay None, average = parameters."""
        self._runtime.gate.refresh([group for group, _ in self._shards])
        for group, average in self._shards:
            source, first = _source(group)
            for start, stop in _chunks(average, source):
                if average.resident:
                    mine, given = average.load(start, stop), source.load(first + start, first + stop)
                else:
                    mine, given = average.host(start, stop), source.host(first + start, first + stop)
                mine.copy_(given) if decay is None else mine.lerp_(given.to(mine.dtype), 1 - decay)
                if not average.resident and average.view(start, stop) is None:  # `mine` is a copy of what rests on disk
                    average.write(start, mine).wait()

    def lend(self, where: str) -> None:
        """Replace the parameters by the averages, rounded to their dtype (collective). where: the call that does it, for errors."""
        self._runtime.gate.wait()
        self._exchange(self._lend)
        self._runtime.moved.lent = where

    def give_back(self) -> None:
        """Replace the averages by the parameters again, bit for bit (collective)."""
        self._runtime.moved.lent = ""
        self._exchange(self._give_back)

    @torch.no_grad()
    def _exchange(self, write: Callable[[ParamGroup, Rest], None]) -> None:
        """Write this rank's shards of all groups by `write(group, average)`; gather replicated parameters again (collective)."""
        runtime, groups = self._runtime, [group for group, _ in self._shards]
        runtime.gate.invalidate()  # units drop gathered copies of the values that are about to be replaced
        runtime.comm.exchange(b"", "AveragedModel.swapped")  # a barrier: no peer reads this rank's shards any more
        runtime.comm.fence_write(synchronised=True)
        for group, average in self._shards:
            write(group, average)
            group.mark_written()  # a backward of an earlier forward raises, as after a step
        works = [group.gather() for group in groups if group.values.replicated]
        for work in works:
            work.wait()
        if works:
            runtime.comm.exchange(b"", "averaged parameters gathered")  # no rank may write shards that a peer still copies
        runtime.comm.fence_read()

    def _lend(self, group: ParamGroup, average: Rest) -> None:
        """Copy the group's values to `_aside`, then the average into the values."""
        values, tiers = group.values.rest, self._runtime.tiers
        if id(group) not in self._aside:
            self._aside[id(group)] = tiers.place(group.offload, values.numel, values.dtype)
            tiers.ledger.enter(AVERAGES, values.nbytes, group.offload.tier)
        _copy(values, self._aside[id(group)])
        _copy(average, values)

    def _give_back(self, group: ParamGroup, average: Rest) -> None:
        """Copy the group's values back from `_aside`, and free the copy; its file on disk is kept for the next `swapped`."""
        aside = self._aside[id(group)]
        _copy(aside, group.values.rest)
        if group.offload.tier is not Tier.DISK:
            self._runtime.tiers.ledger.strike(AVERAGES, aside.nbytes, group.offload.tier)
            del self._aside[id(group)]

    def full(self) -> dict[str, Tensor]:
        """Return the model's state dict with whole averages, on every rank (collective)."""
        kept = {id(group): rest for group, rest in self._shards}
        return full_tensors(self._runtime.model, lambda group: kept.get(id(group), group.values.rest))

    def put_full(self, given: Mapping[str, Tensor], where: str) -> None:
        """Take this rank's slices of whole averages. Raise ConfigError if one is missing or has another shape; `where` is named."""
        kept = {id(group): rest for group, rest in self._shards}
        self._runtime.gate.wait()
        put_full_tensors(self._runtime.model, lambda group: kept.get(id(group)), given, where)


def _source(group: ParamGroup) -> tuple[Rest, int]:
    """Return the Rest of a group's masters (of its values where it has no masters), and this rank's first element in it."""
    rest, shard_numel = group.masters.stepped, group.layout.shard_numel
    return rest, group.comm.rank * shard_numel if rest.numel != shard_numel else 0


def _copy(source: Rest, target: Rest) -> None:
    """Copy `source` to `target`, rounded to its dtype."""
    for start, stop in _chunks(target, source):
        values = source.load(start, stop)
        target.store(start, values if target.resident else values.to(target.dtype))


def _chunks(target: Rest, source: Rest) -> Iterator[tuple[int, int]]:
    """Yield ranges [start, stop) of `target`: one if both rest on the device, else chunks of _CHUNK_NUMEL elements."""
    step = max(target.numel, 1) if target.resident and source.resident else _CHUNK_NUMEL  # range() takes no step of 0
    for start in range(0, target.numel, step):
        yield start, min(start + step, target.numel)
