"""Steps that fail and are caught: what comes next is as if they had not been, or refused. Interrupted forwards, failed backwards,
batches that are given up by the module's own zero_grad or by `p.grad = None`, steps without zero_grad."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from zoo import Block, Stack, normal_batches, run_threads, same, seeded, sgd

import zeroshard as zs
from zeroshard.engine import shard_model

DIM = 6
MODES = [
    pytest.param({"stage": 0}, id="stage0"),
    pytest.param({"stage": 2}, id="stage2"),
    pytest.param({"stage": 3, "map_shared": True}, id="stage3-mapped"),
    pytest.param({"stage": 3, "map_shared": False}, id="stage3"),
    pytest.param({"stage": 3, "map_shared": False, "offload_param": "cpu"}, id="parameters-on-host"),
    pytest.param({"stage": 3, "map_shared": False, "precision": "bf16"}, id="bf16"),
]
every_mode = pytest.mark.parametrize("mode", MODES)
FP16 = {"precision": "fp16", "initial_loss_scale": 256.0}
BATCHES = normal_batches(6, 2, 4, DIM)
PLAIN = seeded(Stack, DIM, 3, Block)
WITHOUT: dict = {}  # states that were trained without a failure


def build() -> nn.Module:
    return copy.deepcopy(PLAIN)


def backward(model: nn.Module, number: int, rank: int) -> None:
    model(*BATCHES[number][rank]).square().mean().backward()


class Trouble(BaseException):
    """No Exception, as KeyboardInterrupt is none."""


def fail_backward(model: nn.Module, number: int, rank: int) -> None:
    def fail(grad: Tensor) -> None:
        raise ValueError("in backward")

    handle = model.blocks[1].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    with pytest.raises(ValueError, match="in backward"):
        backward(model, number, rank)
    handle.remove()


def fail_forward(model: nn.Module, number: int, rank: int) -> None:
    def fail(module: nn.Module, args: tuple) -> None:
        raise Trouble

    handle = model.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(Trouble):
        model(*BATCHES[number][rank])
    handle.remove()


def gathered(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    with zs.gathered(model, write=True), torch.no_grad():
        for param in model.parameters():
            param.add_(0.25)


def multiplied(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def loaded(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    model.load_state_dict({name: 2 * value for name, value in build().state_dict().items()})


def saved(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    zs.save(folder, model, optimizer, overwrite=True)
    multiplied(model, optimizer, folder)
    zs.load(folder, model, optimizer)


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    pass


@every_mode
@pytest.mark.parametrize("then", [nothing, gathered, multiplied, loaded, saved])
@pytest.mark.parametrize("fail", [fail_backward, fail_forward])
def test_what_comes_after_a_step_that_failed(tmp_path, mode, fail, then):
    """The same as without the failed step."""
    wanted = trained(None, then, str(tmp_path), tuple(mode.items()))
    for name, value in trained(fail, then, str(tmp_path), tuple(mode.items())).items():
        same(value, wanted[name], name, 0.0)


def trained(fail: Callable | None, then: Callable, folder: str, mode: tuple) -> dict[str, Tensor]:
    """By three steps of two ranks, with something between the first and the second; `fail` before it."""
    if fail is None and (then, mode) in WITHOUT:
        return WITHOUT[then, mode]

    def run(rank):
        model = build()
        model, optimizer = zs.shard(model, sgd(model.parameters()), units=(Block,), **dict(mode))
        for number in range(3):
            if number == 1 and fail is not None:
                fail(model, 5, rank)
                optimizer.zero_grad()
            if number == 1:
                then(model, optimizer, folder)
            backward(model, number, rank)
            optimizer.step()
            optimizer.zero_grad()
        return zs.full_state_dict(model)

    state = run_threads(2, run)[0]
    return WITHOUT.setdefault((then, mode), state) if fail is None else state


@every_mode
def test_gradients_that_went_with_a_failed_backward(mode):
    """Those of the backwards before it are gone, too: a step is refused on every rank until zero_grad."""

    def run(rank):
        model = build()
        model, optimizer = zs.shard(model, sgd(model.parameters()), units=(Block,), **mode)
        backward(model, 0, rank)
        fail_backward(model, 1, rank)
        for use in (optimizer.step, lambda: zs.clip_grad_norm_(model, 1.0), lambda: zs.full_gradients(model)):
            with pytest.raises(zs.ZeroshardError, match=r"a backward failed after others.*optimizer\.zero_grad\(\)"):
                use()
        optimizer.zero_grad()
        backward(model, 0, rank)
        optimizer.step()
        assert not optimizer.last_step.skipped

    run_threads(2, run)


# -- batches that are given up -----------------------------------------------------------------------------------


def by_the_module(model: nn.Module) -> None:
    model.zero_grad()


def by_the_module_to_zero(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def by_hand(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


def plainly(model: nn.Module, number: int, rank: int, weight: float) -> None:
    backward(model, number, rank)


def weighted(model: nn.Module, number: int, rank: int, weight: float) -> None:
    zs.backward(model, model(*BATCHES[number][rank]).square().mean() * weight, weight=weight)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("give_up", [by_the_module, by_the_module_to_zero, by_hand])
@pytest.mark.parametrize("options", [{"max_grad_norm": 0.01}, FP16, {}], ids=["clipped", "fp16", "plain"])
@pytest.mark.parametrize("train", [plainly, weighted])
def test_a_batch_that_is_given_up_leaves_nothing(train, options, give_up, stage):
    """Neither its norm nor its weight: steps are as without it."""

    def run(rank, gives_up):
        model = build()
        model, optimizer = zs.shard(model, sgd(model.parameters()), stage=stage, **options)
        for number in range(3):
            if gives_up:
                train(model, 5, rank, 3.0)
                zs.clip_grad_norm_(model, 100.0)
                give_up(model)
            train(model, number, rank, 2.0)
            optimizer.step()
            give_up(model)
        return zs.full_state_dict(model)

    (wanted, _), (got, _) = run_threads(2, run, False), run_threads(2, run, True)
    for name, value in wanted.items():
        same(got[name], value, name, 0.0)


def test_the_modules_own_zero_grad_is_called_and_comes_back():
    class Counts(nn.Linear):
        calls = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.calls += 1
            super().zero_grad(set_to_none)

    def run(rank):
        model, _ = zs.shard(Counts(3, 3), None, stage=2)
        model.zero_grad()
        assert model.calls == 1
        zs.close(model)
        assert "zero_grad" not in model.__dict__

    run_threads(2, run)


# -- what is seen of gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_gradients_are_seen_without_the_loss_scale(stage, offload):
    """In fp16, whoever looks: p.grad, full_gradients, after clipping; then another backward adds to them as ever. What is
    looked at by one rank alone changes nothing."""
    options = {} if offload is None or not stage else {"offload_optimizer": offload}

    def run(rank):
        model = build()
        reference = copy.deepcopy(model)
        model, optimizer = zs.shard(model, sgd(model.parameters()), stage=stage, **FP16, **options)
        for number in range(2):
            for other in range(2):
                reference(*BATCHES[number][other]).square().mean().mul(0.5).backward()
            backward(model, number, rank)
            if rank == 0:
                _ = [param.grad for param in model.parameters()]
        zs.clip_grad_norm_(model, 1e6)
        for name, grad in zs.full_gradients(model).items():
            same(grad, reference.get_parameter(name).grad, name, 2e-2)
        for param in model.parameters():
            param.grad = param.grad * 0.5
        optimizer.step()
        optimizer.step()  # twice on one gradient, as torch does
        return zs.full_state_dict(model, masters=True), reference

    results = run_threads(2, run)
    optimizer = sgd(results[0][1].parameters())
    for param in results[0][1].parameters():
        param.grad.mul_(0.5)
    optimizer.step()
    optimizer.step()
    for state, _reference in results:
        for name, value in results[0][1].state_dict().items():
            same(state[name], value, name, 2e-3)


# -- values and states that were given ---------------------------------------------------------------------------


def computed(param: Tensor) -> None:
    param.data = param.data * 0.5 + param.data.clamp(max=0.1)


def put_back(param: Tensor) -> None:
    before = param.data.clone()
    param.data.add_(1.0)
    param.data = before.mul_(3.0)


def stepped(param: Tensor) -> None:
    param.data = param.data - 0.5 * param.grad


def itself(param: Tensor) -> None:
    param.data = param.data


@every_mode
@pytest.mark.parametrize("write", [computed, put_back, stepped, itself])
def test_data_takes_what_was_computed_from_it(mode, write):
    """At stage 3 that is a sharded tensor, too, but not the parameter."""
    low = mode.get("precision") == "bf16"
    refused = {2: zs.ShardedAccessError, 3: zs.ModelChanged if low else None}.get(mode["stage"]) if write is stepped else None

    def run(rank):
        model = build().bfloat16() if low else build()
        wanted = copy.deepcopy(model)
        for other in range(2):
            (wanted(BATCHES[0][other][0].to(wanted.last.weight.dtype)).float().square().mean() / 2).backward()
        model, optimizer = zs.shard(model, sgd(model.parameters()), **mode)
        backward(model, 0, rank)
        for one, other in zip(model.parameters(), wanted.parameters(), strict=True):
            if refused is not None:  # whole values and a sharded gradient; fp32 gradients of bf16 values
                with pytest.raises(refused):
                    write(one)
                continue
            write(one)
            write(other)
        optimizer.zero_grad()
        for name, value in zs.full_state_dict(model).items():
            same(value, wanted.get_parameter(name).data, name, 1e-6)

    run_threads(2, run)


@every_mode
@pytest.mark.parametrize("held", ["loss", "reference", None])
def test_optimizer_states_come_along_where_parameters_are_replaced(mode, held):
    """Whatever keeps torch from exchanging a parameter's object: a graph that lives, a weak reference."""

    def run(rank, held):
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for number in range(2):
            loss = sum(model(*BATCHES[number][other]).square().mean() for other in range(2)) / 2
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        kept = {"loss": loss, "reference": [weakref.ref(param) for param in model.parameters()]}.get(held)
        del loss
        model, optimizer = zs.shard(model, optimizer, **mode)
        assert all(zs.full_optimizer_state(model).values())
        backward(model, 2, rank)
        optimizer.step()
        del kept
        return zs.full_state_dict(model)

    (wanted, _), (got, _) = run_threads(2, run, None), run_threads(2, run, held)
    for name, value in wanted.items():
        same(got[name], value, name, 0.0)


