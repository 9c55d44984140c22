"""Optimizers, a model, its data, and a loop that runs both sharded and in plain torch, for the tests of the optimizer."""

import copy

import pytest
import torch
from helpers import MLP, differences, seeded, state_differences, vector_batches
from torch import nn

import zeroshard as zs
from zeroshard.testing import run_threads

WORLD = 2
MODEL = seeded(MLP)
DATA = vector_batches(4, 1, WORLD)
STAGES = (0, 1, 2, 3)
ALL_STAGES = pytest.mark.parametrize("stage", STAGES)


class Lion(torch.optim.Optimizer):
    """A custom elementwise optimizer, as users write them: per parameter, with a state of its own (arXiv 2302.06675)."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                    state["steps"] = 0
                state["steps"] += 1
                first, second = group["betas"]
                direction = state["momentum"].mul(first).add(p.grad, alpha=1 - first).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                state["momentum"].mul_(second).add_(p.grad, alpha=1 - second)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.01),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True, maximize=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, betas=(0.8, 0.9)),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "adamw tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2)),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.9, centered=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2, weight_decay=0.01),
    "radam": lambda params: torch.optim.RAdam(params, lr=1e-2),
    "adamax": lambda params: torch.optim.Adamax(params, lr=1e-2),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=1.0),
    "asgd": lambda params: torch.optim.ASGD(params, lr=1e-2),
    "rprop": lambda params: torch.optim.Rprop(params, lr=1e-2),
    "lion": lambda params: Lion(params, lr=1e-2, weight_decay=0.1),
}


def pair(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, OPTIMIZERS["adamw"](model.parameters())


def run_both(loop, stage: int, world_size: int = WORLD, **options) -> None:
    """loop(model, optimizer, batch_of, sharded) -> optimizer: the same code for both; then everything is compared.

    In plain torch the "batch" is that of all ranks one after another, with the mean of their gradients.
    """

    def rank_run(rank: int):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, OPTIMIZERS["adamw"](model.parameters()), stage=stage, **options)
        loop(model, optimizer, lambda step: [DATA[step][0][rank]])
        result = zs.full_state_dict(model), zs.full_optimizer_state(model)
        zs.close(model)
        return result

    plain = copy.deepcopy(MODEL)
    optimizer = OPTIMIZERS["adamw"](plain.parameters())
    loop(plain, optimizer, lambda step: DATA[step][0])
    states = {name: dict(optimizer.state.get(p, {})) for name, p in plain.named_parameters()}
    for weights, got_states in run_threads(world_size, rank_run):
        assert not differences(weights, plain.state_dict())
        assert not state_differences(got_states, states)


def backward(model: nn.Module, batches: list) -> None:
    """Backward of this rank's batch, or (plain) of every rank's, with the mean left in .grad."""
    for batch in batches:
        model(*batch).backward()
    if len(batches) > 1:
        for p in model.parameters():
            p.grad.mul_(1.0 / len(batches))
