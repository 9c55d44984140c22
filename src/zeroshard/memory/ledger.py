"""The ledger: bytes held by the sharding layer, by category, now and at peak; and bytes sent, by collective.

Every buffer of the library is entered when it comes to life and struck out when it goes, so that a report is a
reading, not an estimate. Sizes are bytes per rank.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer states"
MASTERS = "master weights"
GATHERED = "gathered units"
STAGING = "staging"
PARTIAL = "partial gradients"


@dataclass
class Traffic:
    """Totals of one kind of collective: calls, bytes that one rank sent, and calls by unit."""

    count: int = 0
    nbytes: int = 0
    units: dict[str, int] = field(default_factory=dict)


class Ledger:
    """Bytes by category (`now`, `peak`) and traffic by kind of collective."""

    def __init__(self) -> None:
        self.now: dict[str, int] = defaultdict(int)
        self.peak: dict[str, int] = defaultdict(int)
        self.traffic: dict[str, Traffic] = defaultdict(Traffic)
        self.total_peak = 0

    def enter(self, category: str, nbytes: int) -> None:
        """Count `nbytes` more in a category."""
        self.now[category] += nbytes
        self.peak[category] = max(self.peak[category], self.now[category])
        self.total_peak = max(self.total_peak, sum(self.now.values()))

    def strike(self, category: str, nbytes: int) -> None:
        """Count `nbytes` less; the inverse of `enter`."""
        self.now[category] -= nbytes
        assert self.now[category] >= 0, f"ledger: {category} fell below zero"

    def sent(self, kind: str, nbytes: int, unit: str) -> None:
        """Count one collective of a unit, of which this rank sent `nbytes`."""
        entry = self.traffic[kind]
        entry.units[unit] = entry.units.get(unit, 0) + 1
        entry.count += 1
        entry.nbytes += nbytes
