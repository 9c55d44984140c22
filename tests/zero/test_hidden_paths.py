"""Ways through a model that its units' outputs and the optimizer's states do not show: losses that modules keep, backwards of
backwards, writes into parameters by `.data` and in the middle of a forward."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor, nn
from zoo import Block, Case, Stack, check, every_mode, normal_batches, run_threads, same, seeded, sgd, square

import zeroshard as zs
from zeroshard.engine import schedule
from zeroshard.engine.ledger import GATHERED
from zeroshard.engine.runtime import runtime_of
from zeroshard.seam import engine_of

DIM = 7
RELEASED = {"stage": 3, "map_shared": False}
every_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])

# -- losses that do not leave by an output -----------------------------------------------------------------------


class Keeps(nn.Module):
    """A block that keeps a loss of its own: as an attribute or in a list that it is given."""

    def __init__(self, kind: str, after: bool) -> None:
        super().__init__()
        self.lin, self.norm, self.scale = nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.Parameter(torch.rand(DIM))
        self.kind, self.after, self.kept = kind, after, None

    def forward(self, x: Tensor, losses: list | None = None) -> Tensor:
        if not self.after:
            self.keep(x, losses)
        out = torch.tanh(self.norm(self.lin(x)) * self.scale) + x
        if self.after:
            self.keep(out, losses)
        return out

    def keep(self, x: Tensor, losses: list | None) -> None:
        parts = {"matrix": lambda: x @ self.lin.weight, "scale": lambda: x * self.scale, "norm": lambda: self.norm(x)}
        self.kept = parts[self.kind]().square().mean()
        if losses is not None:
            losses.append(self.kept)


class Keeping(nn.Module):
    def __init__(self, kind: str, after: bool) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Keeps(kind, after) for _ in range(4)), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, losses: list | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, losses)
        return self.last(x)


def attribute_too(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    return square(model, batch) + sum(block.kept for block in model.blocks)


def attribute_alone(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    model(*batch)
    return sum(block.kept for block in model.blocks)


def list_too(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    losses: list[Tensor] = []
    return model(*batch, losses).square().mean() + sum(losses)


@every_mode
# leaves: below
@pytest.mark.parametrize("units", [pytest.param("leaf", marks=pytest.mark.slow), (Keeps,)], ids=["leaf", "block"])
@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (attribute_too, "matrix"),
        (attribute_too, "scale"),
        (attribute_too, "norm"),
        (attribute_alone, "matrix"),
        (list_too, "norm"),
    ],
)
def test_a_loss_that_a_module_keeps(mode, units, after, kind, loss):
    """Backward may reach it before any output of the module: the unit must be there."""
    check(Case(seeded(Keeping, kind, after), normal_batches(3, 2, 4, DIM), loss, optimizer=sgd), units=units, **mode)


@pytest.mark.parametrize("loss", [attribute_too, list_too])
def test_nothing_stays_gathered_for_a_loss_that_a_module_keeps(loss):
    """Backward gathers the unit when it comes to it."""

    def run(rank):
        model, _ = zs.shard(seeded(Keeping, "norm", True), None, units=(Keeps,), overlap=False, **RELEASED)
        runtime = runtime_of(model)
        for _ in range(2):
            value = loss(model, (torch.ones(2, DIM),))
            assert runtime.tiers.ledger.now[GATHERED] == 0
            value.backward()
            assert runtime.tiers.ledger.now[GATHERED] == 0

    run_threads(2, run)


class Kept(torch.autograd.Function):
    """Keeps a view of the weight in its `ctx`, past the hooks of saved tensors."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight.t()
        return x @ ctx.weight

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad @ ctx.weight.t(), grad.t() @ ctx.saved_tensors[0]


