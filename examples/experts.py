"""A mixture of experts at stage 3: each expert is gathered where a token was sent to it, and a rank may leave experts out.

Run: python examples/experts.py (2 threads are the ranks), or torchrun --nproc-per-node 2 examples/experts.py.
Prints how many tokens each expert gets, by rank (rank 1's data needs half of the experts only); the loss, which falls; and what is
gathered at once, which is one expert and not all of them.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.testing import run_threads

EXPERTS, DIM = 4, 32
TRUTH = torch.randn(EXPERTS, DIM, DIM, generator=torch.Generator().manual_seed(100)) / DIM**0.5  # what each expert is to learn


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Experts(nn.Module):
    """Each token (a vector) goes to the expert of its kind. A router that learns would choose; here the data says the kind."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = kinds == number
            if mine.any():  # else the expert is not used on this rank: its gradient here is zero
                out[mine] = expert(x[mine])
        return out


def train(rank: int, start: Experts) -> None:
    model = copy.deepcopy(start)  # zs.shard changes a model in place
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    # units: what is gathered together, here each expert. map_shared=False: ranks of one host copy what they gather, as ranks of
    # several hosts do; otherwise they would read each other's memory, and nothing would be gathered.
    model, optimizer = zs.shard(model, optimizer, stage=3, units=(Expert,), map_shared=False)

    draw, tokens = torch.Generator().manual_seed(rank), [0] * EXPERTS
    for step in range(60):
        x = torch.randn(64, DIM, generator=draw)
        kinds = torch.randint(EXPERTS // (1 + rank), (64,), generator=draw)
        loss = (model(x, kinds) - torch.einsum("td,tde->te", x, TRUTH[kinds])).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for number in range(EXPERTS):
            tokens[number] += int((kinds == number).sum())
        if rank == 0 and (step == 0 or step % 20 == 19):
            print(f"step {step + 1:2}: loss {loss.item():.3f}")
    sys.stdout.write(f"rank {rank}: tokens by expert {tokens}\n")  # one write, so that lines of ranks do not mix
    if rank == 0:
        expert = sum(param.numel() * 4 for param in start.experts[0].parameters())
        print(f"an expert has {expert:,} bytes; at most {zs.report(model).peak['gathered units']:,} were gathered at once")


if __name__ == "__main__":
    torch.manual_seed(0)
    start = Experts()
    if "RANK" in os.environ:  # torchrun has started this process
        dist.init_process_group()
        train(dist.get_rank(), start)
        dist.destroy_process_group()
    else:
        run_threads(2, train, start)
