"""A forward that computes with parameters of modules it does not call: equal to one process, and memory goes back."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from lending_cases import CASES, OwnFunction, Reaches, TiedByHand
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint
from zoo import Block, Case, check, every_mode, normal_batches, same, seeded, sgd

import zeroshard as zs
from zeroshard.engine.ledger import GATHERED
from zeroshard.engine.runtime import runtime_of
from zeroshard.testing import run_threads

RELEASED = {"stage": 3, "map_shared": False}
DIM = 7


@every_mode
@pytest.mark.parametrize("units", ["auto", "leaf"])
@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_process(mode, units, name):
    build, batches, loss = CASES[name]
    # the gradients of both uses are added, or reduced, one after the other
    tolerance = 1e-6 if "reentrant" in name or name == "own function" else 0.0
    check(Case(seeded(build), batches, loss, optimizer=sgd, tolerance=tolerance), units=units, **mode)


class RecomputesAll(nn.Module):
    """All of it is computed again in backward, before a gradient has reached any unit that is gathered: the last one is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2)), nn.Linear(DIM, 1)

    def part(self, x: Tensor) -> Tensor:
        mean = torch.stack([block.weight for block in self.blocks]).mean(0)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x @ mean)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, x, use_reentrant=False)


@every_mode
def test_recomputed_before_backward_reaches_a_unit(mode):
    case = Case(seeded(RecomputesAll), normal_batches(3, 2, 4, DIM), lambda m, batch: m(*batch).square().mean(), optimizer=sgd)
    threshold = {"param_persistence_threshold": DIM + 1} if mode["stage"] == 3 else {}
    check(case, units="leaf", **mode, **threshold)


@pytest.mark.parametrize("options", [{"overlap": False}, {"max_live_parameters": 10**6}, {"offload_param": "cpu"}], ids=str)
def test_equal_whatever_else_is_set(options):
    build, batches, loss = CASES["reaches"]
    check(Case(seeded(build), batches, loss, optimizer=sgd), units="leaf", **RELEASED, **options)


def test_equal_with_parameters_on_disk(tmp_path):
    build, batches, loss = CASES["tied by hand"]
    check(Case(seeded(build), batches, loss), units="leaf", stage=3, offload_param="nvme", offload_path=str(tmp_path))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains(precision):
    """The gradient of both uses reaches the masters."""
    tokens = torch.arange(6).view(2, 3)
    start = seeded(TiedByHand)

    def run(rank):
        model = copy.deepcopy(start)
        model, optimizer = zs.shard(
            model, torch.optim.Adam(model.parameters(), 1e-2), units="leaf", precision=precision, **RELEASED
        )
        losses = []
        for _ in range(20):
            losses.append(model(tokens, tokens))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return losses[0].item(), losses[-1].item()

    for first, last in run_threads(2, run):
        assert last < 0.5 * first


