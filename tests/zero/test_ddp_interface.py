"""Programs for DDP and FSDP2 switch reductions off by attributes, enter `no_sync()` and read `module`: what a sharded model does then."""

import copy

import pytest
import torch
from helpers import adamw, differences, seeded, state_differences
from torch import nn

import zeroshard as zs
from zeroshard.testing import run_threads

WORLD, MICRO_STEPS, STEPS = 2, 3, 2
MODEL = seeded(lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)))
DATA = torch.randn(STEPS, MICRO_STEPS, WORLD, 4, 5, generator=torch.Generator().manual_seed(0))


def by_accumulate(model, micro_step, backward):
    if micro_step < MICRO_STEPS - 1:
        with zs.accumulate(model):
            backward()
    else:
        backward()


def by_the_switch(model, micro_step, backward):
    model.require_backward_grad_sync = micro_step == MICRO_STEPS - 1
    backward()


def by_fsdps_switch(model, micro_step, backward):
    model.set_requires_gradient_sync(micro_step == MICRO_STEPS - 1)
    backward()


def by_no_sync(model, micro_step, backward):
    if micro_step < MICRO_STEPS - 1:
        with model.no_sync():
            backward()
    else:
        backward()


def trained(rank: int, run_micro_step, stage: int, **options) -> tuple[dict, dict, int]:
    """(parameters, optimizer states, reductions) after some steps of several micro-steps."""
    model = copy.deepcopy(MODEL)
    model, optimizer = zs.shard(model, adamw(model.parameters()), stage=stage, **options)
    for batches in DATA:
        for micro_step, batch in enumerate(batches):
            run_micro_step(model, micro_step, lambda batch=batch: model(batch[rank]).square().mean().backward())
        optimizer.step()
        optimizer.zero_grad()
    reductions = sum(entry.count for kind, entry in zs.report(model).communication.items() if kind == "reduce")
    result = zs.full_state_dict(model), zs.full_optimizer_state(model), reductions
    zs.close(model)
    return result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_switch_and_no_sync_are_accumulate(stage, precision):
    def rank_run(rank: int) -> None:
        wanted = trained(rank, by_accumulate, stage, precision=precision)
        for served in (by_the_switch, by_fsdps_switch, by_no_sync):
            found = trained(rank, served, stage, precision=precision)
            assert not differences(found[0], wanted[0]) and not state_differences(found[1], wanted[1])
            assert found[2] == wanted[2] > 0
        every_micro_step = trained(rank, lambda model, _, backward: backward(), stage, precision=precision)
        assert every_micro_step[2] == MICRO_STEPS * wanted[2]

    run_threads(WORLD, rank_run)


def test_the_switch_can_be_read_and_lasts_until_it_is_set_again():
    def rank_run(rank: int) -> None:
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=2)
        assert model.require_backward_grad_sync is True
        model.require_backward_grad_sync = False
        with model.no_sync():
            model(DATA[0, 0, rank]).square().mean().backward()
        assert model.require_backward_grad_sync is False  # as before the context
        held = zs.full_gradients(model)  # what uses gradients reduces what was held back
        model.require_backward_grad_sync = True
        optimizer.zero_grad()
        model(DATA[0, 0, rank]).square().mean().backward()
        assert not differences(zs.full_gradients(model), held)

    run_threads(WORLD, rank_run)


def test_module_is_told_by_name_and_unwrapping_programs_end():
    model, _ = zs.shard(copy.deepcopy(MODEL), None, stage=3)
    with pytest.raises(AttributeError, match=r"Write `model` in place of `model\.module`.*zs\.full_state_dict"):
        _ = model.module
    assert not hasattr(model, "module") and getattr(model, "module", model) is model
    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'modul'"):
        _ = model.modul
    pytest.importorskip("accelerate")
    from accelerate.utils import extract_model_from_parallel

    assert extract_model_from_parallel(model) is model
    assert extract_model_from_parallel(model, recursive=True) is model
    pytest.importorskip("transformers")
    from transformers.modeling_utils import unwrap_model

    assert unwrap_model(model) is model and unwrap_model(model, recursive=True) is model


class Wrapper(nn.Module):
    """A model of a user who gave it attributes of these names."""

    require_backward_grad_sync = "mine"

    def __init__(self) -> None:
        super().__init__()
        self.module = copy.deepcopy(MODEL)

    def no_sync(self) -> str:
        return "mine"

    def forward(self, x):
        return self.module(x)


def test_a_model_keeps_its_own_attributes_of_these_names():
    model, _ = zs.shard(Wrapper(), None, stage=3)
    assert type(model.module) is nn.Sequential and model.no_sync() == model.require_backward_grad_sync == "mine"
    model.require_backward_grad_sync = False
    assert model.__dict__["require_backward_grad_sync"] is False and model(DATA[0, 0, 0]).shape == (4, 3)


class Registered(nn.Module):
    """A base whose derived classes are entered in a list."""

    derived: list = []

    def __init_subclass__(cls, **options) -> None:
        super().__init_subclass__(**options)
        Registered.derived.append(cls)


class Derived(Registered):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x)


def test_the_class_is_one_of_the_users_class_by_the_same_name_and_close_takes_it_back():
    model = Derived()
    zs.shard(model, None, stage=1)
    assert isinstance(model, Derived) and Registered.derived == [Derived]
    shown, given = type(model), Derived
    assert (shown.__name__, shown.__module__, shown.__qualname__) == (given.__name__, given.__module__, given.__qualname__)
    zs.close(model)
    assert type(model) is Derived and not hasattr(model, "no_sync")


def test_a_closed_model_whose_class_was_changed_since_raises_its_own_errors():
    model = nn.Linear(5, 3)
    zs.shard(model, None, stage=1)
    torch.nn.utils.parametrize.register_parametrization(model, "bias", nn.Identity(), unsafe=True)
    zs.close(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 4))


def test_a_part_of_a_sharded_sequential_is_an_ordinary_module():
    """nn.Sequential makes slices of its own class."""
    model, _ = zs.shard(copy.deepcopy(MODEL), None, stage=0)
    part = model[:1]
    assert type(part) is nn.Sequential and part[0] is model[0]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_whole_model_that_is_compiled_has_the_switch(when):
    def rank_run(rank: int) -> None:
        model = copy.deepcopy(MODEL)
        model = torch.compile(model, backend="eager") if when == "before" else model
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=2)
        model = torch.compile(model, backend="eager") if when == "after" else model
        for micro_step, batch in enumerate(DATA[0]):
            model.require_backward_grad_sync = micro_step == MICRO_STEPS - 1
            model(batch[rank]).square().mean().backward()
        optimizer.step()
        sharded = model if when == "before" else model._orig_mod
        (count,) = (entry.count for kind, entry in zs.report(sharded).communication.items() if kind == "reduce")
        assert count == zs.report(sharded).units

    run_threads(1, rank_run)
