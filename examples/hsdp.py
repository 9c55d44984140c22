"""Hybrid sharding (HSDP, MiCS): states are sharded inside of each group of ranks, and all groups hold the same.

Run: python examples/hsdp.py (4 threads are the ranks), or torchrun --nproc-per-node 4 examples/hsdp.py.
Prints for stage 3 over all four ranks, and over groups of two, what a rank keeps (twice as much in groups), and the losses, which
are the same in four digits. A gather stays inside of a group: where that is a node, no parameter crosses the network.
"""

import copy
import os

import torch
import torch.distributed as dist

import zeroshard as zs
from zeroshard.planner.models import GPT, GPTConfig
from zeroshard.testing import run_threads


def train(rank: int, start: GPT) -> None:
    # Groups of two ranks. With a 2-D mesh in place of the number: mesh=init_device_mesh("cuda", (nodes, ranks_of_a_node)).
    for name, options in (("stage 3 over 4 ranks", {}), ("stage 3 in 2 groups of 2", {"shard_size": 2})):
        model = copy.deepcopy(start)  # zs.shard changes a model in place
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        model, optimizer = zs.shard(model, optimizer, stage=3, **options)

        draw, losses = torch.Generator().manual_seed(rank), []
        for _ in range(20):
            tokens = (torch.randint(64, (8, 1), generator=draw) + torch.arange(33)) % 64  # rows that count upwards
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

        # Parameters, gradients and optimizer states of this rank, measured.
        kept = sum(zs.report(model).at_rest.values())
        if rank == 0:
            print(f"{name:<24} keeps {kept:9,} bytes a rank; loss {losses[0]:.4f} to {losses[-1]:.4f}")
        zs.close(model)


if __name__ == "__main__":
    torch.manual_seed(0)
    start = GPT(GPTConfig(vocab_size=64, seq_len=32, dim=64, layers=2, heads=4))
    if "RANK" in os.environ:  # torchrun has started this process
        dist.init_process_group()
        train(dist.get_rank(), start)
        dist.destroy_process_group()
    else:
        run_threads(4, train, start)
