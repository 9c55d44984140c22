"""Uneven data: ranks with 2, 3 and 6 batches train together, and nobody waits for a rank that has no more.

Run: python examples/uneven_data.py (3 threads are the ranks), or torchrun --nproc-per-node 3 examples/uneven_data.py.
Prints, with zs.join and with zs.stop_together, how many batches each rank trained on and how many steps there were; and that all ranks
end with the same parameters.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from zeroshard.testing import run_threads

BATCHES = (2, 3, 6)  # of each rank


def batches(rank: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(16, 8, generator=draw) for _ in range(BATCHES[rank])]


def train(rank: int, start: nn.Module) -> None:
    # zs.join: a rank without data goes on as a peer. Each step is the mean over the ranks that had a batch, so all data is used.
    model, optimizer, used = *sharded(start), 0
    with zs.join(model):
        for batch in batches(rank):
            used += step(model, optimizer, batch)
    tell("zs.join", model, rank, used)

    # zs.stop_together: all ranks stop with the shortest loader, so every step has data from every rank.
    model, optimizer, used = *sharded(start), 0
    for batch in zs.stop_together(model, batches(rank)):
        used += step(model, optimizer, batch)
    tell("zs.stop_together", model, rank, used)


def sharded(start: nn.Module) -> tuple:
    model = copy.deepcopy(start)  # zs.shard changes a model in place
    return zs.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), stage=2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> int:
    (model(batch) - batch.flip(1)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return 1


def tell(name: str, model: nn.Module, rank: int, used: int) -> None:
    total = sum(value.double().sum().item() for value in zs.full_state_dict(model).values())
    line = f"{name}: rank {rank} used {used} of {BATCHES[rank]} batches in {zs.report(model).steps} steps, parameters add up to {total:.6f}"
    sys.stdout.write(line + "\n")  # one write, so that lines of ranks do not mix


if __name__ == "__main__":
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    if "RANK" in os.environ:  # torchrun has started this process
        dist.init_process_group()
        train(dist.get_rank(), start)
        dist.destroy_process_group()
    else:
        run_threads(3, train, start)
