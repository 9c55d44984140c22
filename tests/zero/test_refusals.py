"""What a refusal tells its reader to do is done here, to the end of the task: the values are those of one process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from zoo import Stack, run_threads, same, seeded, square

import zeroshard as zs

RELEASED = {"stage": 3, "map_shared": False}
DIM = 7


class Penalised(Stack):
    """Returns a loss of a parameter, or of what is inside of it, beside its output, where that is asked for."""

    def forward(self, x: Tensor, penalty: bool = False, inner: bool = False) -> object:
        output = super().forward(x)
        if inner:
            return output, self.first(x).square().mean()
        return (output, self.first.weight.pow(2).sum()) if penalty else output


BASE = seeded(Penalised)
X = torch.linspace(-1, 1, 2 * DIM).view(2, DIM)


def sgd(params: object) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=1.0)


def one_process(loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """Gradients, by torch alone."""
    model = copy.deepcopy(BASE)
    loss(model).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def on_ranks(task: Callable[[nn.Module, torch.optim.Optimizer], object], **options: object) -> list:
    """Two ranks have the same model and do the same with it."""

    def run(rank: int) -> object:
        model = copy.deepcopy(BASE)
        return task(*zs.shard(model, sgd(model.parameters()), **(RELEASED | options)))

    return run_threads(2, run)


def same_gradients(model: nn.Module, wanted: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    found = {name: grad for name, grad in zs.full_gradients(model).items() if grad is not None}
    wanted = {name: grad for name, grad in wanted.items() if grad is not None}
    assert set(found) == set(wanted)
    for name, grad in wanted.items():
        same(found[name], grad, name, tolerance)
    model.zero_grad()


def test_computing_with_a_parameter_outside_of_a_forward():
    """In the forward, with the whole; for values alone, gathered."""
    wanted = one_process(lambda model: square(model, (X,)) + model.first.weight.pow(2).sum())

    def task(model: nn.Module, _: object) -> None:
        weight = model.first.weight
        with pytest.raises(
            zs.ShardedAccessError, match=r"first.weight.*in the model's forward, or with `p.full_tensor\(\)`.*no_grad"
        ):
            weight.pow(2).sum()
        (square(model, (X,)) + weight.full_tensor().pow(2).sum()).backward()
        same_gradients(model, wanted)
        output, penalty = model(X, penalty=True)
        (output.square().mean() + penalty).backward()
        same_gradients(model, wanted)
        with torch.no_grad(), zs.gathered(model):
            same(weight.pow(2).sum(), BASE.first.weight.pow(2).sum(), "value", 1e-6)

    on_ranks(task)


def test_computing_with_values_alone():
    def task(model: nn.Module, _: object) -> None:
        weight, expected = model.first.weight, BASE.first.weight.detach().t() @ torch.ones(DIM)
        with torch.no_grad():
            with pytest.raises(
                zs.ShardedAccessError, match=r"in the model's forward, run it inside .* or take `p.full_tensor\(\)`, on all"
            ):
                weight.t() @ torch.ones(DIM)
            same(weight.full_tensor().t() @ torch.ones(DIM), expected, "full_tensor", 0.0)
        with zs.gathered(model):
            same((weight.t() @ torch.ones(DIM)).detach(), expected, "gathered", 0.0)

    on_ranks(task)


def test_the_norm_of_a_parameter():
    wanted = one_process(lambda model: model.first.weight.norm())

    def task(model: nn.Module, _: object) -> None:
        weight = model.first.weight
        with pytest.raises(
            zs.ShardedAccessError, match=r"that of `p.full_tensor\(\)`, on all ranks, or ask for it under torch.no_grad"
        ):
            weight.norm()
        weight.full_tensor().norm().backward()
        same_gradients(model, wanted)
        with torch.no_grad():
            same(weight.norm(), BASE.first.weight.detach().norm(), "norm", 1e-6)

    on_ranks(task)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_computing_with_a_gradient(stage):
    wanted = one_process(lambda model: square(model, (X,)))["first.weight"]

    def task(model: nn.Module, _: object) -> None:
        square(model, (X,)).backward()
        with pytest.raises(zs.ShardedAccessError, match=r"Take `p.grad.full_tensor\(\)`, or zs.full_gradients\(model\)"):
            model.first.weight.grad.cumsum(0)
        same(model.first.weight.grad.full_tensor().cumsum(0), wanted.cumsum(0), "full_tensor", 1e-6)
        same(zs.full_gradients(model)["first.weight"].cumsum(0), wanted.cumsum(0), "full_gradients", 1e-6)
        same(model.first.weight.grad.sum(0), wanted.sum(0), "read at rest", 1e-6)

    on_ranks(task, stage=stage)


def test_writing_a_part_that_slices_do_not_allow():
    wanted = BASE.first.weight.detach().clone()
    wanted[:, 1] = 3.0

    def task(model: nn.Module, _: object) -> None:
        with pytest.raises(zs.ShardedAccessError, match=r"inside `with zs.gathered\(module\):` \(write=True to change it\)"):
            model.first.weight.data[:, 1].fill_(3.0)
        with pytest.raises(zs.ShardedWriteError, match=r"inside `with zs.gathered\(module, write=True\):`"):
            model.first.weight.data.index_fill_(1, torch.tensor([1]), 3.0)
        with zs.gathered(model.first, write=True):
            model.first.weight.data[:, 1].fill_(3.0)
        same(zs.full_state_dict(model)["first.weight"], wanted, "written", 0.0)

    on_ranks(task)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backward_inside_of_gathered(stage):
    """Of the model, and of a loss of its parameters: both outside."""
    wanted = one_process(lambda model: square(model, (X,)) + model.first.weight.pow(2).sum())

    def task(model: nn.Module, _: object) -> None:
        with (
            pytest.raises(
                zs.ShardedWriteError, match=r"given a gradient inside.*forward and backward outside; .*`p.full_tensor\(\)`"
            ),
            zs.gathered(model),
        ):
            (square(model, (X,)) + model.first.weight.pow(2).sum()).backward()
        with zs.gathered(model):
            late = model.first.weight.pow(2).sum()
        with pytest.raises(
            zs.ShardedAccessError, match=r"in the model's forward, or outside of zs.gathered with `p.full_tensor\(\)`"
        ):
            late.backward()
        (square(model, (X,)) + model.first.weight.full_tensor().pow(2).sum()).backward()
        same_gradients(model, wanted)

    on_ranks(task, stage=stage)


def test_a_parameter_that_was_kept():
    kept: list[Tensor] = []

    def task(model: nn.Module, _: object) -> None:
        mine: list[Tensor] = []
        model.blocks[0].up.register_forward_hook(lambda module, args, output: mine.append(module.weight))
        model.blocks[0].up.register_forward_hook(lambda module, args, output: kept.append(module.weight.pow(2).sum().detach()))
        square(model, (X,)).backward()
        with pytest.raises(
            zs.ShardedAccessError, match=r"inside the forward, or take that of the module whole: `module.weight.full_tensor\(\)`"
        ):
            mine[0].pow(2).sum()
        value = BASE.blocks[0].up.weight.detach().pow(2).sum()
        same(model.blocks[0].up.weight.full_tensor().pow(2).sum().detach(), value, "whole", 1e-6)
        same(kept[0], value, "in the forward", 1e-6)

    on_ranks(task)


def test_two_parameters_that_are_cut_differently():
    wanted = one_process(lambda model: (model.first.weight[:3] * model.last.weight).sum())

    def task(model: nn.Module, _: object) -> None:
        first, second = model.first.weight, model.last.weight
        with pytest.raises(zs.ShardedAccessError, match=r"cut differently.*full_tensor\(\) of both"):
            first[:3] * second
        (first.full_tensor()[:3] * second.full_tensor()).sum().backward()
        same_gradients(model, wanted)

    on_ranks(task, units="model")


def test_what_leaves_torch():
    def task(model: nn.Module, _: object) -> None:
        weight = model.first.weight
        array = lambda: np.asarray(weight.detach(), dtype="float64")  # noqa: E731  # numpy gives the dtype
        for take in (lambda: weight.numpy(), lambda: weight.detach().numpy(), lambda: weight.tolist(), array):
            with pytest.raises(zs.ShardedAccessError, match=r"call detach\(\).full_tensor\(\)"):
                take()
        assert weight.detach().full_tensor().numpy().tolist() == BASE.first.weight.tolist()
        with pytest.raises(zs.ShardedAccessError, match=r"Use zs.full_state_dict\(model\) or zs.save"):
            torch.save(weight, io.BytesIO())
        file = io.BytesIO()
        torch.save(zs.full_state_dict(model), file)
        file.seek(0)
        same(torch.load(file)["first.weight"], BASE.first.weight.detach(), "saved", 0.0)

    on_ranks(task)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_and_a_loss_beside_the_outputs(stage):
    """A loss of the parameters is one of the whole; another leaves by the outputs."""

    def task(model: nn.Module, _: object) -> None:
        hidden: list[Tensor] = []
        hook = model.first.register_forward_hook(lambda module, args, output: hidden.append(output))
        model(X)
        with pytest.raises(zs.ZeroshardError, match=r"Return such losses from forward.*alone from `p.full_tensor\(\)`"):
            hidden[0].square().mean().backward()
        hook.remove()
        model.zero_grad()
        model.first.weight.full_tensor().pow(2).sum().backward()
        same_gradients(model, one_process(lambda model: model.first.weight.pow(2).sum()), 1e-2)
        model(X, inner=True)[1].backward()
        same_gradients(model, one_process(lambda model: model.first(X).square().mean()), 1e-2)

    on_ranks(task, stage=stage, precision="fp16", loss_scale=64.0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_while_sums_are_held_back(stage):
    wanted = one_process(lambda model: square(model, (X,)) * 2)["first.weight"]

    def task(model: nn.Module, _: object) -> None:
        for _ in range(2):
            with zs.accumulate(model):
                square(model, (X,)).backward()
            with pytest.raises(
                zs.ShardedAccessError, match=r"Run the last backward outside .* or take zs.full_gradients\(model\)"
            ):
                model.first.weight.grad  # noqa: B018
            square(model, (X,)).backward()
            same(model.first.weight.grad.full_tensor(), wanted, "the last outside", 1e-6)
            model.zero_grad()
            with zs.accumulate(model):
                square(model, (X,)).backward()
                square(model, (X,)).backward()
            same(zs.full_gradients(model)["first.weight"], wanted, "full_gradients", 1e-6)
            model.zero_grad()

    on_ranks(task, stage=stage)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_of_another_shape(stage):
    model, _ = zs.shard(nn.Linear(3, 2), None, stage=stage)
    for value in (torch.ones(3), torch.ones(6), torch.ones(3, 2)):
        with pytest.raises(
            zs.ModelChanged, match=r"weight.grad was assigned a tensor of shape \(.*\): expected the parameter's, \(2, 3\)\."
        ):
            model.weight.grad = value
    assert model.weight.grad is None
    model.weight.grad = torch.ones(2, 3)
    assert model.weight.grad.shape == (2, 3)


def test_a_table_that_is_renormalised_in_its_forward():
    tokens = torch.arange(4)

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(5, DIM, max_norm=1.0), nn.Linear(DIM, 2))

    def renormalise(weight: Tensor) -> None:
        with torch.no_grad():
            weight.copy_(torch.renorm(weight, 2, 0, 1.0))

    base = seeded(build)
    plain = copy.deepcopy(base)
    plain[0].max_norm = None
    optimizer = sgd(plain.parameters())
    for _ in range(2):
        renormalise(plain[0].weight)
        plain(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def run(rank: int) -> None:
        model = copy.deepcopy(base)
        model, optimizer = zs.shard(model, sgd(model.parameters()), **RELEASED)
        with pytest.raises(zs.ShardedWriteError, match=r"in `with zs.gathered\(module, write=True\)`"):
            model(tokens)
        model[0].max_norm = None
        for _ in range(2):
            with zs.gathered(model[0], write=True):
                renormalise(model[0].weight)
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, value in zs.full_state_dict(model).items():
            same(value, plain.state_dict()[name], name, 1e-6)

    run_threads(2, run)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_scaler_of_torch(stage):
    """fp16 with the library's own loss scale instead trains as fp32 does, to its precision."""
    plain = copy.deepcopy(BASE)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def run(rank: int) -> dict[str, Tensor]:
        model = copy.deepcopy(BASE)
        model, optimizer = zs.shard(
            model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, precision="fp16", loss_scale=64.0
        )
        for _ in range(3):
            square(model, (X,)).backward()
            optimizer.step()
            assert not optimizer.last_step.skipped
            optimizer.zero_grad()
        return zs.full_state_dict(model, masters=True)

    for _ in range(3):
        square(plain, (X,)).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    for state in run_threads(2, run):
        for name, value in plain.state_dict().items():
            same(state[name], value, name, 1e-2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_changes_that_want_the_model_closed(stage):
    """Unfreeze, replace, resize: zs.close, change, a new optimizer, zs.shard; then it trains as on one process."""

    def unfrozen(model: nn.Module) -> None:
        model.first.weight.requires_grad_(True)

    def replaced(model: nn.Module) -> None:
        model.last = nn.Linear(DIM, 4)
        nn.init.constant_(model.last.weight, 0.1)
        nn.init.zeros_(model.last.bias)

    base = copy.deepcopy(BASE)
    base.first.weight.requires_grad_(False)
    for change, message in (
        (unfrozen, "frozen at zs.shard.*unfreeze it, and zs.shard.. again"),
        (replaced, "replaced.*zs.shard.. it again"),
    ):
        plain = copy.deepcopy(base)
        change(plain)
        square(plain, (X,)).backward()

        def run(rank: int, change=change, message=message, plain=plain) -> None:
            model, _ = zs.shard(copy.deepcopy(base), None, stage=stage)
            before = model.last
            change(model)
            with pytest.raises(zs.ModelChanged, match=message):
                model(X)
            model.last = before
            zs.close(model)
            change(model)
            model, optimizer = zs.shard(model, sgd(model.parameters()), stage=stage)
            square(model, (X,)).backward()
            same_gradients(model, {name: param.grad for name, param in plain.named_parameters()})

        run_threads(2, run)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_complex_parameter(stage):
    """Its two parts as one real parameter train as it does on one process."""

    class Rotates(nn.Module):
        def __init__(self, real: bool) -> None:
            super().__init__()
            value = torch.complex(torch.linspace(-1, 1, 12), torch.linspace(1, 2, 12)).view(3, 4)
            self.real, self.weight = real, nn.Parameter(torch.view_as_real(value).clone() if real else value)
            self.last = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            weight = torch.view_as_complex(self.weight) if self.real else self.weight
            return self.last(torch.view_as_real(torch.complex(x, -x) @ weight).flatten(1))

    bases = {real: seeded(Rotates, real) for real in (False, True)}
    x = torch.linspace(-1, 1, 6).view(2, 3)
    adam = lambda model: torch.optim.AdamW(model.parameters(), lr=0.1)  # noqa: E731
    plain = copy.deepcopy(bases[False])
    plain_optimizer = adam(plain)
    for _ in range(3):
        plain(x).square().mean().backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    def run(rank: int) -> None:
        model = copy.deepcopy(bases[False])
        remedy = r"weight: expected a real parameter, got torch.complex64.*torch.view_as_real\(value\).*torch.view_as_complex\(self.weight\)"
        with pytest.raises(zs.ShardedAccessError, match=remedy):
            zs.shard(model, adam(model), stage=stage)
        model = copy.deepcopy(bases[True])
        model, optimizer = zs.shard(model, adam(model), stage=stage, map_shared=False)
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = zs.full_state_dict(model)
        same(torch.view_as_complex(found["weight"]), plain.weight.detach(), "weight", 1e-5)
        same(found["last.weight"], plain.last.weight.detach(), "last.weight", 1e-5)

    run_threads(2, run)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_average_that_was_made_before(stage):
    """torch's own has whole parameters: at stage 3 it says who averages slices, whose numbers are those of one process."""
    ema_of_torch = lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # noqa: E731

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer, update: Callable[[], None]) -> None:
        for _ in range(3):
            square(model, (X,)).backward()
            optimizer.step()
            optimizer.zero_grad()
            update()

    plain = copy.deepcopy(BASE)
    wanted = ema_of_torch(plain)
    trained(plain, sgd(plain.parameters()), lambda: wanted.update_parameters(plain))

    def run(rank: int) -> None:
        model = copy.deepcopy(BASE)
        average = ema_of_torch(model)
        model, optimizer = zs.shard(model, sgd(model.parameters()), stage=stage, map_shared=False)
        if stage < 3:
            trained(model, optimizer, lambda: average.update_parameters(model))
            found = average.module.state_dict()
        else:
            with pytest.raises(zs.ShardedAccessError, match=r"AveragedModel\) take zs.ema\(model, decay\)"):
                average.update_parameters(model)
            with pytest.raises(zs.ShardedAccessError, match=r"for a moving average zs.ema\(model, decay\)"):
                ema_of_torch(model)
            ours: list[zs.AveragedModel] = []  # made after the first step, where torch's first update copies
            trained(model, optimizer, lambda: ours or ours.append(zs.ema(model, 0.9)))
            found = ours[0].full_state_dict()
        for name, value in wanted.module.state_dict().items():
            same(found[name], value, name, 1e-6)

    run_threads(2, run)