class Half(nn.Module):
    """Computes with the weight of a module that it does not own."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.lin, self.other = nn.Linear(DIM, DIM), [other]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x)) @ self.other[0].weight


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Half(self.first) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("units", ["leaf", (Half,)], ids=["leaf", "block"])
@pytest.mark.parametrize("mode", [{"map_shared": True}, {"map_shared": False}], ids=["mapped", "released"])
def test_a_compiled_block_may_do_it(mode, units):
    """One rank: the tracer serves one thread at a time. After the second step nothing is compiled anew."""
    plain, model = seeded(Reader), seeded(Reader)
    compiled = CompileCounter()
    for block in model.blocks:
        block.compile(backend=compiled)
    model, optimizer = zs.shard(model, sgd(model.parameters()), units=units, stage=3, **mode)
    reference, counts = sgd(plain.parameters()), []
    for _step, ((x,),) in enumerate(normal_batches(4, 1, 2, DIM)):
        for each, stepper in ((plain, reference), (model, optimizer)):
            each(x).square().mean().backward()
            stepper.step()
            stepper.zero_grad()
        counts.append(compiled.frame_count)
    assert counts[1] == counts[-1], counts
    assert counts[0] > 0 or units == "leaf"  # before torch 2.13 what is left between the hooks of leaves is not compiled
    for name, value in zs.full_state_dict(model).items():
        same(value, plain.state_dict()[name], name, 1e-6)


def _sharded(build: Callable[[], nn.Module], **options: object) -> nn.Module:
    return zs.shard(copy.deepcopy(build), None, units="leaf", **(RELEASED | options))[0]


def _gathered_nbytes(model: nn.Module) -> int:
    return runtime_of(model).tiers.ledger.now[GATHERED]


@pytest.mark.parametrize("name", CASES)
def test_memory_goes_back_after_an_evaluation_and_after_backward(name):
    build, batches, loss = CASES[name]
    plain = seeded(build)

    def run(rank):
        model = _sharded(plain)
        for _ in range(2):
            with torch.no_grad():
                value = loss(model, batches[0][rank])
            assert _gathered_nbytes(model) == 0
            same(value, loss(plain, batches[0][rank]).detach(), "evaluation", 0.0)
            loss(model, batches[0][rank]).backward()
            assert _gathered_nbytes(model) == 0

    run_threads(2, run)


def test_an_evaluation_between_forward_and_backward():
    """Backward finds what views of the weight were computed with; a forward after a write reads it anew."""
    build, batches, loss = CASES["tied by hand"]
    plain = seeded(build)

    def run(rank):
        model, batch = _sharded(plain), batches[0][rank]
        first = loss(model, batch)
        with torch.no_grad():
            loss(model, batches[1][rank])
        (first + loss(model, batch)).backward()
        expected = copy.deepcopy(plain)
        for _each in (0, 1):
            mean = [torch.autograd.grad(2 * loss(expected, batches[0][r]), expected.emb.weight)[0] for r in range(2)]
        torch.testing.assert_close(zs.full_gradients(model)["emb.weight"], (mean[0] + mean[1]) / 2)
        runtime_of(model).zero_grad()
        loss(model, batch)  # its backward never comes
        with torch.no_grad():
            model.emb.weight.mul_(2.0)
            expected.emb.weight.mul_(2.0)
            same(loss(model, batch), loss(expected, batch), "after a write", 0.0)

    run_threads(2, run)


class Gives(nn.Module):
    """Returns a view of a parameter that another module owns."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.other = nn.Linear(DIM, 3), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.other(x), self.lin.weight.T


@pytest.mark.parametrize("grad", [True, False])
def test_a_view_that_leaves_the_model_can_be_read(grad):
    plain = seeded(Gives)

    def run(rank):
        model = _sharded(plain)
        with torch.set_grad_enabled(grad):
            for _ in range(2):
                out, view = model(torch.ones(2, DIM))
                same(view.detach(), plain.lin.weight.T.detach(), "view", 0.0)
        if grad:
            (out.sum() + view.square().sum()).backward()
            torch.testing.assert_close(zs.full_gradients(model)["lin.weight"], 2 * plain.lin.weight.detach())
        assert _gathered_nbytes(model) > 0  # what the view refers to
        del out, view
        assert _gathered_nbytes(model) == 0

    run_threads(2, run)


class Looks(nn.Module):
    """Looks at another module's weight in many ways, writes into it, and computes nothing with it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.average = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.average.weight
        assert weight.shape == (DIM, DIM) and weight.dim() == 2 and weight.is_floating_point() and weight.requires_grad
        assert weight.new_ones(3, dtype=torch.int64).tolist() == [1, 1, 1] and weight.new_empty(0).device == weight.device
        assert len(weight) == DIM and weight.stride() == (DIM, 1) and x.to(weight).type_as(weight).dtype == weight.dtype
        with torch.no_grad():
            weight.mul_(0.5)
            weight.data.add_(1.0)
            self.average.bias.zero_()
        return self.lin(x)


def test_looking_and_writing_gather_nothing():
    plain = seeded(Looks)

    def run(rank):
        model = _sharded(plain, overlap=False)  # no gathers ahead
        model(torch.ones(2, DIM)).sum().backward()
        units = runtime_of(model).tiers.ledger.traffic["gather"].units
        assert units and not any("average" in unit for unit in units), units
        same(zs.full_state_dict(model)["average.weight"], plain.average.weight.detach() * 0.5 + 1.0, "written", 0.0)

    run_threads(2, run)


class Distance(nn.Module):
    """A block, called on what another model makes of the input, which computes with that model's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(DIM)

    def forward(self, x: Tensor, teacher: nn.Module) -> Tensor:
        apart = (self.block.up.weight - teacher.block.up.weight).square().sum()
        return self.block(x) * apart + teacher.block.down.weight.sum()


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(DIM)

    def forward(self, x: Tensor, student: nn.Module) -> Tensor:
        return student(self.block(x), self)


