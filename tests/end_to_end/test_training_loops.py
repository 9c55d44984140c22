"""What people do around a model: hooks, repeated backwards, evaluation in between, several models under one loss.

All equal to plain torch at stages 2 and 3.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from zoo import (
    Case,
    Stack,
    adamw,
    check,
    every_mode,
    normal_batches,
    reference,
    run_threads,
    same,
    seeded,
    sgd,
    square,
)  # fmt: skip

import zeroshard as zs

# -- hooks -----------------------------------------------------------------------------------------------------


@every_mode
def test_user_hooks_fire_as_in_plain_torch(mode):
    """Forward hooks, tensor hooks that change the gradient, and post-accumulate hooks, set before and after."""

    def install(model, log):
        model.blocks[1].register_forward_hook(lambda m, a, out: (log.append("forward"), out * 2)[1])
        model.blocks[0].register_forward_pre_hook(lambda m, a: (log.append("pre"), (a[0] + 1,))[1])
        model.blocks[2].up.weight.register_hook(lambda grad: (log.append("tensor"), grad * 3)[1])
        model.last.bias.register_post_accumulate_grad_hook(lambda p: log.append(("accumulated", tuple(p.shape))))

    (batches,), base = normal_batches(1, 1, 4, 7), seeded(Stack)

    def run(rank, sharded, before):
        model, log = copy.deepcopy(base), []
        if before:
            install(model, log)
        if sharded:
            model, _ = zs.shard(model, None, **mode)
        if not before:
            install(model, log)
        for _ in range(2):
            square(model, batches[0]).backward()
        grads = zs.full_gradients(model) if sharded else {n: p.grad for n, p in model.named_parameters()}
        return log, grads

    wanted_log, wanted = run(0, False, True)
    for before in (True, False):
        ((log, grads),) = run_threads(1, run, True, before)
        assert sorted(map(str, log)) == sorted(map(str, wanted_log)), before
        for name, grad in wanted.items():
            same(grads[name], grad, name, 0.0)


def test_hooks_stay_with_the_parameter_when_the_model_is_closed():
    def run(rank):
        model, log = seeded(Stack), []
        model.last.bias.register_post_accumulate_grad_hook(lambda p: log.append("before"))
        model.last.bias.register_hook(lambda g: log.append("tensor before"))
        model, _ = zs.shard(model, None, stage=3)
        model.last.bias.register_hook(lambda g: log.append("tensor after"))
        model.first.bias.register_post_accumulate_grad_hook(lambda p: log.append("after"))
        zs.close(model)
        square(model, (torch.ones(2, 7),)).backward()
        return sorted(log)

    assert run_threads(1, run) == [["after", "before", "tensor after", "tensor before"]]


@every_mode
def test_full_backward_hooks_of_the_user(mode):
    seen = []
    model = seeded(Stack)
    model.blocks[1].register_full_backward_hook(lambda m, inputs, outputs: seen.append(outputs[0].shape))
    check(Case(model, normal_batches(2, 2, 4, 7), square), **mode)
    assert len(seen) == 2 * 2 * 2  # steps x ranks x (reference, sharded)


# -- loops -----------------------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("loop", ["twice", "retained", "two_losses", "created", "grad"])
def test_several_backwards_before_a_step(mode, loop):
    base, batches = seeded(Stack), normal_batches(3, 2, 4, 7)

    def backward(model, batch):
        if loop == "twice":
            square(model, batch).backward()
            model(*batch).sum().backward()
        elif loop == "retained":
            loss = square(model, batch)
            loss.backward(retain_graph=True)
            loss.backward()
        elif loop == "two_losses":
            out = model(*batch)
            out.sum().backward(retain_graph=True)
            out.square().mean().backward()
        elif loop == "created":
            square(model, batch).backward(create_graph=True)
        else:
            x = batch[0].clone().requires_grad_()
            (grad,) = torch.autograd.grad(model(x).sum(), x)
            (model(x).sum() + grad.sum()).backward()

    def run(rank):
        model = copy.deepcopy(base)
        model, optimizer = zs.shard(model, adamw(model.parameters()), **mode)
        for ranks in batches:
            backward(model, ranks[rank])
            optimizer.step()
            optimizer.zero_grad()
        return zs.full_state_dict(model)

    replicas = [copy.deepcopy(base) for _ in range(2)]
    optimizers = [adamw(m.parameters()) for m in replicas]
    for ranks in batches:
        for model, batch in zip(replicas, ranks, strict=True):
            backward(model, batch)
        grads = [(a.grad + b.grad) / 2 for a, b in zip(*(m.parameters() for m in replicas), strict=True)]
        for model, optimizer in zip(replicas, optimizers, strict=True):
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.grad = grad.clone()
            optimizer.step()
            optimizer.zero_grad()
    for state in run_threads(2, run):
        for name, value in replicas[0].state_dict().items():
            same(state[name], value, name, 2e-5)


@every_mode
def test_autocast_around_the_forward(mode):
    def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return square(model, batch).float()

    check(Case(seeded(Stack), normal_batches(3, 2, 4, 7), loss), **mode)


@every_mode
def test_torch_autograd_grad_gives_local_gradients(mode):
    """Of the user's parameters, as of any data-parallel model: not averaged, and `p.grad` is not touched."""
    plain, (batches,) = seeded(Stack), normal_batches(1, 2, 4, 7)

    def run(rank):
        model, _ = zs.shard(copy.deepcopy(plain), None, **mode)
        expected = copy.deepcopy(plain)
        for _ in range(2):
            mine = torch.autograd.grad(square(model, batches[rank]), list(model.parameters()))
            theirs = torch.autograd.grad(square(expected, batches[rank]), list(expected.parameters()))
            for name, got, wanted in zip(dict(plain.named_parameters()), mine, theirs, strict=True):
                same(got, wanted, name, 0.0)
            assert all(p.grad is None for p in model.parameters())
        square(model, batches[rank]).backward()
        return zs.full_gradients(model)

    first, second = run_threads(2, run)
    losses = [square(plain, batch) for batch in batches]
    for name, param in plain.named_parameters():
        wanted = sum(torch.autograd.grad(loss, param, retain_graph=True)[0] for loss in losses) / 2
        same(first[name], second[name], name, 0.0)
        same(first[name], wanted, name, 1e-6)