# -- reads at rest that all ranks make ---------------------------------------------------------------------------------

READS = {
    "max": lambda p: p.max(), "min": lambda p: torch.min(p), "largest of rows": lambda p: p.max(0).values, "mean": lambda p: p.data.mean(),
    "equal": lambda p: torch.equal(p, p.detach()), "close": lambda p: torch.allclose(p, p + 1e-9), "compared": lambda p: (p == p.data).all(),
    "view": lambda p: p.data.view(-1).sum(), "flat": lambda p: p.detach().flatten()[:5].sum(), "std": lambda p: torch.std(p),
    "item": lambda p: p.item() if p.numel() == 1 else p.max().item(),
}  # fmt: skip


@pytest.mark.parametrize("options", [{"stage": 2}, RELEASED, {**RELEASED, "offload_param": "cpu"}], ids=str)
@pytest.mark.parametrize("name", READS)
def test_what_is_read_of_parameters_at_rest_is_what_one_process_reads(name, options):
    def run(rank):
        model, _ = zs.shard(copy.deepcopy(BASE), **options)
        got, wanted = (READS[name](each.first.weight) for each in (model, BASE))
        if name == "flat" and options["stage"] == 3:  # rows of a view are a sharded tensor as well
            got = got.full_tensor() if hasattr(got, "full_tensor") else got
        same(torch.as_tensor(got).detach(), torch.as_tensor(wanted).detach(), name, 1e-6)

    run_threads(2, run)


