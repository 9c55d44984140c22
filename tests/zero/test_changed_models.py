"""A model that was changed after zs.shard() is refused at its next forward: a parameter came, or its dtype is another."""

import copy

import pytest
import torch
from torch import nn
from zoo import every_mode, run_threads, seeded, sgd

import zeroshard as zs

X = torch.ones(2, 5)


class Net(nn.Module):
    """Parts that may get a parameter: a Linear without bias, a module without any, a container."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(5, 3, bias=False)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out = self.last(x)
        return out if "extra" not in self.last._parameters else out + self.last.extra


def a_new_one(model):
    model.last.extra = nn.Parameter(torch.zeros(3))


def an_absent_bias(model):
    model.last.bias = nn.Parameter(torch.zeros(3))


def in_a_module_without(model):
    model.blocks[1][1].scale = nn.Parameter(torch.ones(5))


def in_the_root(model):
    model.scale = nn.Parameter(torch.ones(5))


def removed(model):
    model.first.bias = None


CHANGES = {
    a_new_one: "last.extra", an_absent_bias: "last.bias", in_a_module_without: r"blocks.1.1.scale", in_the_root: "scale",
    removed: "first.bias",
}  # fmt: skip


@every_mode
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_parameter_that_came_or_went_is_named(mode, change):
    def run(rank):
        model = seeded(Net)
        zs.shard(model, sgd(model.parameters()), **mode)
        model(X).sum().backward()
        change(model)
        with pytest.raises(zs.ModelChanged, match=rf"parameter {CHANGES[change]} was replaced.*zs.close\(model\) first"):
            model(X)

    run_threads(2, run)


def unfrozen(model):
    model.blocks[1][0].weight.requires_grad_(True)


def replaced_last(model):
    model.last.weight = nn.Parameter(torch.zeros(3, 5))


def exchanged(model):
    first, second = (block[0]._parameters for block in model.blocks)
    first["weight"], second["weight"] = second["weight"], first["weight"]


@every_mode
@pytest.mark.parametrize("change", [unfrozen, replaced_last, a_new_one, removed, exchanged], ids=lambda f: f.__name__)
def test_a_refused_change_has_done_no_harm(mode, change, tmp_path):
    """A unit of several parameters, the last of which is another: undone, it trains on; closed, all of it is there."""

    initial = seeded(Net)
    initial.blocks[1][0].weight.requires_grad_(False)

    def run(rank):
        model, plain = copy.deepcopy(initial), copy.deepcopy(initial)
        model, optimizer = zs.shard(model, sgd(model.parameters()), units="model", **mode)
        theirs = sgd(plain.parameters())

        def steps():
            for each, stepped in ((model, optimizer), (plain, theirs)):
                each(X).sum().backward()
                stepped.step()
                stepped.zero_grad()

        steps()
        modules = list(model.modules())
        before = [dict(module._parameters) for module in modules]
        change(model)
        with pytest.raises(zs.ModelChanged):
            model(X)
        if change is not unfrozen:
            for call in (zs.save, zs.load):
                with pytest.raises(zs.ModelChanged, match="was replaced"):
                    call(tmp_path, model, optimizer)
        for module, params in zip(modules, before, strict=True):
            module._parameters.clear()
            module._parameters.update(params)
        model.blocks[1][0].weight.requires_grad_(False)
        steps()
        change(model)
        with pytest.raises(zs.ModelChanged):
            model(X)
        zs.close(model)
        change(plain)
        for (name, mine), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert type(mine) is nn.Parameter and mine.requires_grad is other.requires_grad, name
            assert torch.equal(mine, other), name
        zs.close(zs.shard(model, sgd(model.parameters()), **mode)[0])

    run_threads(2, run)
    assert not any(tmp_path.iterdir())


@every_mode
def test_the_conversion_of_a_part_is_named(mode):
    """Not the first parameter of its group."""

    def run(rank):
        model = seeded(Net)
        zs.shard(model, sgd(model.parameters()), units="model", **mode)
        with pytest.raises(zs.ModelChanged, match=r"parameter last\.weight was converted from .*float32 on cpu to .*float16"):
            list(model.modules())[-1].half()
        model(X)  # nothing has changed

    run_threads(2, run)


@every_mode
@pytest.mark.parametrize("how", ["half", "bfloat16", "double", "to"])
def test_a_conversion_is_named(mode, how):
    def run(rank):
        model = seeded(Net)
        zs.shard(model, sgd(model.parameters()), **mode)
        model(X)
        model.float()  # is what it was
        model(X)
        message = r"parameter first.weight was converted from .*torch.float32 on cpu to .*precision='bf16'"
        with pytest.raises(zs.ModelChanged, match=message):
            model.to(torch.float16) if how == "to" else getattr(model, how)()
        model(X).sum().backward()  # nothing has changed

    run_threads(2, run)