def test_parameters_of_two_models_meet_in_one_operation():
    student, teacher, x = seeded(Distance), seeded(Asks, seed=1), torch.ones(2, DIM)
    first, second = copy.deepcopy(student), copy.deepcopy(teacher)
    second(x, first).sum().backward()

    def run(rank):
        ours, theirs = _sharded(student), _sharded(teacher)
        with pytest.raises(zs.ShardedAccessError, match=r"block\.up\.weight.*in the model's forward"):
            ours(x, theirs)  # the other model runs no forward
        theirs(x, ours).sum().backward()
        for model, plain in ((ours, first), (theirs, second)):
            assert _gathered_nbytes(model) == 0
            for name, grad in zs.full_gradients(model).items():
                torch.testing.assert_close(grad, dict(plain.named_parameters())[name].grad, msg=name)

    run_threads(2, run)


@pytest.mark.parametrize("mode", [{}, RELEASED], ids=["mapped", "released"])
def test_outside_of_a_forward_it_is_refused_with_the_remedy(mode):
    plain = seeded(Reaches)

    def run(rank):
        model, _ = zs.shard(copy.deepcopy(plain), None, units="leaf", **mode)
        hidden = model(torch.ones(2, DIM))
        for _ in range(2):
            with pytest.raises(zs.ShardedAccessError, match=r"last\.weight.*in the model's forward.*full_tensor.*zs\.gathered"):
                hidden[:, :3] @ model.last.weight
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(torch.ones(2, 2))  # a forward that has failed is over

    run_threads(2, run)


def test_a_module_inside_of_a_unit_is_refused_by_itself_and_works_as_a_unit():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x)

    plain, x = nn.Sequential(Pair(), Pair()), torch.ones(2, DIM)

    def run(rank):
        model, _ = zs.shard(copy.deepcopy(plain), None, units=("Pair",), **RELEASED)
        with pytest.raises(
            zs.ShardedAccessError, match=r"0\.inside\.weight.* The forward of 0 gathers it: .* in units= .* class of 0\."
        ):
            model[0].inside(x)
        remedied, _ = zs.shard(copy.deepcopy(plain), None, units=("Pair", "Linear"), **RELEASED)
        assert torch.equal(remedied[0].inside(x), plain[0].inside(x))
        assert torch.equal(remedied(x), plain(x))

    run_threads(2, run)


def test_a_detached_weight_is_refused_with_the_remedy():
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.a(x), self.b.weight.detach())

    def run(rank):
        with pytest.raises(zs.ShardedAccessError, match=r"b\.weight"):
            _sharded(Detached())(torch.ones(2, DIM))

    run_threads(2, run)


@pytest.mark.parametrize("again", [False, True])
def test_hooks_see_a_gradient_that_an_own_function_returns(again):
    """Also those from before zs.shard, and after zs.close and another zs.shard."""
    model, seen = OwnFunction(), []
    model.never.weight.register_post_accumulate_grad_hook(lambda param: seen.append(tuple(param.shape)))
    for _ in range(1 + again):
        zs.shard(model, sgd(model.parameters()), units="leaf", **RELEASED)
        model(torch.ones(2, DIM)).sum().backward()
        assert model.never.weight.grad is not None and model.never.weight.grad.full_tensor().abs().sum() > 0
        zs.close(model)
    assert seen == [(DIM, DIM)] * (1 + again)
