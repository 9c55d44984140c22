"""One process that trains as a pipeline of data-parallel ranks does: micro-batches added up rank by rank, then over ranks."""

import torch
import torch.nn.functional as F
from helpers import seeding
from torch import Tensor

from zeroshard.planner.models.gpt import GPT, GPTConfig

STEPS, MICRO, ROWS, SEQ, VOCAB = 3, 4, 8, 6, 32


def model(tied: bool = False, layers: int = 4) -> GPT:
    with seeding(7):
        return GPT(GPTConfig(vocab_size=VOCAB, seq_len=SEQ, dim=16, layers=layers, heads=2, tied=tied))


def batch(step: int, dp: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(100 * step + dp)
    tokens = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=made)
    return tokens[:, :-1], tokens[:, 1:]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, eps=1e-3)


def one_process(
    tied: bool, dps: int, backwards: bool = False, max_norm: float | None = None
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """(loss of each data-parallel rank in each step, parameters). Tied ones are two that get the sum of both gradients, as in two
    stages: an addition of one process would be in another order. backwards: the gradients of the last micro-batch come first."""
    whole = model(tied)
    if tied:
        whole.head.weight = torch.nn.Parameter(whole.embedding.weight.detach().clone())
    optimizer, losses = adamw(whole.parameters()), []
    for step in range(STEPS):
        sums, row = [], []
        for dp in range(dps):
            optimizer.zero_grad()
            tokens, targets = batch(step, dp)
            total = torch.zeros(())
            values = [loss(whole(x), y) / MICRO for x, y in zip(tokens.chunk(MICRO), targets.chunk(MICRO), strict=True)]
            for value in reversed(values) if backwards else values:
                value.backward()
            for value in values:
                total = total + value.detach()
            row.append(total.item())
            sums.append({name: p.grad.clone() for name, p in whole.named_parameters()})
        losses.append(row)
        grads = {name: sum((other[name] for other in sums[1:]), sums[0][name]) * (1.0 / dps) for name in sums[0]}
        if tied:
            grads["embedding.weight"] = grads["head.weight"] = grads["embedding.weight"] + grads["head.weight"]
        squares = sum(grads[name].double().square().sum().item() for name in grads if not (tied and name == "head.weight"))
        factor = 1.0 if max_norm is None else min(1.0, max_norm / (squares**0.5 + 1e-6))
        for name, p in whole.named_parameters():
            p.grad = grads[name] * factor
        optimizer.step()
    return losses, {name: p.detach() for name, p in whole.named_parameters()}
