"""The ledger: bytes held by the sharding layer, by category, now and at peak; and bytes sent, by collective.

Every buffer of the library is entered when it is allocated and struck out when it is freed, so that a report is a
measurement, not an estimate. Sizes are bytes per rank.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, OrderedDict, defaultdict
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..config import Tier
from ..utils.axes import DP, EP, SP

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer states"
MASTERS = "master weights"
AVERAGES = "averaged parameters"
GATHERED = "gathered units"
SECONDARY = "secondary shards"
RESIDUALS = "lost in compression"
STAGING = "staging"
PARTIAL = "partial gradients"
OF_ACTIVATIONS = {f"all-to-all along {axis}": axis for axis in (EP, SP)}  # kinds of traffic; the others are of model states


class Listener(Protocol):
    """An observer of all allocated memory, in ledgers or not: the planner."""

    def watch(self, ledger: Ledger) -> None:
        """Note a new ledger."""

    def claim(self, tensor: Tensor) -> None:
        """Note that a ledger has an entry for this tensor's memory."""

    def looking_away(self) -> contextlib.AbstractContextManager[None]:
        """Context whose allocations the listener does not count, since a ledger has, or gets, an entry for each."""


listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def claimed(tensor: Tensor) -> Tensor:
    """Return the tensor, and tell the listener not to count its bytes: a ledger has an entry for them."""
    found = listener.get()
    if found is not None:
        found.claim(tensor)
    return tensor


def making() -> contextlib.AbstractContextManager[None]:
    """Context of allocations that the listener does not count, since a ledger has, or gets, an entry for each."""
    found = listener.get()
    return contextlib.nullcontext() if found is None else found.looking_away()


@dataclass
class Traffic:
    """Totals of one kind of collective: calls, calls by unit, bytes that this rank sent. between: bytes sent to other nodes."""

    count: int = 0
    nbytes: int = 0
    between: int = 0
    units: dict[str, int] = field(default_factory=dict)


class Observer:
    """An object that hears of each change of a ledger when it is counted. A subclass overrides the methods that it needs.

    Threads: the one that counts calls the methods: the rank's own, autograd's, a delayed update's, or one that drops gathered
    memory. Two may call at once, and one call may come inside of another. Methods must return soon, not raise, not use the model.
    """

    def allocated(self, category: str, nbytes: int, tier: Tier) -> None:
        """Hear that `nbytes` more are held in a category, such as GATHERED."""

    def freed(self, category: str, nbytes: int, tier: Tier) -> None:
        """Hear that `nbytes` less are held."""

    def sent(self, kind: str, label: str, inside: int, between: int) -> None:
        """Hear of a collective ("gather", "reduce", ...), for which this rank sends so many bytes: inside its node, and to other
        nodes. label: the collective with the name of the unit, as in messages about stalls."""

    def moved(self, source: Tier, target: Tier, nbytes: int) -> None:
        """Hear that bytes are copied from one tier to another."""


class Ledger:
    """Bytes by category (`now`, `peak`: on the device; `elsewhere`: by tier) and traffic by kind of collective and by link.

    moved: bytes so far by link, a pair of tiers (source, target). ahead: bytes of `moved` that were read ahead for a later step.
    How many those are at the end of a step depends on the disk's speed; the bytes that a step uses do not (`used`).
    """

    def __init__(self) -> None:
        """Make an empty ledger. Any thread may enter, strike and count; only the rank's own thread reads."""
        self.now: dict[str, int] = defaultdict(int)
        self.peak: dict[str, int] = defaultdict(int)
        self.traffic: dict[str, Traffic] = defaultdict(Traffic)
        self.total_peak = 0
        self.elsewhere: dict[Tier, dict[str, int]] = {Tier.HOST: defaultdict(int), Tier.DISK: defaultdict(int)}
        self.elsewhere_peak: dict[Tier, int] = {Tier.HOST: 0, Tier.DISK: 0}
        self.moved: dict[tuple[Tier, Tier], int] = defaultdict(int)
        self.ahead: dict[tuple[Tier, Tier], int] = defaultdict(int)
        self._observers: OrderedDict[int, Observer] = OrderedDict()  # no dict, since RemovableHandle refers to it weakly
        # reentrant: the garbage collector may run a finalizer that strikes (engine/flat_buffer.py:detach) inside of `enter`
        self._lock = threading.RLock()
        found = listener.get()
        if found is not None:
            found.watch(self)

    def observe(self, observer: Observer) -> RemovableHandle:
        """Tell an observer of each change from now on, until `remove()` of the handle that this returns."""
        handle = RemovableHandle(self._observers)
        self._observers[handle.id] = observer
        return handle

    def _told(self) -> tuple[Observer, ...]:
        """Return the observers: a copy, since one may be removed meanwhile."""
        return tuple(self._observers.values()) if self._observers else ()

    def enter(self, category: str, nbytes: int, tier: Tier = Tier.DEVICE) -> None:
        """Count `nbytes` more in a category."""
        with self._lock:  # a delayed update runs in a thread of its own
            if tier is Tier.DEVICE:
                self.now[category] += nbytes
                self.peak[category] = max(self.peak[category], self.now[category])
                self.total_peak = max(self.total_peak, sum(self.now.values()))
            else:
                held = self.elsewhere[tier]
                held[category] += nbytes
                self.elsewhere_peak[tier] = max(self.elsewhere_peak[tier], sum(held.values()))
        for observer in self._told():
            observer.allocated(category, nbytes, tier)

    def strike(self, category: str, nbytes: int, tier: Tier = Tier.DEVICE) -> None:
        """Count `nbytes` less; the inverse of `enter`."""
        held = self.now if tier is Tier.DEVICE else self.elsewhere[tier]
        with self._lock:
            held[category] -= nbytes
        assert held[category] >= 0, f"ledger: {category} fell below zero"
        for observer in self._told():
            observer.freed(category, nbytes, tier)

    def move(self, source: Tier, target: Tier, nbytes: int) -> None:
        """Count bytes moved over a link."""
        if source is not target:
            with self._lock:
                self.moved[source, target] += nbytes
            for observer in self._told():
                observer.moved(source, target, nbytes)

    def read_ahead(self, source: Tier, target: Tier, nbytes: int) -> None:
        """Count bytes, already in `moved`, as read ahead for a later step; negative: they are now used, or dropped."""
        with self._lock:
            self.ahead[source, target] += nbytes

    def used(self) -> dict[tuple[Tier, Tier], int]:
        """Return the bytes so far by link, without bytes read ahead."""
        with self._lock:
            return {link: nbytes - self.ahead.get(link, 0) for link, nbytes in self.moved.items()}

    def sent_by_axis(self) -> Counter[str]:
        """Return the bytes that this rank has sent so far, by axis: activations along ep and sp, model states along dp."""
        found = Counter({DP: 0})
        for kind, entry in self.traffic.items():
            found[OF_ACTIVATIONS.get(kind, DP)] += entry.nbytes
        return found

    def sent(self, kind: str, nbytes: tuple[int, int], unit: str) -> None:
        """Count one collective of a unit, for which this rank sent `nbytes`: (inside its node, to other nodes)."""
        entry = self.traffic[kind]
        entry.units[unit] = entry.units.get(unit, 0) + 1
        entry.count += 1
        entry.nbytes += sum(nbytes)
        entry.between += nbytes[1]
        for observer in self._told():
            observer.sent(kind, unit, *nbytes)
