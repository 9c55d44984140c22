"""Several optimizers of one sharded model, parameters that are not the model's in one of them, and groups that are added later.

The same loop runs sharded and in one plain process, and weights and states are equal: bit for bit, but where a norm is added up in
another order.
"""

import contextlib
import copy
import functools
import gc
from collections.abc import Callable

import pytest
import torch
from helpers import Branches, differences, seeded
from optimizers import DATA, MODEL, STAGES, WORLD
from torch import nn

import zeroshard as zs
from zeroshard.assembly import late_optimizer
from zeroshard.engine.runtime import runtime_of
from zeroshard.testing import run_threads

Loop = Callable[..., None]


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Matrices and the rest, as programs divide a model."""
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1), torch.optim.AdamW(rest, lr=0.01)]


def by_depth(model: nn.Module) -> list[torch.optim.Optimizer]:
    """The first layers, and the last."""
    *first, last = model.layers
    return [
        torch.optim.SGD([p for layer in first for p in layer.parameters()], lr=0.1, momentum=0.9),
        torch.optim.AdamW([model.gain, *last.parameters()], lr=0.01),
    ]


def interleaved(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Weights and biases, so that both have parameters in each unit."""
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False))
    return [torch.optim.AdamW(matrices, lr=0.01), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]


def backward(model, batches):
    """Add the mean gradient over the ranks' batches to what is there."""
    earlier = {param: param.grad for param in model.parameters()} if len(batches) > 1 else {}
    for param in earlier:
        param.grad = None
    for batch in batches:
        model(*batch).backward()
    for param, grad in earlier.items():
        if param.grad is not None:
            param.grad.mul_(1.0 / len(batches))
            param.grad = param.grad if grad is None else grad + param.grad


def steps(model, optimizers, batches, clip=None):
    for number in range(4):
        backward(model, batches(number))
        if clip is not None:
            clip(model)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def in_turn(model, optimizers, batches):
    """Each drops its gradients right after its step, while the other's are still to be used."""
    for number in range(4):
        backward(model, batches(number))
        for optimizer in optimizers if number % 2 else reversed(optimizers):
            optimizer.step()
            optimizer.zero_grad()


def alternating(model, optimizers, batches):
    """As GANs do: one steps, with gradients that add up in the other's parameters until that drops them."""
    for number in range(4):
        optimizer = optimizers[number % 2]
        optimizer.zero_grad()
        backward(model, batches(number))
        optimizer.step()


def adding_up(model, optimizers, batches):
    """The second steps after every second backward, with the sum of two; the first after each."""
    first, second = optimizers
    for number in range(4):
        backward(model, batches(number))
        first.step()
        first.zero_grad(set_to_none=number % 2 == 0)
        if number % 2:
            second.step()
            second.zero_grad()


def named(model, optimizers):
    names = {id(param): name for name, param in model.named_parameters()}
    return {
        f"{names[id(param)]} {key}": value.full_tensor() if hasattr(value, "full_tensor") else value
        for optimizer in optimizers
        for param, entries in optimizer.state.items()
        for key, value in entries.items()
        if id(param) in names and isinstance(value, torch.Tensor)
    }


def plain(make, loop: Loop, prepare=lambda model: None):
    model = copy.deepcopy(MODEL)
    prepare(model)
    optimizers = make(model)
    loop(model, optimizers, lambda number: DATA[number % 4][0])
    return model.state_dict(), {name: value.detach() for name, value in named(model, optimizers).items()}


def sharded(rank, make, loop: Loop, prepare=lambda model: None, **options):
    model = copy.deepcopy(MODEL)
    prepare(model)
    zs.shard(model, **options)
    optimizers = make(model)
    loop(model, optimizers, lambda number: [DATA[number % 4][0][rank]])
    found = zs.full_optimizer_state(model)
    states = {
        f"{name} {key}": value for name, each in found.items() for key, value in each.items() if isinstance(value, torch.Tensor)
    }
    shown = named(model, optimizers)
    assert shown.keys() == states.keys()
    weights = zs.full_state_dict(model, masters=True)
    zs.close(model)
    return weights, states


def check(make, loop: Loop, *, close: bool = False, **options) -> None:
    expected = plain(make, loop)
    for got in run_threads(WORLD, functools.partial(sharded, make=make, loop=loop, **options)):
        for mine, wanted in zip(got, expected, strict=True):
            if close:
                assert mine.keys() == wanted.keys()
                for name, value in wanted.items():
                    torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-6, msg=name)
            else:
                assert not differences(mine, wanted), options


MAKES = [muon_and_adamw, by_depth, interleaved]
LOOPS = [steps, in_turn, alternating, adding_up]


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_every_stage_equals_two_optimizers_of_one_process(make, loop):
    for stage in STAGES:
        check(make, loop, stage=stage)


OPTIONS = [
    {"stage": 2, "offload_optimizer": "cpu"}, {"stage": 3, "offload_optimizer": "cpu", "offload_gradient": "cpu", "offload_param": "cpu"},
    {"stage": 3, "offload_optimizer": "nvme", "offload_gradient": "nvme"},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tiers(options, tmp_path):
    for make in (interleaved, muon_and_adamw):
        for loop in (steps, in_turn, adding_up):
            check(make, loop, offload_path=str(tmp_path), **options)


@pytest.mark.parametrize("stage", STAGES)
def test_one_given_to_zs_shard_and_one_made_after_it(stage):
    expected = plain(interleaved, in_turn)

    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        given, _ = interleaved(model)
        zs.shard(model, given, stage=stage)
        in_turn(model, [given, interleaved(model)[1]], lambda number: [DATA[number][0][rank]])
        return zs.full_state_dict(model)

    for got in run_threads(WORLD, rank_run):
        assert not differences(got, expected[0])


# -- beside one optimizer with two groups ----------------------------------------------------------------------------


def one_of_two_groups(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False))
    return [torch.optim.AdamW([{"params": matrices, "lr": 0.02}, {"params": rest, "weight_decay": 0.2}], lr=0.01)]


def two_of_one_class(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False))
    return [torch.optim.AdamW(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01, weight_decay=0.2)]


def by_weight(model, optimizers, batches):
    """Two backwards of a step, each with a weight; both zs.clip_grad_norm_ and gradients that are held back."""
    for number in range(4):
        with zs.accumulate(model):
            zs.backward(model, model(*batches(number)[0]), weight=3.0)
        zs.backward(model, model(*batches(number + 1)[0]), weight=1.0)
        zs.clip_grad_norm_(model, 0.3)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


