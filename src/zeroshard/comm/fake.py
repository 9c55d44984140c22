"""FakeComm: one rank of a world of any size, with nobody there. For planning and for counting.

The real runtime runs over it, usually on fake tensors: every gather, reduction and exchange is counted and takes its
buffers, but nothing moves. Peers are taken to agree with this rank in all control messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base import Comm, Region, Work


class FakeComm(Comm):
    """Rank `rank` of `world_size` ranks; the others are imagined."""

    imagined = True

    def __init__(self, rank: int, world_size: int, device: torch.device | str = "cpu") -> None:
        self.rank, self.world_size, self.device = rank, world_size, torch.device(device)

    def gather(self, full: Tensor, source: Region, label: str, tag: int | None = None) -> Work:
        return Work()

    def reduce(
        self, source: Region, out: Tensor, *, scale: float, accumulate: bool, tag: int, label: str
    ) -> Work:
        work = Work()
        work.square_sum = 1.0  # see `square_sums`
        return work

    def exchange(self, payload: bytes, label: str) -> list[bytes]:
        return [payload] * self.world_size

    def square_sums(self, tensors: Sequence[Tensor]) -> float:
        return float(len(tensors))  # fake tensors hold no numbers; finite, so that no step is skipped
