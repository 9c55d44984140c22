"""A loss of `p.full_tensor()` and `p.to_local()`: its gradient reaches the parameter at every stage, equal to one process."""

from __future__ import annotations

import copy

import pytest
import torch
from private_ranks import PostOffice, PrivateComm
from torch import Tensor, nn
from zoo import MODES, Case, Stack, check, normal_batches, run_threads, same, seeded, sgd, square

import zeroshard as zs
from zeroshard.engine.runtime import runtime_of

STAGES = [pytest.param({"stage": 0}, id="stage0"), pytest.param({"stage": 1}, id="stage1"), *MODES]
every_stage = pytest.mark.parametrize("mode", STAGES)
DIM = 7


def whole(param: Tensor) -> Tensor:
    return param.full_tensor() if hasattr(param, "full_tensor") else param


def slices(param: Tensor) -> Tensor:
    return param.to_local() if hasattr(param, "to_local") else param


def penalty(model: nn.Module, read) -> Tensor:
    """Of matrices, a vector, and two parameters of one unit."""
    params = (model.first.weight, model.blocks[1].up.weight, model.blocks[1].up.bias, model.last.bias)
    return sum(read(param).add(0.3).pow(3).sum() for param in params)


def together(model: nn.Module, batch: tuple, read) -> Tensor:
    return square(model, batch) + penalty(model, read)


def alone(model: nn.Module, batch: tuple, read) -> Tensor:
    return penalty(model, read)


def before(model: nn.Module, batch: tuple, read) -> Tensor:
    penalty(model, read).backward()
    return square(model, batch)


def between(model: nn.Module, batch: tuple, read) -> Tensor:
    loss = square(model, batch)
    penalty(model, read).backward()
    return loss


def after(model: nn.Module, batch: tuple, read) -> Tensor:
    square(model, batch).backward()
    return penalty(model, read)


def accumulated(model: nn.Module, batch: tuple, read) -> Tensor:
    if "_zeroshard" in model.__dict__:
        with zs.accumulate(model):
            together(model, batch, read).backward()
    else:
        together(model, batch, read).backward()
    return together(model, (batch[0] + 1.0,), read)


def through_the_loss(model: nn.Module, batch: tuple, read) -> Tensor:
    return square(model, batch) * penalty(model, read)


LOSSES = [together, alone, before, between, after, accumulated]


@every_stage
@pytest.mark.parametrize("read", [whole, slices])
@pytest.mark.parametrize("loss", LOSSES)
def test_equal_to_one_process(mode, loss, read):
    batches = normal_batches(3, 2, 4, DIM)
    check_sum(Case(seeded(Stack), batches, lambda model, batch: loss(model, batch, read), optimizer=sgd, tolerance=1e-5), **mode)


def check_sum(case: Case, **options: object) -> None:
    """As `check`, but for the losses' values: of slices each rank has a part."""
    loss = case.loss

    def judged(model: nn.Module, batch: tuple) -> Tensor | None:
        loss(model, batch).backward()

    case.loss = judged
    check(case, **options)


@every_stage
def test_ranks_that_compute_other_things_with_the_whole_are_averaged(mode):
    """Also a factor that itself has a gradient, and a loss that is a product of both kinds."""
    batches = [[(x, rank) for rank, (x,) in enumerate(row)] for row in normal_batches(3, 2, 4, DIM)]

    def loss(model: nn.Module, batch: tuple) -> Tensor:
        x, rank = batch
        return through_the_loss(model, (x,), whole) + (rank + 1) * whole(model.first.weight).mul(x[0]).sum()

    check(Case(seeded(Stack), batches, loss, optimizer=sgd, tolerance=1e-5), units="leaf", **mode)


@pytest.mark.parametrize("options", [{"offload_param": "cpu"}, {"offload_gradient": "cpu"}, {"overlap": False}], ids=str)
@pytest.mark.parametrize("read", [whole, slices])
def test_wherever_states_rest(options, read):
    case = Case(seeded(Stack), normal_batches(2, 2, 4, DIM), lambda m, b: together(m, b, read), optimizer=sgd, tolerance=1e-5)
    check_sum(case, stage=3, map_shared=False, **options)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "tagged"])
@pytest.mark.parametrize("loss", [after, before, accumulated])
def test_where_ranks_meet_for_every_gather(stage, ordered, loss):
    """A backward of parameters alone gathers nothing, also where an earlier step has recorded what a backward gathers."""
    office, base, (rows,) = PostOffice(), seeded(Stack), normal_batches(1, 2, 4, DIM)

    def run(rank: int) -> tuple:
        model = copy.deepcopy(base)
        comm = PrivateComm(office, rank, 2, ordered)
        model, optimizer = zs.shard(model, sgd(model.parameters()), stage=stage, comm=comm)
        for _ in range(2):
            loss(model, rows[rank], whole).backward()
            optimizer.step()
            optimizer.zero_grad()
        return zs.full_state_dict(model), runtime_of(model).schedule.notes

    got = run_threads(2, run)
    plain = copy.deepcopy(base)
    optimizer = sgd(plain.parameters())
    for _ in range(2):
        for row in rows:
            loss(plain, row, whole).backward()
        for param in plain.parameters():
            param.grad = None if param.grad is None else param.grad / 2
        optimizer.step()
        optimizer.zero_grad()
    for state, messages in got:
        assert not any("not used by this rank" in message for message in messages)
        for name, value in plain.state_dict().items():
            same(state[name], value, name, 1e-5)