FORMS = [
    {"precision": "bf16"}, {"precision": "bf16", "master_weights": "split"}, {"precision": "bf16", "offload_optimizer": "cpu"},
    {"precision": "bf16", "gradient_dtype": "bf16"}, {"optimizer_states": zs.StateFormat("int8", min_numel=10, block=32)},
    {"optimizer_states": zs.StateFormat("int8", min_numel=10, block=32), "offload_optimizer": "cpu"},
]  # fmt: skip


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_precisions_and_forms_equal_one_optimizer_of_two_groups(options):
    for stage in STAGES if "offload_optimizer" not in options else (1, 3):
        for loop in (steps, by_weight):
            two, one = (
                run_threads(WORLD, functools.partial(sharded, make=make, loop=loop, stage=stage, **options))
                for make in (two_of_one_class, one_of_two_groups)
            )
            for mine, wanted in zip(two, one, strict=True):
                for values, expected in zip(mine, wanted, strict=True):
                    assert not differences(values, expected), (stage, loop.__name__)


def test_each_counts_as_one_step_of_the_model():
    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=2)
        optimizers = interleaved(model)
        steps(model, optimizers, lambda number: [DATA[number][0][rank]])
        found = [runtime_of(model).progress.steps]
        optimizers[0].step()  # without gradients
        alternating(model, optimizers, lambda number: [DATA[number][0][rank]])
        return [*found, runtime_of(model).progress.steps]

    assert run_threads(WORLD, rank_run) == [[4, 8]] * WORLD


def test_one_that_was_skipped_and_repaired_steps_in_the_same_step_of_the_model():
    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=2)
        first, second = interleaved(model)
        counted = []
        for optimizers in ([first, second, first], [first, first, second], [second, first, first]):
            backward(model, [DATA[0][0][rank]])
            model.layers[0].weight.grad.fill_(float("inf"))
            for number, optimizer in enumerate(optimizers):
                if optimizer is first and first in optimizers[:number]:
                    model.layers[0].weight.grad.fill_(1.0)
                optimizer.step()
            assert not first.last_step.skipped
            counted.append((runtime_of(model).progress.steps, runtime_of(model).attendance.steps))
            for optimizer in (first, second):
                optimizer.zero_grad()
        return counted

    assert run_threads(WORLD, rank_run) == [[(1, 1), (2, 2), (3, 3)]] * WORLD


# -- clipping, GradScaler, schedulers ----------------------------------------------------------------------------------


def torchs_clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_clipping_of_all_before_both_steps(make):
    expected = plain(make, functools.partial(steps, clip=torchs_clip))
    for stage in STAGES:
        for clip in (torchs_clip, lambda model: zs.clip_grad_norm_(model, 0.2)):
            for got in run_threads(
                WORLD, functools.partial(sharded, make=make, loop=functools.partial(steps, clip=clip), stage=stage)
            ):
                for mine, wanted in zip(got, expected, strict=True):
                    for name, value in wanted.items():
                        torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-6, msg=f"{stage} {name}")


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_clipping_before_each_step(make):
    """A norm is that of the gradients that there are: not of those that the other optimizer has dropped since the last one."""

    def clipping(clip, norms):
        def loop(model, optimizers, batches):
            for number in range(4):
                backward(model, batches(number))
                for optimizer in optimizers if number % 2 else reversed(optimizers):
                    for bound in (0.2, 0.05):
                        norms.append(clip(model, bound).item())
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=number < 2)

        return loop

    wanted = []
    expected = plain(make, clipping(lambda model, bound: torch.nn.utils.clip_grad_norm_(model.parameters(), bound), wanted))

    def rank_run(rank, stage):
        norms = []
        return *sharded(rank, make, clipping(zs.clip_grad_norm_, norms), stage=stage), norms

    for stage in STAGES:
        for *got, norms in run_threads(WORLD, functools.partial(rank_run, stage=stage)):
            assert norms == pytest.approx(wanted, rel=1e-4), stage
            for mine, theirs in zip(got, expected, strict=True):
                for name, value in theirs.items():
                    torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-6, msg=f"{stage} {name}")


def clip_own(params, *args):
    torch.nn.utils.clip_grad_norm_(params, 0.1)


@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("loop", [steps, in_turn, alternating, adding_up], ids=lambda loop: loop.__name__)
def test_max_grad_norm_clips_what_an_optimizer_steps(make, loop):
    def clipping(model):
        """Let each optimizer of a plain model clip its own gradients in its step."""
        optimizers = make(model)
        for optimizer in optimizers:
            own = [param for group in optimizer.param_groups for param in group["params"]]
            optimizer.register_step_pre_hook(functools.partial(clip_own, own))
        return optimizers

    expected = plain(clipping, loop)
    for stage in STAGES:
        for got in run_threads(WORLD, functools.partial(sharded, make=make, loop=loop, stage=stage, max_grad_norm=0.1)):
            for mine, wanted in zip(got, expected, strict=True):
                for name, value in wanted.items():
                    torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-5, msg=f"{stage} {name}")


def scaled_loop(clips: bool) -> Loop:
    def loop(model, optimizers, batches):
        """GradScaler; in step 1 the gradient of a bias is not finite, and so its optimizer alone is skipped."""
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        for number in range(4):
            for count, batch in enumerate(batches(number), 1):
                hook = (
                    model.layers[0].bias.register_hook(lambda grad: grad * float("inf")) if number == 1 and count == 1 else None
                )
                scaler.scale(model(*batch) / len(batches(number))).backward()
                if hook is not None:
                    hook.remove()
            for optimizer in optimizers if clips and number != 1 else ():
                scaler.unscale_(optimizer)
            if clips and number != 1:
                torchs_clip(model)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
        assert scaler.get_scale() == 64.0

    return loop


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_grad_scaler(make, clips):
    for stage in STAGES:
        check(make, scaled_loop(clips), close=True, stage=stage)


