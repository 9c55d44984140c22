"""Models whose forward computes with a parameter of another module, in every place where that can be."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import Block, Stack, normal_batches, square, token_batches

DIM = 7


class Reaches(Stack):
    """Reads a leaf's weight before the leaf is called, another's after, one of a block; one leaf is never called."""

    def __init__(self) -> None:
        super().__init__(DIM, 2, Block)
        self.table, self.never = nn.Linear(DIM, 30), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.never.weight) + x @ self.blocks[0].up.weight.T @ self.blocks[1].up.weight
        x = F.linear(super().forward(x) @ self.last.weight, self.table.weight) + self.table(x)
        return x * self.never.weight.pow(2).sum() + torch.cat([self.last.weight, self.table.weight])[:30, 0]


class _Product(torch.autograd.Function):
    """x @ w.T, as fused losses compute it: the weight reaches autograd as the program holds it, through no function of torch."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class OwnFunction(Stack):
    """Gives weights of two leaves to an autograd.Function; one of them is never called, the other one is."""

    def __init__(self) -> None:
        super().__init__(DIM, 2, Block)
        self.never = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = _Product.apply(super().forward(x) @ self.last.weight, self.last.weight)
        return _Product.apply(x @ self.last.weight, self.never.weight)


class TiedByHand(nn.Module):
    """The vocabulary head is the embedding's weight, transposed in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.body, self.norm = nn.Embedding(11, DIM), Block(DIM), nn.LayerNorm(DIM)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.norm(self.body(self.emb(tokens)))
        return F.cross_entropy((hidden @ self.emb.weight.T).flatten(0, 1), targets.flatten())


class Recomputes(nn.Module):
    """The reading is done again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.part, self.first(x), use_reentrant=self.reentrant)
        return F.linear(x, self.last.weight.mul(2.0), self.last.bias)

    def part(self, x: Tensor) -> Tensor:
        return torch.tanh(self.last(x)) @ self.last.weight


class InALog(nn.Module):
    """Parameters found in a plain list, not through their modules; one takes no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.maps[1].requires_grad_(False)
        self.log = [m.weight for m in self.maps]

    def forward(self, x: Tensor) -> Tensor:
        for weight, module in zip(self.log, self.maps, strict=True):
            x = torch.tanh(x @ weight) + module(x)
        return x


class Inside(nn.Module):
    """A block, not the model, reads a sibling's weight; in its own loss it looks at shapes and dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.blocks = nn.Linear(DIM, DIM), nn.ModuleList()
        for _ in range(2):
            block = Block(DIM)
            block.sibling = [self.shared]  # not registered
            block.register_forward_hook(lambda m, args, out: out @ m.sibling[0].weight.to(out.dtype))
            self.blocks.append(block)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.shared.weight.dtype).type_as(self.shared.weight) + self.shared.weight.new_zeros(1)
        for block in self.blocks:
            x = block(x)
        return x * self.shared.weight.shape[0] / self.shared.weight.numel() + self.shared(x)


def _cases() -> dict[str, tuple[Callable[[], nn.Module], list, Callable]]:
    numbers, tokens = normal_batches(3, 2, 4, DIM), token_batches(3, 2, 11, 2, 3)
    return {
        "reaches": (Reaches, numbers, square),
        "tied by hand": (TiedByHand, tokens, lambda model, batch: model(*batch)),
        "recomputed": (lambda: Recomputes(False), numbers, square),
        "recomputed, reentrant": (lambda: Recomputes(True), numbers, square),
        "in a list": (InALog, numbers, square),
        "inside a block": (Inside, numbers, square),
        "own function": (OwnFunction, numbers, square),
    }


CASES = _cases()
