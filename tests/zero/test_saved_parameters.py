"""No path of backward reads released memory: random models with side outputs and hidden losses, whose released memory is poisoned.

What a forward saves of gathered parameters are handles; whatever else refers to the memory of a unit keeps it.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from zoo import Case, check, normal_batches, run_threads, seeded, sgd

import zeroshard as zs
from zeroshard.engine.flat_buffer import ParameterBuffer
from zeroshard.engine.ledger import GATHERED
from zeroshard.engine.runtime import runtime_of

DIM = 7
RELEASED = {"stage": 3, "map_shared": False}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Released memory reads as NaN in place of what was there."""
    plain = ParameterBuffer.release

    def release(self):
        if self._present and self.full.dtype.is_floating_point:
            self.full.data.fill_(float("nan"))
        plain(self)
        if self.sharded and not self.mapped and self.full.untyped_storage().nbytes() == 0:
            self.full.untyped_storage().resize_(self._full_nbytes)
            self.full.data.fill_(float("nan"))

    monkeypatch.setattr(ParameterBuffer, "release", release)


# -- random models -----------------------------------------------------------------------------------------------


class Stashed(torch.autograd.Function):
    """x @ weight; what backward needs is kept in `ctx` as plain attributes."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight = x, weight
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.weight.T, ctx.x.T @ grad


class Saving(torch.autograd.Function):
    """The same as it is meant to be written."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad


KINDS = (
    "plain", "attribute", "listed", "closure", "view", "view kept", "stash", "stash after", "saving", "in place", "dropped", "checkpoint", "reentrant",
    "inner hooks", "offloads", "tied", "frozen", "expanded",
)  # fmt: skip


class Odd(nn.Module):
    """A block that computes in one of many ways, and may leave a loss elsewhere than in its output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.lin, self.norm = kind, nn.Linear(DIM, DIM), nn.LayerNorm(DIM)
        self.scale, self.matrix = nn.Parameter(torch.rand(DIM)), nn.Parameter(torch.randn(DIM, DIM) / DIM)
        self.loss: Tensor | None = None
        if kind == "frozen":
            self.matrix.requires_grad_(False)
            self.lin.weight.requires_grad_(False)

    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor | tuple:
        return getattr(self, "_" + self.kind.replace(" ", "_"))(x, losses)

    def base(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.lin(x)) * self.scale) @ self.matrix

    def side(self, x: Tensor) -> Tensor:
        return ((x * self.scale) @ self.matrix).square().mean()

    def _plain(self, x, losses):
        return self.base(x)

    def _attribute(self, x, losses):
        self.loss = self.side(x)
        return self.base(x)

    def _listed(self, x, losses):
        out = self.base(x)
        losses.append(self.side(out))
        return out

    def _closure(self, x, losses):
        side = self.side(x)
        return self.base(x), lambda: side

    def _view(self, x, losses):
        losses.append(self.side(x))
        return self.base(x), self.matrix.T

    def _view_kept(self, x, losses):
        self.kept = self.matrix[1:3]
        self.loss = (x[:, :2] @ self.kept).square().mean()
        return self.base(x)

    def _stash(self, x, losses):
        self.loss = Stashed.apply(x, self.matrix).square().mean()
        return Stashed.apply(self.base(x), self.matrix)

    def _stash_after(self, x, losses):
        out = Stashed.apply(self.base(x), self.matrix)
        losses.append(Stashed.apply(out, self.matrix.T).square().mean())
        losses.append(Stashed.apply(out, self.matrix).square().mean())
        return out

    def _saving(self, x, losses):
        losses.append(Saving.apply(x, self.matrix).square().mean())
        return Saving.apply(self.base(x), self.matrix)

    def _in_place(self, x, losses):
        out = self.base(x)
        out[:, 0] = out[:, 0] * 2
        out *= self.scale
        losses.append(self.side(out))
        return out

    def _dropped(self, x, losses):
        self.side(x)
        return self.base(x)

    def _checkpoint(self, x, losses):
        losses.append(checkpoint(self.side, x, use_reentrant=False))
        return checkpoint(self.base, x, use_reentrant=False)

    def _reentrant(self, x, losses):
        return checkpoint(self.base, x, use_reentrant=True)

    def _inner_hooks(self, x, losses):
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            self.loss = self.side(x)
            return self.base(x)

    def _offloads(self, x, losses):
        with save_on_cpu():
            losses.append(self.side(x))
        return self.base(x)

    def _tied(self, x, losses):
        return F.linear(F.linear(x, self.matrix), self.matrix.T)

    def _frozen(self, x, losses):
        losses.append(self.side(x))
        return self.base(x)

    def _expanded(self, x, losses):
        return self.base(x) + self.scale.expand_as(x)


class Random(nn.Module):
    """Odd blocks in a random order; some are called twice, under a checkpoint, or have their weight used by the model itself."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.blocks = nn.ModuleList(Odd(rng.choice(KINDS)) for _ in range(5))
        self.plan = [(number, rng.choice(["", "", "twice", "checkpoint", "weight", "offload"])) for number in range(5)]
        self.calls, self.last = rng.choice([1, 1, 2]), nn.Linear(DIM, DIM)

    def block(self, number: int, x: Tensor, losses: list[Tensor]) -> Tensor:
        out = self.blocks[number](x, losses)
        if not isinstance(out, tuple):
            return out
        return out[0] + (out[1]() if callable(out[1]) else out[1].sum())

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        for number, how in self.plan:
            if how == "checkpoint" and self.blocks[number].kind in ("plain", "dropped", "tied", "expanded", "saving"):
                x = x + checkpoint(lambda x, n=number: self.block(n, x, []), x, use_reentrant=False)
            elif how == "offload":
                with save_on_cpu():
                    x = x + self.block(number, x, losses)
            else:
                x = x + self.block(number, x, losses)
            if how == "twice":
                x = x + self.block(number, x, losses)
            if how == "weight":
                x = torch.tanh(x @ self.blocks[number].matrix.T)
        return self.last(x).square().mean() + sum(losses)


