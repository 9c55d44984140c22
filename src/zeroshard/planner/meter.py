"""The meter: all memory that an imagined rank holds, and the fullest moment of each phase.

    the ledger     what the library holds, by category and tier
    storages       what operators make and no ledger's entry claims: activations, temporaries among them

A ledger tells of each entry (`listening`), who runs operators of each new storage (`born`); a storage is alive until it is freed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from ..config import Tier
from ..memory.host_memory import KEEP_NBYTES, MMAP_NBYTES
from ..memory.ledger import Ledger, listener
from ..utils import torch_compat
from .plan import ACTIVATIONS, Held

_ROUNDED = 512  # bytes: blocks of torch's caching allocators


class Meter:
    """phase: one of `plan.PHASES`, told by who follows the rank. optimizing: forward and backward are over.

    fullest: bytes by category at the fullest moment of a phase. looking: new storages count.
    """

    def __init__(self, separate: bool = True) -> None:
        """separate: the device has a memory of its own; else the fullest moment is that of device and host together."""
        self._memories = ((Tier.DEVICE,), (Tier.HOST,), (Tier.DISK,)) if separate else ((Tier.DEVICE, Tier.HOST), (Tier.DISK,))
        self._highest: dict[tuple[str, tuple[Tier, ...]], int] = {}
        self.phase, self.optimizing, self.looking = "load", False, True
        self.ledgers: list[Ledger] = []
        self.fullest: dict[tuple[str, Tier], Held] = {}
        self.alive_nbytes = 0
        self._alive: dict[int, int] = {}  # bytes of storages that no ledger counts
        self._heap_nbytes = 0  # of blocks that come from the C library's heap
        self._heap_highest = {False: 0, True: 0}  # in the second step: of forward and backward, and of the optimizer's step
        self._moment_of: dict[str, bool] = {}  # phase -> whether its fullest moment was while stepping
        self._stretch_nbytes = 0
        self._stretch: Held = {}  # the fullest moment since `stretch` was last called

    def enter(self, phase: str) -> None:
        """What follows is of another phase."""
        if self.phase == "load":
            self._heap_highest = {False: 0, True: 0}
        self.phase, self.optimizing = phase, phase == "step"
        self.sample()

    def begin(self) -> None:
        """What follows is the step that is told of."""
        self._heap_highest = {False: 0, True: 0}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Ledgers that are opened meanwhile are watched."""
        token = listener.set(self)
        try:
            yield
        finally:
            listener.reset(token)

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        """What is made meanwhile has, or gets, an entry."""
        before, self.looking = self.looking, False
        try:
            yield
        finally:
            self.looking = before

    def watch(self, ledger: Ledger) -> None:
        """Whose entries count from now on."""
        ledger.changed = self.sample
        self.ledgers.append(ledger)
        self.sample()

    def born(self, storage: torch.UntypedStorage) -> None:
        """A new storage: alive until it is not."""
        nbytes = -(-storage.nbytes() // _ROUNDED) * _ROUNDED
        key = torch_compat.storage_id(storage)
        self._alive[key] = nbytes
        self.alive_nbytes += nbytes
        weakref.finalize(storage, self._forget, key).atexit = False
        if nbytes < MMAP_NBYTES:
            self._heap_nbytes += nbytes
            self._heap_highest[self.optimizing] = max(self._heap_highest[self.optimizing], self._heap_nbytes)
            weakref.finalize(storage, self._given_back, nbytes).atexit = False

    def _given_back(self, nbytes: int) -> None:
        self._heap_nbytes -= nbytes

    def kept(self, phase: str) -> int:
        """Bytes of the C library's heap that are free at the fullest moment of a phase: what others have left is in pieces.

        Of ranks with a quiet heap (memory/host_memory.py): there what loading has freed serves again, but the step's larger
        blocks find no room between those of forward and backward, and the other way round. More than KEEP_NBYTES goes back.
        """
        computing, stepping = (
            max(0, highest - self._heap_nbytes) for highest in (self._heap_highest[False], self._heap_highest[True])
        )
        kept = computing if phase == "save" or self._moment_of.get(phase) else 0
        kept += stepping if phase in ("save", "forward", "backward") else 0
        return 0 if phase == "load" else min(kept, KEEP_NBYTES)

    def _forget(self, key: int) -> None:
        self.alive_nbytes -= self._alive.pop(key, 0)

    def claim(self, tensor: Tensor) -> None:
        """A ledger counts it."""
        self._forget(torch_compat.storage_id(tensor.untyped_storage()))

    def held(self, tier: Tier) -> Held:
        """Bytes by category now."""
        found: Held = {}
        for ledger in self.ledgers:
            for name, nbytes in _entered(ledger, tier).items():
                if nbytes:
                    found[name] = found.get(name, 0) + nbytes
        if tier is Tier.DEVICE and self.alive_nbytes > 0:
            found[ACTIVATIONS] = self.alive_nbytes
        return found

    def stretch(self) -> Held:
        """Bytes by category at the fullest moment since the last call, of device and host together where they are one memory."""
        found, self._stretch_nbytes, self._stretch = self._stretch, 0, {}
        return found or self._held_together()

    def _held_together(self) -> Held:
        found: Held = {}
        for tier in self._memories[0]:
            for name, nbytes in self.held(tier).items():
                found[name] = found.get(name, 0) + nbytes
        return found

    def sample(self) -> None:
        """Note what is held, where it is more than before in this phase."""
        for tiers in self._memories:
            total = sum(sum(each.values()) for ledger in self.ledgers for each in (_entered(ledger, tier) for tier in tiers))
            total += self.alive_nbytes if Tier.DEVICE in tiers else 0
            if Tier.DEVICE in tiers and total >= self._stretch_nbytes:
                self._stretch_nbytes, self._stretch = total, self._held_together()
            # of equal ones the last: what was just made has its entry by then
            if total >= self._highest.get((self.phase, tiers), 0):
                self._highest[self.phase, tiers] = total
                self._moment_of[self.phase] = self.optimizing if Tier.DEVICE in tiers else self._moment_of.get(self.phase, False)
                self.fullest |= {(self.phase, tier): self.held(tier) for tier in tiers}


def _entered(ledger: Ledger, tier: Tier) -> Held:
    return ledger.now if tier is Tier.DEVICE else ledger.elsewhere[tier]
