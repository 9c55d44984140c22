"""The dynamic loss scale step by step: when it is halved, when doubled, and what overflows in between use up.

The sequences with a delay of 1 are those of DeepSpeed's DynamicLossScaler (0.19.8): worked out by hand, and 300 random ones compared once.
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from zoo import Stack, run_threads, same, seeded

import zeroshard as zs
from zeroshard.engine.mixed_precision import LossScaler

# name: (options, steps (x: an overflow), the scale after each)
SEQUENCES = {
    "plain": ({}, "....x..x", [256, 512, 512, 1024, 512, 512, 1024, 512]),
    "delay": ({"loss_scale_delay": 1}, ".......", [256, 256, 512, 512, 1024, 1024, 2048]),
    "delay after each overflow": ({"loss_scale_delay": 1}, "x..x...", [128, 128, 128, 64, 64, 64, 128]),
    "hysteresis": (
        {"loss_scale_delay": 1, "loss_scale_hysteresis": 2}, "xxxx.x...xx", [256, 128, 64, 32, 32, 16, 16, 16, 32, 32, 16],
    ),
    "consecutive": (
        {"loss_scale_delay": 1, "loss_scale_hysteresis": 2, "consecutive_hysteresis": True, "loss_scale_window": 3},
        "x.x.x.xx.xx", [256, 256, 256, 256, 256, 256, 256, 128, 128, 128, 64],
    ),
    "an overflow that is let pass delays": (
        {"loss_scale_delay": 1, "loss_scale_hysteresis": 3, "loss_scale_window": 3},
        "xxx....x.xxx", [256, 256, 128, 128, 128, 128, 256, 256, 256, 256, 128, 64],
    ),
    "minimum": ({"loss_scale_delay": 1, "min_loss_scale": 64.0}, "xxxxx...", [128, 64, 64, 64, 64, 64, 64, 128]),
}  # fmt: skip


def scaler_of(options):
    return LossScaler(zs.Config(precision="fp16", **{"initial_loss_scale": 256.0, "loss_scale_window": 2, **options}))


def scales(scaler, steps):
    found = []
    for step in steps:
        scaler.update(overflow=step == "x")
        found.append(scaler.scale)
    return found


@pytest.mark.parametrize("name", SEQUENCES)
def test_the_scale_after_each_step(name):
    options, steps, expected = SEQUENCES[name]
    assert scales(scaler_of(options), steps) == expected


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_checkpoint_between_two_steps_changes_nothing(name):
    options, steps, expected = SEQUENCES[name]
    for cut in range(len(steps)):
        first, second = scaler_of(options), scaler_of(options)
        scales(first, steps[:cut])
        second.load(first.state())
        assert scales(second, steps[cut:]) == expected[cut:]


def test_a_fixed_scale_stays():
    scaler = scaler_of({"loss_scale": 8.0, "loss_scale_hysteresis": 2})
    assert scales(scaler, "x.x....") == [8.0] * 7


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("case", ["two models", "fed again", "inside of itself", "the input's"])
def test_a_gradient_that_enters_several_times_is_scaled_once(stage, case):
    """In fp16: an output that is an input again, of the same model or of another."""

    class Recursive(Stack):
        def forward(self, x: Tensor, depth: int = 0) -> Tensor:
            return self.last(x) if depth == 0 else self(torch.tanh(self.first(x)), depth - 1)

    def loss(one: nn.Module, other: nn.Module, x: Tensor) -> Tensor:
        if case == "inside of itself":
            return one(x, depth=2).square().mean() + 0 * other(x).sum()
        hidden = one(x)
        again = {"two models": other, "fed again": one}.get(case)
        return (hidden if again is None else again(hidden.repeat(1, 3)[:, :7])).square().mean() + 0 * other(x).sum()

    bases = [seeded(Recursive), seeded(Recursive, seed=1)]
    plain = copy.deepcopy(bases)
    x = torch.linspace(-1, 1, 14).view(2, 7).requires_grad_()
    loss(*plain, x).backward()
    wanted, others = [{n: p.grad for n, p in model.named_parameters()} for model in plain]

    def run(rank: int) -> None:
        models = copy.deepcopy(bases)
        for model in models:
            zs.shard(model, None, stage=stage, precision="fp16", loss_scale=256.0, map_shared=False)
        mine = x.detach().clone().requires_grad_()
        loss(*models, mine).backward()
        same(mine.grad, x.grad, "x", 1e-2)
        for model, grads in zip(models, (wanted, others), strict=True):
            for name, grad in zs.full_gradients(model).items():
                assert (grad is None) == (grads[name] is None), name
                if grad is not None:
                    same(grad, grads[name], name, 1e-2)

    run_threads(2, run)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_backward_inside_of_the_forward_is_scaled(stage):
    """As a training loop does that is a method of its model: the loss of an inner forward, before the outer one has ended."""

    class Loop(Stack):
        def forward(self, x: Tensor, train: bool = False) -> Tensor:
            if not train:
                return super().forward(x)
            loss = self(x).square().mean()
            loss.backward()
            return loss.detach()

    base = seeded(Loop)
    plain, x = copy.deepcopy(base), torch.linspace(-1, 1, 14).view(2, 7)
    plain(x, train=True)

    def run(rank: int) -> None:
        model = copy.deepcopy(base)
        zs.shard(model, None, stage=stage, precision="fp16", loss_scale=256.0)
        model(x, train=True)
        wanted = {name: param.grad for name, param in plain.named_parameters()}
        for name, grad in zs.full_gradients(model).items():
            same(grad, wanted[name], name, 1e-2)

    run_threads(2, run)
