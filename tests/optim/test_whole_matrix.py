"""Optimizers that step whole parameters: the numbers of one process at every stage, each parameter stepped by one rank."""

import copy

import pytest
import torch
from helpers import OddGPT, seeded, token_batches
from offloading import tiers
from private_ranks import PostOffice, PrivateComm
from zoo import Stack, square

import zeroshard as zs
from zeroshard.engine.runtime import runtime_of
from zeroshard.testing import run_threads
from zeroshard.values import whole_step

MODEL = seeded(lambda: OddGPT(dim=24, layers=2, tied=False))
DATA = token_batches(4, 1, 3)


class Trust(torch.optim.SGD):
    """Like LARS: each parameter's step is scaled by norms of the whole, and states have other shapes and numbers."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(step=torch.tensor(0.0), slow=torch.zeros_like(param))
                    if param.dim() == 2:
                        state["rows"] = param.new_zeros(param.shape[0], 1)
                state["step"] += 1
                state["slow"].lerp_(param.grad, 0.5)
                if "rows" in state:
                    state["rows"].lerp_(param.grad.square().mean(1, keepdim=True), 0.5)
                ratio = param.norm() / (state["slow"].norm() + 1e-6)
                scale = 1 / (state["rows"].sqrt() + 1e-3) if "rows" in state else 1.0
                param.add_(state["slow"] * scale, alpha=-group["lr"] * ratio.clamp(max=1.0).item() / state["step"].item())


zs.whole_matrix(Trust)


def _trust(model):
    return Trust(model.parameters(), lr=0.01)


def _adafactor(model):
    return torch.optim.Adafactor(model.parameters(), lr=0.02)


class Rows(torch.optim.Optimizer):
    """Factored as Transformers' Adafactor is: states of rows and columns have one dimension, as slices do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state, square = self.state[param], param.grad.square() + 1e-8
                if not state:
                    names = ("rows", "columns") if param.dim() == 2 else ("squares",)
                    state.update(
                        step=0, rms=0, **{name: square.mean(1 - i) * 0 for i, name in enumerate(names) if len(names) == 2}
                    )
                    if len(names) == 1:
                        state["squares"] = torch.zeros_like(param)
                state["step"], state["rms"] = state["step"] + 1, param.norm() / param.numel() ** 0.5
                if param.dim() == 2:
                    state["rows"].lerp_(square.mean(1), 0.5)
                    state["columns"].lerp_(square.mean(0), 0.5)
                    scale = torch.outer(state["rows"] / state["rows"].mean(), state["columns"])
                else:
                    scale = state["squares"].lerp_(square, 0.5)
                param.add_(param.grad / scale.sqrt(), alpha=-group["lr"] / state["step"] ** 0.5)


zs.whole_matrix(Rows)


def _rows(model):
    return Rows(model.parameters(), lr=0.01)


def _muon(model):
    hidden = [p for name, p in model.named_parameters() if name.startswith("blocks") and p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is other for other in hidden)]
    groups = [{"params": hidden, "use_muon": True, "lr": 0.02}, {"params": others, "use_muon": False, "lr": 0.01}]
    return zs.Muon(groups)


MAKERS = {"trust": _trust, "adafactor": _adafactor, "rows": _rows, "muon": _muon}


def _reference(name, world, steps=4):
    model = copy.deepcopy(MODEL)
    optimizer = MAKERS[name](model)
    for step in range(steps):
        for rank in range(world):
            model(*DATA[step][0][rank]).backward()
        for param in model.parameters():
            param.grad.mul_(1 / world)
        optimizer.step()
        optimizer.zero_grad()
    names = {param: name for name, param in model.named_parameters()}
    return model.state_dict(), {names[param]: state for param, state in optimizer.state.items()}


def _train(rank, name, steps, **options):
    model = copy.deepcopy(MODEL)
    model, optimizer = zs.shard(model, MAKERS[name](model), **options)
    for step in steps:
        _step(rank, model, optimizer, step)
    return model, optimizer


def _step(rank, model, optimizer, step):
    model(*DATA[step][0][rank]).backward()
    optimizer.step()
    optimizer.zero_grad()


