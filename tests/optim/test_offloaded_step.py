"""The host's step, slab by slab: steps that differ in what they step."""

import copy

import pytest
import torch
from helpers import adamw, seeded
from offloading import tiers
from torch import nn

import zeroshard as zs
from zeroshard.engine.runtime import runtime_of
from zeroshard.testing import run_threads
from zeroshard.tiers.io.async_file import Engine


class TwoParts(nn.Module):
    """A small part that every step uses, and one that some do."""

    def __init__(self, width: int = 512):
        super().__init__()
        self.small = nn.Linear(32, 32)
        self.large = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 32))

    def forward(self, x, both):
        y = self.small(x)
        return (self.large(y) if both else y).square().mean()


MODEL = seeded(TwoParts)
DATA = torch.randn(2, 4, 4, 32, generator=torch.Generator().manual_seed(1))  # (ranks, steps, samples, features)


def trained(rank: int, both: list[bool], options: dict, make_optimizer=adamw) -> tuple[dict, list[int]]:
    """Weights after a step for each of `both`, and the bytes of the step's buffers after each."""
    model = copy.deepcopy(MODEL)
    model, optimizer = zs.shard(model, make_optimizer(model.parameters()), **options)
    core, sizes = runtime_of(model).optimizers.core, []
    for step, used in enumerate(both):
        model(DATA[rank, step], used).backward()
        optimizer.step()
        optimizer.zero_grad()
        sizes.append(core.host.pool.nbytes if core.host is not None else 0)
    zs.close(model)
    return model.state_dict(), sizes


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_later_step_may_step_more_than_the_first(world_size, stage, tmp_path):
    """Of the arena that the first step was given, all may hold what was read ahead for the next."""
    both = [False, True, False, True]
    plain = {"stage": stage, "units": "leaf"}
    offloaded = {**plain, **tiers(str(tmp_path), "none", "cpu", "nvme")}
    expected = run_threads(world_size, trained, both, plain)
    got = run_threads(world_size, trained, both, offloaded)
    for (weights, sizes), (wanted, _) in zip(got, expected, strict=True):
        assert all(torch.equal(weights[name], value) for name, value in wanted.items())
        assert sizes[0] < sizes[1] == sizes[3]


@pytest.mark.parametrize("slow", [False, True])
def test_what_a_step_moves_does_not_depend_on_how_much_was_read_ahead(slow, tmp_path, monkeypatch):
    plain = Engine.write

    def write(self, *args, **kwargs):
        handle = plain(self, *args, **kwargs)
        if slow:
            handle.done = lambda: False  # until someone waits: the step ends with all its memory on its way to disk
        else:
            handle.wait()
        return handle

    monkeypatch.setattr(Engine, "write", write)
    (moved, ahead, theory) = run_threads(1, moved_by_steps, tiers(str(tmp_path), "none", "cpu", "nvme"))[0]
    assert moved[1:] == [theory, theory]  # the first has no states to read
    assert max(ahead) == 0 if slow else min(ahead) > 0


def moved_by_steps(rank: int, options: dict) -> tuple[list[dict], list[int], dict]:
    """Bytes by link in each of three steps, the bytes read ahead at the end of each, and what a step should move."""
    model = copy.deepcopy(MODEL.small)
    model, optimizer = zs.shard(model, adamw(model.parameters()), stage=2, **options)
    moved, ahead, before = [], [], {}
    for step in range(3):
        model(DATA[rank, step]).square().mean().backward()
        optimizer.step()
        report = zs.report(model)
        moved.append({link: nbytes - before.get(link, 0) for link, nbytes in report.moved.items()})
        ahead.append(sum(runtime_of(model).tiers.ledger.ahead.values()))
        before = report.moved
        optimizer.zero_grad()
    ledger = runtime_of(model).tiers.ledger
    zs.close(model)
    assert not any(ledger.ahead.values())
    return moved, ahead, report.theory_moved_per_step


class ManyStates(torch.optim.Optimizer):
    """Twelve states as large as the parameter: more than a first step foresees."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                for number in range(12):
                    state.setdefault(f"mean_{number}", torch.zeros_like(param)).lerp_(param.grad, 0.1 * (number + 1) / 12)
                param.sub_(sum(state.values()), alpha=group["lr"])


def test_a_first_step_that_makes_more_states_than_foreseen(tmp_path):
    def two_groups(params):
        """Two runs of one shard: the first makes the columns of which the second then has to read more."""
        params = list(params)
        optimizer = ManyStates(params[:1])
        optimizer.add_param_group({"params": params[1:]})
        return optimizer

    plain = {"stage": 3, "units": "model"}
    offloaded = {**plain, **tiers(str(tmp_path), "none", "cpu", "nvme")}
    expected = run_threads(1, trained, [True, True], plain, two_groups)[0][0]
    got = run_threads(1, trained, [True, True], offloaded, two_groups)[0][0]
    assert all(torch.equal(got[name], value) for name, value in expected.items())


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
def test_a_clipped_gradient_is_rounded_once_wherever_it_rests(tier, tmp_path):
    """fp32 gradients of parameters that are stepped in bf16: times the clip's factor in fp32, then to bf16."""

    def run(offload):
        model = seeded(lambda: nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        options = {"precision": "bf16", "master_weights": False, "gradient_dtype": torch.float32, "stage": 2}
        if offload is not None:
            options |= {"offload_optimizer": {"device": "cpu", "fused": False}, "offload_path": str(tmp_path)}
            options |= {"offload_gradient": {"device": offload, "any_filesystem": True}}
        model, optimizer = zs.shard(model, optimizer, **options)
        for scale in (1.0, 0.7):
            model(torch.linspace(-scale, 1, 512).view(8, 64)).float().square().sum().backward()
        zs.clip_grad_norm_(model, 0.5)
        optimizer.step()
        return zs.full_optimizer_state(model)["weight"]["momentum_buffer"]

    assert torch.equal(run(tier), run(None))
