"""An optimizer that is made after zs.shard(model), as with FSDP, is the model's sharded optimizer from its first use on.

`train` of helpers with `late`: model sharded, optimizer and scheduler made, steps. Everything equals one process bit for bit, and so
what an optimizer given to zs.shard does; zs.report, zs.save and zs.load know of it.
"""

import copy
import functools
import gc
import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from helpers import OddGPT, Task, adamw, assert_equal_runs, differences, reference, seeded, token_batches, train
from offloading import tiers
from optimizers import ALL_STAGES, DATA, MODEL, OPTIMIZERS, WORLD, backward
from torch import nn

import zeroshard as zs
from zeroshard.assembly import late_optimizer
from zeroshard.comm.launch import run_processes
from zeroshard.config import Tier
from zeroshard.engine.ledger import OPTIMIZER
from zeroshard.engine.runtime import runtime_of
from zeroshard.formats.state_codecs import coded_column
from zeroshard.testing import run_threads
from zeroshard.tiers import room
from zeroshard.utils.host_memory import Limit


def by_kind(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, in another order than the model's, of which vectors have no weight decay."""
    vectors = [p for p in model.parameters() if p.dim() < 2]
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    return torch.optim.AdamW([{"params": vectors, "weight_decay": 0.0}, {"params": matrices}], lr=1e-2)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    hidden = [p for block in model.blocks for p in block.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if all(p is not other for other in hidden)]
    return zs.Muon([{"params": hidden, "use_muon": True}, {"params": others, "use_muon": False}], lr=1e-2)


def decaying(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


GPT = seeded(OddGPT)
TASK = Task(GPT, token_batches(3, 1, 3), by_kind, True, clip={1: 0.05}, scheduler=decaying, early=True, states=True, late=True)
UNCLIPPED = replace(TASK, clip={})  # another layout adds up norms in another order


# -- equality --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_stage_equals_one_process(world_size):
    for stage in (0, 1, 2, 3):
        for precision in ("fp32", "bf16") if world_size == 2 else ("fp32",):
            outcomes = run_threads(world_size, functools.partial(train, task=TASK, stage=stage, precision=precision))
            plain = reference(TASK, world_size, precision, outcomes[0].coefficients)
            for got in outcomes:
                assert_equal_runs(got, plain, f"stage {stage}, {precision}")


TIERS = [
    {"optimizer": "cpu"}, {"optimizer": "nvme", "gradient": "nvme"}, {"parameter": "cpu", "optimizer": "cpu", "gradient": "cpu"},
]  # fmt: skip


@pytest.mark.parametrize("places", TIERS, ids=str)
def test_every_tier_equals_an_optimizer_given_to_zs_shard(places, tmp_path):
    options = {"stage": 3, "precision": "bf16", **tiers(str(tmp_path), **places)}
    late, early = (
        run_threads(WORLD, functools.partial(train, task=replace(UNCLIPPED, late=each), **options)) for each in (True, False)
    )
    for got, expected in zip(late, early, strict=True):
        assert_equal_runs(got, expected, str(places))


OTHERS = [
    {"master_weights": "split", "precision": "bf16"}, {"optimizer_states": zs.StateFormat("int8", min_numel=10, block=32)},
    {"optimizer_states": {"exp_avg": zs.StateFormat("int4", min_numel=10, block=64), "exp_avg_sq": "bf16"}},
    {"precision": "fp16", "initial_loss_scale": 128.0}, {"precision": "bf16", "offload_optimizer": "cpu", "delayed_update": 1},
]  # fmt: skip


@pytest.mark.parametrize("options", OTHERS, ids=str)
def test_forms_of_states_and_masters(options):
    late, early = (
        run_threads(WORLD, functools.partial(train, task=replace(UNCLIPPED, late=each), stage=2, **options))
        for each in (True, False)
    )
    for got, expected in zip(late, early, strict=True):
        assert_equal_runs(got, expected, str(options))


@pytest.mark.parametrize("name", ["momentum", "adagrad", "adamw foreach", "adamw tensor lr", "lion", "fused", "muon"])
def test_classes_of_optimizers(name):
    make = {"muon": muon, "fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True)}.get(name)
    task = replace(UNCLIPPED, optimizer=make or (lambda model: OPTIMIZERS[name](model.parameters())), scheduler=None)
    late, early = (run_threads(WORLD, functools.partial(train, task=replace(task, late=each), stage=3)) for each in (True, False))
    for got, expected in zip(late, early, strict=True):
        assert_equal_runs(got, expected, name)


def _over_torch_distributed(rank, ranks):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return [train(rank, TASK, stage=stage, comm="dist") for stage in (1, 3)]


@pytest.mark.processes
def test_over_torch_distributed():
    for outcomes in run_processes(_over_torch_distributed, WORLD):
        for got in outcomes:
            assert_equal_runs(got, reference(TASK, WORLD, coefficients=got.coefficients))


@ALL_STAGES
def test_one_kernel_steps_a_run(stage):
    """As many runs as where the optimizer was given to zs.shard."""

    def rank_run(rank, late):
        model = copy.deepcopy(GPT)
        optimizer = None if late else by_kind(model)
        zs.shard(model, optimizer, stage=stage)
        optimizer = optimizer or by_kind(model)
        assert type(optimizer).__name__ == "AdamW" and isinstance(optimizer, torch.optim.AdamW)
        model(*TASK.data[0][0][rank]).backward()
        optimizer.step()
        return [len(runs) for runs in optimizer.core.runs]

    assert run_threads(WORLD, rank_run, True) == run_threads(WORLD, rank_run, False)


# -- what else uses the optimizer ------------------------------------------------------------------------------------


def sharded(stage=3, make=adamw, **options):
    model = copy.deepcopy(MODEL)
    zs.shard(model, stage=stage, **options)
    return model, make(model.parameters())


def trained(model, optimizer, rank, steps=range(2)):
    for number in steps:
        optimizer.zero_grad()
        backward(model, [DATA[number][0][rank]])
        optimizer.step()
    return zs.full_state_dict(model)


@ALL_STAGES
def test_before_the_first_step(stage):
    """A report, an average, clipping with both functions, zero_grad inside zs.accumulate: each finds the optimizer."""

    def rank_run(rank):
        model, optimizer = sharded(stage)
        assert optimizer.last_step is None and optimizer.state_dict()["state"] == {}
        with zs.accumulate(model):
            backward(model, [DATA[1][0][rank]])
            optimizer.zero_grad()
        average = zs.ema(model, 0.5)
        backward(model, [DATA[0][0][rank]])
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        torch.testing.assert_close(zs.clip_grad_norm_(model, 0.01), torch.tensor(0.1), check_dtype=False)
        assert norm > 0.1 and zs.full_optimizer_state_dict(model) in ({}, {**optimizer.state_dict(), "state": {}})
        optimizer.zero_grad(set_to_none=False)
        assert all(not p.grad.abs().sum() for p in model.parameters())
        optimizer.step()
        held = zs.report(model).at_rest["optimizer states"]
        assert average.updates == 1 and held >= 8 * sum(p.numel() for p in model.parameters()) // WORLD

    run_threads(WORLD, rank_run)


@pytest.mark.parametrize(("stage", "other", "ranks"), [(1, 3, 4), (3, 2, 1)])
def test_a_checkpoint_before_the_first_step_of_another_world_size(stage, other, ranks, tmp_path):
    def save(rank):
        model, optimizer = sharded(stage)
        trained(model, optimizer, 0)
        zs.save(tmp_path, model, optimizer)
        return trained(model, optimizer, 0, [2, 3])

    def load(rank):
        model, optimizer = sharded(other)
        zs.load(tmp_path, model, optimizer)
        return trained(model, optimizer, 0, [2, 3])

    expected = run_threads(2, save)[0]
    for got in run_threads(ranks, load):  # a power of two: the mean of equal gradients is exact
        assert not differences(got, expected)


@ALL_STAGES
def test_a_state_dict_of_one_process_before_the_first_step(stage):
    plain = copy.deepcopy(MODEL)
    optimizer = adamw(plain.parameters())
    for number in range(4):
        if number == 2:
            weights, told = copy.deepcopy(plain.state_dict()), copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        backward(plain, DATA[number][0])
        optimizer.step()

    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        model.load_state_dict(weights)
        zs.shard(model, stage=stage)
        late = adamw(model.parameters())
        late.load_state_dict(told)
        return trained(model, late, rank, [2, 3])

    for got in run_threads(WORLD, rank_run):
        assert not differences(got, plain.state_dict())


@ALL_STAGES
def test_a_closure_and_hooks_of_torch(stage):
    def rank_run(rank):
        model, optimizer = sharded(stage)
        seen = []
        optimizer.register_step_pre_hook(lambda *args: seen.append("before"))
        optimizer.register_step_post_hook(lambda *args: seen.append("after"))

        def closure():
            optimizer.zero_grad()
            loss = model(*DATA[0][0][rank])
            loss.backward()
            return loss

        first = optimizer.step
        losses = [first(closure).item(), first(closure).item()]  # a bound method that the program has kept
        assert seen == ["before", "after"] * 2 and losses[1] < losses[0]

    run_threads(WORLD, rank_run)


def test_a_rank_without_any_batch():
    def rank_run(rank):
        model, optimizer = sharded(2)
        with zs.join(model):
            if rank == 0:
                trained_alone(model, optimizer)
        return zs.full_state_dict(model)

    def trained_alone(model, optimizer):
        optimizer.zero_grad()
        backward(model, [DATA[0][0][0]])
        optimizer.step()

    plain = copy.deepcopy(MODEL)
    trained_alone(plain, adamw(plain.parameters()))
    for got in run_threads(WORLD, rank_run):
        assert not differences(got, plain.state_dict())


def test_a_deep_copy_has_ordinary_parameters():
    def rank_run(rank):
        model, optimizer = sharded(2)
        copied = copy.deepcopy(optimizer)
        for param in copied.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        before = [param.detach().clone() for param in copied.param_groups[0]["params"]]
        copied.step()
        assert not any(torch.equal(*pair) for pair in zip(copied.param_groups[0]["params"], before, strict=True))
        copied.zero_grad()
        assert all(param.grad is None for param in copied.param_groups[0]["params"]) and type(copied) is torch.optim.AdamW
        return trained(model, optimizer, rank)

    run_threads(1, rank_run)


class Momentum(torch.optim.Optimizer):
    """A class that zeroshard does not know, which makes its states in its constructor."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        for param in self.param_groups[0]["params"]:
            self.state[param]["mean"] = torch.zeros_like(param)

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.sub_(self.state[param]["mean"].mul_(0.9).add_(param.grad), alpha=0.1)


@ALL_STAGES
def test_states_from_the_constructor(stage):
    """A trial of the class, on each rank by itself, does not read states of which each rank has a slice."""

    def rank_run(rank):
        return trained(*sharded(stage, Momentum), rank)

    plain = copy.deepcopy(MODEL)
    optimizer = Momentum(plain.parameters())
    for number in range(2):
        optimizer.zero_grad()
        backward(plain, DATA[number][0])
        optimizer.step()
    for got in run_threads(WORLD, rank_run):
        assert not differences(got, plain.state_dict())


class Sharpness(torch.optim.Optimizer):
    """SAM (arXiv 2010.01412), as programs write it: it holds the optimizer that steps, and has its groups."""

    def __init__(self, params, **options):
        super().__init__(params, options)
        self.base = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self):
        for param in self.param_groups[0]["params"]:
            self.state[param]["old"] = param.data.clone()
            param.add_(param.grad, alpha=0.1)
        self.zero_grad()

    @torch.no_grad()
    def descend(self):
        for param in self.param_groups[0]["params"]:
            param.data = self.state[param]["old"]
        self.base.step()
        self.zero_grad()

    def step(self, closure):
        self.climb()
        closure()
        self.descend()


def test_of_an_optimizer_that_holds_another_the_inner_one_is_taken():
    def loop(model, optimizer, batches):
        backward(model, batches(0))
        optimizer.climb()
        backward(model, batches(0))
        optimizer.descend()
        backward(model, batches(1))
        optimizer.step(lambda: backward(model, batches(1)))

    def rank_run(rank):
        model, optimizer = sharded(3, functools.partial(Sharpness, lr=0.1))
        loop(model, optimizer, lambda number: [DATA[number][0][rank]])
        assert runtime_of(model).optimizers.one is optimizer.base
        return zs.full_state_dict(model)

    plain = copy.deepcopy(MODEL)
    loop(plain, Sharpness(plain.parameters(), lr=0.1), lambda number: DATA[number][0])
    for got in run_threads(WORLD, rank_run):
        assert not differences(got, plain.state_dict())


# -- refusals, each with what to write ---------------------------------------------------------------------------------


@ALL_STAGES
def test_an_optimizer_from_before(stage):
    """At stage 0 it sees whole mean gradients, as with DDP; elsewhere the line that the error names trains."""

    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        optimizer, mixed = adamw(model.parameters()), adamw([nn.Parameter(torch.ones(2)), *model.parameters()])
        zs.shard(model, stage=stage)
        if stage == 0:
            return trained(model, optimizer, rank)
        for each in (mixed, optimizer):
            with pytest.raises(
                zs.ConfigError, match=r"AdamW was made before zs.shard\(model\).*Write zs.shard\(model, optimizer, ...\), or make"
            ):
                trained(model, each, rank)
        optimizer.zero_grad()
        with zs.gathered(model):
            optimizer = adamw(model.parameters())
        with pytest.raises(zs.ConfigError, match=r"or inside zs.gathered.*after zs.shard\(model\) and outside zs.gathered"):
            trained(model, optimizer, rank)
        model.zero_grad()
        return trained(model, adamw(model.parameters()), rank)

    plain = copy.deepcopy(MODEL)
    optimizer = adamw(plain.parameters())
    for number in range(2):
        optimizer.zero_grad()
        backward(plain, DATA[number][0])
        optimizer.step()
    for got in run_threads(WORLD, rank_run):
        assert not differences(got, plain.state_dict())


@ALL_STAGES
def test_a_parameter_has_one_optimizer(stage):
    """Of two with the same parameters, the first that steps is taken."""

    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=stage)
        matrices = [p for p in model.parameters() if p.dim() == 2]
        optimizers = [torch.optim.Muon(matrices), torch.optim.AdamW(model.parameters())]
        backward(model, [DATA[0][0][rank]])
        with pytest.raises(
            zs.ZeroshardError,
            match=r"no optimizer: expected one of its parameters, got AdamW, Muon\. Give zs.shard one, or make one after it, and delete",
        ):
            zs.clip_grad_norm_(model, 1.0)
        optimizers[0].step()
        with pytest.raises(
            zs.ConfigError,
            match=r"layers.0.weight is a parameter of this AdamW and of another optimizer of the model, Muon.*drop all references",
        ):
            optimizers[1].step()
        zs.close(model)
        rest = [p for p in model.parameters() if p.dim() != 2]
        groups = [{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}]
        model, optimizer = zs.shard(model, zs.Muon(groups), stage=stage)
        trained(model, optimizer, rank)

    run_threads(WORLD, rank_run)


@ALL_STAGES
def test_an_optimizer_of_two_models(stage):
    def rank_run(rank):
        models = [copy.deepcopy(MODEL), nn.Linear(3, 2)]
        for model in models:
            zs.shard(model, stage=stage)
        optimizer = adamw([p for model in models for p in model.parameters()])
        backward(models[0], [DATA[0][0][rank]])
        with pytest.raises(
            zs.ConfigError, match=r"this AdamW has parameters of two sharded models, MLP and Linear\. Make one for each"
        ):
            optimizer.step()
        trained(models[0], adamw(models[0].parameters()), rank)

    run_threads(WORLD, rank_run)


def test_what_zs_shard_refuses_is_refused_with_nothing_changed():
    """A class that looks beyond elements. Another optimizer then trains."""

    def rank_run(rank):
        model, optimizer = sharded(3, torch.optim.LBFGS)
        backward(model, [DATA[0][0][rank]])
        with pytest.raises(zs.ConfigError, match="LBFGS takes products of whole gradients"):
            optimizer.step(lambda: 0.0)
        assert not hasattr(optimizer, "core")
        del optimizer
        optimizer = adamw(model.parameters())
        optimizer.step()
        assert not optimizer.last_step.skipped

    run_threads(WORLD, rank_run)


def test_ranks_that_make_different_optimizers():
    """Buffers may differ by then: a cache that follows each rank's batches."""

    def rank_run(rank):
        model, optimizer = sharded(2, functools.partial(torch.optim.SGD, lr=0.1 * (rank + 1)))
        model.register_buffer("cache", torch.zeros(rank + 1), persistent=False)
        backward(model, [DATA[0][0][rank]])
        before = zs.full_state_dict(model)
        with pytest.raises(zs.ModelMismatch, match=r"rank 0: group 0: lr=0.1; rank 1: group 0: lr=0.2"):
            optimizer.step()
        assert not differences(zs.full_state_dict(model), before)
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()

    run_threads(WORLD, rank_run)


class Coded(torch.optim.AdamW):
    state_columns = (coded_column("exp_avg", zs.StateFormat("int8", block=256)),)


def test_states_whose_form_must_be_known_when_parameters_are_laid_out():
    """A class that declares columns of blocks; what the error says trains."""

    def rank_run(rank):
        model, optimizer = sharded(3, Coded)
        backward(model, [DATA[0][0][rank]])
        with pytest.raises(zs.ConfigError, match=r"this Coded keeps states encoded.*write zs.shard\(model, optimizer, ...\)"):
            optimizer.step()
        zs.close(model)
        assert type(optimizer) is Coded
        model, optimizer = zs.shard(model, optimizer, stage=3)
        trained(model, optimizer, rank)

    run_threads(WORLD, rank_run)


@ALL_STAGES
def test_memory_is_checked_before_the_first_step(stage, monkeypatch):
    """zs.shard(model) can not count states of which it does not know; the first step does, and a loaded state is there already."""
    limits, states = room.limits, 8 * sum(p.numel() for p in MODEL.parameters())

    def rank_run(rank):
        model, optimizer = sharded(stage)
        backward(model, [DATA[0][0][rank]])
        runtime_of(model).comm.exchange(b"", "all are sharded")
        monkeypatch.setattr(room, "limits", lambda: [Limit("RAM", states - 1, "more of it")])
        with pytest.raises(zs.HostMemoryError, match=r"(?s)Nothing was allocated.*optimizer states  .*more of it"):
            optimizer.step()
        runtime_of(model).comm.exchange(b"", "all have failed")
        monkeypatch.setattr(room, "limits", limits)
        optimizer.step()
        assert not optimizer.last_step.skipped

    run_threads(WORLD, rank_run)


@ALL_STAGES
def test_closing_the_model(stage):
    """An optimizer that was not used becomes an ordinary one again; one that was used is closed with the model."""

    def rank_run(rank):
        model, optimizer = sharded(stage)
        zs.close(model)
        assert type(optimizer) is torch.optim.AdamW
        backward(model, [DATA[0][0][rank]])
        optimizer.step()
        zs.shard(model, stage=stage)
        again = adamw(model.parameters())
        backward(model, [DATA[0][0][rank]])
        again.step()
        zs.close(model)
        with pytest.raises(zs.ModelClosed):
            again.step()
        zs.shard(model, stage=3)
        lost = adamw(model.parameters())
        zs.close(model, restore=False)
        with pytest.raises(zs.ModelClosed, match="model of this AdamW was closed"):
            lost.step()

    run_threads(WORLD, rank_run)


# -- two models, schedulers, wrappers, failures ----------------------------------------------------------------------


def net(seed: int = 0) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), seed)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, scale: float = 1.0) -> None:
    model(torch.ones(2, 8) * scale).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_both_models_of_an_optimizer_can_be_closed():
    def run(rank):
        one, two = net(), net(1)
        zs.shard(one, stage=2), zs.shard(two, stage=2)
        optimizer = torch.optim.AdamW([*one.parameters(), *two.parameters()])
        zs.close(one), zs.close(two)
        assert type(optimizer) is torch.optim.AdamW and "tally" not in vars(optimizer)
        stepped(nn.Sequential(one, nn.Linear(3, 8), two), optimizer)

    run_threads(2, run)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_without_a_batch_follows_the_scheduler_of_the_others(stage):
    def run(rank):
        model = net()
        zs.shard(model, stage=stage)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        with zs.join(model):
            for _ in range(3 if rank == 0 else 0):
                stepped(model, optimizer)
                scheduler.step()
        return optimizer.param_groups[0]["lr"]

    assert run_threads(2, run) == [0.1 / 8] * 2