class ReturnsNothing(nn.Module):
    """What it computes is left in the mapping that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 3)

    def forward(self, state: dict) -> None:
        state["x"] = Kept.apply(state["x"], self.weight)
        state["weights"].append(self.weight.view(-1)[2:])


class Mapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(ReturnsNothing() for _ in range(3)), nn.Linear(DIM, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = {"x": x, "weights": []}
        for block in self.blocks:
            block(state)
        return self.last(state["x"]) + sum(weight.square().sum() for weight in state["weights"])


@every_mode
def test_a_forward_that_returns_nothing(mode):
    check(Case(seeded(Mapping), normal_batches(3, 2, 4, DIM), square, optimizer=sgd), units=(ReturnsNothing,), **mode)


class WritesAndReturnsNothing(ReturnsNothing):
    def forward(self, state: dict) -> None:
        with torch.no_grad():
            self.weight.mul_(0.5)


def test_a_forward_that_writes_its_parameters_and_returns_nothing_is_refused():
    def run(rank):
        model, _ = zs.shard(nn.ModuleList(seeded(WritesAndReturnsNothing) for _ in range(2)), None, **RELEASED)
        with pytest.raises(zs.ShardedWriteError, match=r"0\.weight: written in place inside a forward"):
            model[0]({})

    run_threads(2, run)


class WritesItsInput(nn.Module):
    """One of its two layers is frozen, so the end of its backward is told by marks on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.frozen, self.lin = nn.LeakyReLU(0.3, inplace=True), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(x)
        return self.frozen(x) + self.lin(x)


@every_mode
def test_a_partly_frozen_unit_that_writes_its_input_in_place(mode):
    model = seeded(lambda: nn.Sequential(nn.Linear(DIM, DIM), *(WritesItsInput() for _ in range(3)), nn.Linear(DIM, 2)))
    check(Case(model, normal_batches(3, 2, 4, DIM), square, optimizer=sgd), units=(WritesItsInput,), **mode)


class InPlace(nn.Module):
    """Operations in place, and what nobody uses, leave nodes in the graph to which no output leads."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.act, self.router = nn.Linear(DIM, DIM), nn.SiLU(inplace=True), nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1).topk(2).values
        shares /= shares.sum(-1, keepdim=True)  # as routers of Transformers do
        out = self.act(self.lin(x)) * shares[:, :1]
        out[0] = out[0] * 2
        out *= shares[:, 1:]
        self.lin(out).sum()
        return out


@every_mode
def test_what_is_done_in_place_or_dropped_keeps_nothing(mode):
    model = seeded(lambda: nn.Sequential(*(InPlace() for _ in range(3)), nn.Linear(DIM, 2)))
    traces = check(Case(model, normal_batches(3, 2, 4, DIM), square), units=(InPlace,), **mode)
    assert traces[0].notes.deviations == ()

    def run(rank):
        sharded, _ = zs.shard(copy.deepcopy(model), None, units=(InPlace,), overlap=False, **RELEASED)
        for _ in range(2):
            loss = sharded(torch.ones(2, DIM)).sum()
            assert runtime_of(sharded).tiers.ledger.now[GATHERED] == 0
            loss.backward()

    run_threads(1, run)


# -- backwards of backwards --------------------------------------------------------------------------------------


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeps("scale", True) for _ in range(2))
        self.prelu, self.last = nn.PReLU(DIM), nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(self.prelu(x))


def penalised(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """Wasserstein with a gradient penalty: another forward comes between the inner backward and the outer one."""
    x = batch[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return model(batch[0] + 1.0).mean() + (grad.norm(dim=1) - 1.0).square().mean()


@every_mode
@pytest.mark.parametrize("units", ["leaf", (Keeps,)], ids=["leaf", "block"])
def test_a_gradient_penalty(mode, units):
    check(Case(seeded(Critic), normal_batches(3, 2, 4, DIM), penalised, optimizer=sgd, tolerance=1e-5), units=units, **mode)


def test_memory_goes_back_after_the_outer_backward():
    def run(rank):
        model, _ = zs.shard(seeded(Critic), None, units="leaf", **RELEASED)
        for _ in range(2):
            loss = penalised(model, (torch.ones(2, DIM),))
            loss.backward()
            del loss  # what the inner backward has computed with goes with its graph
            assert runtime_of(model).tiers.ledger.now[GATHERED] == 0

    run_threads(2, run)


# -- writes ------------------------------------------------------------------------------------------------------


class Renormalises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, DIM, max_norm=0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.emb(tokens)


class Averages(nn.Module):
    """An average of weights that the forward itself updates."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.slow = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.slow.weight.mul_(0.9).add_(self.lin.weight, alpha=0.1)
        return self.lin(x) + self.slow(x).detach()


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "released"])
@pytest.mark.parametrize(
    ("build", "data", "name"),
    [(Renormalises, torch.arange(4), "emb.weight"), (Averages, torch.ones(2, DIM), "slow.weight")],
    ids=["max_norm", "average"],
)
def test_a_forward_that_writes_into_its_unit_is_refused(mapped, build, data, name):
    """It would be lost, or applied once for every rank."""

    def run(rank):
        model, _ = zs.shard(seeded(build), None, stage=3, map_shared=mapped, units="model")
        before, where = (
            zs.full_state_dict(model),
            "in memory that ranks share" if mapped else "where each rank has a copy",
        )
        with pytest.raises(zs.ShardedWriteError, match=rf"{name}: written in place inside a forward, {where}.*no_grad"):
            model(data)
        if not mapped:
            assert all(torch.equal(value, before[name]) for name, value in zs.full_state_dict(model).items())

    run_threads(2, run)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_forward_tells_of_a_write_after_unshard(world_size):
    """And not of a write inside itself, nor of memory that ranks share where there is one."""
    where = "in memory that ranks share" if world_size > 1 else "where each rank keeps the whole: it has"

    def run(rank):
        model, _ = zs.shard(seeded(lambda: nn.Linear(DIM, DIM)), None, stage=3, map_shared=True)
        engine_of(model).units([model]).unshard()()
        with torch.no_grad():
            model.weight.add_(1.0)
        for _ in range(2):
            with pytest.raises(zs.ShardedWriteError, match=rf"weight: written in place after unshard\(\), {where}"):
                model(torch.ones(2, DIM))

    run_threads(world_size, run)


