"""What users do with an optimizer besides stepping it: states that are assigned and removed, groups that are edited, wrappers,
schedulers once an epoch, a class that keeps things on itself. Sharded it works as in plain torch, or says what to do.
"""

import copy
import io
import time
from collections import OrderedDict

import pytest
import torch
from optimizers import ALL_STAGES, DATA, MODEL, OPTIMIZERS, WORLD, backward, run_both
from torch import nn

import zeroshard as zs
from zeroshard.testing import run_threads
from zeroshard.tiers.host_step import HostStepper

WITH_TIERS = pytest.mark.parametrize(
    "options", [{"stage": 0}, {"stage": 3}, {"stage": 1, "offload_optimizer": "cpu"}], ids=["0", "3", "host"]
)
SOME_STAGES = pytest.mark.parametrize("stage", [0, 3])


def step(model, optimizer, batches) -> None:
    backward(model, batches)
    optimizer.step()
    optimizer.zero_grad()


# -- optimizer.state ---------------------------------------------------------------------------------------------


def anew(model, optimizer):
    optimizer.state.clear()


def pop_weights(model, optimizer):
    for layer in model.layers:
        assert set(optimizer.state.pop(layer.weight)) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.state.pop(model.layers[0].weight, None) is None


def delete_one(model, optimizer):
    del optimizer.state[model.layers[1].weight]


def empty_each(model, optimizer):
    for param in model.parameters():
        optimizer.state[param] = {}


def assign_tensors(model, optimizer):
    for number, param in enumerate(model.parameters()):
        state = optimizer.state[param]
        state["exp_avg"] = state["exp_avg"] * 0.5  # sharded alike
        state["exp_avg_sq"] = torch.full(tuple(param.shape), 0.25 + number)  # whole


def assign_whole_states(model, optimizer):
    for param in model.parameters():
        moment = torch.linspace(0.1, 1.0, param.numel()).view(param.shape)
        optimizer.state[param] = {"step": torch.tensor(3.0), "exp_avg": moment, "exp_avg_sq": moment * 2}


def assign_another_state(model, optimizer):
    param = model.layers[0].weight
    entries = dict(optimizer.state[param])
    entries["exp_avg"].clamp_(min=0.0)
    entries["exp_avg"], entries["exp_avg_sq"] = entries["exp_avg_sq"], entries["exp_avg"]
    optimizer.state[param] = entries


def assign_one_step(model, optimizer):
    optimizer.state[model.layers[1].bias]["step"] = torch.tensor(0.0)


def assign_each_step(model, optimizer):
    for state in optimizer.state.values():
        state["step"] = torch.tensor(0.0)


def kept_beside_an_assignment(model, optimizer):
    for param in model.parameters():
        state = optimizer.state[param]
        first, second = state["exp_avg"], state["exp_avg_sq"]
        state["step"] = torch.tensor(0.0)
        first.zero_()
        second.zero_()


def through_data(model, optimizer):
    for param in model.parameters():
        state = optimizer.state[param]
        state["exp_avg"].data = torch.ones(tuple(param.shape))
        state["exp_avg"].data.mul_(0.5)
        state["exp_avg_sq"].data = state["exp_avg_sq"].data * 4.0


def other_ways(model, optimizer):
    state = optimizer.state[model.gain]
    state.update(step=torch.tensor(5.0), exp_avg=torch.tensor(0.5))
    state = optimizer.state[model.layers[2].weight]
    moment = state.pop("exp_avg")
    state.setdefault("exp_avg", moment * 3)
    state |= {"step": torch.tensor(2.0)}


def moved(model, optimizer):
    """As Lightning moves states: mappings are made anew by their class, and assigned."""
    for param, entries in optimizer.state.items():
        optimizer.state[param] = type(entries)(OrderedDict((key, value * 1) for key, value in entries.items()))


CHANGES = [
    anew, pop_weights, delete_one, empty_each, assign_tensors, assign_whole_states, assign_another_state, assign_one_step,
    assign_each_step, kept_beside_an_assignment, through_data, other_ways, moved,
]  # fmt: skip


@WITH_TIERS
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_states_that_are_assigned_or_removed(options, change):
    def loop(model, optimizer, batch_of):
        step(model, optimizer, batch_of(0))
        with torch.no_grad():
            change(model, optimizer)
        for number in (1, 2):
            step(model, optimizer, batch_of(number))

    run_both(loop, **options)


