"""The program of ddp_before.py with zeroshard at stage 3: each rank keeps a slice of the parameters, of AdamW's states and of the average.

Run: torchrun --nproc-per-node 2 examples/ddp_after.py FOLDER --steps 20; again with --steps 40 it goes on where it was, or where
ddp_before.py was. Prints what that prints.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import zeroshard as zs

CLASSES, SIZE, PATCH, WIDTH, DECAY = 4, 16, 4, 32, 0.9


class Classifier(nn.Module):
    """A vision transformer of two layers."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn((SIZE // PATCH) ** 2, WIDTH))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            tokens = layer(tokens)
        return self.head(tokens.mean(1))


def images(count, seed):
    """Stripes in one of four directions, with noise: (count, 1, SIZE, SIZE) images and their classes."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=draw)
    angles = labels[:, None, None] * torch.pi / CLASSES
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    stripes = torch.sin(rows * angles.cos() + columns * angles.sin() + 6 * torch.rand(count, 1, 1, generator=draw))
    return TensorDataset((stripes + torch.randn(stripes.shape, generator=draw))[:, None], labels)


@torch.no_grad()
def accuracy(model):
    inputs, labels = images(256, seed=1).tensors
    model.eval()
    share = (model(inputs).argmax(-1) == labels).float().mean().item()
    model.train()
    return share


def main(folder, steps, accumulate=2):
    rank, size = dist.get_rank(), dist.get_world_size()
    data = images(1024, seed=0)
    sampler = DistributedSampler(data, size, rank)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    path, step = os.path.join(folder, "checkpoint.pt"), 0
    if os.path.exists(path):
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    model, optimizer = zs.shard(model, optimizer, stage=3)
    average = zs.ema(model, DECAY)
    if step:
        average.load_state_dict(saved["average"])

    while step < steps:
        sampler.set_epoch(step)  # an epoch here is of a few batches
        for number, (inputs, labels) in zip(range(5 * accumulate), loader, strict=False):
            last = (number + 1) % accumulate == 0
            model.require_backward_grad_sync = last
            loss = nn.functional.cross_entropy(model(inputs), labels) / accumulate
            loss.backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
        if rank == 0:
            print(f"step {step}: loss {accumulate * loss.item():.4f}")

    with average.swapped(model):
        share = accuracy(model)
    saved = {
        "model": zs.full_state_dict(model),
        "optimizer": zs.full_optimizer_state_dict(model),
        "average": average.full_state_dict(),
        "step": step,
    }
    if rank == 0:
        print(f"accuracy by the average: {share:.4f}")
        torch.save(saved, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    main(arguments.folder, arguments.steps)
    dist.barrier()  # rank 0 still writes: a rank that ends before has ended in an abort
    dist.destroy_process_group()