def test_each_has_its_scheduler_and_its_skipped_steps():
    """A gradient that is not finite skips the step of the optimizer that has it; schedulers of the other advance."""

    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=3)
        optimizers = interleaved(model)
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
        for number in range(3):
            backward(model, [DATA[number][0][rank]])
            if number == 1:
                model.layers[1].bias.grad = torch.full((7,), float("nan"))
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()
            assert [optimizer.last_step.skipped for optimizer in optimizers] == [False, number == 1]
            for optimizer in optimizers:
                optimizer.zero_grad()
        return [optimizer.param_groups[0]["lr"] for optimizer in optimizers]

    assert run_threads(WORLD, rank_run) == [[0.01 / 8, 0.1 / 4]] * WORLD


@pytest.mark.parametrize("options", [*({"stage": stage} for stage in STAGES), {"stage": 2, "offload_gradient": "cpu"}], ids=str)
def test_zero_grad_drops_those_of_its_own_parameters(options):
    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        zs.shard(model, **options)
        first, second = interleaved(model)
        backward(model, [DATA[0][0][rank]])
        before = {name: grad.clone() for name, grad in zs.full_gradients(model).items()}
        first.zero_grad()
        now = zs.full_gradients(model)
        assert all((now[name] is None) == (before[name].dim() == 2) for name in now)
        assert all(torch.equal(now[name], before[name]) for name in now if now[name] is not None)
        first.step()
        assert first.last_step.skipped and not first.state_dict()["state"]
        second.zero_grad(set_to_none=False)
        assert all(
            not param.grad.full_tensor().any() if options["stage"] else not param.grad.any()
            for param in second.param_groups[0]["params"]
        )
        second.zero_grad()
        assert all(param.grad is None for param in model.parameters())
        with zs.accumulate(model):
            backward(model, [DATA[0][0][rank]])
            first.zero_grad()
        backward(model, [DATA[0][0][rank]])
        for name, grad in zs.full_gradients(model).items():
            torch.testing.assert_close(grad, before[name] * (1 if grad.dim() == 2 else 2))
        for to_none in (True, False):  # sums are held back over reduced gradients
            with zs.accumulate(model):
                backward(model, [DATA[0][0][rank]])
                first.zero_grad(to_none)
            backward(model, [DATA[0][0][rank]])
        for name, grad in zs.full_gradients(model).items():
            torch.testing.assert_close(grad, before[name] * (1 if grad.dim() == 2 else 6))

    run_threads(WORLD, rank_run)


# -- states ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("make", MAKES, ids=lambda make: make.__name__)
def test_state_dicts_of_each_go_round(make, stage):
    """Those of a plain process load, and those of the sharded optimizers do."""
    model = copy.deepcopy(MODEL)
    optimizers = make(model)
    steps(model, optimizers, lambda number: DATA[number][0])
    weights, told = copy.deepcopy(model.state_dict()), [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    steps(model, optimizers, lambda number: DATA[number][0])

    def rank_run(rank):
        sharded = copy.deepcopy(MODEL)
        sharded.load_state_dict(weights)
        zs.shard(sharded, stage=stage)
        mine = make(sharded)
        for _ in range(2):
            for optimizer, state in zip(mine, told, strict=True):
                optimizer.load_state_dict(state)
            again = [optimizer.state_dict() for optimizer in mine]
            steps(sharded, mine, lambda number: [DATA[number][0][rank]])
            found = zs.full_state_dict(sharded)
            sharded.load_state_dict(weights)
            for optimizer, state in zip(mine, again, strict=True):
                optimizer.load_state_dict(state)
        return found

    for got in run_threads(WORLD, rank_run):
        assert not differences(got, model.state_dict())


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 3}, {"stage": 3, "offload_optimizer": "cpu"}], ids=str)
def test_a_checkpoint_has_all(options, tmp_path):
    """Saved by two ranks and loaded by one and by four, at another stage, before the first step."""

    def run(rank, saves=False, **options):
        model = copy.deepcopy(MODEL)
        zs.shard(model, **options)
        optimizers = muon_and_adamw(model)
        if saves:
            steps(model, optimizers, lambda number: [DATA[number][0][0]])
            zs.save(tmp_path, model, optimizers[::-1])  # in any order
        else:
            zs.load(tmp_path, model, optimizers)
            optimizers[0].load_state_dict(optimizers[0].state_dict())
        steps(model, optimizers, lambda number: [DATA[number][0][0]])
        return zs.full_state_dict(model)

    expected = run_threads(2, functools.partial(run, saves=True, **options))[0]
    for ranks in (1, 4):
        for got in run_threads(ranks, functools.partial(run, stage=2)):
            assert not differences(got, expected)

    def refused(rank):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=2)
        optimizers = interleaved(model)
        with pytest.raises(zs.CheckpointMismatch, match=r"optimizer: saved AdamW\+Muon, wanted SGD\+AdamW"):
            zs.load(tmp_path, model, optimizers)
        for given in (optimizers[0], optimizers[:1]):
            with pytest.raises(zs.ConfigError, match=r"stepped by several: give a list of all \(SGD, AdamW\)"):
                zs.save(tmp_path, model, given)
        zs.load(tmp_path, model)

    run_threads(2, refused)


# -- parameters that are not the model's ---------------------------------------------------------------------------------


class Beside(nn.Module):
    """A sharded model, and a temperature and a small layer beside it."""

    def __init__(self, options=None):
        super().__init__()
        self.inner = copy.deepcopy(MODEL)
        if options is not None:
            zs.shard(self.inner, **options)
        self.temperature, self.layer = nn.Parameter(torch.tensor(0.5)), seeded(lambda: nn.Linear(5, 5))

    def outside(self):
        return [self.temperature, *self.layer.parameters()]

    def train_on(self, optimizers, batches, saved=None):
        for number in range(6):
            if number == 3 and saved is not None:
                for optimizer in optimizers:
                    saved.append(copy.deepcopy(optimizer.state_dict()))
            frozen = number == 4  # no parameter of the model has a gradient
            for batch in batches(number):
                x, y = batch
                loss = self.layer(x).square().mean() if frozen else self.inner(self.layer(x), y) * self.temperature
                (loss / len(batches(number))).backward()
            for param in self.outside() if len(batches(number)) == 1 else ():  # the program averages these
                self.average(param)
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=number % 2 == 0)

    def average(self, param):
        if param.grad is not None:
            everyone = runtime_of(self.inner).comm.exchange(param.grad.numpy().tobytes(), "average")
            param.grad.copy_(
                sum(torch.frombuffer(bytearray(part), dtype=torch.float32).view(param.shape) for part in everyone) / len(everyone)
            )


