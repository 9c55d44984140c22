"""The sharded optimizer is the user's optimizer: any elementwise one, its groups, schedulers, states, hooks and closures.

Everything is compared with plain torch on one process, bit for bit: weights, moments and step counts.
"""

import copy
import math
import threading
import types

import pytest
import torch
from helpers import (
    Branches,
    Task,
    assert_equal_runs,
    differences,
    reference,
    seeded,
    state_differences,
    train,
    vector_batches,
)
from optimizers import ALL_STAGES, DATA, MODEL, OPTIMIZERS, STAGES, WORLD, backward, run_both
from torch import nn

import zeroshard as zs
from zeroshard.testing import run_threads


def compare(task: Task, world_size: int = WORLD, stages=STAGES, precision: str = "fp32", **options) -> None:
    """All stages against one process, all ranks."""
    options |= {"precision": precision}
    per_rank = run_threads(world_size, lambda rank: [train(rank, task, stage=stage, **options) for stage in stages])
    expected = reference(task, world_size, precision, per_rank[0][0].coefficients)
    for rank, outcomes in enumerate(per_rank):
        for stage, got in zip(stages, outcomes, strict=True):
            assert_equal_runs(got, expected, f"stage {stage} rank {rank}:")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_elementwise_optimizer_steps_as_on_one_process(name):
    compare(Task(MODEL, DATA, OPTIMIZERS[name], states=True))
    compare(Task(MODEL, DATA, OPTIMIZERS[name], states=True), precision="bf16", stages=(0, 3))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_fused_kernel_rounds_its_last_lanes_otherwise(precision):
    """Stages are bit-equal among themselves. Plain torch gives the kernel tensors whose last (numel % 16) elements run
    through its scalar loop, without fused multiply-adds; flat shards are multiples of 32. So one step's states differ
    by the rounding of two operations (2 ulp: 2^-22 relative), and weights by lr times a few ulp of an update of about 1.
    """
    lr = 1e-2
    task = Task(MODEL, DATA[:1], lambda params: torch.optim.AdamW(params, lr=lr, fused=True), states=True)
    outcomes = run_threads(WORLD, lambda rank: [train(rank, task, stage=s, precision=precision) for s in STAGES])
    expected = reference(task, WORLD, precision)
    for got in [outcome for rank in outcomes for outcome in rank]:
        assert_equal_runs(got, outcomes[0][0])
        for name, state in expected.states.items():
            for key, value in state.items():
                torch.testing.assert_close(torch.as_tensor(got.states[name][key]), value, rtol=2**-22, atol=0)
            ulps = 2**-23 * expected.weights[name].abs().max()
            torch.testing.assert_close(got.weights[name], expected.weights[name], rtol=0, atol=float(ulps) + lr * 2**-21)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Weights decay, biases do not and learn faster; the last layer has options of its own."""
    last = set(model.layers[-1].parameters())
    weights = [p for p in model.parameters() if p.dim() > 1 and p not in last]
    biases = [p for p in model.parameters() if p.dim() == 1 and p not in last]
    groups = [
        {"params": weights, "weight_decay": 0.2},
        {"params": biases, "lr": 5e-2, "weight_decay": 0.0},
        {"params": list(last), "betas": (0.5, 0.6)},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


@pytest.mark.parametrize("units", ["auto", "model", "leaf"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parameter_groups_keep_their_options(units, world_size):
    data = vector_batches(3, 1, world_size)
    compare(Task(MODEL, data, two_groups, by_model=True, states=True), world_size, units=units)


def plateau(optimizer):
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    return types.SimpleNamespace(step=lambda: scheduler.step(1.0))


SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),  # also moves betas
    "plateau": plateau,
    "chained": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2), torch.optim.lr_scheduler.ExponentialLR(o, 0.5)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("early", [True, False], ids=["before shard", "after shard"])
@pytest.mark.filterwarnings("error")  # torch warns where it thinks that the scheduler went ahead of the optimizer
def test_schedulers_work_whenever_they_were_built(name, early):
    compare(Task(MODEL, DATA, two_groups, by_model=True, scheduler=SCHEDULERS[name], early=early, states=True))


# which branches each rank uses: all, the same on all ranks, different ones, none
ROUTES = [
    [((0, 1, 2), (0, 1, 2))],
    [((0,), (0,))],
    [((1,), (2,))],
    [((), ())],
    [((0,), ()), ((), (2,))],  # two micro-batches
    [((0, 1, 2), (1,))],
]


@pytest.mark.parametrize("name", ["adamw", "momentum", "lion", "nadam"])
@pytest.mark.parametrize("units", ["auto", "leaf", "model"])
def test_parameters_that_take_no_part_keep_their_moments_and_step_counts(name, units):
    """No rank has a gradient: not stepped, as on one process. Some rank has: zeros from the others."""
    generator = torch.Generator().manual_seed(3)
    data = [[[(torch.randn(3, 6, generator=generator), chosen) for chosen in ranks] for ranks in micros] for micros in ROUTES]
    compare(Task(seeded(Branches), data, OPTIMIZERS[name], states=True), units=units)


@ALL_STAGES
def test_a_step_without_gradients_does_nothing_and_says_so(stage):
    def loop(model, optimizer, batch_of):
        for step in range(2):
            backward(model, batch_of(step))
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(2):
                optimizer.step()
                if hasattr(optimizer, "last_step"):
                    assert optimizer.last_step == zs.StepRecord(0.0, 1.0, skipped=True)

    run_both(loop, stage)


@ALL_STAGES
def test_options_changed_by_hand_count(stage):
    def loop(model, optimizer, batch_of):
        for step in range(3):
            backward(model, batch_of(step))
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
                group["weight_decay"] = 0.1 * step
            optimizer.step()
            optimizer.zero_grad()

    run_both(loop, stage)


@ALL_STAGES
def test_a_closure_is_run_with_gradients_and_its_loss_comes_back(stage):
    def loop(model, optimizer, batch_of):
        for step in range(3):

            def closure(step=step):
                optimizer.zero_grad()
                backward(model, batch_of(step))
                return 7.5

            with torch.no_grad():
                assert optimizer.step(closure) == 7.5

    run_both(loop, stage)


@ALL_STAGES
def test_step_hooks_run_once_a_step_around_it(stage):
    events = []

    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        optimizer.register_step_pre_hook(lambda *_: events.append((rank, "before, early")))
        model, optimizer = zs.shard(model, optimizer, stage=stage)
        optimizer.register_step_pre_hook(lambda *_: events.append((rank, "before")))
        optimizer.register_step_post_hook(lambda *_: events.append((rank, "after")))
        for step in range(2):
            backward(model, [DATA[step][0][rank]])
            optimizer.step()
        zs.close(model)

    run_threads(WORLD, rank_run)
    for rank in range(WORLD):
        assert [event for r, event in events if r == rank] == ["before, early", "before", "after"] * 2


@ALL_STAGES
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_one_ranks_overflow_skips_the_step_on_all(stage, precision):
    """Weights, moments and step counts stay; the record names the parameter; training goes on as if never happened."""
    poisoned = copy.deepcopy(DATA)
    poisoned[1][0][1][0][0, 0] = math.inf  # rank 1's input in step 1

    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        options = {"loss_scale": 8.0} if precision == "fp16" else {}
        model, optimizer = zs.shard(model, OPTIMIZERS["adamw"](model.parameters()), stage=stage, precision=precision, **options)
        records = []
        for step in range(3):
            backward(model, [poisoned[step][0][rank]])
            optimizer.step()
            optimizer.zero_grad()
            records.append(optimizer.last_step)
        weights, states = zs.full_state_dict(model, masters=True), zs.full_optimizer_state(model)
        zs.close(model)
        return records, weights, states

    scale = 8.0 if precision == "fp16" else 1.0
    expected = reference(Task(MODEL, [DATA[0], DATA[2]], OPTIMIZERS["adamw"]), WORLD, precision, scale=scale)
    for records, weights, states in run_threads(WORLD, rank_run):
        assert [record.skipped for record in records] == [False, True, False]
        assert not math.isfinite(records[1].grad_norm)
        assert any(name.startswith("layers.0.weight (rank") for name in records[1].nonfinite)
        assert records[0].nonfinite == records[2].nonfinite == ()
        assert not differences(weights, expected.weights)
        assert not state_differences(states, expected.states)


@pytest.mark.parametrize("how", ["forward", "full_state_dict"])
def test_a_step_writes_nothing_that_a_slower_peer_still_reads_after_a_clip(how):
    stepped = threading.Event()

    def rank_run(rank: int) -> bool:
        model = seeded(lambda: nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)))
        model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=1.0), units=["Linear"])
        batch = torch.ones(4, 16)
        look = (
            (lambda: model(batch))
            if how == "forward"
            else lambda: torch.cat([v.flatten() for v in zs.full_state_dict(model).values()])
        )
        with torch.no_grad():
            before = look().clone()
        model(batch).square().sum().backward()
        zs.clip_grad_norm_(model, 100.0)

        def pause(*_: object) -> None:
            stepped.wait(0.5)

        if rank == 1:  # reads while rank 0 has entered its step
            model[0].register_forward_hook(pause)
            if how != "forward":
                pause()
        with torch.no_grad():
            after = look().clone()
        optimizer.step()
        stepped.set()
        return torch.equal(before, after)

    assert run_threads(2, rank_run) == [True, True]


def test_a_write_waits_for_a_peer_that_reads_a_unit_for_the_second_time_in_a_row():
    written = threading.Event()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(self.block(x))

    def pause(*_: object) -> None:
        written.wait(0.5)

    def rank_run(rank: int) -> bool:
        model = seeded(Twice)
        model, _ = zs.shard(model, torch.optim.SGD(model.parameters(), lr=1.0), units=["Linear"])
        average, batch = zs.ema(model), torch.ones(4, 16)
        with torch.no_grad():
            model(batch)  # the order that is expected from now on: the block, and the block again
            before = model.block(batch).clone()
            average.full_state_dict()  # allocates memory that peers read: another fence is passed before the next gather
            if rank == 1:
                model.block.register_forward_pre_hook(pause)
            after = model.block(batch).clone()
            model.block.weight.mul_(2.0)
        written.set()
        return torch.equal(before, after)

    assert run_threads(2, rank_run) == [True, True]