def test_a_model_whose_shared_memory_was_written_is_refused_until_it_is_loaded(tmp_path):
    def run(rank):
        model, _ = zs.shard(seeded(lambda: nn.Linear(DIM, DIM)), None, stage=3, map_shared=True)
        expected, result = zs.full_state_dict(model), model(torch.ones(2, DIM))
        zs.save(tmp_path, model, None, step=1)

        def write(module, args, output):
            with torch.no_grad():
                module.weight.add_(1.0)

        handle = model.register_forward_hook(write, prepend=True)
        for call in (lambda: model(torch.ones(2, DIM)), lambda: model(torch.ones(2, DIM)), lambda: zs.full_state_dict(model)):
            with pytest.raises(zs.ShardedWriteError, match=r"weight: written in place .* all have other values now. Load a"):
                call()
        handle.remove()
        with pytest.raises(zs.ShardedWriteError, match="other values now"):
            zs.save(tmp_path / "late", model, None, step=2)
        zs.load(tmp_path, model, None)
        assert all(torch.equal(value, expected[name]) for name, value in zs.full_state_dict(model).items())
        assert torch.equal(model(torch.ones(2, DIM)), result)

    run_threads(2, run)


@every_mode
def test_such_an_average_in_a_unit_of_its_own(mode):
    check(Case(seeded(Averages), normal_batches(3, 2, 4, DIM), square, optimizer=sgd), units="leaf", **mode)


def assigned(model: nn.Module) -> None:
    """After a step: other values, by assignment."""
    model.first.weight.data = torch.arange(float(DIM * DIM)).view(DIM, DIM) / 50
    with torch.no_grad():
        vector = torch.linspace(-1, 1, model.last.weight.numel() + model.last.bias.numel())
        torch.nn.utils.vector_to_parameters(vector, model.last.parameters())


def clamped(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.05, 0.05)


@every_stage
@pytest.mark.parametrize("after", [assigned, clamped])
def test_values_that_are_assigned_or_written_through_data(stage, after):
    check(Case(seeded(Stack), normal_batches(4, 2, 4, DIM), square, after=after, optimizer=sgd), stage=stage)


