"""A small model under tensor parallelism, and parts of it as pipeline stages, with the names that the whole has."""

import torch
import torch.nn as nn
import torch.nn.functional as F

DIM, VOCAB, SAMPLES = 8, 10, 4  # a vocabulary that four ranks do not divide


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)
        self.register_buffer("scale", torch.full((DIM,), 0.5))

    def forward(self, x):
        return x + self.scale.to(x.dtype) * self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """`net(tokens, targets)` is the loss."""

    def __init__(self, tied=False):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleDict({"0": Block(), "1": Block()})
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, tokens, targets):
        x = self.emb(tokens)
        for block in self.blocks.values():
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Stage(nn.Module):
    """Half of a Net. `stage()` is a loss of its own: that of the embedding is the same function of it as that of the head."""

    def __init__(self, net, number):
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): net.blocks[str(number)]})
        setattr(self, "head" if number else "emb", net.head if number else net.emb)

    def forward(self):
        (block,) = self.blocks.values()
        end = self.head(torch.eye(DIM)).t() if hasattr(self, "head") else self.emb(torch.arange(VOCAB))
        return end.square().mean() + block(torch.linspace(-1, 1, 3 * DIM).view(3, DIM)).square().mean()


def parallelized(model, tp):
    """In place: blocks column- and row-wise, embedding and head by the vocabulary, norms not at all."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    tied = hasattr(model, "emb") and hasattr(model, "head") and model.head.weight is model.emb.weight
    plan = {"emb": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, tp, {name: style for name, style in plan.items() if hasattr(model, name)})
    for block in model.blocks.values():
        parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if tied:
        model.head.weight = model.emb.weight
    return model


def two_groups(model):
    """AdamW with two groups, by dimensions."""
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == wanted] for wanted in (True, False))
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)


def batch(step, place=0, places=1):
    """A data-parallel rank's part of the samples of a step, which are the same at every layout."""
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(0, VOCAB, (2, SAMPLES, 6), generator=generator)
    part = slice(place * SAMPLES // places, (place + 1) * SAMPLES // places)
    return tokens[part], targets[part]
