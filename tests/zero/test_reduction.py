"""The reduction of a unit (engine/reduction.py): its worked example, when it starts, and how few functions lie on its way."""

import sys

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.testing import run_threads


class Sum(nn.Module):
    """The loss sum(w * x) for one parameter of three numbers, whose gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w * x).sum()


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_the_example_of_two_ranks_and_three_numbers(stage):
    def run(rank):
        model, _ = zs.shard(Sum(), None, stage=stage)
        model(torch.tensor([[1.0, 2.0, 3.0], [5.0, 6.0, 7.0]][rank])).backward()
        return zs.full_gradients(model)["w"]

    for got in run_threads(2, run):
        assert got.tolist() == [3.0, 4.0, 5.0]


@pytest.mark.parametrize("stage", (2, 3))
def test_few_functions_lie_between_the_hook_of_autograd_and_the_collective(stage):
    def run(rank):
        model, _ = zs.shard(nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))), None, stage=stage, units="leaf")
        loss, found = model(torch.ones(2, 3)).sum(), []

        def follow(frame, event, _):
            if event == "call" and frame.f_code.co_name == "collect":
                names = []
                while frame is not None and frame.f_code.co_name != "hook":
                    names += [frame.f_code.co_name] * ("zeroshard" in frame.f_code.co_filename)
                    frame = frame.f_back
                found.append(names[::-1])

        sys.setprofile(follow)
        try:
            loss.backward()
        finally:
            sys.setprofile(None)
        return found

    for found in run_threads(2, run):
        assert found and all(names == ["complete", "_start", "reduce", "reduce", "collect"] for names in found), found


def test_a_unit_is_complete_once_and_a_round_may_come_again():
    model, _ = zs.shard(nn.Linear(2, 2), None)
    reduction = model._zeroshard.reductions.of[0]
    assert reduction.arrive(0) == (False, False) and reduction.since_left
    assert reduction.arrive(1) == (True, True) and not reduction.since_left
    assert reduction.arrive(1) == (False, False) and reduction.since_left
    assert reduction.arrive(0) == (False, True)  # another round, as of a second checkpoint; the unit was complete before
    reduction.begin()
    assert not reduction.since_left and reduction.arrive(1) == (False, False)