class Reads(Stack):
    """In its forward, of a leaf that it calls and of one that it does not."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight
        x = x @ (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).T
        return super().forward(x) + penalty(self, whole)


@every_stage
def test_inside_of_a_forward(mode):
    check(Case(seeded(Reads), normal_batches(3, 2, 4, DIM), square, optimizer=sgd, tolerance=1e-5), units="leaf", **mode)


@pytest.mark.parametrize("read", [whole, slices])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_scales_it_as_the_loss(stage, read):
    """The gradients are those without a scale."""
    base = seeded(Stack)

    def run(rank: int, scale: float) -> dict[str, Tensor]:
        model = copy.deepcopy(base)
        options = {"precision": "fp16", "loss_scale": scale, "map_shared": False}
        model, optimizer = zs.shard(model, sgd(model.parameters()), stage=stage, **options)
        (square(model, (torch.ones(2, DIM),)) + penalty(model, read)).backward()
        found = zs.full_gradients(model)
        optimizer.zero_grad()
        penalty(model, read).backward()  # no output of the model has a part in it
        return found | {f"alone {name}": grad for name, grad in zs.full_gradients(model).items() if grad is not None}

    for plain, scaled in zip(run_threads(2, run, 1.0), run_threads(2, run, 64.0), strict=True):
        assert "alone first.weight" in plain
        for name, grad in plain.items():
            same(scaled[name], grad, name, 1e-2)


@every_stage
def test_autograd_grad_and_a_gradient_of_a_gradient(mode):
    """Local gradients, as of any data-parallel model; the penalty is one of the gradient's norm."""
    base, batches = seeded(Stack), normal_batches(2, 2, 4, DIM)

    def loss(model: nn.Module, batch: tuple) -> Tensor:
        weight = model.first.weight
        (grad,) = torch.autograd.grad(whole(weight).pow(3).sum(), weight, create_graph=True)
        return square(model, batch) + grad.square().sum()

    check(Case(base, batches, loss, optimizer=sgd, tolerance=1e-5), **mode)


@every_stage
def test_values_and_what_takes_no_gradient(mode):
    """Slices make up the whole at each stage; frozen parameters have both, and neither has a graph."""
    base = seeded(Stack)
    base.blocks[0].requires_grad_(False)

    def run(rank: int) -> list[dict[str, Tensor]]:
        model, _ = zs.shard(copy.deepcopy(base), None, **mode)
        for name, param in model.named_parameters():
            grows = not name.startswith("blocks.0.")
            assert param.full_tensor().requires_grad is param.to_local().requires_grad is grows
            with torch.no_grad():
                assert not param.full_tensor().requires_grad and param.to_local()._base is not None
        copies = {name: param.full_tensor().detach() for name, param in model.named_parameters()}
        with torch.no_grad():
            for value in copies.values():
                value.add_(1.0)  # a copy: the model keeps its values
        return [{n: read(p).detach().clone() for n, p in model.named_parameters()} for read in (whole, slices)]

    first, second = run_threads(2, run)
    for name, value in base.named_parameters():
        same(first[0][name], value.detach(), name, 0.0)
        same(torch.cat([first[1][name], second[1][name]]), value.detach().reshape(-1), name, 0.0)


def test_what_would_lose_a_gradient_says_so():
    """Of what was computed with slices; of what is only born; of a slice that a step has written since."""

    def run(rank: int) -> None:
        with zs.init(stage=3):
            model = Stack()
        with pytest.raises(zs.ShardedAccessError, match=r"Linear.weight takes no gradient before zs.shard"):
            model.first.weight.full_tensor().sum().backward()
        model, optimizer = zs.shard(model, sgd(model.parameters()), stage=3)
        weight = model.first.weight
        for part in (weight[2], weight[1:3], weight * 2, weight.abs()):
            assert part.full_tensor().shape == part.shape
            with pytest.raises(zs.ShardedAccessError, match=r"first.weight.*: backward reached .*`p.full_tensor\(\)\[0\]`, not"):
                part.full_tensor().sum().backward()
        local = weight.to_local().exp()
        weight.full_tensor()[0].sum().backward()
        expected = torch.zeros(DIM, DIM)
        expected[0] = 1.0
        same(weight.grad.full_tensor(), expected, "gradient of a row", 0.0)
        optimizer.step()
        with pytest.raises(zs.ShardedWriteError, match=r"first.weight: written .*or to_local\(\) again"):
            local.sum().backward()
        optimizer.zero_grad()
        weight.to_local().exp().sum().backward()
        same(weight.grad.full_tensor(), weight.full_tensor().exp().detach(), "again", 1e-6)
        assert runtime_of(model).backward is None

    run_threads(2, run)
