"""`zeroshard.testing.run_threads`: what must hold of a world of threads for others' tests to be worth something."""

import gc
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from zeroshard.testing import run_threads


class Counted(nn.Module):
    """Counts how often the parametrization is computed."""

    calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight * self.calls


def parametrized():
    layer = nn.Linear(2, 2)
    parametrize.register_parametrization(layer, "weight", Counted())
    layer.parametrizations.weight[0].calls = 0  # registering has called it
    return layer


def test_each_rank_has_its_own_cache_of_parametrizations():
    """Rank 1 is inside of `cached()` all the time: rank 0's value must not outlive its own."""
    inside, over = threading.Event(), threading.Event()

    def run(rank):
        layer = parametrized()
        counted = layer.parametrizations.weight[0]
        if rank == 1:
            with parametrize.cached():
                kept = layer.weight
                inside.set()
                assert over.wait(30)
                assert layer.weight is kept  # rank 0, which has left `cached()` twice, has not emptied it
            return counted.calls
        assert inside.wait(30)
        try:
            _ = layer.weight, layer.weight  # not in `cached()`: computed each time
            outside = counted.calls
            for _ in range(2):
                with parametrize.cached(), parametrize.cached():
                    assert layer.weight is layer.weight
            return outside, counted.calls
        finally:
            over.set()

    assert run_threads(2, run) == [(2, 4), 1]


def test_torch_compile_still_sees_through_parametrizations():
    run_threads(1, lambda rank: None)
    layer, x = parametrized(), torch.ones(1, 2)
    with torch.no_grad():
        layer.parametrizations.weight[0].calls = 0
        expected = layer(x)
        layer.parametrizations.weight[0].calls = 0
        assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(x), expected)


def test_no_automatic_collection_while_ranks_run():
    """Else torch.get_rng_state() in one thread and a finalizer in another can wait for each other for ever."""
    assert gc.isenabled()
    assert run_threads(2, lambda rank: gc.isenabled()) == [False, False]
    assert gc.isenabled()


def test_collection_comes_back_after_an_error():
    def fails(rank):
        raise ValueError("rank")

    with pytest.raises(ValueError, match="rank"):
        run_threads(2, fails)
    assert gc.isenabled()