def all_in_one(beside):
    return [torch.optim.AdamW([{"params": beside.inner.parameters()}, {"params": beside.outside(), "lr": 0.1}], lr=0.01)]


def mixed_groups(beside):
    inner = beside.inner.layers
    return [
        torch.optim.SGD([beside.temperature, *inner[0].parameters()], lr=0.1, momentum=0.9),
        torch.optim.AdamW(
            [*inner[1].parameters(), *inner[2].parameters(), beside.inner.gain, *beside.layer.parameters()], lr=0.01
        ),
    ]


def muon_outside(beside):
    everything = [*beside.inner.parameters(), *beside.outside()]
    matrices, rest = ([p for p in everything if (p.dim() == 2) is wanted] for wanted in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


@pytest.mark.parametrize("make", [all_in_one, mixed_groups, muon_outside], ids=lambda make: make.__name__)
@pytest.mark.parametrize("options", [{"stage": stage} for stage in STAGES] + [{"stage": 2, "offload_optimizer": "cpu"}], ids=str)
def test_parameters_beside_the_model(make, options):
    """They are stepped as they are; states and gradients of theirs are ordinary ones; a state dict of one process loads."""
    one, saved = Beside(), []
    optimizers = make(one)
    one.train_on(optimizers, lambda number: DATA[number % 4][0], saved)
    states = [optimizer.state[one.temperature] for optimizer in optimizers if one.temperature in optimizer.state]

    def rank_run(rank):
        beside = Beside(options)
        mine, told = make(beside), []
        beside.train_on(mine, lambda number: [DATA[number % 4][0][rank]], told)
        assert [len(each["state"]) for each in told] == [len(each["state"]) for each in saved]
        for optimizer, state in zip(mine, saved, strict=True):
            optimizer.load_state_dict(state)
            assert optimizer.state_dict()["state"].keys() == state["state"].keys()
        for optimizer, state in zip(mine, told, strict=True):  # of its own
            found = optimizer.state_dict()["state"]
            assert found.keys() == state["state"].keys()
        held = next(optimizer for optimizer in mine if beside.temperature in optimizer.state)
        held.state[beside.temperature] = {"kept": 1}
        assert held.state[beside.temperature] == {"kept": 1}
        outside = {name: value for name, value in beside.state_dict().items() if not name.startswith("inner.")}
        return outside, zs.full_state_dict(beside.inner)

    for outside, inner in run_threads(WORLD, rank_run):
        expected = one.state_dict()
        for name, value in {**outside, **{f"inner.{name}": value for name, value in inner.items()}}.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    assert len(states) == 1


def test_states_of_parameters_beside_the_model_load():
    """What one process has saved, sharded training goes on from."""
    one, saved = Beside(), []
    optimizers = all_in_one(one)
    one.train_on(optimizers, lambda number: DATA[number % 4][0])
    weights, told = copy.deepcopy(one.state_dict()), copy.deepcopy(optimizers[0].state_dict())
    one.train_on(optimizers, lambda number: DATA[number % 4][0])

    def rank_run(rank):
        beside = Beside()
        beside.load_state_dict(weights)
        zs.shard(beside.inner, stage=3)
        mine = all_in_one(beside)
        mine[0].load_state_dict(told)
        beside.train_on(mine, lambda number: [DATA[number % 4][0][rank]])
        with pytest.raises(zs.ConfigError, match="zs.save: optimizer: it also steps parameters that are not the model's"):
            zs.save("nowhere", beside.inner, mine[0])
        with pytest.raises(zs.ConfigError, match=r"steps parameters beside the model.*Take zs\.full_optimizer_state\(model\)"):
            zs.full_optimizer_state_dict(beside.inner)
        assert len(zs.full_optimizer_state(beside.inner)) == len(list(MODEL.parameters()))
        return beside.temperature.detach(), zs.full_state_dict(beside.inner)

    for temperature, inner in run_threads(WORLD, rank_run):
        torch.testing.assert_close(temperature, one.temperature.detach())
        for name, value in inner.items():
            torch.testing.assert_close(value, one.inner.state_dict()[name], rtol=1e-5, atol=1e-6, msg=name)
    assert not saved


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_beside_the_model_without_states_yet(stage):
    """Adagrad makes states in its constructor: those of a group that is added come in the next step."""

    def program(beside, batches):
        optimizer = torch.optim.Adagrad(beside.inner.parameters(), lr=0.1)
        optimizer.add_param_group({"params": beside.outside()})
        beside.train_on([optimizer], batches)
        return beside

    expected = program(Beside(), lambda number: DATA[number % 4][0]).state_dict()

    def rank_run(rank):
        beside = program(Beside({"stage": stage}), lambda number: [DATA[number % 4][0][rank]])
        return beside.temperature.detach(), zs.full_state_dict(beside.inner)

    for temperature, inner in run_threads(WORLD, rank_run):
        torch.testing.assert_close(temperature, expected["temperature"], rtol=1e-5, atol=1e-6)
        for name, value in inner.items():
            torch.testing.assert_close(value, expected[f"inner.{name}"], rtol=1e-5, atol=1e-6, msg=name)


# -- groups that are added later -----------------------------------------------------------------------------------------


def unfreezing(make_first):
    def loop(model, optimizers, batches):
        """The last layer is trained first, the others with it from step 2 on; in step 3 another group comes with states loaded."""
        (optimizer,) = optimizers
        for number in range(5):
            if number in (2, 3):
                layer = model.layers[3 - number]
                layer.requires_grad_(True)
                optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.05})
            backward(model, batches(number % 4))
            optimizer.step()
            optimizer.zero_grad()

    return loop


def of_last_layer(cls, **options):
    def make(model):
        for layer in model.layers[:2]:
            layer.requires_grad_(False)
        model.gain.requires_grad_(False)
        return [cls(model.layers[2].parameters(), **options)]

    return make


@pytest.mark.parametrize(
    "make",
    [of_last_layer(torch.optim.AdamW, lr=0.01), of_last_layer(torch.optim.SGD, lr=0.1, momentum=0.9)],
    ids=["AdamW", "SGD"],
)
@pytest.mark.parametrize("options", [{}, {"offload_optimizer": "cpu"}], ids=str)
def test_unfrozen_layers_in_a_group_of_their_own(make, options):
    for stage in STAGES if not options else (1, 3):
        expected = plain(make, unfreezing(make))
        for got in run_threads(WORLD, functools.partial(sharded, make=make, loop=unfreezing(make), stage=stage, **options)):
            for mine, wanted in zip(got, expected, strict=True):
                assert not differences(mine, wanted), stage