RESULTS = {
    "ranked": lambda p: torch.kthvalue(torch.cat([(p.abs() * 2).view(-1), (p * p.grad).view(-1)]), 9).values,
    "product": lambda p: (p + p.grad) @ torch.arange(float(DIM)), "sorted": lambda p: (p * 2).sort(1).values,
    "list": lambda p: torch.tensor((p * p.grad > 0).view(-1).tolist()), "chosen": lambda p: (p * 2)[:, [0, 2]],
    "filled": lambda p: p.masked_fill_((p * p.grad).abs() <= 0.01, 7.0), "not filled": lambda p: p.masked_fill_(p.grad.abs() < 0, 7.0),
}  # fmt: skip


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 2}, RELEASED, {**RELEASED, "offload_param": "cpu"}], ids=str)
@pytest.mark.parametrize("name", RESULTS)
def test_results_of_slices_are_computed_of_the_whole(name, options):
    """Scores and masks of parameters and gradients, which are themselves refused (above)."""
    plain = copy.deepcopy(BASE)
    square(plain, (X,)).backward()
    with torch.no_grad():
        wanted = RESULTS[name](plain.first.weight)

    def task(model: nn.Module, _: object) -> None:
        square(model, (X,)).backward()
        with torch.no_grad():
            got = RESULTS[name](model.first.weight)
        got = got.full_tensor() if hasattr(got, "full_tensor") else got
        same(got, wanted, name, 1e-6)
        same(zs.full_state_dict(model)["first.weight"], plain.first.weight.detach(), name, 1e-6)

    on_ranks(task, **options)


def test_gradients_go_through_what_is_read_at_rest():
    wanted = one_process(lambda model: square(model, (X,)) + model.first.weight.max() + model.last.weight.std())

    def run(rank):
        model, _ = zs.shard(copy.deepcopy(BASE), **RELEASED)
        (square(model, (X,)) + model.first.weight.max() + model.last.weight.std()).backward()
        same_gradients(model, wanted, 1e-6)
        with pytest.raises(zs.ShardedAccessError, match=r"aten.max.default needs the whole of first.weight.*`p.full_tensor\(\)`"):
            model.first.weight.view(-1).max()  # of a view that is in a graph: a gradient would be lost
        same(model.first.weight.full_tensor().view(-1).max().detach(), BASE.first.weight.max().detach(), "remedy", 0.0)

    run_threads(2, run)
