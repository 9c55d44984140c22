"""DeepSpeed's schedules: its numbers (tables worked out by hand, and DeepSpeed itself where it is installed) and its contract."""

import math

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.integrations.deepspeed import lr_schedules as ours
from zeroshard.integrations.deepspeed.logs import logger
from zeroshard.testing import run_threads

CASES = {
    "LRRangeTest": [{}, {"lr_range_test_min_lr": [1e-4, 2e-3], "lr_range_test_step_size": 7, "lr_range_test_staircase": True}],
    "OneCycle": [
        {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 40},
        {"cycle_min_lr": [1e-4, 1e-5], "cycle_max_lr": 1e-2, "cycle_first_step_size": 30, "cycle_second_step_size": 50,
         "cycle_first_stair_count": 7, "cycle_second_stair_count": 3, "decay_lr_rate": 0.3, "decay_step_size": 11,
         "decay_mom_rate": 0.1},
        {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 9, "cycle_momentum": False, "decay_step_size": 4},
    ],
    "WarmupLR": [{}, {"warmup_min_lr": 1e-5, "warmup_max_lr": [1e-2, 1e-3], "warmup_num_steps": 50, "warmup_type": "linear"}],
    "WarmupDecayLR": [
        {"total_num_steps": 150, "warmup_num_steps": 20},
        {"total_num_steps": 90, "warmup_max_lr": 0.1, "warmup_num_steps": 1, "warmup_type": "linear"},
    ],
    "WarmupCosineLR": [
        {"total_num_steps": 150, "warmup_num_steps": 20},
        {"total_num_steps": 10, "warmup_num_steps": 30, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05, "warmup_type": "linear"},
    ],
}  # fmt: skip
EACH = [pytest.param(name, params, id=f"{name}-{n}") for name, cases in CASES.items() for n, params in enumerate(cases)]


@pytest.fixture(autouse=True)
def quiet():
    before, logger.disabled = logger.disabled, True
    yield
    logger.disabled = before


def adam(groups=2, **options):
    return torch.optim.AdamW([{"params": [nn.Parameter(torch.zeros(2))], "lr": 0.1 / (n + 1)} for n in range(groups)], **options)


def trace(make, optimizer, steps=200):
    """Rates and betas of every group after building and after each step."""
    schedule = make(optimizer)
    rows = [[(float(g["lr"]), g["betas"]) for g in optimizer.param_groups]]
    for _ in range(steps):
        schedule.step()
        rows.append([(float(g["lr"]), g["betas"]) for g in optimizer.param_groups])
        assert [float(rate) for rate in schedule.get_last_lr()] == [rate for rate, _ in rows[-1]]
    return rows


@pytest.mark.parametrize(("name", "params"), EACH)
def test_as_deepspeed_does(name, params):
    deepspeed = pytest.importorskip("deepspeed")
    if "zeroshard" in deepspeed.__version__:
        pytest.skip("this is zeroshard's own")
    theirs = getattr(pytest.importorskip("deepspeed.runtime.lr_schedules"), name)
    for steps, start in ((200, -1), (5, 60)):
        got, expected = (
            trace(lambda o, cls=cls: cls(o, **params, last_batch_iteration=start), adam(), steps)
            for cls in (getattr(ours, name), theirs)
        )
        flat = [[torch.tensor([[r, *b] for r, b in row], dtype=torch.float64) for row in rows] for rows in (got, expected)]
        torch.testing.assert_close(torch.stack(flat[0]), torch.stack(flat[1]), rtol=1e-12, atol=1e-15)