def test_groups_come_to_one_of_several_and_with_parameters_beside_the_model():
    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=3)
        first, second, extra = model.layers[0], model.layers[1], nn.Parameter(torch.ones(3))
        one = torch.optim.AdamW(first.parameters(), lr=0.01)
        other = torch.optim.SGD(second.parameters(), lr=0.1)
        steps(model, [one, other], lambda number: [DATA[number][0][rank]])
        with pytest.raises(zs.ConfigError, match=r"layers.1.weight is a parameter of this AdamW and of another .* SGD"):
            one.add_param_group({"params": [second.weight]})
        with pytest.raises(ValueError, match="more than one parameter group"):
            one.add_param_group({"params": [first.weight]})
        assert len(one.param_groups) == 1
        one.add_param_group({"params": [model.gain, extra], "lr": 0.5})
        extra.grad = torch.ones(3)
        before = model.gain.full_tensor().clone()
        steps(model, [one, other], lambda number: [DATA[number][0][rank]])
        assert extra.grad is None and not torch.equal(model.gain.full_tensor(), before)
        torch.testing.assert_close(extra.detach(), torch.ones(3) - 0.5 * (1 + 0.01) * torch.ones(3), rtol=1e-4, atol=1e-4)
        zs.close(model)
        with pytest.raises(zs.ModelClosed, match=r"add_param_group\(\) after zs.close"):
            one.add_param_group({"params": [nn.Parameter(torch.ones(1))]})

    run_threads(WORLD, rank_run)


def test_ranks_that_add_different_groups():
    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=2)
        optimizer = torch.optim.AdamW(model.layers[0].parameters())
        backward(model, [DATA[0][0][rank]])
        optimizer.step()
        optimizer.add_param_group({"params": [model.layers[1].weight], "lr": 0.1 * (rank + 1)})
        with pytest.raises(zs.ModelMismatch, match="group 1: lr=0.1; rank 1: .*group 1: lr=0.2"):
            optimizer.step()

    run_threads(WORLD, rank_run)


# -- what serves one -----------------------------------------------------------------------------------------------------


def test_what_serves_one_optimizer_says_so():
    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=2)
        optimizers = interleaved(model)
        backward(model, [DATA[0][0][rank]])
        assert zs.report(model).at_rest["optimizer states"] == 0
        with pytest.raises(zs.ConfigError, match=r"stepped by 2 optimizers \(SGD, AdamW\), and what was called serves one"):
            zs.ema(model)
        with pytest.raises(zs.ConfigError, match=r"zs.join serves a model with one optimizer.*zs.stop_together"), zs.join(model):
            pass
        with pytest.raises(zs.ConfigError, match="zs.full_optimizer_state_dict: the model has several optimizers"):
            zs.full_optimizer_state_dict(model)
        for optimizer in optimizers:
            optimizer.step()
        assert zs.state_of(model.layers[0].weight, "exp_avg").full().abs().sum() > 0
        assert zs.state_of(model.layers[0].bias, "momentum_buffer").names() == ["momentum_buffer"]
        assert zs.report(model).at_rest["optimizer states"] > 0
        assert {each.kind for each in runtime_slices(model)} == {
            "optimizer:exp_avg",
            "optimizer:exp_avg_sq",
            "optimizer:step",
            "optimizer:momentum_buffer",
        }
        zs.offload_states(model)
        zs.reload_states(model)
        optimizers[1].step()

    run_threads(WORLD, rank_run)


def runtime_slices(model):
    from zeroshard.seam import engine_of

    return engine_of(model).slices("optimizer")


@pytest.mark.parametrize(
    ("options", "told"),
    [({"precision": "fp16"}, "precision='fp16'"), ({"offload_optimizer": "cpu", "delayed_update": 1}, "delayed_update")],
)
def test_options_that_serve_one_optimizer(options, told):
    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=2, **options)
        first, second = interleaved(model)
        backward(model, [DATA[0][0][rank]])
        first.step()
        with pytest.raises(
            zs.ConfigError, match=f"{told} serves one optimizer, and beside this (SGD|AdamW) the model has (SGD|AdamW)"
        ):
            second.step()
        first.step()

    run_threads(WORLD, rank_run)


# -- in hooks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["given", "late and used", "both wait"])
def test_an_optimizer_that_a_hook_steps_is_refused(case):
    """However many others the model has, and whichever of them were used."""

    def rank_run(rank, stage):
        model = copy.deepcopy(MODEL)
        first, *rest = model.parameters()
        given = torch.optim.SGD(rest, lr=0.1)
        zs.shard(model, given if case == "given" else None, stage=stage)
        others = given if case == "given" else torch.optim.SGD(rest, lr=0.1)
        if case == "late and used":
            steps(model, [others], lambda number: [DATA[number][0][rank]])
        own = torch.optim.SGD([first], lr=0.1)
        with pytest.raises(zs.ConfigError, match=r"gain: this hook steps an optimizer of its own \(SGD\)"):
            first.register_post_accumulate_grad_hook(lambda param: (own.step(), own.zero_grad()))
        steps(model, [others, own], lambda number: [DATA[number][0][rank]])

    for stage in (0, 1, 3):
        run_threads(WORLD, functools.partial(rank_run, stage=stage))


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_in_a_backward_is_refused(stage):
    """Of an optimizer that was the model's own before the hook was registered, too."""

    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=stage)
        optimizers = interleaved(model)
        steps(model, optimizers, lambda number: [DATA[number][0][rank]])
        handle = model.layers[0].bias.register_post_accumulate_grad_hook(lambda param: optimizers[1].step() and None)
        with pytest.raises(zs.ZeroshardError, match=r"SGD.step\(\) inside a backward of its model"):
            backward(model, [DATA[0][0][rank]])
        handle.remove()
        for optimizer in optimizers:
            optimizer.zero_grad()
        steps(model, optimizers, lambda number: [DATA[number][0][rank]])

    run_threads(WORLD, rank_run)