class Around(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        return self.inner.step(closure)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_wrapper_from_before_of_the_sharded_optimizer_steps_it(stage):
    plain = net()
    stepped(plain, torch.optim.AdamW(plain.parameters(), lr=0.1))

    def run(rank):
        model = net()
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        outer = Around(inner)
        zs.shard(model, inner, stage=stage)
        stepped(model, outer)
        return zs.full_state_dict(model)

    for state in run_threads(2, run):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_failure_on_the_way_leaves_a_late_optimizer(stage, monkeypatch):
    """And the next step takes it over."""
    plain, kept = late_optimizer.shard_optimizer, []

    def fails(optimizer, runtime):
        kept.append(optimizer)
        if kept.count(optimizer) == 1:
            raise MemoryError("once")
        return plain(optimizer, runtime)

    monkeypatch.setattr(late_optimizer, "shard_optimizer", fails)

    def run(rank):
        model = net()
        zs.shard(model, stage=stage)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 8)).square().mean().backward()
        with pytest.raises(MemoryError):
            optimizer.step()
        optimizer.step()
        assert runtime_of(model).optimizers.sharded == [optimizer] and not optimizer.last_step.skipped

    run_threads(2, run)


@pytest.mark.parametrize("when", ["respect_skipped_steps", "suit"])
def test_ranks_that_are_threads_expect_the_optimizers_of_all(when, monkeypatch):
    """As under FSDP2's door, where the first use of a model does that: also while a rank makes its own, or takes it over."""
    plain, made = getattr(late_optimizer, when), []

    class Listed(torch.optim.SGD):
        def __init__(self, *args, **options):
            made.append(self)
            super().__init__(*args, **options)

    def meanwhile(*args):
        if threading.current_thread().name.startswith("rank"):
            other = threading.Thread(target=lambda: [late_optimizer.expect(each) for each in made])
            other.start()
            other.join(0.2)
        return plain(*args)

    monkeypatch.setattr(late_optimizer, when, meanwhile)

    def run(rank):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=2)
        optimizer = Listed(model.parameters(), lr=0.1)
        for number in range(2):
            backward(model, [DATA[number][0][rank]])
            optimizer.step()
            optimizer.zero_grad()
        assert type(optimizer).__bases__[1] is Listed and not list(runtime_of(model).optimizers.waiting)
        return zs.full_state_dict(model)

    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        backward(model, DATA[number][0])
        optimizer.step()
        optimizer.zero_grad()
    for got in run_threads(WORLD, run):
        assert not differences(got, model.state_dict())