@WITH_TIERS
def test_masters_and_states_of_low_precision(options):
    """A state that starts anew is that of the masters, in their dtype."""

    def rank_run(rank):
        results = []
        for change in (anew, empty_each, assign_whole_states):
            model = copy.deepcopy(MODEL)
            model, optimizer = zs.shard(model, OPTIMIZERS["adamw"](model.parameters()), precision="bf16", **options)
            step(model, optimizer, [DATA[0][0][rank]])
            change(model, optimizer)
            step(model, optimizer, [DATA[1][0][rank]])
            states = zs.full_optimizer_state(model)
            assert {v.dtype for entries in states.values() for v in entries.values()} == {torch.float32}
            results.append([entries["exp_avg"] for entries in states.values()])
        assert all(map(torch.equal, results[0], results[1])) and not all(map(torch.equal, results[0], results[2]))

    run_threads(WORLD, rank_run)


@WITH_TIERS
@pytest.mark.parametrize("change", [empty_each, pop_weights, assign_each_step])
def test_what_is_alike_again_is_stepped_together_again(options, change):
    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, OPTIMIZERS["adamw"](model.parameters()), units="model", **options)
        step(model, optimizer, [DATA[0][0][rank]])
        assert [len(runs) for runs in optimizer.core.runs] == [1]
        change(model, optimizer)
        assert len(optimizer.core.runs[0]) == len(list(model.parameters()))
        step(model, optimizer, [DATA[1][0][rank]])
        if change is not pop_weights:  # whose biases go on with another count
            assert len(optimizer.core.runs[0]) == 1

    run_threads(WORLD, rank_run)


@WITH_TIERS
def test_states_that_can_not_be_are_refused(options):
    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, OPTIMIZERS["adamw"](model.parameters()), **options)
        step(model, optimizer, [DATA[0][0][rank]])
        before = zs.full_optimizer_state(model)
        state = optimizer.state[model.layers[0].weight]
        with pytest.raises(zs.ConfigError, match=r"layers\.0\.weight, 'exp_avg': expected .* shape \(9, 5\), got \(3,\).*pop"):
            state["exp_avg"] = torch.zeros(3)
        with pytest.raises(zs.ConfigError, match=r"shape \(9, 5\), got \(\)"):
            state["exp_avg"].data = torch.zeros(())
        with pytest.raises(zs.ConfigError, match=r"a tensor of shape \(2,\), which is not a parameter that this optimizer steps"):
            optimizer.state[torch.zeros(2)] = {"step": 1}
        with pytest.raises(zs.ConfigError, match="'all', which is not a parameter"):
            optimizer.state["all"]["step"] = 1
        with pytest.raises(KeyError):
            optimizer.state.pop(torch.zeros(2))
        after = zs.full_optimizer_state(model)
        assert all(torch.equal(after[name][key], value) for name, entries in before.items() for key, value in entries.items())
        state = optimizer.state
        zs.close(model)
        state.clear()
        assert not optimizer.state
        with pytest.raises(zs.ModelClosed, match="after zs.close"):
            optimizer.state = {model.gain: {"step": torch.tensor(1.0)}}

    run_threads(WORLD, rank_run)


@ALL_STAGES
def test_a_state_dict_is_plain_and_nobody_elses(stage):
    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, OPTIMIZERS["adamw"](model.parameters()), stage=stage)
        step(model, optimizer, [DATA[0][0][rank]])
        found = optimizer.state_dict()
        assert {type(entries) for entries in found["state"].values()} == {dict}
        found["state"][0].clear()
        assert len(optimizer.state_dict()["state"][0]) == 3
        if stage == 0:
            assert {type(v) for entries in optimizer.state_dict()["state"].values() for v in entries.values()} == {torch.Tensor}
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            assert torch.load(file, weights_only=True)["state"].keys() == found["state"].keys()
            for entries in (copy.deepcopy(optimizer.state), optimizer.state.copy()):
                assert type(entries).__name__ == "defaultdict" and {type(e) for e in entries.values()} == {dict}
            kept = copy.deepcopy(optimizer.state[model.gain])
            kept["exp_avg"].zero_()
            assert type(kept["exp_avg"]) is torch.Tensor and optimizer.state[model.gain]["exp_avg"] != 0

    run_threads(WORLD, rank_run)


# -- optimizers that hold others ---------------------------------------------------------------------------------


class Wrapper(torch.optim.Optimizer):
    """As Lookahead and accelerate's are made: it shares the groups of the optimizer that it calls."""

    def __init__(self, base, held):
        super().__init__(base.param_groups, base.defaults)
        self.held = held

    def step(self, closure=None):
        raise AssertionError("not called")