# -- ranks that differ ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("order", [True, False])
def test_ranks_that_step_different_optimizers_are_told_by_name(order, clips):
    """One of them alone, or all in another order; at every stage, on every rank."""

    def rank_run(rank, make, stage, told):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=stage)
        optimizers = make(model)
        steps(model, optimizers, lambda number: [DATA[number][0][rank]])
        backward(model, [DATA[0][0][rank]])
        if clips:
            zs.clip_grad_norm_(model, 0.1)
        with pytest.raises(zs.CollectiveMismatch, match=told):
            for optimizer in (optimizers[::-1] if rank else optimizers) if order else optimizers[rank : rank + 1]:
                optimizer.step()

    names = ["SGD", "AdamW"], ["AdamW", "AdamW"]
    for (sgd, adamw), make in zip(names, (interleaved, two_of_one_class), strict=True):
        told = rf"optimizer step of {adamw} \(layers.0.weight, ...\).*; rank 1: optimizer step of {sgd} \(gain, ...\)"
        for stage in STAGES:
            run_threads(WORLD, functools.partial(rank_run, make=make, stage=stage, told=told))


def test_a_step_of_a_model_with_one_optimizer_names_none():
    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=2)
        world, labels = runtime_of(model).topology.world, []
        optimizer = one_of_two_groups(model)[0]
        exchange = world.exchange
        world.exchange = lambda payload, label: labels.append((label, len(payload))) or exchange(payload, label)
        for clips in (False, True):
            backward(model, [DATA[0][0][rank]])
            if clips:
                zs.clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.step()
        return [each for each in labels if each[0].startswith("optimizer step")]

    norm = [(f"optimizer step: gradient norm [step {number}]", 40) for number in (1, 2)]
    expected = [("optimizer step: compare optimizers", 32), *norm, ("optimizer step without gradients", 0)]
    assert run_threads(WORLD, rank_run) == [expected] * WORLD


@pytest.mark.parametrize("stage", STAGES)
def test_what_an_optimizer_keeps_does_not_depend_on_garbage(stage):
    """One of other parameters, never used, that the program dropped, and that one rank alone has collected."""

    def rank_run(rank, dropped):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=stage)
        optimizer, stale = interleaved(model)
        if dropped:
            stale.itself = stale
            if rank == 1:
                runtime_of(model).optimizers.waiting.discard(stale)  # as the collector would do: threads share one
        else:
            runtime_of(model).optimizers.waiting.discard(stale)
        del stale
        with gc_disabled():
            with zs.accumulate(model):
                backward(model, [DATA[1][0][rank]])
            optimizer.zero_grad()
            backward(model, [DATA[0][0][rank]])
            optimizer.zero_grad()
            backward(model, [DATA[0][0][rank]])
            return zs.clip_grad_norm_(model, 1e9).item()

    found = [run_threads(WORLD, functools.partial(rank_run, dropped=dropped)) for dropped in (True, False)]
    assert found[0] == found[1]


@contextlib.contextmanager
def gc_disabled():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# -- orders --------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_loads_after_a_group_has_changed_the_order(tmp_path):
    """A new process makes the optimizer with both of its groups, of which the added one has the model's first parameter."""

    def rank_run(rank, classes):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=1)
        first, *params = model.parameters()
        one, other = classes[0](params[:2], lr=0.1), classes[1](params[2:], lr=0.01)
        steps(model, [one, other], lambda number: [DATA[number][0][rank]])
        other.add_param_group({"params": [first], "lr": 0.5})
        assert list(runtime_of(model).optimizers) == [other, one]
        steps(model, [one, other], lambda number: [DATA[number][0][rank]])
        folder = tmp_path / classes[0].__name__
        zs.save(folder, model, [one, other])
        again = copy.deepcopy(MODEL)
        zs.shard(again, stage=2)
        first, *params = again.parameters()
        mine = [classes[0](params[:2], lr=0.1), classes[1]([{"params": params[2:]}, {"params": [first], "lr": 0.5}], lr=0.01)]
        zs.load(folder, again, mine)
        for trained, optimizers in ((model, [one, other]), (again, mine)):
            steps(trained, optimizers, lambda number: [DATA[number][0][rank]])
        assert not differences(zs.full_state_dict(again), zs.full_state_dict(model))

    for classes in ((torch.optim.RMSprop, torch.optim.AdamW), (torch.optim.AdamW, torch.optim.AdamW)):
        run_threads(WORLD, functools.partial(rank_run, classes=classes))


def test_an_average_serves_one_optimizer():
    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=2)
        matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False))
        first = torch.optim.AdamW(matrices)
        average = zs.ema(model, 0.0)
        second = torch.optim.SGD(rest, lr=0.1)
        backward(model, [DATA[0][0][rank]])
        for _ in range(2):
            first.step()
            with pytest.raises(zs.ConfigError, match="zs.ema serves one optimizer, and beside this SGD the model has AdamW"):
                second.step()
        assert not differences(average.full_state_dict(), zs.full_state_dict(model))

    run_threads(WORLD, rank_run)


def test_one_that_does_not_suit_raises_at_its_own_step():
    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=2)
        matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False))
        refused, optimizer = torch.optim.LBFGS(rest), torch.optim.AdamW(matrices)
        for _ in range(2):
            backward(model, [DATA[0][0][rank]])
            optimizer.step()
            for use in (refused.step, lambda: zs.save("nowhere", model, [optimizer, refused])):
                with pytest.raises(zs.ConfigError, match="LBFGS takes products of whole gradients"):
                    use()
        optimizer.zero_grad()
        assert all((param.grad is None) == (param.dim() == 2) for param in model.parameters())

    run_threads(WORLD, rank_run)


def test_gradients_of_one_that_does_not_suit_do_not_matter_to_the_other(monkeypatch):
    """They are kept, and neither stop its steps nor enter their norm; garbage is collected once, not in each zero_grad."""
    collections = []
    plain_collection = late_optimizer.collect_garbage
    monkeypatch.setattr(late_optimizer, "collect_garbage", lambda: (collections.append(1), plain_collection()))

    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=2)
        matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False))
        refused, optimizer = torch.optim.LBFGS(rest), torch.optim.AdamW(matrices)
        found = []
        for number in range(4):
            backward(model, [DATA[number % 4][0][rank]])
            if number == 0:
                model.gain.grad = torch.full_like(zs.full_gradients(model)["gain"], float("nan"))
            optimizer.step()
            optimizer.zero_grad()
            found.append(optimizer.last_step.skipped)
        assert model.gain.grad.full_tensor().isnan().all()
        before = len(collections)
        for _ in range(3):
            optimizer.zero_grad()
        return found, len(collections) - before, refused

    for skipped, collected, _ in run_threads(WORLD, rank_run):
        assert skipped == [False] * 4 and collected == 0