class Trainer:
    """An object in a reference cycle: only the garbage collector frees it."""

    def __init__(self, model):
        self.itself, self.optimizer = self, torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["on all ranks", "on rank 1"])
def test_an_optimizer_that_is_garbage_does_not_count(ranks):
    def run(rank):
        model = net()
        zs.shard(model, stage=3)
        if rank in ranks:
            Trainer(model)
        trainer = Trainer(model)
        model(torch.ones(2, 8)).square().mean().backward()
        zs.clip_grad_norm_(model, 1.0)
        assert zs.ema(model).updates == 0 and runtime_of(model).optimizers.one is trainer.optimizer
        trainer.optimizer.step()

    gc.collect()
    gc.disable()
    try:
        run_threads(2, run)
    finally:
        gc.enable()


def test_what_replaces_an_optimizer_is_told_and_works():
    def run(rank):
        model = net()
        zs.shard(model, stage=2)
        params = list(model.parameters())
        one, two = torch.optim.AdamW(params[:2]), torch.optim.AdamW(params)
        scheduler = torch.optim.lr_scheduler.StepLR(one, 1)
        stepped(model, one)
        average = zs.ema(model, 0.5)
        with pytest.raises(zs.ConfigError, match=r"To replace that one, drop all references to it, its schedulers' too \(del\)"):
            two.step()
        assert one.state  # as it was
        del one, scheduler
        stepped(model, two)
        assert list(runtime_of(model).optimizers) == [two] and average.updates == 1
        assert all(two.state[param]["step"] == 1 for param in params)

    run_threads(2, run)


