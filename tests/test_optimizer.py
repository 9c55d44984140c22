"""The sharded optimizer is the user's optimizer: any elementwise one, its groups, schedulers, states, hooks and closures.

Everything is compared with plain torch on one process, bit for bit: weights, moments and step counts.
"""

import copy
import math
import types

import pytest
import torch
from helpers import (
    MLP,
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
from torch import nn

import zeroshard as zs
from zeroshard.testing import run_threads

WORLD = 2
MODEL = seeded(MLP)
DATA = vector_batches(4, 1, WORLD)
STAGES = (0, 1, 2, 3)
ALL_STAGES = pytest.mark.parametrize("stage", STAGES)


class Lion(torch.optim.Optimizer):
    """A custom elementwise optimizer, as users write them: per parameter, with a state of its own (arXiv 2302.06675)."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                    state["steps"] = 0
                state["steps"] += 1
                first, second = group["betas"]
                direction = state["momentum"].mul(first).add(p.grad, alpha=1 - first).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                state["momentum"].mul_(second).add_(p.grad, alpha=1 - second)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.01),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True, maximize=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, betas=(0.8, 0.9)),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "adamw tensor lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2)),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.9, centered=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2, weight_decay=0.01),
    "radam": lambda params: torch.optim.RAdam(params, lr=1e-2),
    "adamax": lambda params: torch.optim.Adamax(params, lr=1e-2),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=1.0),
    "asgd": lambda params: torch.optim.ASGD(params, lr=1e-2),
    "rprop": lambda params: torch.optim.Rprop(params, lr=1e-2),
    "lion": lambda params: Lion(params, lr=1e-2, weight_decay=0.1),
}


def compare(task: Task, world_size: int = WORLD, stages=STAGES, precision: str = "fp32", **options) -> None:
    """All stages against one process, all ranks."""
    options |= {"precision": precision}
    per_rank = run_threads(
        world_size, lambda rank: [train(rank, task, stage=stage, **options) for stage in stages], timeout_s=40
    )
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
    data = [
        [[(torch.randn(3, 6, generator=generator), chosen) for chosen in ranks] for ranks in micros] for micros in ROUTES
    ]
    compare(Task(seeded(Branches), data, OPTIMIZERS[name], states=True), units=units)


# -- one loop with a variation, in plain torch and sharded ---------------------------------------------------------


def run_both(loop, stage: int, world_size: int = WORLD, **options) -> None:
    """loop(model, optimizer, batch_of, sharded) -> optimizer: the same code for both; then everything is compared.

    In plain torch the "batch" is that of all ranks one after another, with the mean of their gradients.
    """

    def rank_run(rank: int):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, OPTIMIZERS["adamw"](model.parameters()), stage=stage, **options)
        loop(model, optimizer, lambda step: [DATA[step][0][rank]])
        result = zs.full_state_dict(model), zs.full_optimizer_state(model)
        zs.close(model)
        return result

    plain = copy.deepcopy(MODEL)
    optimizer = OPTIMIZERS["adamw"](plain.parameters())
    loop(plain, optimizer, lambda step: DATA[step][0])
    states = {name: dict(optimizer.state.get(p, {})) for name, p in plain.named_parameters()}
    for weights, got_states in run_threads(world_size, rank_run):
        assert not differences(weights, plain.state_dict())
        assert not state_differences(got_states, states)


def backward(model: nn.Module, batches: list) -> None:
    """Backward of this rank's batch, or (plain) of every rank's, with the mean left in .grad."""
    for batch in batches:
        model(*batch).backward()
    if len(batches) > 1:
        for p in model.parameters():
            p.grad.mul_(1.0 / len(batches))


@ALL_STAGES
@pytest.mark.parametrize("how", ["optimizer", "model", "assign", "optimizer zeros", "model zeros"])
def test_every_way_to_drop_gradients(stage, how):
    def loop(model, optimizer, batch_of):
        for step in range(4):
            backward(model, batch_of(step))
            optimizer.step()
            if how.startswith("optimizer"):
                optimizer.zero_grad(set_to_none="zeros" not in how)
            elif how.startswith("model"):
                model.zero_grad(set_to_none="zeros" not in how)
            else:
                for p in model.parameters():
                    p.grad = None

    run_both(loop, stage)


@ALL_STAGES
def test_a_gradient_set_to_zero_is_still_stepped(stage):
    """set_to_none=False leaves zeros, and a step with zeros decays moments and weights, as in torch."""

    def loop(model, optimizer, batch_of):
        backward(model, batch_of(0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()

    run_both(loop, stage)


@ALL_STAGES
def test_gradients_that_stay_are_stepped_again(stage):
    def loop(model, optimizer, batch_of):
        backward(model, batch_of(0))
        optimizer.step()
        optimizer.step()

    run_both(loop, stage)


@ALL_STAGES
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("write", ["scale", "zero", "assign", "through data", "foreach"])
def test_gradients_changed_by_hand_are_what_is_measured_and_stepped(stage, precision, write):
    """The norm is that of what is stepped, whether it was found on the way or not."""

    def change(model):
        grads = [p.grad for p in model.parameters()]
        for p in model.parameters():
            if write == "scale":
                p.grad.mul_(0.5).add_(p.grad, alpha=3.0)
            elif write == "zero":
                p.grad.zero_()
            elif write == "assign":
                p.grad = p.grad * 4.0
            elif write == "through data":
                p.grad.data.mul_(8.0)
        if write == "foreach":
            torch._foreach_mul_(grads, 0.25)

    def rank_run(rank):
        model, optimizer = zs.shard(*_pair(copy.deepcopy(MODEL)), stage=stage, precision=precision)
        for step in range(2):
            backward(model, [DATA[step][0][rank]])
            change(model)
            expected = torch.cat([g.reshape(-1) for g in zs.full_gradients(model).values()]).double().norm().item()
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.last_step.grad_norm == pytest.approx(expected, rel=1e-6)
        weights = zs.full_state_dict(model, masters=True)
        zs.close(model)
        return weights

    results = run_threads(WORLD, rank_run)
    if precision == "fp32":
        plain, optimizer = _pair(copy.deepcopy(MODEL))
        for step in range(2):
            backward(plain, DATA[step][0])
            change(plain)
            optimizer.step()
            optimizer.zero_grad()
        for weights in results:
            assert not differences(weights, plain.state_dict())


@ALL_STAGES
def test_gradients_made_without_a_backward_are_stepped(stage):
    """Assigned to one parameter only, after a step that left others' gradients behind."""

    def loop(model, optimizer, batch_of):
        backward(model, batch_of(0))
        optimizer.step()
        optimizer.zero_grad()
        weight = model.layers[0].weight
        weight.grad = torch.full(tuple(weight.shape), 0.25)
        optimizer.step()
        if hasattr(optimizer, "last_step"):
            assert optimizer.last_step.grad_norm == 0.25 * math.sqrt(weight.numel())

    run_both(loop, stage)


def _pair(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, OPTIMIZERS["adamw"](model.parameters())


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
        assert any(name.startswith("layers.0.weight (shard of rank") for name in records[1].nonfinite)
        assert records[0].nonfinite == records[2].nonfinite == ()
        assert not differences(weights, expected.weights)
        assert not state_differences(states, expected.states)


# -- states ------------------------------------------------------------------------------------------------------


def plain_steps(model, optimizer, steps) -> None:
    for step in steps:
        backward(model, DATA[step][0])
        optimizer.step()
        optimizer.zero_grad()


@ALL_STAGES
@pytest.mark.parametrize("name", ["adamw", "momentum", "nadam", "lion"])
def test_state_from_before_sharding_goes_on(stage, name):
    plain = copy.deepcopy(MODEL)
    optimizer = OPTIMIZERS[name](plain.parameters())
    plain_steps(plain, optimizer, [0, 1])

    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        mine = OPTIMIZERS[name](model.parameters())
        plain_steps(model, mine, [0, 1])
        model, mine = zs.shard(model, mine, stage=stage)
        early = zs.full_optimizer_state(model)
        for step in (2, 3):
            backward(model, [DATA[step][0][rank]])
            mine.step()
            mine.zero_grad()
        result = early, zs.full_state_dict(model), zs.full_optimizer_state(model)
        zs.close(model)
        return result

    results = run_threads(WORLD, rank_run)
    before = {n: copy.deepcopy(dict(optimizer.state.get(p, {}))) for n, p in plain.named_parameters()}
    plain_steps(plain, optimizer, [2, 3])
    after = {n: dict(optimizer.state.get(p, {})) for n, p in plain.named_parameters()}
    for early, weights, late in results:
        assert not state_differences(early, before)
        assert not differences(weights, plain.state_dict())
        assert not state_differences(late, after)


@ALL_STAGES
@pytest.mark.parametrize("source", ["its own", "a plain optimizer's"])
def test_a_state_dict_can_be_loaded_again(stage, source):
    """Back to the moments of step 2, from this optimizer's own state_dict or from one process's, then on."""
    plain = copy.deepcopy(MODEL)
    optimizer = OPTIMIZERS["adamw"](plain.parameters())
    plain_steps(plain, optimizer, [0, 1])
    saved = copy.deepcopy(optimizer.state_dict())

    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        model, mine = zs.shard(model, OPTIMIZERS["adamw"](model.parameters()), stage=stage)

        def sharded_step(step):
            backward(model, [DATA[step][0][rank]])
            mine.step()
            mine.zero_grad()

        sharded_step(0)
        sharded_step(1)
        own = mine.state_dict()
        own["state"] = {i: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in s.items()} for i, s in own["state"].items()}
        weights = zs.full_state_dict(model)
        sharded_step(2)  # to be forgotten
        mine.load_state_dict(own if source == "its own" else saved)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(weights[name])
        sharded_step(3)
        result = zs.full_state_dict(model), zs.full_optimizer_state(model)
        zs.close(model)
        return result

    results = run_threads(WORLD, rank_run)
    plain_steps(plain, optimizer, [3])
    states = {n: dict(optimizer.state.get(p, {})) for n, p in plain.named_parameters()}
    for weights, got in results:
        assert not differences(weights, plain.state_dict())
        assert not state_differences(got, states)


@ALL_STAGES
def test_states_are_shown_by_parameter_with_true_shapes(stage):
    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, OPTIMIZERS["adamw"](model.parameters()), stage=stage)
        assert not optimizer.state
        backward(model, [DATA[0][0][rank]])
        optimizer.step()
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
        for p in model.parameters():
            assert optimizer.state[p]["exp_avg"].shape == p.shape
            assert optimizer.state[p]["step"] == 1
        zs.close(model)

    run_threads(WORLD, rank_run)
