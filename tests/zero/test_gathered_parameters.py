"""zs.gathered of parameters: the user's objects are whole inside, one rank may write, others are not touched."""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch
from torch import nn
from zoo import Block, Stack, adamw, run_threads, same, seeded, square

import zeroshard as zs
from zeroshard.engine.ledger import GATHERED
from zeroshard.engine.runtime import runtime_of

STAGES = [
    {"stage": 0}, {"stage": 2, "precision": "bf16"}, {"stage": 3}, {"stage": 3, "map_shared": False, "precision": "bf16"},
    {"stage": 3, "offload_param": "cpu", "offload_optimizer": "cpu"},
]  # fmt: skip
every_stage = pytest.mark.parametrize("options", STAGES, ids=str)
ONES = (torch.ones(2, 7),)


BASE = seeded(Stack)
one_at_a_time = threading.Lock()  # ranks share torch's generator


def sharded(**options):
    model = copy.deepcopy(BASE)
    return zs.shard(model, adamw(model.parameters()), **options)


def is_ordinary(param):
    """Also for who copies or pickles it."""
    file = io.BytesIO()
    torch.save(param, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    copies = copy.deepcopy(param), loaded
    return not hasattr(param, "_home") and all(type(one) is nn.Parameter and torch.equal(one, param) for one in copies)


def trained(model, optimizer):
    """After a step: values as they rest, and masters."""
    square(model, ONES).backward()
    optimizer.step()
    return zs.full_state_dict(model), zs.full_state_dict(model, masters=True)


@every_stage
def test_the_users_objects_are_whole_and_what_one_rank_writes_reaches_all(options):
    def run(rank):
        model, optimizer = sharded(**options)
        weight, bias, other = model.blocks[0].up.weight, model.blocks[0].up.bias, model.blocks[1].up.weight
        kind, before = type(weight), zs.full_state_dict(model)
        with zs.gathered((p for p in [weight, None, weight, nn.Parameter(torch.ones(2)), bias]), modifier_rank=1) as given:
            assert len(given) == 4 and is_ordinary(weight) and weight is model.blocks[0].up.weight
            assert weight.shape == (14, 7) and weight.data.numel() == 98 and weight.untyped_storage().nbytes() == weight.nbytes
            same(weight.detach(), before["blocks.0.up.weight"], "read", 0.0)
            assert type(other) is type(model.blocks[1].up.weight) and hasattr(other, "_home")
            torch.nn.init.constant_(weight, 0.5 + rank)  # rank 0's is dropped
            bias.data.copy_(torch.arange(14.0) * (1 if rank == 1 else -1))
        assert type(weight) is kind and weight is model.blocks[0].up.weight
        after = zs.full_state_dict(model, masters=True)
        assert (after["blocks.0.up.weight"] == 1.5).all() and after["blocks.0.up.bias"].tolist() == list(range(14))
        assert torch.equal(zs.full_state_dict(model)["blocks.1.up.weight"], before["blocks.1.up.weight"])
        return trained(model, optimizer)

    first, second = run_threads(2, run)
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


@every_stage
def test_a_step_after_a_write_is_that_of_one_process(options):
    base = copy.deepcopy(BASE)
    with torch.no_grad():
        base.blocks[0].up.weight.fill_(1.5)

    def run(rank):
        model, optimizer = sharded(**options)
        with zs.gathered(model.blocks[0].up.weight, modifier_rank=0), torch.no_grad():
            if rank == 0:
                model.blocks[0].up.weight.fill_(1.5)
        mine = trained(model, optimizer)[1]
        model = copy.deepcopy(base)
        return mine, trained(*zs.shard(model, adamw(model.parameters()), **options))[1]

    for mine, expected in run_threads(2, run):
        for name, value in expected.items():
            same(mine[name], value, name, 0.0)


@every_stage
def test_a_write_that_was_not_announced_names_the_parameter_and_is_undone(options):
    def run(rank):
        model, optimizer = sharded(**options)
        before = zs.full_state_dict(model, masters=True)
        with pytest.raises(zs.ShardedWriteError, match=r"written inside.*blocks.0.up.bias \(on rank 1\)"):
            with zs.gathered([model.blocks[0].up.bias, model.first.weight]), torch.no_grad():
                if rank == 1:
                    model.blocks[0].up.bias.fill_(3)
        with pytest.raises(zs.ShardedWriteError, match="ranks .1. wrote other values than rank 0"):
            with zs.gathered([model.first.weight], write=True), torch.no_grad():
                model.first.weight.fill_(rank)
        after = zs.full_state_dict(model, masters=True)
        assert all(torch.equal(value, before[name]) for name, value in after.items())
        trained(model, optimizer)

    run_threads(2, run)


@every_stage
def test_nested(options):
    """Disjoint sets each for themselves; the same parameter again for reading only."""

    def run(rank):
        model, _ = sharded(**options)
        up = model.blocks[0].up
        with zs.gathered([up.weight], modifier_rank=0), torch.no_grad():
            with zs.gathered([up.bias, up.weight], modifier_rank=None):
                assert is_ordinary(up.weight) and is_ordinary(up.bias)
            assert is_ordinary(up.weight) and hasattr(up.bias, "_home")
            with zs.gathered(up.bias, write=True):
                up.bias.fill_(2)
            with (
                pytest.raises(zs.ZeroshardError, match="gathered already. Announce the write there"),
                zs.gathered(up.weight, write=True),
            ):
                pass
            up.weight.fill_(1)
        state = zs.full_state_dict(model)
        return state["blocks.0.up.weight"].unique().tolist(), state["blocks.0.up.bias"].unique().tolist()

    assert run_threads(2, run) == [([1.0], [2.0])] * 2


@pytest.mark.parametrize("released", [True, False])
def test_forwards_inside_and_around(released):
    """A part of a unit that is whole for reading is no obstacle; in a forward operations compute with what is gathered."""

    class Penalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Stack()

        def forward(self, x):
            out = self.inner(x)
            with zs.gathered([self.inner.first.weight, self.inner.blocks[0].up.weight]):
                return out.square().sum() + (self.inner.first.weight @ self.inner.first.weight.T).sum()

    given = seeded(Penalised)

    def run(rank):
        base = copy.deepcopy(given)
        model, optimizer = zs.shard(copy.deepcopy(base), None, stage=3, map_shared=not released)
        with zs.gathered(model.inner.blocks[0].up.weight):
            model(*ONES).backward()
        base_loss = base.inner(*ONES).square().sum() + (base.inner.first.weight @ base.inner.first.weight.T).sum()
        base_loss.backward()
        for name, param in base.named_parameters():
            same(zs.full_gradients(model)[name], param.grad, name, 1e-5)

    run_threads(2, run)


def test_a_gradient_of_a_copy_is_not_lost_in_silence():
    def run(rank):
        model, _ = sharded(stage=3)
        with zs.gathered(model.first.weight):
            loss = model.first.weight.square().sum()
        with pytest.raises(zs.ShardedAccessError, match="first.weight: a backward reached what was computed"):
            loss.backward()
        model, optimizer = sharded(stage=2)
        square(model, ONES).backward()
        with zs.gathered(model.first.weight), pytest.raises(zs.ZeroshardError, match="step.. was called inside zs.gathered"):
            optimizer.step()

    run_threads(2, run)


def test_only_the_units_of_what_is_named_are_gathered_and_one_at_a_time():
    base = nn.Sequential(*(Block(16) for _ in range(4)))

    def run(rank):
        model, _ = zs.shard(copy.deepcopy(base), None, stage=3, map_shared=False, units=("Block",))
        runtime = runtime_of(model)
        unit = max(4 * unit.groups[0].layout.numel for unit in runtime.units)
        runtime.tiers.ledger.peak.clear()
        with zs.gathered([model[0].up.bias, model[1].up.bias]):
            pass
        return runtime.tiers.ledger.peak[GATHERED], unit + 2 * model[0].up.bias.nbytes

    for peak, bound in run_threads(2, run):
        assert 0 < peak <= bound


def test_what_is_wrong_is_said_before_anything_changes():
    def run(rank):
        model, _ = sharded(stage=3)
        with (
            pytest.raises(zs.ConfigError, match="modifier_rank: expected None or a rank from 0 to 1, got 2"),
            zs.gathered(model, modifier_rank=2),
        ):
            pass
        with pytest.raises(zs.ConfigError, match="got both"), zs.gathered(model, write=True, modifier_rank=0):
            pass
        with pytest.raises(TypeError, match="iterable of parameters, got str"), zs.gathered(["first"]):
            pass
        for nothing in (None, [], [None], torch.ones(2), [nn.Parameter(torch.ones(1))]):
            with zs.gathered(nothing, modifier_rank=7):
                pass

    run_threads(2, run)


@every_stage
def test_frozen_parameters(options):
    """They are gathered and written as others; at rest they can be copied and, where they are whole, pickled."""

    def run(rank):
        model = copy.deepcopy(BASE)
        frozen = model.blocks[0].up.bias.requires_grad_(False)
        model, optimizer = zs.shard(model, adamw(p for p in model.parameters() if p.requires_grad), **options)
        with zs.gathered(frozen, modifier_rank=1):
            if rank == 1:
                frozen.fill_(3)
        if options["stage"] < 3:
            assert torch.equal(copy.deepcopy(frozen), frozen)
            file = io.BytesIO()
            torch.save(frozen, file)
            assert torch.equal(torch.load(io.BytesIO(file.getvalue()), weights_only=False), frozen)
        state = trained(model, optimizer)[0]
        assert not zs.close(model).blocks[0].up.bias.requires_grad and not hasattr(model.blocks[0].up.bias, "_home")
        return state["blocks.0.up.bias"].unique().tolist()

    assert run_threads(2, run) == [[3.0]] * 2


def test_a_copy_of_what_is_born_is_another():
    """As PEFT copies the modules that it is to save."""

    def run(rank):
        with zs.init(stage=3), one_at_a_time:
            model = seeded(Stack)
        model.blocks[1].up.bias.requires_grad_(False)
        other = copy.deepcopy(model)
        with torch.no_grad():
            model.first.weight.fill_(2)
        other, _ = zs.shard(other, None, stage=3)
        assert not other.blocks[1].up.bias.requires_grad
        for name, value in zs.full_state_dict(other).items():
            same(value, BASE.state_dict()[name], name, 0.0)

    run_threads(2, run)


@pytest.mark.parametrize("rank_that_writes", [0, 2])
def test_between_birth_and_shard(rank_that_writes):
    """As Transformers initialises and loads weights; also in another order on each rank, replaced, and of another size."""

    def run(rank):
        with zs.init(stage=3), one_at_a_time:
            model = seeded(Stack)
        weight, bias = model.blocks[1].up.weight, model.first.bias
        with zs.gathered([weight, bias][:: 1 if rank else -1], modifier_rank=rank_that_writes):
            assert is_ordinary(weight) and weight.shape == (14, 7)
            if rank == rank_that_writes:
                torch.nn.init.ones_(weight)
                bias.data.normal_(generator=torch.Generator().manual_seed(3))
        with (
            pytest.raises(zs.ShardedWriteError, match=r"written inside.*Linear.weight \(on rank 0\)"),
            zs.gathered(weight),
            torch.no_grad(),
        ):
            weight.fill_(4)
        with zs.gathered(model, write=True):
            model.first.weight.data = torch.full((9, 7), 2.0)
        assert model.first.weight.shape == (9, 7)
        with zs.gathered(model.first.weight, write=True):
            model.first.weight.data = torch.full((7, 7), 2.0)
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3)
        return zs.full_state_dict(model), trained(model, optimizer)

    expected = torch.empty(7).normal_(generator=torch.Generator().manual_seed(3))
    for state, _ in run_threads(3, run):
        assert (state["blocks.1.up.weight"] == 1).all() and (state["first.weight"] == 2).all()
        same(state["first.bias"], expected, "bias", 0.0)
        same(state["blocks.0.up.weight"], BASE.state_dict()["blocks.0.up.weight"], "untouched", 0.0)


def test_a_part_of_a_unit_is_copied_and_pickled_inside():
    """A module with parameters of a unit, which is no unit itself; the copy is an ordinary module."""

    def run(rank):
        model, _ = sharded(stage=3, units=("Block",))
        with zs.gathered(model):
            up, file = model.blocks[0].up, io.BytesIO()
            torch.save(up, file)
            copies = copy.deepcopy(up), torch.load(io.BytesIO(file.getvalue()), weights_only=False)
            expected = {name: value.clone() for name, value in up.state_dict().items()}
        for one in copies:
            one.load_state_dict(one.state_dict())
            for name, value in expected.items():
                same(one.state_dict()[name], value, name, 0.0)

    run_threads(2, run)
