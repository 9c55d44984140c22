"""Any order of backwards, held-back backwards, evaluations, failures, steps and zero_grads equals a simple model of it.

The model of the contract, in plain torch: each rank has local sums (`held`); a reduced backward sends held + own, takes
the mean in rank order and adds it to what was reduced before; a step reduces what is still held; zero_grad drops both.
Ranks use different branches of the network, so parameters come and go. Sequences are drawn by hypothesis.
"""

import contextlib
import copy

import pytest
import torch
from helpers import Branches, differences, seeded, state_differences
from hypothesis import given, settings
from hypothesis import strategies as st

import zeroshard as zs
from zeroshard.testing import run_threads

WORLD = 2
MODEL = seeded(lambda: Branches(dim=5))
INPUTS = torch.randn(12, WORLD, 3, 5, generator=torch.Generator().manual_seed(0))


class Broken(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("on purpose")


routes = st.tuples(*[st.sampled_from([(), (0,), (1,), (2, 0), (0, 1, 2)])] * WORLD)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("backward"), routes),
        st.tuples(st.just("hold"), routes),
        st.tuples(st.sampled_from(["step", "zero", "evaluate", "fail in backward", "fail in forward"]), routes),
        st.tuples(st.just("step and zero"), routes),
    ),
    min_size=2,
    max_size=12,
)


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sharded_run(rank: int, sequence: list, stages: tuple, **options) -> list[tuple]:
    results = []
    for stage in stages:
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, optimizer_of(model), stage=stage, **options)
        for number, (action, ranks) in enumerate(sequence):
            x, route = INPUTS[number][rank], ranks[rank]
            if action == "backward":
                model(x, route).backward()
            elif action == "hold":
                with zs.accumulate(model):
                    model(x, route).backward()
            elif action == "evaluate":
                with torch.no_grad():
                    model(x, route)
            elif action.startswith("fail"):
                fail(model, x, action)
                optimizer.zero_grad()
            if "step" in action:
                optimizer.step()
            if "zero" in action:
                optimizer.zero_grad()
        optimizer.step()
        results.append((zs.full_state_dict(model), zs.full_gradients(model), zs.full_optimizer_state(model)))
        zs.close(model)
    return results


def fail(model, x, action: str) -> None:
    """Half a forward, or half a backward: the stem's gradients never come."""
    if action == "fail in forward":
        with pytest.raises(RuntimeError):
            model(x[:, :1], (0,))
        return
    handle = model.stem.register_forward_hook(lambda module, args, output: Broken.apply(output))
    try:
        with pytest.raises(ZeroDivisionError):
            model(x, (0, 1, 2)).backward()
    finally:
        handle.remove()


def plain_run(sequence: list) -> tuple:
    """The model of the contract."""
    model = copy.deepcopy(MODEL)
    optimizer = optimizer_of(model)
    held: list[dict] = [{} for _ in range(WORLD)]
    reduced: dict = {}

    def local(number: int, rank: int, route: tuple) -> None:
        model(INPUTS[number][rank], route).backward()
        for p in model.parameters():
            if p.grad is not None:
                held[rank][p] = held[rank][p] + p.grad if p in held[rank] else p.grad
                p.grad = None

    def reduce() -> None:
        total: dict = {}
        for part in held:
            for p, grad in part.items():
                total[p] = total[p] + grad if p in total else grad
            part.clear()
        for p, grad in total.items():
            mean = grad * (1.0 / WORLD)
            reduced[p] = reduced[p] + mean if p in reduced else mean

    def drop() -> None:
        reduced.clear()
        for part in held:
            part.clear()

    def step() -> None:
        reduce()
        for p in model.parameters():
            p.grad = reduced.get(p)
        optimizer.step()
        optimizer.zero_grad()

    for number, (action, ranks) in enumerate(sequence):
        if action in ("backward", "hold"):
            for rank in range(WORLD):
                local(number, rank, ranks[rank])
            if action == "backward":
                reduce()
        elif action.startswith("fail"):
            drop()
        if "step" in action:
            step()
        if "zero" in action:
            drop()
    step()
    states = {name: dict(optimizer.state.get(p, {})) for name, p in model.named_parameters()}
    return model.state_dict(), {name: reduced.get(p) for name, p in model.named_parameters()}, states


def check(sequence: list, stages: tuple = (0, 1, 2, 3), **options) -> None:
    weights, gradients, states = plain_run(sequence)
    per_rank = run_threads(WORLD, lambda rank: sharded_run(rank, sequence, stages, **options))
    for results in per_rank:
        for stage, (got_weights, got_gradients, got_states) in zip(stages, results, strict=True):
            where = f"stage {stage} {options}: {sequence}"
            assert not differences(got_weights, weights), where
            assert not differences(got_gradients, gradients), where
            assert not state_differences(got_states, states), where


@settings(max_examples=15)
@given(actions)
def test_any_order_of_events_equals_the_contract(sequence):
    check(sequence)


