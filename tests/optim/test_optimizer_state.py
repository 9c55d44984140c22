"""Gradients and states as the user may handle them: dropped, zeroed, written by hand, shown, saved, loaded, kept.

Everything is compared with plain torch on one process, bit for bit.
"""

import copy
import math

import pytest
import torch
from helpers import differences, seeded, state_differences
from optimizers import ALL_STAGES, DATA, MODEL, OPTIMIZERS, WORLD, backward, pair, run_both

import zeroshard as zs
from zeroshard.testing import run_threads


@ALL_STAGES
@pytest.mark.parametrize("how", ["optimizer", "model", "assign", "optimizer zeros", "model zeros"])
def test_every_way_to_drop_gradients(stage, how):
    def loop(model, optimizer, batch_of):
        for step in range(4):
            backward(model, batch_of(step))
            optimizer.step()
            if how.startswith("optimizer"):
                optimizer.zero_grad(set_to_none="zeros" not in how)
            elif how.startswith("model"):
                model.zero_grad(set_to_none="zeros" not in how)
            else:
                for p in model.parameters():
                    p.grad = None

    run_both(loop, stage)


@ALL_STAGES
def test_a_gradient_set_to_zero_is_still_stepped(stage):
    """set_to_none=False leaves zeros, and a step with zeros decays moments and weights, as in torch."""

    def loop(model, optimizer, batch_of):
        backward(model, batch_of(0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()

    run_both(loop, stage)


@ALL_STAGES
def test_gradients_that_stay_are_stepped_again(stage):
    def loop(model, optimizer, batch_of):
        backward(model, batch_of(0))
        optimizer.step()
        optimizer.step()

    run_both(loop, stage)


@ALL_STAGES
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("write", ["scale", "zero", "assign", "through data", "foreach"])
def test_gradients_changed_by_hand_are_what_is_measured_and_stepped(stage, precision, write):
    """The norm is that of what is stepped, whether it was found on the way or not."""

    def change(model):
        grads = [p.grad for p in model.parameters()]
        for p in model.parameters():
            if write == "scale":
                p.grad.mul_(0.5).add_(p.grad, alpha=3.0)
            elif write == "zero":
                p.grad.zero_()
            elif write == "assign":
                p.grad = p.grad * 4.0
            elif write == "through data":
                p.grad.data.mul_(8.0)
        if write == "foreach":
            torch._foreach_mul_(grads, 0.25)

    def rank_run(rank):
        model, optimizer = zs.shard(*pair(copy.deepcopy(MODEL)), stage=stage, precision=precision)
        for step in range(2):
            backward(model, [DATA[step][0][rank]])
            change(model)
            expected = torch.cat([g.reshape(-1) for g in zs.full_gradients(model).values()]).double().norm().item()
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.last_step.grad_norm == pytest.approx(expected, rel=1e-6)
        weights = zs.full_state_dict(model, masters=True)
        zs.close(model)
        return weights

    results = run_threads(WORLD, rank_run)
    if precision == "fp32":
        plain, optimizer = pair(copy.deepcopy(MODEL))
        for step in range(2):
            backward(plain, DATA[step][0])
            change(plain)
            optimizer.step()
            optimizer.zero_grad()
        for weights in results:
            assert not differences(weights, plain.state_dict())


@ALL_STAGES
def test_gradients_made_without_a_backward_are_stepped(stage):
    """Assigned to one parameter only, after a step that left others' gradients behind."""

    def loop(model, optimizer, batch_of):
        backward(model, batch_of(0))
        optimizer.step()
        optimizer.zero_grad()
        weight = model.layers[0].weight
        weight.grad = torch.full(tuple(weight.shape), 0.25)
        optimizer.step()
        if hasattr(optimizer, "last_step"):
            assert optimizer.last_step.grad_norm == 0.25 * math.sqrt(weight.numel())

    run_both(loop, stage)


def plain_steps(model, optimizer, steps) -> None:
    for step in steps:
        backward(model, DATA[step][0])
        optimizer.step()
        optimizer.zero_grad()


@ALL_STAGES
@pytest.mark.parametrize("name", ["adamw", "momentum", "nadam", "lion"])
def test_state_from_before_sharding_goes_on(stage, name):
    plain = copy.deepcopy(MODEL)
    optimizer = OPTIMIZERS[name](plain.parameters())
    plain_steps(plain, optimizer, [0, 1])

    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        mine = OPTIMIZERS[name](model.parameters())
        plain_steps(model, mine, [0, 1])
        model, mine = zs.shard(model, mine, stage=stage)
        early = zs.full_optimizer_state(model)
        for step in (2, 3):
            backward(model, [DATA[step][0][rank]])
            mine.step()
            mine.zero_grad()
        result = early, zs.full_state_dict(model), zs.full_optimizer_state(model)
        zs.close(model)
        return result

    results = run_threads(WORLD, rank_run)
    before = {n: copy.deepcopy(dict(optimizer.state.get(p, {}))) for n, p in plain.named_parameters()}
    plain_steps(plain, optimizer, [2, 3])
    after = {n: dict(optimizer.state.get(p, {})) for n, p in plain.named_parameters()}
    for early, weights, late in results:
        assert not state_differences(early, before)
        assert not differences(weights, plain.state_dict())
        assert not state_differences(late, after)


@ALL_STAGES
@pytest.mark.parametrize("source", ["its own", "a plain optimizer's"])
def test_a_state_dict_can_be_loaded_again(stage, source):
    """Back to the moments of step 2, from this optimizer's own state_dict or from one process's, then on."""
    plain = copy.deepcopy(MODEL)
    optimizer = OPTIMIZERS["adamw"](plain.parameters())
    plain_steps(plain, optimizer, [0, 1])
    saved = copy.deepcopy(optimizer.state_dict())

    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        model, mine = zs.shard(model, OPTIMIZERS["adamw"](model.parameters()), stage=stage)

        def sharded_step(step):
            backward(model, [DATA[step][0][rank]])
            mine.step()
            mine.zero_grad()

        sharded_step(0)
        sharded_step(1)
        own = mine.state_dict()
        own["state"] = {
            i: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in s.items()} for i, s in own["state"].items()
        }
        weights = zs.full_state_dict(model)
        sharded_step(2)  # to be forgotten
        mine.load_state_dict(own if source == "its own" else saved)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(weights[name])
        sharded_step(3)
        result = zs.full_state_dict(model), zs.full_optimizer_state(model)
        zs.close(model)
        return result

    results = run_threads(WORLD, rank_run)
    plain_steps(plain, optimizer, [3])
    states = {n: dict(optimizer.state.get(p, {})) for n, p in plain.named_parameters()}
    for weights, got in results:
        assert not differences(weights, plain.state_dict())
        assert not state_differences(got, states)


@ALL_STAGES
def test_states_are_shown_by_parameter_with_true_shapes(stage):
    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, OPTIMIZERS["adamw"](model.parameters()), stage=stage)
        assert not optimizer.state
        backward(model, [DATA[0][0][rank]])
        optimizer.step()
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
        for p in model.parameters():
            assert optimizer.state[p]["exp_avg"].shape == p.shape
            assert optimizer.state[p]["step"] == 1
        zs.close(model)

    run_threads(WORLD, rank_run)


class Private:
    """A state of a class of its own."""


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_state_of_a_class_of_its_own_stays_with_its_rank(everywhere):
    """Ranks tell each other plain values alone; who would need what can not be told raises, on every rank."""

    def rank_run(rank):
        class Odd(torch.optim.SGD):
            def step(self, closure=None):
                super().step(closure)
                for param in self.param_groups[0]["params"] if everywhere or rank else ():
                    self.state[param]["private"] = Private()

        model = seeded(lambda: torch.nn.Linear(64, 2, bias=False))
        model, optimizer = zs.shard(model, Odd(model.parameters(), lr=0.1), stage=2)
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        if everywhere:
            assert type(zs.full_optimizer_state(model)["weight"]["private"]) is Private
        else:
            with pytest.raises(zs.ConfigError, match="'private' of weight"):
                zs.full_optimizer_state(model)
        zs.close(model)

    run_threads(2, rank_run)
