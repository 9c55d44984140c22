"""Post-accumulate hooks of a program: what they see at each stage, and optimizers that they would step in backward."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from zoo import Stack, normal_batches, run_threads, same, seeded, square

import zeroshard as zs
from zeroshard.utils.torch_compat import HOOK_TABLES, carry_hooks, has_hooks, post_accumulate_hooks

BASE = seeded(Stack)
BATCHES = normal_batches(3, 2, 4, 7)
every_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])
BY_NAME: dict[Tensor, torch.optim.Optimizer] = {}  # that a hook finds by its name


def sgd(params: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class Keeps:
    """An object that keeps optimizers, as trainers do."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.optimizers = {param: sgd([param]) for param in params}

    def step(self, param: Tensor) -> None:
        self.optimizers[param].step()
        self.optimizers[param].zero_grad()

    __call__ = step


def in_a_closure(params: list[nn.Parameter]) -> None:
    """The recipe of PyTorch's tutorial, which GaLore's layer-wise optimizers and torchtune follow."""
    optimizers = {param: sgd([param]) for param in params}

    def step(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in params:
        param.register_post_accumulate_grad_hook(step)


def one_each(params: list[nn.Parameter]) -> None:
    def step(optimizer: torch.optim.Optimizer, param: Tensor) -> None:
        optimizer.step()

    for param in params:
        param.register_post_accumulate_grad_hook(functools.partial(step, sgd([param])))


def of_an_object(params: list[nn.Parameter]) -> None:
    kept = Keeps(params)
    for param in params:
        param.register_post_accumulate_grad_hook(kept.step)


def an_object(params: list[nn.Parameter]) -> None:
    kept = Keeps(params)
    for param in params:
        param.register_post_accumulate_grad_hook(kept)


def by_name(params: list[nn.Parameter]) -> None:
    BY_NAME.update({param: sgd([param]) for param in params})
    for param in params:
        param.register_post_accumulate_grad_hook(lambda param: BY_NAME[param].step())


def of_torch(params: list[nn.Parameter]) -> None:
    _apply_optimizer_in_backward(torch.optim.SGD, params, {"lr": 0.1})


RECIPES = [in_a_closure, one_each, of_an_object, an_object, by_name, of_torch]


@every_stage
@pytest.mark.parametrize("given", [True, False], ids=["beside another", "alone"])
def test_an_optimizer_in_backward_is_refused_and_the_remedy_trains(stage, given):
    """As on one process, on the mean of the gradients."""
    plain = copy.deepcopy(BASE)
    in_a_closure(list(plain.parameters()))
    for batches in BATCHES:
        (sum(square(plain, batch) for batch in batches) / 2).backward()

    def run(rank: int) -> None:
        model = copy.deepcopy(BASE)
        params = list(model.parameters())
        before = [(id(param), type(param), param.detach().clone()) for param in params]
        in_a_closure(params)
        optimizer = sgd(params) if given else None
        with pytest.raises(
            zs.ConfigError, match=r"first.weight.*and 19 more.*optimizer of its own \(SGD\).*give zs.shard one optimizer"
        ):
            zs.shard(model, optimizer, stage=stage)
        for param, (identity, cls, value) in zip(model.parameters(), before, strict=True):
            assert (id(param), type(param)) == (identity, cls) and torch.equal(param, value)
        for param in params:
            post_accumulate_hooks(param).clear()
        model, optimizer = zs.shard(model, sgd(params), stage=stage)
        for batches in BATCHES:
            square(model, batches[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, value in zs.full_state_dict(model).items():
            same(value, plain.state_dict()[name], name, 1e-5)

    run_threads(2, run)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_wherever_the_optimizer_is_kept_it_is_found(recipe):
    def run(rank: int) -> None:
        model = copy.deepcopy(BASE)
        recipe([model.last.weight, model.last.bias])
        with pytest.raises(zs.ConfigError, match=r"^last.weight, last.bias: a hook steps an optimizer of its own \(SGD\)"):
            zs.shard(model, sgd(model.parameters()), stage=2)

    run_threads(1, run)
    BY_NAME.clear()


@every_stage
def test_after_zs_shard_it_is_refused_where_it_is_registered(stage):
    def run(rank: int) -> None:
        model, _ = zs.shard(copy.deepcopy(BASE), None, stage=stage)
        optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}
        with pytest.raises(
            zs.ConfigError, match=r"last.bias: this hook steps an optimizer of its own \(SGD\).*give zs.shard one optimizer"
        ):
            model.last.bias.register_post_accumulate_grad_hook(lambda param: optimizers[param].step())
        square(model, BATCHES[0][rank]).backward()

    run_threads(2, run)


@every_stage
def test_an_optimizer_that_hooks_may_look_at(stage):
    """The one that zs.shard is given, what wraps it, and one of other parameters."""

    def run(rank: int) -> list[float]:
        model, seen = copy.deepcopy(BASE), []
        optimizer, elsewhere = sgd(model.parameters()), sgd([nn.Parameter(torch.ones(1))])
        wrapper = torch.optim.Optimizer.__new__(torch.optim.Optimizer)
        wrapper.__dict__.update(optimizer.__dict__)
        for rates in (optimizer, wrapper, elsewhere):
            model.last.bias.register_post_accumulate_grad_hook(
                lambda param, rates=rates: seen.append(rates.param_groups[0]["lr"])
            )
        model, optimizer = zs.shard(model, optimizer, stage=stage)
        model.first.bias.register_post_accumulate_grad_hook(lambda param: seen.append(optimizer.param_groups[0]["lr"]))
        square(model, BATCHES[0][rank]).backward()
        return seen

    assert run_threads(2, run) == [[0.1] * 4] * 2


@every_stage
@pytest.mark.parametrize("born", [False, True])
def test_a_hook_gets_the_programs_own_parameter_with_the_local_gradient(stage, born):
    """Registered before; after zs.shard the object is the same, and the gradient has been sent."""
    plain = [copy.deepcopy(BASE) for _ in range(2)]
    for rank, model in enumerate(plain):
        square(model, BATCHES[0][rank]).backward()

    def run(rank: int) -> None:
        if born:
            with zs.init(stage=stage):
                model = Stack()
        else:
            model = copy.deepcopy(BASE)
        names, seen = {}, {}

        def before(param: Tensor) -> None:
            seen[names[param], "before"] = param.detach().clone(), param.grad.clone(), param.tag, dict(param.tag)
            param.tag["seen"] = True
            param.grad.mul_(2.0)  # and is sent so

        def after(param: Tensor) -> None:
            seen[names[param], "after"] = param, param.grad

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(before)
        model, _ = zs.shard(model, None, stage=stage, map_shared=False)
        if born:
            with zs.gathered(model, write=True), torch.no_grad():
                for param, value in zip(model.parameters(), BASE.parameters(), strict=True):
                    param.copy_(value)
        for name, param in model.named_parameters():
            names[param], param.tag = name, {"name": name}
            param.register_post_accumulate_grad_hook(after)
        square(model, BATCHES[0][rank]).backward()
        found = zs.full_gradients(model)
        for name, param in plain[rank].named_parameters():
            value, grad, tag, told = seen[name, "before"]
            same(value, param.detach(), name, 0.0)
            same(grad, param.grad, name, 0.0)
            assert told == {"name": name} and tag == {"name": name, "seen": True} == model.get_parameter(name).tag
            own, sent = seen[name, "after"]
            assert own is model.get_parameter(name) and sent is None
            same(found[name], sum(each.get_parameter(name).grad for each in plain), name, 1e-6)
        zs.close(model)
        assert {type(hook) for hook in post_accumulate_hooks(model.last.bias).values()} == {types.FunctionType}
        seen.clear()
        square(model, BATCHES[0][rank]).backward()
        same(seen["last.bias", "after"][1], plain[rank].last.bias.grad * 2, "after close", 1e-6)

    run_threads(2, run)


@every_stage
def test_a_hook_that_writes_the_parameter_is_told(stage):
    """One whose optimizer was not found among them."""

    def run(rank: int) -> None:
        model = copy.deepcopy(BASE)
        hidden = {param: sgd([param]) for param in model.parameters()}
        BY_NAME.update(hidden)
        hook: Callable = lambda param: globals()["BY_" + "NAME"][param].step()  # noqa: E731
        model.last.bias.register_post_accumulate_grad_hook(hook)
        model, _ = zs.shard(model, None, stage=stage, map_shared=False)
        with pytest.raises(
            zs.ShardedWriteError, match="last.bias: a hook has written this parameter in backward.*give zs.shard one optimizer"
        ):
            square(model, BATCHES[0][rank]).backward()
        zs.close(model)

    run_threads(2, run)
    BY_NAME.clear()


def test_torch_keeps_hooks_where_they_are_looked_for():
    """Private: without these tables hooks of a program would be lost when a parameter is sharded."""
    for table in HOOK_TABLES:
        assert hasattr(torch.Tensor, table), (
            f"torch.Tensor has no {table}: where does it keep hooks now? See utils/torch_compat.py"
        )
    one, other, seen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)), []
    assert not has_hooks(one) and post_accumulate_hooks(one) == {}
    handle = one.register_post_accumulate_grad_hook(lambda param: seen.append(param))
    one.register_hook(lambda grad: seen.append(grad))
    assert has_hooks(one) and len(post_accumulate_hooks(one)) == 1
    carry_hooks(one, other)
    (other * 3).sum().backward()
    assert len(seen) == 2 and torch.equal(seen[0], torch.full((2,), 3.0)) and seen[1] is other
    handle.remove()
    assert post_accumulate_hooks(other) == {}, "a handle removes the hook wherever its table is"