def test_a_copy_of_a_late_optimizer_steps():
    def run(rank):
        model = net()
        zs.shard(model, stage=3)
        optimizer = copy.copy(torch.optim.SGD(model.parameters(), lr=0.1))
        stepped(model, optimizer)
        assert not optimizer.last_step.skipped

    run_threads(2, run)


# -- what replaces an optimizer that the program has dropped ---------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_a_delayed_update_of_a_dropped_optimizer_is_not_lost(stage):
    def run(rank, replaces):
        model = net()
        zs.shard(model, stage=stage, offload_optimizer="cpu", delayed_update=1)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for number in range(5):
            if replaces and number == 3:
                optimizer = None
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loss = model(torch.ones(2, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    assert run_threads(2, run, True) == run_threads(2, run, False)


def test_what_follows_steps_follows_those_of_the_next_optimizer():
    """Also where the first that comes is refused, and where states are away when it comes."""

    def run(rank):
        model = net()
        zs.shard(model, stage=2, offload_optimizer="cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stepped(model, optimizer)
        average = zs.ema(model, 0.5)
        optimizer = None
        optimizer = torch.optim.LBFGS(model.parameters())
        with pytest.raises(zs.ConfigError, match="LBFGS takes products"):
            optimizer.step(lambda: None)
        optimizer = None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stepped(model, optimizer)
        optimizer = None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zs.offload_states(model)
        with pytest.raises(zs.StatesAway):
            optimizer.load_state_dict(optimizer.state_dict())
        zs.reload_states(model)
        stepped(model, optimizer)
        assert average.updates == 2 and len(runtime_of(model).gate.steppers) == 1

    run_threads(2, run)


def test_saves_and_loads_take_what_replaces_an_optimizer(tmp_path):
    def run(rank):
        model = net()
        zs.shard(model, stage=2)
        first, *rest = list(model.parameters())
        one = torch.optim.AdamW(model.parameters(), lr=0.1)
        stepped(model, one)
        zs.save(tmp_path / "one", model, one)
        one = None
        two = torch.optim.AdamW(model.parameters(), lr=0.1)
        zs.load(tmp_path / "one", model, two)
        assert all(two.state[param]["step"] == 1 for param in model.parameters())
        two = None
        two, three, other = (torch.optim.SGD(params, lr=0.1) for params in ([first], rest, rest))
        zs.save(tmp_path / "two", model, [two, three])
        with pytest.raises(zs.ConfigError, match=r"of this SGD and of another .* To replace that one"):
            zs.save(tmp_path / "three", model, [two, other])
        assert list(runtime_of(model).optimizers) == [two, three]

    run_threads(2, run)


@pytest.mark.parametrize(
    "options", [{"offload_optimizer": "cpu"}, {"optimizer_states": zs.StateFormat("int8", min_numel=1, block=32)}], ids=str
)
def test_states_of_a_dropped_optimizer_are_freed(options):
    """But those columns of a shard in which another optimizer has states."""

    def held(model):
        ledger = runtime_of(model).tiers.ledger
        return ledger.now[OPTIMIZER], ledger.elsewhere[Tier.HOST][OPTIMIZER]

    def run(rank, replaces):
        model = net()
        zs.shard(model, stage=2, **options)
        first, *rest = list(model.parameters())
        optimizers = [torch.optim.AdamW(params, lr=0.1) for params in ([first], rest)] if replaces else []
        while replaces and not all(each.state for each in optimizers):
            stepped(model, next(each for each in optimizers if not each.state))
        if replaces:
            one, other = optimizers
            before = [other.state[param]["exp_avg"].full_tensor().clone() for param in rest]
            optimizers.clear()
            one = None
            one = torch.optim.SGD([first], lr=0.1)
            stepped(model, one)
            assert all(torch.equal(other.state[p]["exp_avg"].full_tensor(), was) for p, was in zip(rest, before, strict=True))
            assert any(was.any() for was in before)
            one = other = None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stepped(model, optimizer)
        assert not any(group.columns for group in runtime_of(model).groups)
        return held(model)

    assert run_threads(2, run, True) == run_threads(2, run, False)
