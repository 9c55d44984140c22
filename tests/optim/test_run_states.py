"""States of runs: one object, whether the optimizer's class keeps them or they rest in columns of the shard."""

import copy

import pytest
import torch
from helpers import adamw
from offloading import tiers
from torch import nn

import zeroshard as zs
from zeroshard.engine.rest import Rest
from zeroshard.testing import run_threads

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8))
DATA = torch.randn(3, 4, 24)
PLACES = {
    "own": {},
    "host": {"offload_optimizer": "cpu"},
    "disk": None,
    "split": {"precision": "bf16", "master_weights": "split"},
}


def stepped(options: dict, make=adamw):
    """A model of one unit after a step, and its optimizer's core."""
    model = copy.deepcopy(MODEL)
    model, optimizer = zs.shard(model, make(model.parameters()), stage=3, units=[], **options)
    model(DATA).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, optimizer.core


def read(run, value) -> torch.Tensor:
    """The run's elements of a column."""
    return value.load(run.start, run.stop).clone() if isinstance(value, Rest) else value.clone()


def life(rank: int, place: str, disk: str) -> None:
    options = tiers(disk, "none", "none", "nvme") if place == "disk" else PLACES[place]
    model, optimizer, core = stepped(options)
    (run,) = core.all_runs
    states = run.states
    assert states.own == (place == "own") and list(states.scalars) == ["step"]
    assert all(isinstance(value, Rest) == (place != "own") for value in states.columns.values())
    first = "step" if place == "own" else "exp_avg"  # columns of the shard come first; the class's own order is kept
    assert next(iter(states.load())) == first
    before = {name: read(run, value) for name, value in states.columns.items()}

    parts = core.maker.split(run)
    assert states.entries is None and [part.start for part in parts] == sorted(part.start for part in parts)
    for part in parts:
        for name, value in part.states.columns.items():
            assert torch.equal(read(part, value), before[name][part.start - run.start : part.stop - run.start])
    parts[0].states.scalars["step"].add_(1)  # a part has scalars of its own
    assert [float(part.states.scalars["step"]) for part in parts] == [2.0] + [1.0] * (len(parts) - 1)
    assert parts[0].states.kind() != parts[1].states.kind() == parts[2].states.kind()

    ((one, rest),) = core.maker.joined([parts], core.runtime.groups)
    assert one is parts[0] and rest.indices == run.indices[1:]
    parts[0].states.scalars["step"].sub_(1)
    ((again,),) = core.maker.joined([[one, rest]], core.runtime.groups)
    assert (again.start, again.stop, again.indices) == (run.start, run.stop, run.indices)
    assert {name: read(again, value).tolist() for name, value in again.states.columns.items()} == {
        name: value.tolist() for name, value in before.items()
    }
    core.runs = [[again]]

    again.states.put("more", again.states.column("more", torch.float32))
    again.states.put("count", 3)
    assert list(again.states.columns) == [*before, "more"] and again.states.scalars["count"] == 3
    for name in list(again.states.load()):
        again.states.remove(name)
    assert again.states.entries is None and again.states.load() == {}  # as before the first step
    model(DATA).sum().backward()
    optimizer.step()
    assert float(again.states.scalars["step"]) == 1.0
    zs.close(model)


@pytest.mark.parametrize("place", PLACES)
def test_states_are_cut_joined_and_changed_alike_wherever_they_are(place, tmp_path):
    run_threads(1, life, place, str(tmp_path))


def without_states(rank: int, device: str) -> tuple[bool, bool]:
    options = {} if device == "none" else {"offload_optimizer": device}
    model, _, core = stepped(options, lambda params: torch.optim.SGD(params, lr=0.1))
    (run,) = core.all_runs
    entries, kind = run.states.entries, run.states.kind()
    run.states.clear()
    zs.close(model)
    return entries is None, kind == run.states.kind()


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_a_run_without_states_remembers_its_first_step_where_kernels_make_states(device):
    """A kernel makes the states of a first step; the optimizer's class sees by itself that there are none."""
    ((absent, same),) = run_threads(1, without_states, device)
    assert (absent, same) == ((True, True) if device == "none" else (False, False))