@pytest.mark.slow  # 5 s; at the units of every day: above
@settings(max_examples=15)
@given(actions, st.sampled_from(["leaf", "model"]), st.booleans(), st.booleans())
def test_any_order_of_events_at_other_unit_sizes(sequence, units, overlap, map_shared):
    check(sequence, (1, 3), units=units, overlap=overlap, map_shared=map_shared)


BOTH = ((0, 1, 2), (0, 1, 2))


@pytest.mark.parametrize(
    "words",
    [
        "hold hold step and zero, backward",  # nothing reduced before the step: the step does it
        "hold backward hold backward step and zero",
        "backward hold step and zero, backward",  # something reduced, something held
        "hold zero backward",
        "hold evaluate backward step and zero, hold",
        "backward fail in backward, backward",
        "hold fail in backward, hold backward",
        "fail in forward, backward step and zero, fail in forward, hold backward",
        "backward step step backward step",
    ],
)
def test_the_orders_that_people_use(words):
    known = ["step and zero", "fail in backward", "fail in forward", "backward", "hold", "step", "zero", "evaluate"]
    sequence, rest = [], words.replace(",", "")
    while rest:
        action = next(a for a in known if rest.startswith(a))
        sequence.append((action, BOTH))
        rest = rest[len(action) :].lstrip()
    check(sequence)


# -- what else looks at gradients that are held back ---------------------------------------------------------------

ALL_STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def small(stage: int, **options):
    """A sharded copy of the model; SGD with lr 1, so that a step subtracts the gradient."""
    model = copy.deepcopy(MODEL)
    return zs.shard(model, torch.optim.SGD(model.parameters(), lr=1.0), stage=stage, **options)


def hold(model, rank: int) -> None:
    for number in range(2):
        model(INPUTS[number][rank], (0, 2)).backward()


def held_back(rank: int, stage: int):
    model, optimizer = small(stage)
    with zs.accumulate(model):
        hold(model, rank)
    return model, optimizer


def held_gradients() -> dict:
    """What `hold` leaves: the mean over ranks of the sums of both backwards."""
    model = copy.deepcopy(MODEL)
    for number in range(2):
        for rank in range(WORLD):
            (model(INPUTS[number][rank], (0, 2)) / WORLD).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def stepped(factor: float = 1.0) -> dict:
    """The weights after one step with `factor` times these gradients."""
    grads = held_gradients()
    return {n: v if grads[n] is None else v - factor * grads[n] for n, v in MODEL.state_dict().items()}


def close(got: dict, wanted: dict) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (got[name] is None) == (value is None), name
        if value is not None:
            torch.testing.assert_close(got[name], value, msg=name)


@ALL_STAGES
def test_gradients_held_back_are_clipped(stage):
    norm = torch.stack([g.square().sum() for g in held_gradients().values() if g is not None]).sum().sqrt()

    def run(rank):
        model, optimizer = held_back(rank, stage)
        found = zs.clip_grad_norm_(model, float(norm) / 4)
        optimizer.step()
        torch.testing.assert_close(found, norm)
        assert optimizer.last_step.grad_norm == pytest.approx(float(norm), rel=1e-5) and not optimizer.last_step.skipped
        return zs.full_state_dict(model)

    for state in run_threads(WORLD, run):
        close(state, stepped(0.25))


@ALL_STAGES
def test_gradients_held_back_are_among_the_full_ones(stage):
    def run(rank):
        model, optimizer = held_back(rank, stage)
        gradients = zs.full_gradients(model)
        optimizer.step()
        return gradients, zs.full_state_dict(model)

    for gradients, state in run_threads(WORLD, run):
        close(gradients, held_gradients())
        close(state, stepped())


@ALL_STAGES
def test_a_step_inside_accumulate_uses_what_is_held_back(stage):
    def run(rank):
        model, optimizer = small(stage)
        with zs.accumulate(model):
            model(INPUTS[3][rank], (1,)).backward()
            optimizer.zero_grad()  # which does not make the next ones unknown
            hold(model, rank)
            optimizer.step()
            optimizer.zero_grad()
            states = [zs.full_state_dict(model)]
            hold(model, rank)
        optimizer.step()
        return [*states, zs.full_state_dict(model)]

    def plain(rank):
        model, optimizer = small(stage)
        for _ in range(2):
            optimizer.zero_grad()
            hold(model, rank)
            optimizer.step()
        return zs.full_state_dict(model)

    wanted = run_threads(WORLD, plain)[0]
    for once, twice in run_threads(WORLD, run):
        close(once, stepped())
        close(twice, wanted)


@ALL_STAGES
@pytest.mark.parametrize("before", ["nothing", "reduced", "set to None"])
def test_zero_grad_that_leaves_zeros_drops_what_is_held_back(stage, before):
    def run(rank):
        model, optimizer = small(stage)
        if before != "nothing":
            backward(model, 5, rank, None)
        if before == "set to None":
            for param in model.parameters():
                param.grad = None
        with zs.accumulate(model):
            hold(model, rank)
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        if before == "set to None":
            backward(model, 0, rank, None)
            backward(model, 1, rank, None)
            optimizer.step()
            close(zs.full_state_dict(model), stepped())
            return MODEL.state_dict()
        return zs.full_state_dict(model)

    for state in run_threads(WORLD, run):
        close(state, MODEL.state_dict())


