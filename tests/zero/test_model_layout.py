"""The layout of a model: a pure function of what a model consists of and its options; the build and the ledger follow it."""

import copy
import dataclasses

import pytest
import torch
from helpers import OddGPT, adamw, seeded
from torch import nn

import zeroshard as zs
from zeroshard.comm.fake import FakeComm, Imagination, imagination
from zeroshard.config import Config, Tier
from zeroshard.engine import shard_model
from zeroshard.engine.inner_optimizer import optimizer_groups
from zeroshard.engine.ledger import GRADIENTS, MASTERS, PARAMETERS
from zeroshard.engine.runtime import runtime_of
from zeroshard.engine.shard_model import Inventory
from zeroshard.engine.topology import Topology
from zeroshard.errors import ConfigError, ModelClosed, ZeroshardError
from zeroshard.formats.state_plans import state_plans
from zeroshard.policies import collect, partition
from zeroshard.testing import run_threads
from zeroshard.tiers.room import needs_of

MODEL = seeded(lambda: OddGPT(dim=16, layers=2, tied=True))


def inventory_of(model: nn.Module, config: Config) -> Inventory:
    specs, optimizer = collect(model, config), adamw(model.parameters())
    return Inventory(partition(model, config, specs), state_plans(config, optimizer, specs), optimizer_groups(optimizer))


def topology(ranks: int) -> Topology:
    token = imagination.set(Imagination(separate=True))
    try:
        return Topology.flat(FakeComm(0, ranks))
    finally:
        imagination.reset(token)


def content(layout) -> list:
    return [(group.layout, group.sizes, [spec.name for spec in group.specs]) for group in layout.groups]


