"""A small network, its batches and configurations for the engine, and what one process makes of them with torch alone."""

import functools
import sys

import torch
from torch import nn

from zeroshard.integrations.deepspeed import door

STEPS, BATCH, WIDTH = 3, 2, 12
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}


def install_in_child():
    """Install the stand-in for DeepSpeed in a forked child, as `python -m zeroshard.deepspeed` does in a new process.

    The process of which it is a fork may have imported what decides at its import whether there is DeepSpeed, and found none.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] in door._DECIDE_AT_IMPORT]:
        del sys.modules[name]
    door.install()
    torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 17)
        self.blocks = nn.Sequential(nn.Linear(17, 17), nn.Tanh(), nn.Linear(17, 17), nn.Tanh())
        self.last = nn.Linear(17, 3)

    def forward(self, x, y=None):
        x = x.to(self.first.weight.dtype)  # DeepSpeed casts no inputs
        out = self.last(self.blocks(torch.tanh(self.first(x))))
        return out if y is None else nn.functional.mse_loss(out.to(y.dtype), y)  # torch 2.11 wants one dtype


@functools.cache
def batches(world, gas):
    draw = torch.Generator().manual_seed(7)
    return [
        [
            [(torch.randn(BATCH, WIDTH, generator=draw), torch.randn(BATCH, 3, generator=draw)) for _ in range(world)]
            for _ in range(gas)
        ]
        for _ in range(STEPS)
    ]


def net():
    """The same weights on each rank: threads share torch's generator, so they are not drawn there."""
    model = Net()
    model.load_state_dict(WEIGHTS)
    return model


torch.manual_seed(3)
WEIGHTS = Net().state_dict()


@functools.cache
def reference(world, gas, clip):
    """(loss of each rank's micro-batches, norm of each step, final weights), by one process and torch alone."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    losses, norms = [], []
    for step in batches(world, gas):
        for micro in step:
            for x, y in micro:
                loss = model(x, y)
                (loss / world / gas).backward()
                losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: value.detach().clone() for name, value in model.state_dict().items()}


def config(stage, world, gas, clip=0.0, **more):
    """At stage 3 all parameters are partitioned, as large ones are."""
    return {
        "train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": gas, "train_batch_size": BATCH * gas * world,
        "gradient_clipping": clip, "optimizer": ADAMW,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **more,
    }  # fmt: skip