def _check(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def _equal(rank, name, expected, options):
    model, optimizer = _train(rank, name, range(4), **options)
    _check(zs.full_state_dict(model), expected[0])
    states = zs.full_optimizer_state(model)
    for parameter, state in expected[1].items():
        _check(states[parameter], state)
    return runtime_of(model).tiers.ledger.traffic["gather"].units


@pytest.mark.parametrize("stage, world", [(0, 2), (1, 3), (2, 2), (3, 3)])
@pytest.mark.parametrize("name", MAKERS)
def test_as_on_one_process(name, stage, world):
    gathers = run_threads(world, _equal, name, _reference(name, world), {"stage": stage})[0]
    assert any(unit.startswith("whole ") for unit in gathers) is (stage > 0)  # counted


@pytest.mark.parametrize("name", MAKERS)
def test_ranks_that_share_no_memory(name):
    office = PostOffice()

    def rank_main(rank, expected):
        for stage in (1, 3):
            _equal(rank, name, expected, {"stage": stage, "comm": PrivateComm(office, rank, 2, True)})

    run_threads(2, rank_main, _reference(name, 2))


@pytest.mark.parametrize("place", ["cpu", "nvme"])
@pytest.mark.parametrize("name", MAKERS)
def test_states_on_other_tiers(name, place, tmp_path, strict_device):
    def rank_main(rank, expected):
        strict_device(rank)
        options = tiers(str(tmp_path), place, place, place, fused=False)
        _equal(rank, name, expected, {"stage": 3, **options})

    run_threads(2, rank_main, _reference(name, 2))


@pytest.mark.parametrize("name", MAKERS)
def test_bf16_with_masters(name):
    """All stages the same bits."""

    def rank_main(rank, stage):
        return zs.full_state_dict(_train(rank, name, range(3), stage=stage, precision="bf16")[0], masters=True)

    first = run_threads(2, rank_main, 0)[0]
    for stage in (1, 3):
        assert all(torch.equal(value, first[key]) for key, value in run_threads(2, rank_main, stage)[0].items())


def test_each_is_stepped_by_one_rank_and_the_work_is_balanced(monkeypatch):
    plain, seen = whole_step.WholeStepper._step_class, []

    def counted(self, job, *args):
        seen.append((job.group.comm.rank, job.group.specs[job.index].name, job.numel))
        return plain(self, job, *args)

    monkeypatch.setattr(whole_step.WholeStepper, "_step_class", counted)
    run_threads(3, lambda rank: _train(rank, "muon", range(1), stage=3) and None)
    hidden = [name for name, p in MODEL.named_parameters() if name.startswith("blocks") and p.dim() == 2]
    assert sorted(name for _, name, _ in seen) == sorted(hidden)
    loads = [sum(numel for rank, _, numel in seen if rank == each) for each in range(3)]
    assert max(loads) - min(loads) <= max(numel for _, _, numel in seen)


@pytest.mark.parametrize("name", MAKERS)
def test_checkpoints_at_another_world_size(name, tmp_path):
    def save(rank):
        model, optimizer = _train(rank, name, range(2), stage=3)
        zs.save(tmp_path, model, optimizer)
        _step(rank, model, optimizer, 2)
        return zs.full_state_dict(model)

    expected = run_threads(2, save)[0]

    def load(rank, stage, world):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, MAKERS[name](model), stage=stage)
        zs.load(tmp_path, model, optimizer)
        _step(rank, model, optimizer, 2)
        if world == 2:  # else other batches
            _check(zs.full_state_dict(model), expected)

    for stage, world in ((0, 2), (1, 2), (3, 3)):
        run_threads(world, load, stage, world)


@pytest.mark.parametrize("name", MAKERS)
def test_state_dicts_go_in_and_out(name):
    """Of one process into a sharded optimizer, and of that into itself."""
    expected = _reference(name, 2, 3)

    def rank_main(rank):
        model = copy.deepcopy(MODEL)
        optimizer = MAKERS[name](model)
        for step in range(2):
            for each in range(2):
                model(*DATA[step][0][each]).backward()
            for param in model.parameters():
                param.grad.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        model, optimizer = zs.shard(model, optimizer, stage=3)  # states are cut along
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        _step(rank, model, optimizer, 2)
        _check(zs.full_state_dict(model), expected[0])

    run_threads(2, rank_main)


