"""A classifier of images trained by DistributedDataParallel: accumulation, clipping, a moving average, evaluation, checkpoints.

Run: torchrun --nproc-per-node 2 examples/ddp_before.py FOLDER --steps 20; again with --steps 40 it goes on where it was.
Prints the loss of every fifth step, and the accuracy on held-out images by the moving average. ddp_after.py is the same program with
zeroshard, and prints the same numbers.
"""

import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    path, step = os.path.join(folder, "checkpoint.pt"), 0
    if os.path.exists(path):
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        average.load_state_dict(saved["average"])
        step = saved["step"]
    model = DDP(model)

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
                with torch.no_grad():
                    for mine, new in zip(average.parameters(), model.module.parameters(), strict=True):
                        mine.lerp_(new, 1 - DECAY)
        if rank == 0:
            print(f"step {step}: loss {accumulate * loss.item():.4f}")

    if rank == 0:
        print(f"accuracy by the average: {accuracy(average):.4f}")
        saved = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "average": average.state_dict(),
            "step": step,
        }
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