def every_loss(model: Random, batch: tuple[Tensor]) -> Tensor:
    total = sum(model(*batch) for _ in range(model.calls))
    for block in model.blocks:
        total = total + (0.0 if block.loss is None else block.loss)
        block.loss = None
    return total


@pytest.mark.parametrize("seed", range(24))
def test_random_models_with_hidden_losses(seed):
    units = random.Random(seed).choice(["leaf", (Odd,), "model", "auto"])
    # gradients of what a reentrant checkpoint or a frozen unit's input feeds are summed in another order
    exact = not {"reentrant", "frozen"} & {block.kind for block in Random(seed).blocks}
    case = Case(seeded(Random, seed), normal_batches(3, 2, 4, DIM), every_loss, optimizer=sgd, tolerance=0.0 if exact else 1e-6)
    check(case, units=units, overlap=seed % 2 == 0, **RELEASED)


# -- one by one --------------------------------------------------------------------------------------------------


def sharded(model: nn.Module, **options) -> nn.Module:
    return zs.shard(copy.deepcopy(model), None, **{"units": "leaf", "overlap": False, **RELEASED, **options})[0]


def gathered_nbytes(model: nn.Module) -> int:
    return runtime_of(model).tiers.ledger.now[GATHERED]


def test_users_hooks_around_a_model_see_activations_alone():
    """Parameters are not offloaded, and count as what they are: gathered for backward."""
    plain, x = (
        seeded(lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))),
        torch.ones(2, DIM, requires_grad=True),
    )

    def run(rank):
        model, seen = sharded(plain), []
        with saved_tensors_hooks(lambda tensor: (seen.append(tuple(tensor.shape)), tensor.clone())[1], lambda tensor: tensor):
            out = model(x)
        assert seen == [(2, DIM)] * 3 and gathered_nbytes(model) == 0  # two inputs of Linear, one of GELU
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        (wanted,) = torch.autograd.grad(plain(x).square().sum(), x)
        assert torch.equal(grad, wanted)

    run_threads(2, run)


