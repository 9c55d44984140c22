"""FakeComm: one rank of a world of any size, with nobody there. For planning and for counting.

The real runtime runs over it, usually on fake tensors: every gather, reduction and exchange is counted and takes its
buffers, but nothing moves. Peers are taken to agree with this rank in all control messages.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from .base import Combine, Comm, Region, Work


class FakeComm(Comm):
    """Rank `rank` of `world_size` ranks; the others are imagined. node_size: ranks a node; None: all are on one."""

    imagined = True

    def __init__(self, rank: int, world_size: int, device: torch.device | str = "cpu", *, node_size: int | None = None) -> None:
        self.rank, self.world_size, self.device = rank, world_size, torch.device(device)
        self._ranks = list(range(world_size))
        self._node_size = node_size or world_size

    @property
    def ranks(self) -> list[int]:
        return self._ranks

    @property
    def nodes(self) -> list[int]:
        return [rank // self._node_size for rank in self._ranks]

    def subgroup(self, parts: Sequence[Sequence[int]], apart: bool = False) -> FakeComm:
        mine = next(part for part in parts if self.rank in part)
        assert self.pending is not None  # made now, and shared
        group = copy.copy(self)
        group.rank, group.world_size = list(mine).index(self.rank), len(mine)
        group._ranks = [self._ranks[rank] for rank in mine]
        return group

    def poll(self) -> None:
        self.pending.advance()

    def gather(self, full: Tensor, source: Region, label: str, tag: int | None = None) -> Work:
        work = Work()
        work.sent = self.sent(full.nbytes // self.world_size)
        return work

    def collect(self, source: Region, combine: Combine, *, tag: int, label: str) -> Work:
        work = Work()
        work.sent = self.sent(source.tensor.nbytes // self.world_size)
        work.square_sum = 1.0  # see `square_sums`
        return work

    def exchange(self, payload: bytes, label: str) -> list[bytes]:
        return [payload] * self.world_size

    def square_sums(self, tensors: Sequence[Tensor]) -> float:
        return float(len(tensors))  # fake tensors hold no numbers; finite, so that no step is skipped