TABLES = {  # name: (params, {iteration: rate of a group whose own rate is 0.1})
    "LRRangeTest": ({"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2}, {-1: 0.01, 0: 0.015, 1: 0.02, 3: 0.03}),
    "OneCycle": (
        {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 2, "decay_lr_rate": 1.0, "decay_step_size": 1},
        {-1: 0.0, 0: 0.5, 1: 1.0, 2: 0.5, 3: 0.0, 4: 0.0},
    ),
    "WarmupLR": ({"warmup_max_lr": 1.0, "warmup_num_steps": 4}, {-1: 0.0, 0: 0.0, 1: 0.5, 3: 1.0, 4: 1.0, 9: 1.0}),
    "WarmupDecayLR": (
        {"total_num_steps": 10, "warmup_max_lr": 1.0, "warmup_num_steps": 2, "warmup_type": "linear"},
        {-1: 0.0, 0: 0.0, 1: 0.5, 2: 1.0, 6: 0.5, 10: 0.0, 12: 0.0},
    ),
    "WarmupCosineLR": (
        {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_type": "linear", "cos_min_ratio": 0.5, "warmup_min_ratio": 0.2},
        {-1: 0.0, 0: 0.02, 1: 0.06, 2: 0.05 + 0.05 * (1 + math.cos(math.pi / 4)) / 2, 3: 0.075, 5: 0.05, 9: 0.05},
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_rates_worked_out_by_hand(name):
    params, table = TABLES[name]
    rows = trace(lambda o: ours.schedule_from_config(name, params, o), adam(1), max(table) + 1)
    for iteration, rate in table.items():
        assert rows[iteration + 1][0][0] == pytest.approx(rate, abs=1e-12), iteration


def test_momentum_goes_against_the_rate_and_optimizers_without_betas_have_none():
    optimizer = adam(1)
    options = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 2}
    schedule = ours.OneCycle(optimizer, **options, cycle_min_mom=0.8, cycle_max_mom=0.9)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    with pytest.raises(AssertionError, match="step"):
        schedule.get_last_lr()
    seen = []
    for _ in range(6):
        schedule.step()
        seen.append(optimizer.param_groups[0]["betas"][0])
        assert schedule.get_mom() == [(seen[-1], 0.99)]
    assert seen == pytest.approx([0.85, 0.8, 0.85, 0.9, 0.9, 0.9])
    assert (schedule.total_size, schedule.step_ratio) == (
        schedule.rise[0] + schedule.fall[0],
        schedule.rise[0] / schedule.total_size,
    )
    assert ours.OneCycle(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), **options).get_mom() is None


@pytest.mark.parametrize(("name", "params"), EACH)
def test_a_state_dict_goes_on_where_it_was(name, params):
    make = getattr(ours, name)
    first, second = adam(), adam()
    straight, cut = make(first, **params), make(first, **params)
    rows = [[g["lr"] for g in first.param_groups] for _ in range(40) if straight.step() is None]
    for _ in range(17):
        cut.step()
    resumed = make(second, **params)
    state = cut.state_dict()
    assert state == {"last_batch_iteration": 16}
    resumed.load_state_dict(state)
    for expected in rows[17:]:
        resumed.step()
        assert [g["lr"] for g in second.param_groups] == expected
    resumed.step(3)
    assert [g["lr"] for g in second.param_groups] == rows[3]


def test_building_with_an_iteration_writes_nothing():
    for name, cases in CASES.items():
        optimizer = adam()
        schedule = getattr(ours, name)(optimizer, **cases[0], last_batch_iteration=5)
        assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.05] and optimizer.param_groups[0]["betas"] == (0.9, 0.999)
        with pytest.raises(AssertionError):
            schedule.get_last_lr()


def test_rates_that_are_tensors_are_written_in_place():
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=rate)
    schedule = ours.WarmupLR(optimizer, warmup_num_steps=2, warmup_type="linear")
    assert optimizer.param_groups[0]["lr"] is rate and rate == 0
    for _ in range(4):
        schedule.step()
    assert optimizer.param_groups[0]["lr"] is rate and rate == pytest.approx(0.1)


def test_what_is_refused():
    optimizer = adam()
    for steps in (0, -1, 2.5, None):
        with pytest.raises(ValueError, match="warmup_num_steps"):
            ours.WarmupLR(optimizer, warmup_num_steps=steps)
        with pytest.raises(ValueError, match="warmup_num_steps"):
            ours.WarmupCosineLR(optimizer, 10, warmup_num_steps=steps)
    for bad in ({"cycle_first_step_size": 0}, {"cycle_second_step_size": -1}, {"cycle_max_lr": [1.0]}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            ours.OneCycle(optimizer, **{"cycle_min_lr": 0.3, "cycle_max_lr": 1.0} | bad)
        assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.05]  # nothing was written
    with pytest.raises(ValueError, match="lr_range_test_step_size"):
        ours.LRRangeTest(optimizer, lr_range_test_step_size=0)
    with pytest.raises(ValueError, match="min_lr"):
        ours.WarmupLR(optimizer, warmup_min_lr=[0.1, 0.2, 0.3])
    with pytest.raises(TypeError, match="Module"):
        ours.WarmupLR(nn.Module())
    with pytest.raises(zs.ConfigError, match="did you mean|Did you mean"):
        ours.schedule_from_config("WarmupLr", {}, optimizer)
    with pytest.raises(zs.ConfigError, match="warmup_steps"):
        ours.schedule_from_config("WarmupLR", {"warmup_steps": 3}, optimizer)


def test_schedulers_of_torch_and_optimizers_within_others():
    optimizer = adam(1)
    scheduler = ours.schedule_from_config("StepLR", {"step_size": 1, "gamma": 0.5}, optimizer)
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    holder = type("Holder", (), {"optimizer": optimizer})()
    assert ours.schedule_from_config("WarmupLR", None, holder).optimizer is optimizer
    none, shortest = (ours.schedule_from_config("WarmupLR", {"warmup_num_steps": steps}, adam(1)) for steps in (0, 1))
    assert none.warmup_num_steps == shortest.warmup_num_steps == 2


def test_a_sharded_optimizer_steps_with_the_scheduled_rates():
    def work(rank):
        model = nn.Linear(4, 4)
        with torch.no_grad():
            [p.fill_(0.5) for p in model.parameters()]
        model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=1.0), stage=3)
        schedule = ours.WarmupLR(optimizer, warmup_max_lr=0.25, warmup_num_steps=4, warmup_type="linear")
        schedule.step()
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return zs.full_state_dict(model)["bias"].tolist()

    for bias in run_threads(2, work):
        assert bias == pytest.approx([0.5 - (0 + 0.0625 + 0.125)] * 4)