def test_several_backwards_of_a_backward():
    plain, x = (
        seeded(lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1))),
        torch.ones(2, DIM, requires_grad=True),
    )

    def inputs_gradients(model: nn.Module) -> list[Tensor]:
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        penalty = grad.square().sum()
        return [torch.autograd.grad(penalty, x, retain_graph=True)[0] for _ in range(3)]

    def run(rank):
        model = sharded(plain)
        found = inputs_gradients(model)
        assert gathered_nbytes(model) == 0
        return found

    for found in run_threads(2, run):
        for got, wanted in zip(found, inputs_gradients(plain), strict=True):
            assert torch.equal(got, wanted)


def test_what_is_saved_is_not_read_outside_of_a_backward():
    def run(rank):
        model = sharded(nn.Sequential(nn.Linear(DIM, DIM, bias=False)))
        out = model(torch.ones(2, DIM, requires_grad=True))
        with pytest.raises(zs.ShardedAccessError, match="saved tensors .* outside of backward"):
            out.grad_fn._saved_mat2  # noqa: B018
        out.sum().backward()

    run_threads(2, run)


def test_where_hooks_are_disabled_training_is_refused_and_the_remedy_works():
    plain = seeded(lambda: nn.Sequential(nn.Linear(DIM, DIM)))

    def run(rank):
        model, x = sharded(plain), torch.ones(2, DIM)
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            with pytest.raises(zs.ShardedAccessError, match=r"saved-tensor hooks are disabled here \(not here\).*zs.gathered"):
                model(x)
            with torch.no_grad():
                assert torch.equal(model(x), plain(x))
            with zs.gathered(model):
                out = model(x)
        assert torch.equal(out, plain(x))
        model(x).sum().backward()
        assert gathered_nbytes(model) == 0

    run_threads(2, run)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_forward_leaves_no_hooks(error):
    class Stops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.error = nn.Linear(DIM, DIM), None

        def forward(self, x: Tensor) -> Tensor:
            out = self.lin(x)
            if self.error is not None:
                raise self.error
            return out

    def run(rank):
        model = sharded(seeded(lambda: nn.Sequential(Stops(), nn.Linear(DIM, DIM))), units=(Stops,))
        x = torch.ones(2, DIM)
        model[0].error = error()
        with pytest.raises(error):
            model(x)
        model[0].error = None
        model(x).sum().backward()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert gathered_nbytes(model) == 0

    run_threads(1, run)


class Appends(nn.Module):
    """Adds a loss to a list, and an entry to a dict, that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.frozen = nn.Linear(DIM, DIM), nn.Parameter(torch.randn(DIM), requires_grad=False)

    def forward(self, x: Tensor, losses: list[Tensor], sums: dict[str, Tensor]) -> Tensor:
        out = self.lin(x) * self.frozen
        losses.append(out.square().mean())
        sums["all"] = sums["all"] + out.sum()
        return out


class Appending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Appends() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        losses, sums = [], {"all": x.sum()}
        for block in self.blocks:
            x = block(x, losses, sums)
        assert len(losses) == 3
        return sum(losses) + sums["all"] * 0.1


@pytest.mark.parametrize("options", [{"stage": 2}, {"stage": 3, "map_shared": True}, RELEASED], ids=["2", "3-mapped", "3"])
def test_what_a_frozen_block_adds_to_a_list_that_it_is_given_counts(options):
    """Its inputs are marked in copies of the containers that hold them."""
    check(Case(seeded(Appending), normal_batches(3, 2, 4, DIM), lambda model, batch: model(*batch), optimizer=sgd, tolerance=1e-6),
          units=(Appends,), **options)  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_a_model_adds_to_a_list_of_fp32_tensors_counts_in_bf16(stage):
    """So it is where inputs are cast."""

    def run(rank):
        model, _ = zs.shard(seeded(Appends), None, stage=stage, precision="bf16")
        first = torch.ones((), requires_grad=True)
        losses, sums = [first], {"all": torch.zeros(())}
        model(torch.ones(2, DIM), losses, sums)
        assert losses[0] is first and len(losses) == 2 and sums["all"].item() != 0.0
        sum(losses).backward()
        return zs.full_gradients(model)["lin.weight"]

    assert all(grad is not None and grad.abs().sum() > 0 for grad in run_threads(2, run))