@every_stage
@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"precision": "fp16", "loss_scale": 64.0}], ids=["bf16", "fp16"])
def test_masters_follow_what_is_written_through_data(stage, options):
    def run(rank):
        model = seeded(Stack)
        model, optimizer = zs.shard(model, sgd(model.parameters()), stage=stage, **options)
        for _ in range(3):
            model(torch.ones(2, DIM)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            clamped(model)
        return zs.full_state_dict(model, masters=True)

    for state in run_threads(2, run):
        assert all(value.abs().max() <= 0.0501 for value in state.values())  # 0.05 in bf16


@every_stage
def test_data_of_another_shape_is_refused(stage):
    def run(rank):
        model, _ = zs.shard(seeded(Stack), None, stage=stage)
        with pytest.raises(zs.ModelChanged, match=r"first\.weight was resized from \(7, 7\) to \(2, 2\)"):
            model.first.weight.data = torch.ones(2, 2)

    run_threads(2, run)


# -- ranks that do other things ----------------------------------------------------------------------------------


def test_a_rank_that_steps_without_a_backward_is_told():
    def run(rank):
        model = seeded(Stack)
        model, optimizer = zs.shard(model, sgd(model.parameters()), stage=2)
        with pytest.raises(zs.CollectiveMismatch, match=r"optimizer step without gradients"):
            if rank == 0:
                model(torch.ones(2, DIM)).sum().backward()
            optimizer.step()

    run_threads(2, run)


def test_dropped_layers_with_parameters_on_disk(tmp_path):
    """All ranks do the same, their disks are never equally fast: nothing that only one has begun may be waited for."""

    class Drops(Stack):
        def forward(self, x: Tensor, left_out: tuple[int, ...]) -> Tensor:
            x = self.first(x)
            for number, block in enumerate(self.blocks):
                x = x if number in left_out else block(x)
            return self.last(x)

    plans = [(), (), (), (1,), (0, 2), (), (0, 1, 2), ()]
    batches = [[(x, plan) for (x,) in row] for row, plan in zip(normal_batches(len(plans), 2, 4, DIM), plans, strict=True)]
    check(
        Case(seeded(Drops), batches, square, optimizer=sgd),
        stage=3,
        units="leaf",
        offload_param="nvme",
        offload_path=str(tmp_path),
    )


def test_forwards_without_backward_take_no_more_and_more_memory(monkeypatch):
    monkeypatch.setattr(schedule, "_MOST_VISITS", 50)
    plain = seeded(Stack)

    def run(rank):
        model, _ = zs.shard(copy.deepcopy(plain), None, stage=3)
        for _ in range(30):
            model(torch.ones(2, DIM))
        visits = len(runtime_of(model).schedule.tracks[True].current)
        square(model, (torch.ones(2, DIM),)).backward()
        expected = copy.deepcopy(plain)
        square(expected, (torch.ones(2, DIM),)).backward()
        same(zs.full_gradients(model)["first.weight"], expected.first.weight.grad, "first.weight", 1e-6)
        return visits

    assert max(run_threads(2, run)) <= 50


# -- torch.func --------------------------------------------------------------------------------------------------


def derivatives(model: nn.Module, x: Tensor) -> list[Tensor]:
    return [
        torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
        torch.func.vjp(model, x)[1](torch.ones(len(x), DIM))[0],
        torch.func.jacrev(model)(x[0]),
        torch.func.vmap(torch.func.hessian(model))(x),
    ]


@pytest.mark.parametrize("mode", [{"stage": 0}, {"stage": 2}, {"stage": 3, "map_shared": True}, {**RELEASED, "gather": True}])
def test_derivatives_of_torch_func(mode):
    """Right where the parameters are there; at stage 3 with released memory they must be gathered around it."""
    model, x = seeded(Block, DIM), torch.ones(2, DIM) / 3
    wanted = derivatives(model, x)

    def run(rank):
        copied, _ = zs.shard(copy.deepcopy(model), None, **{key: mode[key] for key in mode if key != "gather"})
        if mode.get("gather"):
            with zs.gathered(copied):
                return derivatives(copied, x)
        return derivatives(copied, x)

    (got,) = run_threads(1, run)  # torch has one forward-mode level a process
    for one, other in zip(got, wanted, strict=True):
        same(one, other, "derivative", 0.0)


def test_torch_func_on_released_parameters_is_refused():
    """With the remedy, and nothing is left of it: the next forward and backward are right. vmap alone and forward-mode AD work."""
    x = torch.ones(2, DIM)
    tangent = torch.func.jvp(seeded(Block, DIM), (x,), (x,))[1]

    def run(rank):
        model, _ = zs.shard(seeded(Block, DIM), None, **RELEASED)
        wanted = model(x)
        for attempt in (
            lambda: torch.func.vjp(model, x),
            lambda: torch.func.jvp(model, (x,), (x,)),
            lambda: torch.func.jacrev(model)(x[0]),
        ):
            with pytest.raises(zs.ShardedAccessError, match="torch.func.*zs.gathered"):
                attempt()
            same(model(x), wanted, "output after it", 0.0)
        same(torch.func.vmap(model)(x), wanted, "vmap", 0.0)
        with fwAD.dual_level():
            same(fwAD.unpack_dual(model(fwAD.make_dual(x, x))).tangent, tangent, "tangent", 0.0)
        model(x).sum().backward()
        assert runtime_of(model).tiers.ledger.now[GATHERED] == 0

    run_threads(1, run)


class Adapted(nn.Module):
    """A weight to which a forward adds something by a parametrization that it removes again: PEFT's LoRA on parameters."""

    def __init__(self, also_writes: bool = False) -> None:
        super().__init__()
        self.base, self.also_writes = nn.Linear(DIM, DIM, bias=False).requires_grad_(False), also_writes
        self.delta = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        proxy = nn.Module()
        proxy.forward = lambda weight: weight + self.delta
        nn.utils.parametrize.register_parametrization(self.base, "weight", proxy)
        out = self.base(x)
        nn.utils.parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)
        if self.also_writes:
            with torch.no_grad():
                self.base.weight.mul_(0.5)
        return torch.tanh(out)