@every_mode
@pytest.mark.parametrize("train_mode", [True, False])
def test_evaluation_in_between(mode, train_mode):
    def evaluate(model):
        model.train(train_mode)
        outs = []
        with torch.no_grad():
            outs.append(model(torch.ones(2, 7)))
        with torch.inference_mode():
            outs.append(model(torch.ones(2, 7)).clone())
        model(torch.ones(2, 7))  # a forward whose graph is dropped
        model.train()
        assert torch.equal(outs[0], outs[1])

    check(Case(seeded(Stack), normal_batches(4, 2, 4, 7), square, after=evaluate), **mode)


@every_mode
def test_a_graph_that_is_alive_when_the_model_is_sharded_and_closed(mode):
    """A loss variable of a warm-up keeps its graph; neither it nor that of the last step gets in the way."""
    base, batches = seeded(Stack), normal_batches(2, 2, 4, 7)

    def run(rank):
        model = copy.deepcopy(base)
        optimizer = adamw(model.parameters())
        warm = square(model, batches[0][rank])
        warm.backward()
        optimizer.zero_grad()
        model, optimizer = zs.shard(model, optimizer, **mode)
        for ranks in batches:
            loss = square(model, ranks[rank])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        zs.close(model)
        square(model, batches[0][rank]).backward()
        assert all(p.grad is not None for p in model.parameters())
        return {n: p.detach() for n, p in model.named_parameters()}, warm, loss

    wanted = reference(Case(base, batches, square))[0].state
    for state, _, _ in run_threads(2, run):
        for name, value in wanted.items():
            same(state[name], value, name, 0.0)


@every_mode
def test_a_step_without_backward_changes_nothing(mode):
    base = seeded(Stack)

    def run(rank):
        model = copy.deepcopy(base)
        model, optimizer = zs.shard(model, adamw(model.parameters()), **mode)
        optimizer.step()
        assert optimizer.last_step.skipped
        return zs.full_state_dict(model)

    for state in run_threads(2, run):
        for name, value in base.state_dict().items():
            same(state[name], value, name, 0.0)


@every_mode
def test_c14_two_engines_and_a_frozen_reference_under_one_loss(mode):
    base, other, frozen = (seeded(Stack, seed=s) for s in range(3))
    batches = normal_batches(3, 2, 4, 7)

    def loss(models, x: Tensor):
        a, b, c = (model(x) for model in models)
        return (a - c).square().mean() + (a * b).sum() * 0.1

    def run(rank):
        first = copy.deepcopy(base)
        first, optimizer = zs.shard(first, adamw(first.parameters()), **mode)
        second = copy.deepcopy(other)
        second, optimizer2 = zs.shard(second, sgd(second.parameters()), stage=1)
        third, _ = zs.shard(copy.deepcopy(frozen).requires_grad_(False), None, stage=3)
        for ranks in batches:
            loss((first, second, third), *ranks[rank]).backward()
            for each in (optimizer, optimizer2):
                each.step()
                each.zero_grad()
        return [zs.full_state_dict(m) for m in (first, second, third)]

    class All(nn.Module):
        def __init__(self):
            super().__init__()
            self.models = nn.ModuleList(copy.deepcopy([base, other, frozen]))
            self.models[2].requires_grad_(False)

        def forward(self, x):
            return loss(self.models, x)

    class Both(torch.optim.Optimizer):
        def __init__(self, params):
            half = len(params) // 2
            self.each = adamw(params[:half]), sgd(params[half:])
            super().__init__(params, {})

        def step(self):
            for optimizer in self.each:
                optimizer.step()

    wanted = reference(Case(All(), batches, optimizer=Both))[0].state
    for states in run_threads(2, run):
        for number, state in enumerate(states):
            for name, value in state.items():
                same(value, wanted[f"models.{number}.{name}"], f"model {number}, {name}", 0.0)
