"""Save on four ranks at stage 3, resume on two at stage 2: a checkpoint belongs to no number of ranks and to no stage.

Run: python examples/resume_elsewhere.py FOLDER (threads are the ranks; without FOLDER, a temporary folder).
Prints the loss before the save, the loss of the same batch after the load, which is the same, and how training goes on from there.
"""

import copy
import sys
import tempfile

import torch

import zeroshard as zs
from zeroshard.planner.models import GPT, GPTConfig
from zeroshard.testing import run_threads

ROWS = 16  # of the global batch, whatever the number of ranks


torch.manual_seed(0)
START = GPT(GPTConfig(vocab_size=64, seq_len=32, dim=64, layers=2, heads=4))


def sharded(stage: int) -> tuple:
    model = copy.deepcopy(START)  # threads share it; as processes each rank makes its own
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return zs.shard(model, optimizer, stage=stage)


def batch(step: int, rank: int, world_size: int) -> torch.Tensor:
    """This rank's rows of the global batch: rows that count upwards, (ROWS / world_size, 33)."""
    first = torch.randint(64, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    return ((first + torch.arange(33)) % 64).chunk(world_size)[rank]


def train(model, optimizer, steps: range, rank: int, world_size: int) -> None:
    for step in steps:
        tokens = batch(step, rank, world_size)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def evaluate(model) -> float:
    tokens = batch(1000, 0, 1)
    return model(tokens[:, :-1], tokens[:, 1:]).item()


def first_run(rank: int, folder: str) -> None:
    model, optimizer = sharded(stage=3)
    train(model, optimizer, range(10), rank, world_size=4)
    # All ranks save, each its own slices; `extra` takes plain values and whatever has a state_dict.
    zs.save(folder, model, optimizer, extra={"step": 10})
    loss = evaluate(model)
    if rank == 0:
        print(f"4 ranks, stage 3: step 10, loss {loss:.4f}, saved")


def second_run(rank: int, folder: str) -> None:
    model, optimizer = sharded(stage=2)
    # The newest complete checkpoint of the folder: parameters, optimizer states, counters, random generators.
    step = zs.load(folder, model, optimizer).extra["step"]
    loaded = evaluate(model)
    train(model, optimizer, range(step, 20), rank, world_size=2)
    trained = evaluate(model)
    if rank == 0:
        print(f"2 ranks, stage 2: step {step}, loss {loaded:.4f}, loaded")
        print(f"2 ranks, stage 2: step 20, loss {trained:.4f}")


if __name__ == "__main__":
    where = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    run_threads(4, first_run, where)
    run_threads(2, second_run, where)
