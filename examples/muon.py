"""Muon for the matrices of the blocks and AdamW for the rest, at stage 3: one optimizer, with slices of the momentum on each rank.

Run: python examples/muon.py (2 threads are the ranks), or torchrun --nproc-per-node 2 examples/muon.py.
Prints the loss of the same small GPT after the same batches with AdamW alone and with Muon, and what each rank keeps for it: Muon has
one state an element where AdamW has two.
"""

import copy
import os

import torch
import torch.distributed as dist

import zeroshard as zs
from zeroshard.planner.models import GPT, GPTConfig
from zeroshard.testing import run_threads


def adamw(model: GPT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def muon(model: GPT) -> torch.optim.Optimizer:
    # Muon takes matrices that multiply hidden vectors. Embeddings, norms and the head are for AdamW.
    for name, param in model.named_parameters():
        param.use_muon = name.startswith("blocks.") and param.dim() == 2
    return zs.Muon(model.parameters(), lr=0.02, adam_lr=3e-3)


def train(rank: int, start: GPT) -> None:
    for name, make_optimizer in (("AdamW", adamw), ("Muon and AdamW", muon)):
        model = copy.deepcopy(start)  # zs.shard changes a model in place
        model, optimizer = zs.shard(model, make_optimizer(model), stage=3)

        draw, losses = torch.Generator().manual_seed(rank), []
        for _ in range(20):
            tokens = (torch.randint(64, (8, 1), generator=draw) + torch.arange(33)) % 64  # rows that count upwards
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()  # ranks collect the whole matrices in turns, and each steps its share of them
            optimizer.zero_grad()
            losses.append(loss.item())
        if rank == 0:
            states = zs.report(model).at_rest["optimizer states"]
            print(
                f"{name:<15} loss {losses[0]:.3f}, {losses[9]:.3f}, {losses[-1]:.3f} at steps 1, 10, 20; {states:,} bytes of states a rank"
            )
        zs.close(model)


if __name__ == "__main__":
    torch.manual_seed(0)
    start = GPT(GPTConfig(vocab_size=64, seq_len=32, dim=64, layers=2, heads=4))
    if "RANK" in os.environ:  # torchrun has started this process
        dist.init_process_group()
        train(dist.get_rank(), start)
        dist.destroy_process_group()
    else:
        run_threads(2, train, start)
