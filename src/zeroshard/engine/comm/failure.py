"""Failure: what ends the work of a group of ranks. diagnostics/endings.py makes it of how a rank has ended."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import PeerFailed

GONE = "its process exited or was killed"


@dataclass(frozen=True)
class Failure:
    """The failure that ends the work of a group of ranks.

    rank: world rank of the one that failed first. error: the exception that all ranks raise; None: PeerFailed.
    """

    rank: int
    reason: str
    error: Exception | None = None

    def raised(self, waiting_for: str) -> Exception:
        return self.error if self.error is not None else PeerFailed(self.rank, self.reason, waiting_for)
