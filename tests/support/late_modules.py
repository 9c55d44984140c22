"""Modules whose gradients come late: parameters that several reentrant checkpoints use."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import Block

DIM = 7


class Again(nn.Module):
    """One block, checkpointed `times` times over."""

    def __init__(self, times: int = 3) -> None:
        super().__init__()
        self.first, self.block, self.times = nn.Linear(DIM, DIM), Block(DIM), times

    def forward(self, x: Tensor, times: int | None = None) -> Tensor:
        x = self.first(x)
        for _ in range(self.times if times is None else times):
            x = checkpoint(self.block, x, use_reentrant=True)
        return x


class Within(nn.Module):
    """Parts of a block are used inside of a checkpoint and outside: it is complete before all of its gradients are there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(DIM, DIM), Block(DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.part, self.first(x), use_reentrant=True)
        return self.block.down(self.block.up(x))

    def part(self, x: Tensor) -> Tensor:
        return self.block.down(torch.tanh(self.block.up(self.block(x))))


class NormOutside(Within):
    """What is used outside comes last inside: the unit must stay until then."""

    def forward(self, x: Tensor) -> Tensor:
        return self.block.norm(checkpoint(self.block, self.first(x), use_reentrant=True))
