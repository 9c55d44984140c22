"""Reentrant checkpoints run backwards inside of the backward: parameters that several of them use, and where the step's backward ends."""

from __future__ import annotations

import copy

import pytest
import torch
from late_modules import Again, NormOutside, Within
from torch import Tensor, nn
from zoo import MODES, Block, Case, check, normal_batches, run_threads, same, seeded, sgd, square

import zeroshard as zs
from zeroshard.engine.runtime import runtime_of

DIM = 7
STAGES = [pytest.param({"stage": 0}, id="stage0"), pytest.param({"stage": 1}, id="stage1"), *MODES]
every_stage = pytest.mark.parametrize("mode", STAGES)


def accumulated(model: nn.Module, batch: tuple) -> Tensor:
    """The loss of the last micro-batch; the first went into zs.accumulate, or (plain) into p.grad."""
    (x,) = batch
    if "_zeroshard" in model.__dict__:
        with zs.accumulate(model):
            square(model, (x + 1.0,)).backward()
    else:
        square(model, (x + 1.0,)).backward()
    return square(model, batch)


@every_stage
@pytest.mark.parametrize("loss", [square, accumulated], ids=["one", "accumulated"])
@pytest.mark.parametrize("units", ["leaf", (Block,)], ids=["leaf", "block"])
@pytest.mark.parametrize("build", [Again, Within, NormOutside])
def test_gradients_that_come_after_the_reduction_are_added(mode, loss, units, build):
    """Equal but for the order of additions: what was late is reduced by itself."""
    check(Case(seeded(build), normal_batches(3, 2, 4, DIM), loss, optimizer=sgd, tolerance=1e-5), units=units, **mode)


@pytest.mark.parametrize("options", [{"offload_gradient": "cpu", "offload_optimizer": "cpu"}, {"overlap": False}], ids=str)
def test_gradients_that_rest_elsewhere(options):
    check(Case(seeded(Within), normal_batches(3, 2, 4, DIM), square, optimizer=sgd, tolerance=1e-5), stage=3, **options)


@every_stage
def test_on_one_rank_only(mode):
    """Ranks use the block 0, 1 and 3 times: all join what is reduced once more."""
    batches = [[(x, times) for (x,), times in zip(row, (0, 1, 3), strict=True)] for row in normal_batches(3, 3, 4, DIM)]
    check(Case(seeded(Again), batches, square, optimizer=sgd, tolerance=1e-5), **mode)


@every_stage
def test_one_step_is_one_reduction_and_one_more_for_what_was_late(mode):
    """Counted: every nested backward does not end the step's."""

    def run(rank):
        model, _ = zs.shard(seeded(Again), None, units=(Block,), **mode)
        square(model, (torch.ones(2, DIM),)).backward()
        return runtime_of(model).tiers.ledger.traffic["reduce"].units

    for units in run_threads(2, run):
        assert {label.split()[1]: count for label, count in units.items()} == {"block": 2, "(root)": 1}, units


class Fails(nn.Module):
    """A backward that raises, if told so, when some gradients are there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, fail: bool) -> Tensor:
        x = self.first(x)
        if fail:
            x.register_hook(lambda grad: 1 / 0)
        return self.last(x)


@every_stage
def test_a_backward_that_failed_does_not_spoil_the_next_though_no_forward_came_between(mode):
    plain = seeded(Fails)

    def run(rank):
        model, _ = zs.shard(copy.deepcopy(plain), None, units="leaf", **mode)
        x = torch.ones(2, DIM)
        bad, good = square(model, (x, True)), square(model, (x, False))
        with pytest.raises(ZeroDivisionError):
            bad.backward()
        good.backward()
        expected = copy.deepcopy(plain)
        square(expected, (x, False)).backward()
        for name, grad in zs.full_gradients(model).items():
            same(grad, dict(expected.named_parameters())[name].grad, name, 1e-6)

    run_threads(2, run)