# -- sums held back, failed backwards, gradients beside the model --------------------------------------------------------


class Either(nn.Module):
    """Two units of which a forward uses one, and of that one layer."""

    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList(nn.ModuleList(nn.Linear(6, 6) for _ in range(2)) for _ in range(2))

    def forward(self, x, unit, layer):
        return self.units[unit][layer](x).square().sum()


@pytest.mark.parametrize("stage", STAGES[:3])
def test_zero_grad_where_one_rank_alone_holds_sums_in_a_unit(stage):
    """One optimizer has the first layers, the other the second: of these ranks hold sums back in different units."""
    inputs, built = seeded(lambda: torch.randn(3, 6)), seeded(Either)

    def loop(model, ranks, hold):
        first, second = (torch.optim.SGD([p for unit in model.units for p in unit[i].parameters()], lr=0.1) for i in (0, 1))
        for _ in range(2):
            for rank in ranks:
                (model(inputs, 0, 0) / len(ranks)).backward()
            with hold(model):
                for rank in ranks:
                    (model(inputs, rank, 1) / len(ranks)).backward()
            first.zero_grad()
            for rank in ranks:
                (model(inputs, 0, 0) / len(ranks)).backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()

    def rank_run(rank):
        model = copy.deepcopy(built)
        zs.shard(model, stage=stage, units=lambda name, _: name in ("units.0", "units.1"))
        loop(model, [rank], zs.accumulate)
        return zs.full_state_dict(model)

    expected = copy.deepcopy(built)
    loop(expected, range(WORLD), lambda model: contextlib.nullcontext())
    for got in run_threads(WORLD, rank_run):
        torch.testing.assert_close(dict(got), dict(expected.state_dict()))


@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_while_some_ranks_hold_sums_back(stage):
    """A branch that one rank alone uses inside zs.accumulate, and that the other optimizer steps."""
    inputs = seeded(lambda: torch.randn(3, 6))
    built = seeded(Branches)

    def rank_run(rank, drops):
        model = copy.deepcopy(built)
        zs.shard(model, stage=stage)
        first = torch.optim.SGD([*model.stem.parameters(), *model.head.parameters(), *model.branches[0].parameters()], lr=0.1)
        second = torch.optim.SGD([*model.branches[1].parameters(), *model.branches[2].parameters()], lr=0.1)
        model(inputs, (0, 1)).backward()
        for optimizer in (first, second):
            optimizer.step()
        for optimizer in (first, second):
            optimizer.zero_grad()
        with zs.accumulate(model):
            model(inputs, (0, 1) if rank == 0 else (0,)).backward()
        if drops:
            first.zero_grad()
        second.step()
        first.step()
        assert first.last_step.skipped == drops and not second.last_step.skipped
        return {name: value for name, value in zs.full_state_dict(model).items() if name.startswith(("branches.1", "branches.2"))}

    expected, got = (run_threads(WORLD, functools.partial(rank_run, drops=drops)) for drops in (False, True))
    for values, wanted in zip(got, expected, strict=True):
        assert not differences(values, wanted)


@pytest.mark.parametrize("to_none", [True, False])
def test_when_all_have_dropped_theirs_weights_are_forgotten(to_none):
    def rank_run(rank, stage):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=stage)
        optimizers = interleaved(model)
        steps(model, optimizers, lambda number: [DATA[number][0][rank]])
        with zs.accumulate(model):
            zs.backward(model, model(*DATA[1][0][rank]), weight=3.0)
            for optimizer in optimizers:
                optimizer.zero_grad(to_none)
        model(*DATA[0][0][rank]).backward()  # a weight and none would be refused
        for optimizer in optimizers:
            optimizer.step()
        return zs.full_state_dict(model)

    for stage in (0, 1, 3):
        run_threads(WORLD, functools.partial(rank_run, stage=stage))


def first_alone(model, first, second, weigh):
    weigh(0)
    first.step()
    first.zero_grad()


def both(model, first, second, weigh):
    weigh(0)
    first.step()
    second.step()


def clipped(model, first, second, weigh):
    weigh(0)
    zs.clip_grad_norm_(model, 0.1)


def dropped(model, first, second, weigh):
    weigh(0)
    first.zero_grad()


def held_and_dropped(model, first, second, weigh):
    with zs.accumulate(model):
        weigh(0)
    first.zero_grad()


def unweighted(model, first, second, weigh):
    weigh(0, None)
    second.step()


@pytest.mark.parametrize(
    "before", [first_alone, both, clipped, dropped, held_and_dropped, unweighted], ids=lambda each: each.__name__
)
def test_weights_count_from_the_zero_grad_of_all(before):
    """Beside gradients that were divided already, or of a part of the backwards, no weight is right."""
    weights = [3.0, 0.0]

    def rank_run(rank, stage):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=stage)
        optimizers = interleaved(model)

        def weigh(number, weight=weights[rank]):
            loss = model(*DATA[number][0][rank])
            loss.backward() if weight is None else zs.backward(model, loss, weight=weight)

        before(model, *optimizers, weigh)
        for _ in range(2):
            weigh(1)
            with pytest.raises(zs.ZeroshardError, match=r"gradients of zs\.backward.* were added to some that an earlier step"):
                zs.clip_grad_norm_(model, 0.1)
        model.zero_grad()
        weigh(1)
        weigh(2, 1.0)
        zs.clip_grad_norm_(model, float("inf"))
        return zs.full_state_dict(model), zs.full_gradients(model)

    for stage in STAGES:
        for state, gradients in run_threads(WORLD, functools.partial(rank_run, stage=stage)):
            model = copy.deepcopy(MODEL)
            model.load_state_dict(state)
            sum(model(*DATA[1][0][rank]) * weight + model(*DATA[2][0][rank]) for rank, weight in enumerate(weights)).backward()
            for name, param in model.named_parameters():
                torch.testing.assert_close(gradients[name], param.grad / (sum(weights) + WORLD), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("stage", STAGES)
def test_zero_grad_before_the_first_use_while_sums_are_held_back(stage):
    def rank_run(rank):
        model, extra = copy.deepcopy(MODEL), nn.Parameter(torch.ones(3))
        zs.shard(model, stage=stage)
        matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False))
        first, second = torch.optim.AdamW([*matrices, extra]), torch.optim.SGD(rest, lr=0.1)
        with zs.accumulate(model):
            backward(model, [DATA[0][0][rank]])
        extra.grad = kept = torch.ones(3)
        first.zero_grad(set_to_none=False)
        assert extra.grad is kept and not kept.any()
        first.zero_grad()
        assert extra.grad is None
        second.step()
        first.step()
        assert first.last_step.grad_norm == 0 and second.last_step.grad_norm > 0
        extra.grad = kept = torch.ones(3)
        first.zero_grad(set_to_none=False)
        assert extra.grad is kept and not kept.any()

    run_threads(WORLD, rank_run)


