"""Parameters that are trained and that no optimizer has, under FSDP2's door: they keep their gradients, and no optimizer minds them.

What a plain program does with them is the measure; ranks are threads.
"""

import copy
import math

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard import fsdp
from zeroshard.testing import run_threads

WORLD = 2
STAGES = (0, 2, 3)
torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))  # the optimizer has the first layer alone
DATA = torch.randn(6, WORLD, 4, 8)


@pytest.fixture(autouse=True)
def without_options():
    yield
    fsdp.configure()


def sharded(owned: bool = False, **options) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model with the optimizer of its first layer. owned: the optimizer has the rest, too, and does not change it."""
    model = copy.deepcopy(MODEL)
    fsdp.fully_shard(model[0])
    fsdp.fully_shard(model)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 0.0}]
    return model, torch.optim.SGD(groups[: 1 + owned], lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in zs.full_state_dict(model).items()}


def left_of(model: nn.Module) -> torch.Tensor:
    grad = model[2].weight.grad
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()


def assert_close(got: dict, expected: dict) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def plain(bad: int = -1, max_norm: float | None = None) -> tuple[dict, torch.Tensor, list]:
    """Train one process; without the bad batch in the steps. Return parameters, the last layer's gradient, norms that clips returned."""
    model, norms = copy.deepcopy(MODEL), []
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    for number, batches in enumerate(DATA):
        loss_of(model, batches.flatten(0, 1) * (math.nan if number == bad else 1.0)).backward()
        if max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        if number != bad:
            optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), model[2].weight.grad, norms


@pytest.mark.parametrize("stage", STAGES)
def test_a_batch_of_nan_stops_one_step(stage):
    fsdp.configure(stage=stage)

    def train(rank):
        model, optimizer = sharded()
        records = []
        for number, batches in enumerate(DATA):
            loss_of(model, batches[rank] * (math.nan if number == 1 else 1.0)).backward()
            optimizer.step()
            records.append(optimizer.last_step)
            optimizer.zero_grad()
        return values_of(model), left_of(model), records

    expected, grad, _ = plain(bad=1)
    for values, left, records in run_threads(WORLD, train):
        assert [record.skipped for record in records] == [False, True, False, False, False, False]
        assert records[1].nonfinite and all(name.startswith("0.") for name in records[1].nonfinite)
        assert left.isnan().all() and grad.isnan().all()
        assert_close(values, expected)


@pytest.mark.parametrize("stage", STAGES)
def test_the_programs_clip_counts_them(stage):
    fsdp.configure(stage=stage)

    def train(rank):
        model, optimizer = sharded()
        norms = []
        for batches in DATA:
            loss_of(model, batches[rank]).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
            optimizer.step()
            optimizer.zero_grad()
        return values_of(model), left_of(model), norms

    expected, grad, norms = plain(max_norm=0.3)
    for values, left, found in run_threads(WORLD, train):
        assert_close(values, expected)
        torch.testing.assert_close(left, grad, rtol=1e-5, atol=1e-6)
        assert found == pytest.approx(norms)


def test_max_grad_norm_and_the_norm_of_a_step_are_of_the_optimizers_own():
    fsdp.configure(max_grad_norm=0.1)

    def train(rank):
        model, optimizer = sharded()
        norms = []
        for batches in DATA:
            loss_of(model, batches[rank]).backward()
            optimizer.step()
            norms.append(optimizer.last_step.grad_norm)
            optimizer.zero_grad()
        return values_of(model), norms

    model, norms = copy.deepcopy(MODEL), []
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    for batches in DATA:
        loss_of(model, batches.flatten(0, 1)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model[0].parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    for values, found in run_threads(WORLD, train):
        assert_close(values, model.state_dict())
        assert found == pytest.approx(norms)


def weighted(model, optimizer, rank):
    """A batch that the program leaves out, of another weight."""
    for number, batches in enumerate(DATA):
        zs.backward(model, loss_of(model, batches[rank]), weight=5.0 if number == 1 else 1.0 + rank)
        if number != 1:
            optimizer.step()
        optimizer.zero_grad()


def weighted_once(model, optimizer, rank):
    """A weighted batch that the program leaves out, and plain ones."""
    zs.backward(model, loss_of(model, DATA[0, rank]), weight=5.0)
    optimizer.zero_grad()
    for batches in DATA:
        loss_of(model, batches[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()


def uneven(model, optimizer, rank):
    """Data that ends earlier on one rank."""
    with zs.join(model):
        for batches in DATA[: 4 - 2 * rank]:
            loss_of(model, batches[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()


def failing(model, optimizer, rank):
    """A backward that fails after another, which zero_grad makes good, also for verbs that use all gradients."""
    loss_of(model, DATA[0, rank]).backward()
    hook = model[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, DATA[0, rank]).backward()
    hook.remove()
    optimizer.zero_grad()
    for batches in DATA:
        loss_of(model, batches[rank]).backward()
        zs.full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("loop", [weighted, weighted_once, uneven, failing], ids=lambda loop: loop.__name__)
def test_steps_are_those_of_an_optimizer_that_has_them(loop):
    def train(rank, owned):
        model, optimizer = sharded(owned)
        loop(model, optimizer, rank)
        return values_of(model)

    for stage in STAGES:
        fsdp.configure(stage=stage)
        assert_close(run_threads(WORLD, train, False)[0], run_threads(WORLD, train, True)[0])


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_their_gradients_add_up(precision):
    def train(rank, stage):
        model, optimizer = sharded()
        for number, batches in enumerate(DATA):
            model.set_requires_gradient_sync(number not in (1, 2))  # zero_grad keeps sums held back, too
            loss_of(model, batches[rank]).backward()
            optimizer.zero_grad()
        return left_of(model), float(nn.utils.clip_grad_norm_(model[2].parameters(), 1.0))

    model = copy.deepcopy(MODEL)
    for batches in DATA:
        loss_of(model, batches.flatten(0, 1)).backward()
    grad = model[2].weight.grad.clone()
    norm = float(nn.utils.clip_grad_norm_(model[2].parameters(), 1.0))
    close = {"rtol": 1e-5, "atol": 1e-6} if precision == "fp32" else {"rtol": 1e-2, "atol": 1e-2}
    for stage in STAGES:
        fsdp.configure(stage=stage, precision=precision)
        for left, found in run_threads(WORLD, train, stage):
            torch.testing.assert_close(left, grad, **close)
            assert found == pytest.approx(norm, rel=close["rtol"])