@every_mode
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_parametrization_registered_in_a_forward_is_no_write(mode, precision):
    model = seeded(lambda: nn.Sequential(*(Adapted() for _ in range(3)), nn.Linear(DIM, 2)))
    if precision == "fp32":
        check(Case(model, normal_batches(3, 2, 4, DIM), square), units=(Adapted,), **mode)

    def run(rank):
        sharded, _ = zs.shard(copy.deepcopy(model), None, units=(Adapted,), precision=precision, **mode)
        square(sharded, (torch.ones(2, DIM),)).backward()
        assert not any(group.masters.unseen() for group in runtime_of(sharded).groups)
        assert runtime_of(sharded).tiers.ledger.now[GATHERED] == 0

    run_threads(2, run)


def test_what_a_forward_writes_beside_a_parametrization_is_refused():
    with pytest.raises(zs.ShardedWriteError, match="base.weight: written in place inside a forward"):
        model, _ = zs.shard(nn.Sequential(Adapted(), Adapted(also_writes=True)), None, units=(Adapted,), **RELEASED)
        model(torch.ones(2, DIM))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_that_is_moved_where_it_is_keeps_its_masters(stage, precision):
    """Frameworks call model.cpu() or model.to(device) when a run ends, and before each: `param.data = param.data`, which writes nothing."""

    def body(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        zs.shard(model, optimizer, stage=stage, precision=precision)
        model(torch.ones(2, 7)).square().mean().backward()
        optimizer.step()
        exact = [zs.value_of(param).full().clone() for param in model.parameters()]
        model.cpu().to("cpu")
        for param in model.parameters():
            param.data = param.data
        for param, value in zip(model.parameters(), exact, strict=True):
            assert torch.equal(zs.value_of(param).full(), value)
            assert not torch.equal(value, value.to(param.dtype).float())  # there were digits to lose
        with torch.no_grad():
            model[0].weight.data = model[0].weight.data * 2  # other memory is a write
            model[1].weight.data.mul_(2)
        for index, at in ((0, 0), (1, 2)):
            doubled = zs.value_of(model[index].weight).full()
            assert torch.equal(doubled, (exact[at].to(model[0].weight.dtype) * 2).float())

    run_threads(2, body)
