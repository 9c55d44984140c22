"""Any order of backwards, held-back backwards, evaluations, failures, steps and zero_grads equals a simple model of it.

The model of the contract, in plain torch: each rank has local sums (`held`); a reduced backward sends held + own, takes
the mean in rank order and adds it to what was reduced before; a step reduces what is still held; zero_grad drops both.
Ranks use different branches of the network, so parameters come and go. Sequences are drawn by hypothesis.
"""

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
    per_rank = run_threads(WORLD, lambda rank: sharded_run(rank, sequence, stages, **options), timeout_s=30)
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