def test_what_is_refused():
    model = copy.deepcopy(MODEL)
    with pytest.raises(zs.ConfigError, match="neither for Muon nor for AdamW"):
        zs.Muon(model.parameters())
    with pytest.raises(zs.ConfigError, match="expected matrices"):
        zs.Muon([{"params": [model.norm.weight], "use_muon": True}])
    for param in model.parameters():
        param.use_muon = param.dim() == 2
    optimizer = zs.Muon(model.parameters(), lr=0.1, adam_lr=0.2)
    assert [(g["use_muon"], g["lr"]) for g in optimizer.param_groups] == [(True, 0.1), (False, 0.2)]
    with pytest.raises(zs.ConfigError, match="delayed_update: Muon"):
        zs.shard(model, optimizer, stage=3, offload_optimizer="cpu", delayed_update=1)
    zs.tile(model, max_bytes=2000)
    with pytest.raises(zs.ConfigError, match="is a tile, and Adafactor"):
        zs.shard(model, torch.optim.Adafactor(model.parameters()), stage=3)
    with pytest.raises(zs.ConfigError, match="expected a class"):
        zs.whole_matrix(3)


def test_states_of_rows_are_no_slices():
    """With as many rows as this rank's slice has elements."""

    def train(model, optimizer, ranks):
        for step in range(3):
            sum(model(torch.full((2, 2), 1.0 + rank + step)).square().sum() for rank in ranks).div(2).backward()
            optimizer.step()
            optimizer.zero_grad()

    def linear():
        torch.manual_seed(5)
        return torch.nn.Linear(2, 32, bias=False)

    expected = linear()
    alone = Rows(expected.parameters(), lr=0.01)
    train(expected, alone, range(2))
    models = [linear(), linear()]

    def rank_main(rank):
        model, optimizer = zs.shard(models[rank], Rows(models[rank].parameters(), lr=0.01), stage=3)
        assert optimizer.core.runs[0][0].numel == 32
        train(model, optimizer, [rank] * 2)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert optimizer.state[model.weight]["rows"].shape == (32,)
        return zs.full_state_dict(model)["weight"], zs.full_optimizer_state(model)["weight"]

    for weight, state in run_threads(2, rank_main):
        torch.testing.assert_close(weight, expected.weight.detach())
        _check(state, alone.state[expected.weight])


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "options", [{"lr": 0.01, "scale_parameter": False, "relative_step": False}, {"beta1": 0.9, "weight_decay": 0.1}]
)
def test_adafactor_of_transformers(options, stage, monkeypatch):
    found = pytest.importorskip("transformers.optimization").Adafactor  # ./test installs it; a class like it is tested above
    monkeypatch.setitem(MAKERS, "of transformers", lambda model: found(model.parameters(), **options))
    run_threads(2, _equal, "of transformers", _reference("of transformers", 2), {"stage": stage})


@zs.whole_matrix
class CountsInPlace(torch.optim.Optimizer):
    """Counts its steps in a tensor among the options of its group, which each step writes into."""

    def __init__(self, params):
        super().__init__(params, {"count": torch.zeros(())})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for param in (param for param in group["params"] if param.grad is not None):
                param.sub_(param.grad / group["count"])


@pytest.mark.parametrize("stage", [0, 3])
def test_an_option_that_a_step_writes_into_is_kept(stage):
    def rank_main(rank):
        model = seeded(Stack)
        model, optimizer = zs.shard(model, CountsInPlace(model.parameters()), stage=stage)
        for _ in range(3):
            square(model, (torch.ones(2, 7),)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [group["count"].item() for group in optimizer.param_groups], zs.full_state_dict(model)

    plain = seeded(Stack)
    alone = CountsInPlace(plain.parameters())
    for _ in range(3):
        square(plain, (torch.ones(2, 7),)).backward()
        alone.step()
        alone.zero_grad()
    for counts, state in run_threads(2, rank_main):
        assert counts == [3.0]
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-5, atol=1e-6)