@pytest.mark.parametrize("as_held", [lambda o: o, lambda o: [o], lambda o: {"first": o}], ids=["itself", "list", "dict"])
def test_an_optimizer_that_holds_another_is_refused(as_held):
    model = nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = Wrapper(inner, as_held(inner))
    for stage in (0, 3):
        with pytest.raises(zs.ConfigError, match=r"Wrapper\.held holds another optimizer \(SGD\).*Give the inner optimizer"):
            zs.shard(model, outer, stage=stage)
    assert type(outer) is Wrapper and "_zeroshard" not in model.__dict__
    outer.held = outer  # itself is no other
    zs.shard(model, inner)  # the remedy


# -- groups ------------------------------------------------------------------------------------------------------


def take_out(optimizer):
    optimizer.param_groups[0]["params"].pop(0)
    return r"group 0 is without layers\.0\.weight"


def put_in(optimizer):
    optimizer.param_groups[1]["params"] = [*optimizer.param_groups[1]["params"], nn.Parameter(torch.ones(2, 2))]
    return r"group 1 has a tensor of shape \(2, 2\)"


def move(optimizer):
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop(0))
    return r"group 0 is without layers\.0\.weight; group 1 has layers\.0\.weight"


def append(optimizer):
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": []})
    return "there are 3 groups, then there were 2"


@SOME_STAGES
@pytest.mark.parametrize("edit", [take_out, put_in, move, append])
def test_groups_whose_parameters_are_edited_are_refused(stage, edit):
    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) is matrices]} for matrices in (True, False)]
        model, optimizer = zs.shard(model, torch.optim.AdamW(groups, lr=0.1), stage=stage)
        step(model, optimizer, [DATA[0][0][rank]])
        optimizer.load_state_dict(optimizer.state_dict())  # other dictionaries, with the same parameters
        optimizer.param_groups[0]["params"].reverse()  # their order is free
        step(model, optimizer, [DATA[0][0][rank]])
        optimizer.param_groups[0]["params"].reverse()
        before = zs.full_state_dict(model)
        message = edit(optimizer)
        backward(model, [DATA[1][0][rank]])
        with pytest.raises(zs.ConfigError, match=rf"param_groups: expected .*{message}.*add_param_group.*lr=0"):
            optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in zs.full_state_dict(model).items())

    run_threads(WORLD, rank_run)


# -- schedulers --------------------------------------------------------------------------------------------------


@SOME_STAGES
@pytest.mark.parametrize("kind", ["step", "sequential", "chained", "plateau"])
def test_a_scheduler_stands_still_only_where_all_steps_were_skipped(stage, kind):
    lr = torch.optim.lr_scheduler

    def made(optimizer):
        parts = [lr.StepLR(optimizer, 1, gamma=0.5), lr.ExponentialLR(optimizer, 0.5)]
        kinds = {
            "step": lambda: lr.StepLR(optimizer, 1, gamma=0.5),
            "sequential": lambda: lr.SequentialLR(optimizer, parts, milestones=[2]),
            "chained": lambda: lr.ChainedScheduler([parts[0], lr.ConstantLR(optimizer, 1.0)]),
            "plateau": lambda: lr.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1.0),
        }
        return kinds[kind]()

    def rank_run(rank):
        model = nn.Linear(2, 2)
        model, optimizer = zs.shard(model, torch.optim.SGD(model.parameters(), lr=1.0), stage=stage)
        scheduler = made(optimizer)

        def epoch(*skipped):
            before = optimizer.param_groups[0]["lr"]
            for bad in skipped:
                (model(torch.ones(1, 2)).sum() * (float("nan") if bad else 1.0)).backward()
                optimizer.step()
                assert optimizer.last_step.skipped is bad
                optimizer.zero_grad()
            scheduler.step(1.0) if kind == "plateau" else scheduler.step()
            return optimizer.param_groups[0]["lr"] == before

        epoch(False)  # the first of a plateau is its best
        assert not epoch(False, True)
        assert epoch(True, True) or kind == "sequential"  # whose second part starts where the first did
        if kind != "sequential":
            assert not epoch(True, False)
            assert epoch(True)
            assert not epoch()  # without a step in between, as in torch
        zs.close(model)

    run_threads(WORLD, rank_run)


# -- inference mode ----------------------------------------------------------------------------------------------


@ALL_STAGES
def test_a_model_that_is_sharded_in_inference_mode_can_be_trained(stage):
    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        with torch.inference_mode():
            model, optimizer = zs.shard(model, OPTIMIZERS["adamw"](model.parameters()), stage=stage)
            model(*DATA[0][0][rank])
        step(model, optimizer, [DATA[0][0][rank]])
        assert not optimizer.last_step.skipped

    run_threads(WORLD, rank_run)


def test_a_model_of_inference_tensors_is_refused():
    with torch.inference_mode():
        model = nn.Linear(2, 2)
        with pytest.raises(zs.ConfigError, match=r"weight was made under torch\.inference_mode.*build the model outside"):
            zs.shard(model, None)
    assert "_zeroshard" not in model.__dict__


