"""Partition: every parameter in exactly one unit, and every unit entered through all owners of its parameters.

Module trees are drawn at random: leaves, blocks that own a parameter beside their children, containers, repeated
classes, ties between and within blocks, and one module in two places.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zeroshard.config import Config
from zeroshard.engine.parameter import ParamSpec
from zeroshard.engine.shard_model import UnitPlan
from zeroshard.errors import ConfigError, ShardedAccessError
from zeroshard.policies.units import _merge, _split, collect, partition


class Block(nn.Module):
    """Children in a row, and possibly a parameter of its own."""

    def __init__(self, children: list[nn.Module], own: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(*children)
        if own:
            self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.inner(x)


class Net(nn.Module):
    def __init__(self, children: list[nn.Module], own: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(children)
        self.head = nn.Linear(3, 3)
        if own:
            self.position = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


leaves = st.one_of(
    st.builds(lambda bias: nn.Linear(3, 3, bias=bias), st.booleans()),
    st.builds(lambda: nn.LayerNorm(3)),
    st.builds(lambda: nn.Tanh()),
    st.builds(lambda width: nn.Sequential(nn.Linear(3, width), nn.Linear(width, 3)), st.integers(1, 40)),
)
trees = st.recursive(leaves, lambda inner: st.builds(Block, st.lists(inner, min_size=1, max_size=3), st.booleans()), max_leaves=8)


@st.composite
def nets(draw):
    model = Net(draw(st.lists(trees, min_size=1, max_size=4)), draw(st.booleans()))
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    for _ in range(draw(st.integers(0, 3))):  # ties
        left, right = draw(st.sampled_from(linears)), draw(st.sampled_from(linears))
        if left.weight.shape == right.weight.shape:
            right.weight = left.weight
    if draw(st.booleans()):  # one module in two places
        model.blocks.append(draw(st.sampled_from(list(model.blocks))))
    return model


configs = st.builds(
    lambda units, most, least: Config.build(units=units, max_unit_numel=most, min_unit_numel=least),
    st.sampled_from(["auto", "model", "leaf", lambda name, module: isinstance(module, Block)]),
    st.sampled_from([None, None, 1, 20, 200]),
    st.sampled_from([0, 0, 5, 50, 10**6]),
)


def cut(model: nn.Module, config: Config) -> tuple[list[ParamSpec], list[UnitPlan]]:
    specs = collect(model, config)
    return specs, partition(model, config, specs)


@settings(max_examples=150)
@given(nets(), configs)
def test_every_parameter_is_in_exactly_one_unit(model, config):
    specs, plans = cut(model, config)
    assert [id(s.original) for s in specs] == [id(p) for p in model.parameters()]
    assert [s.name for s in specs] == [name for name, _ in model.named_parameters()]
    assigned = [id(spec) for plan in plans for spec in plan.specs]
    assert sorted(assigned) == sorted(map(id, specs))
    assert all(plan.specs for plan in plans)
    firsts = [min(spec.number for spec in plan.specs) for plan in plans]
    assert firsts == sorted(firsts)  # in the order of the model, the same on every rank


@settings(max_examples=150)
@given(nets(), configs)
def test_units_are_entered_through_every_owner(model, config):
    """Whoever computes with a parameter does so inside the forward of one of its unit's modules."""
    _, plans = cut(model, config)
    for plan in plans:
        inside = {id(inner) for module in plan.modules for inner in module.modules()}
        for spec in plan.specs:
            assert all(id(owner) in inside for owner, _ in spec.owners), f"{spec.name} in {plan.name}"
        assert len(set(map(id, plan.modules))) == len(plan.modules), f"{plan.name} would be entered twice"


@given(nets())
def test_one_unit_if_one_is_asked_for(model):
    _, plans = cut(model, Config(units="model"))
    assert len(plans) == 1 and plans[0].name == "(root)"


@given(nets())
def test_leaf_units_hold_what_one_module_owns(model):
    """Unless it is tied: then the unit is the root's, which is entered through all owners."""
    _, plans = cut(model, Config(units="leaf"))
    for plan in plans:
        if plan.name != "(root)":
            assert {id(owner) for spec in plan.specs for owner, _ in spec.owners} <= set(map(id, plan.modules))


sizes = st.lists(st.integers(1, 30), min_size=1, max_size=8)


def plans_of(numels: list[int]) -> list[UnitPlan]:
    plans = []
    for number, numel in enumerate(numels):
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(numel))
        spec = ParamSpec(f"{number}.weight", module.weight, [(module, "weight")], torch.float32, (numel,), True, torch.float32)
        plans.append(UnitPlan(str(number), [module], [spec]))
    return plans


@given(sizes, st.integers(0, 80))
def test_merged_units_reach_the_minimum_and_keep_the_order(numels, least):
    plans = plans_of(numels)
    merged = _merge(plans, least)
    assert [s for plan in merged for s in plan.specs] == [s for plan in plans for s in plan.specs]
    assert all(plan.numel >= least for plan in merged[:-1])
    for plan in merged:  # no more than needed: without its last member it would be too small
        assert plan.numel - plan.specs[-1].original.numel() < max(least, 1)


@given(sizes, st.integers(1, 80))
def test_split_units_keep_below_the_maximum_where_modules_allow(numels, most):
    parts = plans_of(numels)
    whole = UnitPlan("block", [nn.ModuleList([p.modules[0] for p in parts])], [s for p in parts for s in p.specs])
    result = _split(whole, most)
    assert sorted(s.name for p in result for s in p.specs) == sorted(s.name for s in whole.specs)
    if whole.numel <= most:
        assert result == [whole]
    else:
        assert all(len(plan.specs) == 1 for plan in result)  # nothing smaller than a leaf module


def test_an_unknown_class_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"no module of class 'Blok'.*Did you mean 'Block'"):
        cut(Net([Block([nn.Linear(3, 3)], False)], False), Config(units=("Blok",)))


@pytest.mark.parametrize(
    "parameter, words",
    [
        (nn.Parameter(torch.zeros(2, dtype=torch.complex64)), "complex64"),
        (nn.UninitializedParameter(), "no shape"),
    ],
)
def test_a_parameter_that_can_not_be_cut_is_named(parameter, words):
    model = nn.Module()
    model.odd = parameter
    with pytest.raises(ShardedAccessError, match=f"odd.*{words}"):
        collect(model, Config())
