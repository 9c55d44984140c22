"""The meter: all memory that an imagined rank holds, and the fullest moment of each phase.

    the ledger     bytes that the library holds, by category and tier
    storages       those that operators allocate and no entry of a ledger claims: activations and temporaries

A ledger reports each change of its entries (seam's `listener`), `Operators` each new storage (`born`), which counts until it is freed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from ..config import Tier
from ..seam import Ledger, Observer
from ..utils import torch_compat
from ..utils.host_memory import KEEP_NBYTES, MMAP_NBYTES
from .plan import ACTIVATIONS, Held

_ROUNDED = 512  # bytes: blocks of torch's caching allocators


class Meter(Observer):
    """The memory of one imagined rank. phase: one of `plan.PHASES`, set by the recorder. optimizing: backward is over.

    fullest: bytes by category at the fullest moment of each phase, by (phase, tier). looking: whether new storages count.
    """

    def __init__(self, separate: bool = True) -> None:
        """separate: whether the device has a memory of its own; else the fullest moment is that of device and host together."""
        self._memories = ((Tier.DEVICE,), (Tier.HOST,), (Tier.DISK,)) if separate else ((Tier.DEVICE, Tier.HOST), (Tier.DISK,))
        self._highest: dict[tuple[str, tuple[Tier, ...]], int] = {}
        self.phase, self.optimizing, self.looking = "load", False, True
        self.ledgers: list[Ledger] = []
        self.fullest: dict[tuple[str, Tier], Held] = {}
        self.alive_nbytes = 0
        self._alive: dict[int, int] = {}  # bytes of storages that no ledger counts
        self._heap_nbytes = 0  # of blocks that come from the C library's heap
        self._heap_highest = {False: 0, True: 0}  # most of `_heap_nbytes` by `optimizing`, since the second step began
        self._moment_of: dict[str, bool] = {}  # phase -> whether its fullest moment was while stepping
        self._stretch_nbytes = 0
        self._stretch: Held = {}  # bytes by category at the fullest moment since `stretch` was last called

    def enter(self, phase: str) -> None:
        """Begin another phase: what is held from now on counts for it."""
        if self.phase == "load":
            self._heap_highest = {False: 0, True: 0}
        self.phase, self.optimizing = phase, phase == "step"
        self.sample()

    def begin(self) -> None:
        """Begin the second step, the one that the plan describes."""
        self._heap_highest = {False: 0, True: 0}

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        """Do not count storages made in this block: a ledger has, or will have, an entry for each."""
        before, self.looking = self.looking, False
        try:
            yield
        finally:
            self.looking = before

    def watch(self, ledger: Ledger) -> None:
        """Count the entries of a ledger from now on."""
        ledger.observe(self)
        self.ledgers.append(ledger)
        self.sample()

    def allocated(self, category: str, nbytes: int, tier: Tier) -> None:
        self.sample()

    def born(self, storage: torch.UntypedStorage) -> None:
        """Count a new storage until it is freed."""
        nbytes = -(-storage.nbytes() // _ROUNDED) * _ROUNDED
        key = torch_compat.storage_id(storage)
        self._alive[key] = nbytes
        self.alive_nbytes += nbytes
        of_heap = nbytes if nbytes < MMAP_NBYTES else 0
        if nbytes < MMAP_NBYTES:
            self._heap_nbytes += nbytes
            self._heap_highest[self.optimizing] = max(self._heap_highest[self.optimizing], self._heap_nbytes)
        weakref.finalize(storage, self._freed, key, of_heap).atexit = False

    def _freed(self, key: int, of_heap: int) -> None:
        self.alive_nbytes -= self._alive.pop(key, 0)
        self._heap_nbytes -= of_heap

    def kept(self, phase: str) -> int:
        """Return the bytes of the C library's heap that are free at the fullest moment of a phase: holes that other phases left.

        This holds for ranks with `quiet_heap` (utils/host_memory.py): they use again what loading has freed, but the step's
        larger blocks do not fit between those of forward and backward, nor vice versa. The C library keeps at most KEEP_NBYTES.
        """
        computing, stepping = (max(0, self._heap_highest[optimizing] - self._heap_nbytes) for optimizing in (False, True))
        kept = computing if phase == "save" or self._moment_of.get(phase) else 0
        kept += stepping if phase in ("save", "forward", "backward") else 0
        return 0 if phase == "load" else min(kept, KEEP_NBYTES)

    def claim(self, tensor: Tensor) -> None:
        """Stop counting a tensor's storage, which a ledger counts from now on."""
        self.alive_nbytes -= self._alive.pop(torch_compat.storage_id(tensor.untyped_storage()), 0)

    def held(self, *tiers: Tier) -> Held:
        """Return the bytes that these tiers hold together now, by category."""
        found: Held = {}
        for tier in tiers:
            for ledger in self.ledgers:
                for name, nbytes in _entered(ledger, tier).items():
                    if nbytes:
                        found[name] = found.get(name, 0) + nbytes
            if tier is Tier.DEVICE and self.alive_nbytes > 0:
                found[ACTIVATIONS] = self.alive_nbytes
        return found

    def stretch(self) -> Held:
        """Return bytes by category at the fullest moment since the last call, of the device (on CPUs with the host's)."""
        found, self._stretch_nbytes, self._stretch = self._stretch, 0, {}
        return found or self.held(*self._memories[0])

    def sample(self) -> None:
        """Store what is held now as the phase's fullest moment, if it is not less than at that moment so far."""
        for tiers in self._memories:
            total = sum(sum(each.values()) for ledger in self.ledgers for each in (_entered(ledger, tier) for tier in tiers))
            total += self.alive_nbytes if Tier.DEVICE in tiers else 0
            if Tier.DEVICE in tiers and total >= self._stretch_nbytes:
                self._stretch_nbytes, self._stretch = total, self.held(*tiers)
            # among equal moments the last: by then a ledger's entry names the storage that was just made
            if total >= self._highest.get((self.phase, tiers), 0):
                self._highest[self.phase, tiers] = total
                self._moment_of[self.phase] = self.optimizing if Tier.DEVICE in tiers else self._moment_of.get(self.phase, False)
                self.fullest |= {(self.phase, tier): self.held(tier) for tier in tiers}


def _entered(ledger: Ledger, tier: Tier) -> Held:
    return ledger.now if tier is Tier.DEVICE else ledger.elsewhere[tier]