# -- classes with habits of their own ----------------------------------------------------------------------------


class Counts(torch.optim.Optimizer):
    """Keeps its step count on itself, as older implementations do, and counts calls of zero_grad."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.t = self.dropped = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.t += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / self.t)

    def zero_grad(self, set_to_none=True):
        self.dropped += 1
        super().zero_grad(set_to_none)


@ALL_STAGES
def test_what_an_optimizer_keeps_on_itself(stage):
    def train(model, optimizer, batch_of):
        for number in range(3):
            step(model, optimizer, batch_of(number))
            assert optimizer.t == number + 1
            assert all(p.grad is None for p in model.parameters())
        optimizer.t = 0  # counts, too
        step(model, optimizer, batch_of(3))
        assert (optimizer.t, optimizer.dropped) == (1, 4)
        return zs.full_state_dict(model) if hasattr(optimizer, "core") else model.state_dict()

    def rank_run(rank):
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, Counts(model.parameters(), lr=0.1), stage=stage)
        return train(model, optimizer, lambda number: [DATA[number][0][rank]])

    plain = copy.deepcopy(MODEL)
    expected = train(plain, Counts(plain.parameters(), lr=0.1), lambda number: DATA[number][0])
    for weights in run_threads(WORLD, rank_run):
        assert all(torch.equal(value, expected[name]) for name, value in weights.items())


# -- offloaded optimizers ----------------------------------------------------------------------------------------


class Counting(torch.optim.Optimizer):
    """Adam that counts its steps itself: on itself, in its group, or there in a tensor."""

    def __init__(self, params, where: str) -> None:
        super().__init__(params, {"lr": 1e-2, "where": where})
        self.t = 0
        for group in self.param_groups:
            group["t"] = torch.zeros(()) if where == "tensor" else 0

    @torch.no_grad()
    def step(self, closure=None):
        self.t += 1
        for group in self.param_groups:
            group["t"] += 1
            t = self.t if group["where"] == "self" else float(group["t"])
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(param), torch.zeros_like(param)
                state["m"].mul_(0.9).add_(param.grad, alpha=0.1)
                state["v"].mul_(0.99).addcmul_(param.grad, param.grad, value=0.01)
                scale = (state["v"] / (1 - 0.99**t)).sqrt().add_(1e-8)
                param.addcdiv_(state["m"] / (1 - 0.9**t), scale, value=-group["lr"])


@pytest.mark.parametrize("where", ["self", "group", "tensor"])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_an_offloaded_optimizer_that_counts_its_steps(where, ratio):
    """Chunks and slabs are no steps."""
    plain, x = torch.nn.Sequential(*(torch.nn.Linear(9, 9) for _ in range(4))), torch.rand(3, 9)

    def run(rank, **options):
        model = copy.deepcopy(plain)
        model, optimizer = zs.shard(model, Counting(model.parameters(), where), stage=2, **options)
        for _ in range(5):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.t == float(optimizer.param_groups[0]["t"]) == 5
        return zs.full_state_dict(model)

    (wanted,), (got,) = (
        run_threads(1, run),
        run_threads(1, lambda rank: run(rank, offload_optimizer=zs.Offload("cpu", ratio=ratio))),
    )
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name


def test_a_delayed_update_keeps_the_learning_rate_of_its_step(monkeypatch):
    """A scheduler writes into the tensor of a learning rate while the update still runs."""
    plain, x = torch.nn.Linear(9, 9), torch.rand(3, 9)
    step = HostStepper.step

    def late(self, jobs):
        time.sleep(0.05)
        return step(self, jobs)

    monkeypatch.setattr(HostStepper, "step", late)

    def run(rank, lr):
        model = copy.deepcopy(plain)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr, foreach=False)
        model, optimizer = zs.shard(model, optimizer, stage=2, offload_optimizer="cpu", delayed_update=0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(4):
            model(x).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return zs.full_state_dict(model)

    (wanted,), (got,) = run_threads(1, run, 0.1), run_threads(1, run, torch.tensor(0.1))
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)


def test_a_sharded_optimizer_goes_by_the_name_of_its_class():
    """Loggers of learning rates take their keys from it, and count optimizers of one class."""

    def body(rank):
        found = []
        for _ in range(2):
            model = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            zs.shard(model, optimizer, stage=2)
            found.append(optimizer)
        first, second = map(type, found)
        return first.__name__, first.__module__, first is second, isinstance(found[0], torch.optim.SGD), repr(found[0]).split()[0]

    expected = ("SGD", torch.optim.SGD.__module__, True, True, "SGD")
    assert run_threads(1, body) == [expected]