@pytest.mark.parametrize("stage", STAGES)
def test_alternating_goes_on_after_a_failed_backward(stage):
    """Each optimizer drops its own; until then the other's step, and a clip of all, say what is lost."""

    def rank_run(rank, fails):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=stage)
        first, second = optimizers = interleaved(model)
        steps(model, optimizers, lambda number: [DATA[number][0][rank]])
        backward(model, [DATA[0][0][rank]])
        first.step()
        first.zero_grad()
        if fails:
            handle = model.layers[1].register_forward_hook(lambda *given: given[-1].register_hook(fail) and None)
            with pytest.raises(RuntimeError, match="out of memory"):
                backward(model, [DATA[1][0][rank]])
            handle.remove()
        first.zero_grad()
        backward(model, [DATA[1][0][rank]])
        if fails:
            for use in (second.step, lambda: zs.clip_grad_norm_(model, 0.1)):
                with pytest.raises(zs.ZeroshardError, match=r"call zero_grad\(\) of each optimizer that uses them"):
                    use()
        first.step()
        second.zero_grad()
        backward(model, [DATA[2][0][rank]])
        second.step()
        return zs.full_state_dict(model)

    expected, got = (run_threads(WORLD, functools.partial(rank_run, fails=fails)) for fails in (False, True))
    for values, wanted in zip(got, expected, strict=True):
        assert not differences(values, wanted)


def fail(grad):
    raise RuntimeError("out of memory")


def test_a_skipped_step_and_another_are_one_step_of_the_model():
    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=2)
        optimizers, found = interleaved(model), []
        steps(model, optimizers, lambda number: [DATA[number][0][rank]])
        for at in (0, 1, None):
            backward(model, [DATA[0][0][rank]])
            if at is not None:
                param = optimizers[at].param_groups[0]["params"][0]
                param.grad = torch.full(zs.value_of(param).full().shape, float("nan"))
            for optimizer in optimizers:
                optimizer.step()
            assert [optimizer.last_step.skipped for optimizer in optimizers] == [at == 0, at == 1]
            for optimizer in optimizers:
                optimizer.zero_grad()
            found.append((runtime_of(model).attendance.steps, runtime_of(model).progress.steps))
        return found

    assert run_threads(WORLD, rank_run) == [[(5, 5), (6, 6), (7, 7)]] * WORLD


@pytest.mark.parametrize("by_hand", [False, True], ids=["zero_grad", "None"])
def test_optimizers_that_take_turns_have_their_own_weighted_means(by_hand):
    """Each drops its own gradients, and leaves the other's, which a step has divided, alone."""
    weights = [[3.0, 1.0], [2.0, 5.0], [0.0, 4.0], [1.0, 1.0]]

    def train(model, backward, split):
        first, second = optimizers = split(model)
        for number, each in enumerate((first, second, first, second)):
            if by_hand:
                for param in each.param_groups[0]["params"]:
                    param.grad = None
            else:
                each.zero_grad()
            backward(number)
            each.step()
        return optimizers

    def rank_run(rank, stage):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=stage)
        train(model, lambda k: zs.backward(model, model(*DATA[k % 2][0][rank]), weight=weights[k][rank]), interleaved)
        return zs.full_state_dict(model)

    model = copy.deepcopy(MODEL)
    optimizers = interleaved(model)

    def backward(number):
        total = sum(weights[number])
        sum(model(*DATA[number % 2][0][rank]) * weights[number][rank] / total for rank in range(WORLD)).backward()

    train(model, backward, lambda _: optimizers)
    for stage in STAGES:
        for state in run_threads(WORLD, functools.partial(rank_run, stage=stage)):
            for name, value in model.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6, msg=f"{stage} {name}")


def adds_up(first, second, weigh):
    """The second adds up while the first steps."""
    weigh(0)
    first.step()
    first.zero_grad()
    weigh(1)
    first.step()


def drops_between(first, second, weigh):
    """Of the second's two gradients one is dropped, and weights of both count."""
    weigh(0)
    second.zero_grad()
    weigh(1)
    first.step()


def clips_between(first, second, weigh):
    """A gradient that was assigned anew is as divided as it was."""
    weigh(0)
    zs.clip_grad_norm_(first.param_groups[0]["model"], 1.0)
    for param in second.param_groups[0]["params"]:
        param.grad = param.grad * 1.0
    weigh(1)


@pytest.mark.parametrize("before", [adds_up, drops_between, clips_between], ids=lambda each: each.__name__)
def test_a_step_of_weighted_gradients_that_are_no_mean_is_refused(before):
    """Also if another optimizer has divided them since; after zero_grad training goes on."""

    def rank_run(rank, stage):
        model = copy.deepcopy(MODEL)
        zs.shard(model, stage=stage)
        first, second = interleaved(model)
        first.param_groups[0]["model"] = model

        def weigh(number):
            zs.backward(model, model(*DATA[number][0][rank]), weight=[3.0, 0.0][rank])

        before(first, second, weigh)
        for _ in range(2):
            with pytest.raises(zs.ZeroshardError, match=r"they are no mean\. Call zero_grad\(\) of each optimizer"):
                second.step()
        if before is clips_between:  # no step has divided by the last weight, which the first's gradients still have
            first.zero_grad()
        second.zero_grad()
        weigh(2)
        second.step()

    for stage in STAGES:
        run_threads(WORLD, functools.partial(rank_run, stage=stage))
