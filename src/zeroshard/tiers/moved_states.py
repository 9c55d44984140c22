"""zs.offload_states: moves the states of a model from the device to another tier for a while, all at once.

    at rest   --- move --->   away: values in copies on the host or in files, memory released   --- bring back --->   at rest

Objects that refer to a state (views, runs, regions that peers read) are not replaced; while it is away, every access to its
`Rest` raises. States that already rest off the device stay where they are.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from ..config import Offload, Tier
from ..engine.rest import Away, MemoryRest, Rest, Tiers
from ..errors import StatesAway, ZeroshardError
from ..utils.release import give_back, take_again
from ..utils.work import Work

_CHUNK_NUMEL = 16 << 20  # number of elements copied at a time between a device and a disk


@dataclass(eq=False)
class Memory:
    """Memory of one state. kept: its values are needed afterwards; else they come back as zeros."""

    part: str  # one of PARTS
    category: str  # of the ledger
    tensor: Tensor
    tier: Tier
    kept: bool = True
    unused_nbytes: int = 0  # bytes of the tensor that no state uses any more, and that the ledger does not count

    @property
    def counted_nbytes(self) -> int:
        """Bytes that the ledger counts while the memory is where it belongs."""
        return self.tensor.nbytes - self.unused_nbytes


@dataclass(eq=False)
class _Left:
    """A state that is away. copy: its content (None: not kept); nbytes: the size that `take_again` needs."""

    memory: Memory
    nbytes: int = 0
    copy: Rest | None = None
    path: str | None = None  # the folder of the copy
    pending: Work | None = None


class MovedStates(Away):
    """The states of one model that are away.

    lent: name of the running context in which the parameters have other, read-only values (AveragedModel.swapped()); "": none.
    """

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers
        self.lent = ""
        self._left: dict[str, list[_Left]] = {}
        self._classes: dict[int, tuple[Rest, type[Rest]]] = {}  # id -> (rest that raises while away, its own class)
        self._spare: dict[tuple, list[Rest]] = {}  # free places in files, by `_kind`

    def __contains__(self, part: str) -> bool:
        return part in self._left

    @property
    def any(self) -> bool:
        return bool(self._left)

    def check(self, *parts: str) -> None:
        """Raise StatesAway if one of these parts (none named: any) is away; while `lent`, ZeroshardError but for "parameters"."""
        if self.lent and not set(parts) == {"parameters"}:
            raise ZeroshardError(
                f"inside {self.lent} the model's parameters have other values: only forwards, full_state_dict and "
                "stream_full_tensors are possible. Do the rest after that `with` block."
            )
        away = [part for part in self._left if not parts or part in parts]
        if away:
            _refuse(", ".join(away))

    def needed(self, memories: list[Memory], offload: Offload) -> int:
        """Return the bytes that these memories will take in files, beyond the free places that there are."""
        free = {kind: len(rests) for kind, rests in self._spare.items()}
        total = 0
        for tensor in (memory.tensor for memory in memories if memory.kept):
            kind = _kind(offload.path, tensor)
            total += 0 if free.get(kind, 0) > 0 else tensor.nbytes
            free[kind] = free.get(kind, 0) - 1
        return total

    def move(self, parts: list[str], memories: list[Memory], rests: dict[str, list[Rest]], offload: Offload, wait: bool) -> None:
        """Move the parts away. rests: all resting places of each part. wait: return when copies on the host are complete."""
        stays = offload.tier is Tier.HOST and not self.tiers.separate  # on a CPU the states are on the host already
        for part in parts:
            self._left[part] = [self._copied(memory, offload) for memory in memories if memory.part == part and not stays]
            for rest in rests[part]:
                self._classes[id(rest)] = rest, type(rest)
                rest.__class__ = _away(type(rest))  # the object stays; every access to it raises
        for left in (left for part in parts for left in self._left[part]):
            if left.pending is not None:
                left.pending.wait() if wait else left.pending.join()  # before `give_back`: the copy still reads the memory
            left.nbytes = give_back(left.memory.tensor)
            self.tiers.ledger.strike(left.memory.category, left.memory.counted_nbytes, left.memory.tier)

    def _copied(self, memory: Memory, offload: Offload) -> _Left:
        """Start to copy a state away, unless its values are not needed."""
        left, tiers = _Left(memory), self.tiers
        source = memory.tensor.detach()
        if not memory.kept or not source.numel():
            return left
        if offload.tier is Tier.HOST:
            left.copy = MemoryRest(tiers.host_buffer(source.nbytes, offload.pin_memory).view(source.dtype), Tier.HOST, tiers)
            left.pending = tiers.copy(left.copy.tensor, source, Tier.DEVICE, Tier.HOST)
        else:
            free = self._spare.get(_kind(offload.path, source))
            left.copy = free.pop() if free else tiers.place(offload, source.numel(), source.dtype)
            left.path = offload.path
            for start in range(0, source.numel(), _CHUNK_NUMEL):
                left.copy.store(start, source[start : start + _CHUNK_NUMEL])
        tiers.ledger.enter(memory.category, source.nbytes, left.copy.tier)
        return left

    def bring_back(self) -> None:
        """Bring all states back to where they were, with their content."""
        for left in (left for lefts in self._left.values() for left in lefts):
            memory, tiers = left.memory, self.tiers
            if left.pending is not None:
                left.pending.wait()
            take_again(memory.tensor, left.nbytes)
            target = memory.tensor.detach()
            tiers.ledger.enter(memory.category, memory.counted_nbytes, memory.tier)
            if left.copy is None:
                target.zero_()  # not kept: a gradient buffer that had no gradient, say
                continue
            if isinstance(left.copy, MemoryRest):
                tiers.copy(target, left.copy.tensor, Tier.HOST, Tier.DEVICE).wait()
            else:
                for number, part in enumerate(target.split(_CHUNK_NUMEL)):
                    begin = number * _CHUNK_NUMEL
                    if part.device.type == "cpu":
                        left.copy.read(begin, part).wait()
                    else:
                        part.copy_(left.copy.load(begin, begin + part.numel()))
                self._spare.setdefault(_kind(left.path, target), []).append(left.copy)  # its place is free now
            tiers.ledger.strike(memory.category, target.nbytes, left.copy.tier)
        self._allow()

    def _allow(self) -> None:
        for rest, cls in self._classes.values():
            rest.__class__ = cls
        self._left, self._classes = {}, {}

    def forget(self) -> None:
        """Drop the states that are away, after a failure of a disk or a peer; the ledger then counts as if they were back."""
        for left in (left for lefts in self._left.values() for left in lefts):
            memory, ledger = left.memory, self.tiers.ledger
            ledger.enter(memory.category, memory.counted_nbytes, memory.tier)
            if left.copy is not None:
                ledger.strike(memory.category, memory.tensor.nbytes, left.copy.tier)
        self._allow()
        self._spare = {}


def _kind(path: str | None, tensor: Tensor) -> tuple:
    """Return a key that is equal for tensors whose copies can use the same place."""
    return path, tensor.numel(), tensor.dtype


def _refuse(what: str) -> NoReturn:
    raise StatesAway(
        f"the {what} of this model are away (zs.offload_states): call zs.reload_states(model), on all ranks, before it is used."
    )


@functools.cache
def _away(cls: type[Rest]) -> type[Rest]:
    """Return the subclass that a Rest of this class gets while its state is away: every access raises."""
    accesses = ("view", "read", "write", "load", "store", "host")
    return type(f"Away{cls.__name__}", (cls,), dict.fromkeys(accesses, lambda *args: _refuse("states")))
