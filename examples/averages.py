"""An exponential moving average of the parameters (zs.ema), kept as slices, and used for evaluation.

Run: python examples/averages.py (2 threads are the ranks), or torchrun --nproc-per-node 2 examples/averages.py.
Prints the loss on held-out data by the parameters of the last step and by their average, which is lower: steps are large here, and
the average lies between the points to which they lead. No parameters reach less than 1, the variance of the targets' noise. Then
the names of the parameters that are averaged.
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from zeroshard.testing import run_threads

TRUTH = torch.randn(8, 4, generator=torch.Generator().manual_seed(100))


def batch(seed: int, rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (rows, 8) and noisy targets (rows, 4)."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=draw)
    return x, x @ TRUTH + torch.randn(rows, 4, generator=draw)


def train(rank: int, start: nn.Module) -> None:
    model = copy.deepcopy(start)  # zs.shard changes a model in place
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = zs.shard(model, optimizer, stage=3)
    average = zs.ema(model, decay=0.95)  # follows every step by itself

    for step in range(100):
        x, y = batch(1000 * rank + step)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    # Inside of `swapped` the model computes with the average; afterwards its parameters are the same bits as before.
    plain = evaluate(model)
    with average.swapped(model):
        averaged = evaluate(model)
    again = evaluate(model)
    if rank == 0:
        print(f"held-out loss {plain:.4f} by the last step, {averaged:.4f} by the average, {again:.4f} by the last step again")

    # In checkpoints it stays in slices: zs.save(folder, model, optimizer, extra={"ema": average}). Whole it is a state dict.
    names = list(average.full_state_dict())
    if rank == 0:
        print(f"the average of {', '.join(names)} after {average.updates} steps")


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    x, y = batch(12345, rows=4096)
    return (model(x) - y).square().mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    start = nn.Linear(8, 4)
    if "RANK" in os.environ:  # torchrun has started this process
        dist.init_process_group()
        train(dist.get_rank(), start)
        dist.destroy_process_group()
    else:
        run_threads(2, train, start)