# -- weighted means ------------------------------------------------------------------------------------------------

WEIGHED = {  # backwards of each rank: a weight, or None for a plain one
    "in turn": ([2.0, None], [2.0, None]),
    "plain first": ([None, 2.0], [None, 2.0]),
    "one rank alone": ([2.0, 1.0], [2.0, None]),
    "by rank": ([2.0, 1.0], [None, None]),
}


def backward(model, number: int, rank: int, weight: float | None) -> None:
    loss = model(INPUTS[number][rank], (0, 2))
    loss.backward() if weight is None else zs.backward(model, loss, weight=weight)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("reduced", [True, False])
def test_what_is_held_back_is_not_shown_as_the_gradient(stage, reduced):
    """`p.grad` would be a part of it, or None: whoever clips by hand would clip that. The last backward reduces all."""
    plain, x = seeded(lambda: torch.nn.Linear(5, 3)), torch.arange(5.0)

    def run(rank):
        model, _ = zs.shard(copy.deepcopy(plain), None, stage=stage)
        if reduced:
            model(x).sum().backward()
        with zs.accumulate(model):
            model(x * (rank + 2)).sum().backward()
        refused = pytest.raises(zs.ShardedAccessError, match=r"weight\.grad: backwards inside zs\.accumulate.*zs\.full_gradients")
        with refused:
            _ = model.weight.grad
        with refused:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        model(x).sum().backward()
        shown = model.weight.grad if stage == 0 else model.weight.grad.full_tensor()
        assert torch.equal(shown, (4.5 if reduced else 3.5) * x.expand(3, 5))
        with zs.accumulate(model):
            model(x).sum().backward()
        model.zero_grad()  # of the module: drops what is held, too
        model(x).sum().backward()
        shown = model.weight.grad if stage == 0 else model.weight.grad.full_tensor()
        assert torch.equal(shown, x.expand(3, 5))

    run_threads(2, run)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", WEIGHED)
@pytest.mark.parametrize("held", [False, True])
def test_weighted_and_plain_backwards_do_not_mix(name, held, stage):
    def run(rank):
        model, optimizer = small(stage)
        with zs.accumulate(model) if held else contextlib.nullcontext():
            for number, weight in enumerate(WEIGHED[name][rank]):
                backward(model, number, rank, weight)
        with pytest.raises(zs.ZeroshardError, match="zs.backward for all of them, on all ranks, or for none"):
            optimizer.step()
        for weights in ([None, None], [3.0, 0.0]):  # each by itself is fine after zero_grad
            optimizer.zero_grad()
            for number, weight in enumerate(weights):
                backward(model, number, rank, weight)
            x = INPUTS[2][rank].clone().requires_grad_()
            torch.autograd.grad(model(x, (0, 2)), x)  # leaves no gradients, and is none of both
            optimizer.step()
            assert not optimizer.last_step.skipped

    run_threads(WORLD, run)


def test_weights_start_anew_after_zeroed_gradients():
    def run(rank):
        model, optimizer = small(stage=3)
        backward(model, 5, rank, 7.0)
        optimizer.zero_grad(set_to_none=False)
        for number in range(2):
            backward(model, number, rank, 3.0)
        optimizer.step()
        return zs.full_state_dict(model)

    for state in run_threads(WORLD, run):
        close(state, stepped(0.5))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_is_not_assigned_under_sums_held_back(stage):
    def run(rank):
        model, optimizer = small(stage)
        name, param = next(iter(model.named_parameters()))
        with zs.accumulate(model):
            backward(model, 0, rank, None)
        for value in (torch.ones(param.shape), None):
            with pytest.raises(zs.ModelChanged, match=f"{name}.grad was assigned while .* held back"):
                param.grad = value
        backward(model, 1, rank, None)
        param.grad = torch.ones(param.shape)
        optimizer.step()
        assert not optimizer.last_step.skipped

    run_threads(WORLD, run)


@pytest.mark.parametrize("value", [-1.0, float("nan"), None, "1", True, [1.0], torch.ones(2)], ids=str)
def test_a_weight_or_a_norm_that_is_no_such_number(value):
    model, _ = small(stage=2)
    loss = model(INPUTS[0][0], (0,))
    with pytest.raises(zs.ConfigError, match="weight: expected a number of at least 0, got"):
        zs.backward(model, loss, weight=value)
    with pytest.raises(zs.ConfigError, match="max_norm: expected a number of at least 0, got"):
        zs.clip_grad_norm_(model, value)
    zs.backward(model, loss, weight=torch.tensor(2))
    assert zs.clip_grad_norm_(model, float("inf")) > 0
    zs.clip_grad_norm_(model, torch.tensor(0.0))
    assert zs.clip_grad_norm_(model, 1) == 0
