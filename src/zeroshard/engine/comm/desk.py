"""The desk of a rank, where peers ask for its state and report failures. diagnostics/ has desks that answer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import PeerFailed
from .progress import Report

if TYPE_CHECKING:
    from .base import DirectComm

GONE = "its process exited or was killed"
Answers = dict[int, Report | str]  # peer -> its report, or why there is none


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


class Desk:
    """Desk of a rank that has no peers, or does not know their desks yet. Peers are named by their rank in the desk's group.

    told: the failure that ends the group's work: the first that a peer has reported, or that this rank has sent to its peers.
    """

    told: Failure | None = None
    failure: Exception | None = None  # the error that all ranks raise

    def ask(self, peers: Collection[int]) -> Answers:
        """Return reports from peers on their present state; a peer without a known desk may be missing."""
        return {}

    def tell(self, peers: Collection[int], failure: Failure) -> None:
        """Send `peers` the failure that ends the group's work; skip a peer that can not be reached."""

    def open(self, comm: DirectComm) -> Desk:
        """Return a desk for this rank that knows the desks of all ranks of the Comm (collective)."""
        return self

    def nodes(self) -> list[int]:
        """Return the node number of each rank; [] where the desks do not know it."""
        return []

    def explain(self, comm: DirectComm, label: str, error: RuntimeError) -> Failure | None:
        """Return why the group can not go on after an error of its backend, at the operation `label`; None if it can."""
        return self.told

    def how_it_ended(self, peer: int) -> str:
        """Return a text that says how the process of a peer ended."""
        return GONE

    def answer_for(self, owner: object) -> Callable[[], object]:
        """Answer peers until `owner` is collected or the returned function is called. The thread ends with the last owner."""
        return lambda: None

    def rest(self) -> None:
        """End the thread that answers; the next owner starts another one."""

    def close(self) -> None:
        """Close the desk: peers get no answers any more."""