def test_one_inventory_is_laid_out_for_many_configurations_and_none_changes_another():
    model = copy.deepcopy(MODEL)
    model.blocks[0].requires_grad_(False)
    low = Config(stage=3, precision="bf16", param_persistence_threshold=16)
    inventory, comms = inventory_of(model, low), topology(4)
    before = {name: (id(param), param.data_ptr(), type(param)) for name, param in model.named_parameters()}
    first = inventory.lay_out(low, comms)
    known, bytes_before = content(first), needs_of(first)
    stepped_on_host = dataclasses.replace(low, offload_optimizer="cpu", offload_path="/")
    others = [
        inventory.lay_out(config, comms) for config in (Config(stage=0), Config(stage=1, precision="bf16"), stepped_on_host)
    ]
    assert content(first) == known == content(inventory.lay_out(low, comms)) and needs_of(first) == bytes_before
    assert before == {name: (id(param), param.data_ptr(), type(param)) for name, param in model.named_parameters()}
    assert any(group.sizes.whole for group in first.groups), "vectors of 16 elements stay whole at stage 3 ..."
    assert not any(group.sizes.whole for layout in others[:2] for group in layout.groups), "... where others are sharded"
    frozen = [group for group in first.groups if not group.specs[0].requires_grad]
    assert frozen and all(group.sizes.gradient is group.sizes.master is None for group in frozen)
    assert needs_of(others[2])[MASTERS, Tier.HOST, None] == needs_of(first)[MASTERS, Tier.DEVICE, None]
    for thing, field in (
        (first, "config"),
        (first.groups[0], "layout"),
        (inventory, "units"),
        (first.groups[0].specs[0], "original"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, field, None)


@pytest.mark.parametrize("options", [
    {"stage": 0}, {"stage": 2, "precision": "bf16"}, {"stage": 3, "param_persistence_threshold": 16},
    {"stage": 3, "precision": "bf16", "master_weights": "split", "optimizer_states": "int8"},
], ids=str)  # fmt: skip
def test_units_groups_and_the_ledger_are_as_laid_out(options, monkeypatch):
    laid_out = {}
    build = shard_model.Builder.build

    def note(builder):
        laid_out[builder.layout.topology.control.rank] = builder.layout
        return build(builder)

    monkeypatch.setattr(shard_model.Builder, "build", note)

    def on_rank(rank: int) -> None:
        model = copy.deepcopy(MODEL)
        model, _ = zs.shard(model, adamw(model.parameters()), **options)
        runtime, layout = runtime_of(model), laid_out[rank]
        assert [unit.name for unit in runtime.units] == [unit.name for unit in layout.inventory.units]
        for unit, groups in zip(runtime.units, layout.units, strict=True):
            assert unit.runtime is runtime and len(unit.groups) == len(groups)
            for group, given in zip(unit.groups, groups, strict=True):
                assert (group.unit, group.runtime) == (unit, runtime)
                assert (group.layout, group.whole, group.offload) == (given.layout, given.sizes.whole, given.sizes.states)
                assert [spec.name for spec in group.specs] == [spec.name for spec in given.specs]
                assert group.values.dtype == given.sizes.dtype and group.gradients.dtype == given.sizes.gradient
                assert all(spec.original is param for spec, param in zip(group.specs, group.params, strict=True))
        held, needs = runtime.tiers.ledger.now, needs_of(layout)
        for category in (PARAMETERS, GRADIENTS, MASTERS):
            assert held[category] == needs.get((category, Tier.DEVICE, None), 0), category
        zs.close(model)

    run_threads(2, on_rank)


def test_options_that_name_nothing_are_refused_before_the_model_changes(tmp_path):
    for options in ({"units": ["Nothing"]}, {"optimizer_states": {"exp_ag": "bf16"}}):
        model = copy.deepcopy(MODEL)
        before = [(id(param), type(param)) for param in model.parameters()]
        with pytest.raises(ConfigError):
            zs.shard(model, adamw(model.parameters()), stage=3, offload_optimizer="nvme", offload_path=str(tmp_path), **options)
        assert before == [(id(param), type(param)) for param in model.parameters()] and not list(tmp_path.iterdir())


def test_parameters_of_a_build_that_failed_half_way_can_be_read_and_written(monkeypatch):
    made, real = [], shard_model.GradientBuffer

    def gradient_buffer(*args):
        if len(made) == 2:
            raise ValueError("no more")
        made.append(real(*args))
        return made[-1]

    monkeypatch.setattr(shard_model, "GradientBuffer", gradient_buffer)
    model = copy.deepcopy(MODEL)
    with pytest.raises(ValueError, match="no more"):
        zs.shard(model, adamw(model.parameters()), stage=3)
    placed = next(param for param in model.parameters() if hasattr(param, "_home"))
    whole = placed.full_tensor().clone()
    with torch.no_grad():
        placed.add_(1)
    placed.grad = None
    assert torch.equal(placed.full_tensor(), whole + 1) and placed.grad is None
    with pytest.raises((ZeroshardError, ModelClosed)):
        zs.report(model)


@pytest.mark.parametrize("half", [True, False], ids=["in_a_unit", "between_units"])
def test_a_model_whose_build_failed_is_that_of_no_runtime(monkeypatch, half):
    """Its parameters answer, wherever the build stopped, and an optimizer of them is an ordinary one."""
    zs.close(zs.shard(torch.nn.Linear(4, 4), stage=3)[0])  # from now on optimizers of sharded parameters are noticed
    made, real = [], shard_model.ParameterBuffer

    def parameter_buffer(*args, **options):
        if made:
            raise ValueError("no more")
        made.append(1)
        return real(*args, **options)

    monkeypatch.setattr(shard_model, "ParameterBuffer", parameter_buffer)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[1].requires_grad_(not half)
    with pytest.raises(ValueError, match="no more"):
        zs.shard(model, adamw([p for p in model.parameters() if p.requires_grad]), stage=3, units="model" if half else "leaf")
    placed = next(param for param in model.parameters() if hasattr(param, "_home"))
    with torch.no_grad():
        assert torch.equal(placed.full_tensor().sum(), placed.sum())
    with pytest.raises(zs.ShardedAccessError):
        model(torch.ones(1, 8))
    optimizer = torch.optim.SGD([placed], lr=0.1)
    optimizer.step()
    assert type(optimizer) is torch.optim.SGD
    with pytest.raises(ZeroshardError, match=r"call zs.shard\(model"):
        zs.report(model)