# -- writes between a forward and its backward ---------------------------------------------------------------------


def a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    multiplied(model, optimizer, "")


def a_load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loaded(model, optimizer, "")


def a_gathered_write(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with zs.gathered(model, write=True), torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of the model, without optimizer."""
    path = tmp_path_factory.mktemp("saved")
    model = build()
    zs.shard(model, stage=3)
    zs.save(path, model)
    zs.close(model)
    return path


@every_mode
@pytest.mark.parametrize("write", [a_step, in_place, a_load, a_gathered_write, zs.load], ids=lambda f: f.__name__)
def test_a_backward_of_values_that_are_no_more_is_refused(mode, write, saved):
    """As in torch, where saved tensors count their writes. The next forward and backward are right."""

    def run(rank):
        model = build()
        model, optimizer = zs.shard(model, sgd(model.parameters()), units=(Block,), **mode)
        first, second = (model(*BATCHES[number][rank]).square().mean() for number in range(2))
        first.backward(retain_graph=True)
        zs.load(saved, model) if write is zs.load else write(model, optimizer)
        with pytest.raises(RuntimeError, match="modified by an inplace operation|between a forward and its backward"):
            second.backward()
        optimizer.zero_grad()
        before = zs.full_state_dict(model)
        backward(model, 2, rank)
        fresh = copy.deepcopy(PLAIN)
        fresh.load_state_dict(before)
        grads = zs.full_gradients(model)
        for other in range(2):
            fresh(*BATCHES[2][other]).square().mean().mul(0.5).backward()
        for name, param in fresh.named_parameters():
            same(grads[name], param.grad, name, 0.1 if "precision" in mode else 1e-6)

    run_threads(2, run)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_data_of_a_gradient_takes_what_is_assigned(stage):
    def run(rank):
        model = build()
        model, _ = zs.shard(model, sgd(model.parameters()), stage=stage)
        backward(model, 0, rank)
        for param in model.parameters():
            param.grad.data = param.grad.data * 2.0 + 1.0
            param.grad.data.mul_(3.0)
        return zs.full_gradients(model)

    def plain(rank):
        model = build()
        model, _ = zs.shard(model, sgd(model.parameters()), stage=stage)
        backward(model, 0, rank)
        return {name: (grad * 2.0 + 1.0) * 3.0 for name, grad in zs.full_gradients(model).items()}

    for one, other in zip(run_threads(2, run), run_threads(2, plain), strict=True):
        for name, grad in other.items():
            same(one[name], grad, name, 0.0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_hook_that_assigns_the_local_gradient(stage):
    """Registered before zs.shard, it sees what this rank is about to send, and may put something else in its place."""

    def run(rank):
        model = build()

        def halve(param: Tensor) -> None:
            param.grad = param.grad * 0.5

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(halve)
        model, _ = zs.shard(model, sgd(model.parameters()), stage=stage)
        backward(model, 0, rank)
        return zs.full_gradients(model)

    plain = build()
    for rank in range(2):
        plain(*BATCHES[0][rank]).square().mean().mul(0.25).backward()
    for grads in run_threads(2, run):
        for name, param in plain.named_parameters():
            same(grads[name], param.grad, name, 1e-6)


def test_a_write_to_a_model_whose_sharding_failed(monkeypatch):
    """Memory for the unit's second group of parameters was not there: those of the first are sharded, and can be written."""
    placed, plain = [], shard_model.Builder._group

    def group(*args: object) -> object:
        placed.append(args)
        if len(placed) == 2:
            raise Trouble
        return plain(*args)

    monkeypatch.setattr(shard_model.Builder, "_group", group)
    model = nn.ParameterList([torch.ones(3), torch.ones(3, dtype=torch.float64)])
    with pytest.raises(Trouble):
        zs.shard(model, None, stage=3, units="model")
    with torch.no_grad():
        model[0].mul_(2.0)
    assert model[0].full_tensor().tolist() == [2.0, 2.0, 2.0]
