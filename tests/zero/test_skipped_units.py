"""Ranks whose batches use different units at stage 3 where a gather needs every rank (C2, C4): served, or told by name."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import Branches, flat, seeded
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.engine.runtime import runtime_of

STEPS = 6
DIM = 6


class Tower(nn.Module):
    """A tower for images before a body for texts; without an image the tower is not used. `model(image, text)` is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(3))
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2))

    def forward(self, image: Tensor | None, text: Tensor) -> Tensor:
        if image is not None:
            for layer in self.tower:
                image = layer(image)
            text = text + image
        for layer in self.body:
            text = layer(text)
        return text.square().mean()


BRANCHES, TOWER = seeded(Branches), seeded(Tower)


def draw(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, DIM, generator=generator), torch.randn(3, DIM, generator=generator)


def text_only(step: int, micro: int, rank: int) -> tuple:
    """Rank 1 has no image in steps 3 and 4, and in one micro-batch of the last."""
    image, text = draw(10 * step + micro, rank)
    return (None if rank == 1 and (step in (3, 4) or (step == 5 and micro)) else image), text


def by_rank(step: int, micro: int, rank: int) -> tuple:
    """All branches at first; then another one is left out on each rank, and in step 4 the same on all."""
    x, _ = draw(10 * step + micro, rank)
    return x, (0, 1, 2) if step == 0 else (0, 2) if step == 4 else tuple({0, 1, 2} - {(rank + step) % 3})


def alternating(step: int, micro: int, rank: int) -> tuple:
    """Another branch in each step, the same on all ranks."""
    x, _ = draw(10 * step + micro, rank)
    return x, ((step % 3),)


CASES = {"text only": (TOWER, text_only), "by rank": (BRANCHES, by_rank), "alternating": (BRANCHES, alternating)}
UNITS = {"text only": ("Sequential",), "by rank": ("Sequential",), "alternating": ("Sequential",)}
OPTIONS: dict[str, dict] = {
    "plain": {},
    "eager": {"overlap": False},
}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def train(rank: int, case: str, frozen: bool, **options: Any) -> tuple[dict, list[str]]:
    model = copy.deepcopy(CASES[case][0])
    if frozen:
        next(model.children()).requires_grad_(False)
    model, optimizer = zs.shard(
        model, sgd([p for p in model.parameters() if p.requires_grad]), stage=3, units=UNITS[case], **options
    )
    for step in range(STEPS):
        for micro in range(2):
            model(*CASES[case][1](step, micro, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return zs.full_state_dict(model), list(runtime_of(model).schedule.notes)


def reference(case: str, frozen: bool) -> dict:
    model = copy.deepcopy(CASES[case][0])
    if frozen:
        next(model.children()).requires_grad_(False)
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    for step in range(STEPS):
        for micro in range(2):
            for rank in range(2):
                (model(*CASES[case][1](step, micro, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


RUNS = [
    (case, frozen, name) for case in CASES for name in OPTIONS for frozen in ((False, True) if case == "text only" else (False,))
]


def _all(rank: int, world_size: int) -> dict:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return {run: train(rank, *run[:2], comm="dist", stall_timeout_s=10.0, **OPTIONS[run[2]]) for run in RUNS}


@functools.cache
def trained() -> list[dict]:
    return run_processes(_all, 2)


@pytest.mark.processes
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_c02_c04_ranks_may_skip_units_that_the_record_knows(run: tuple) -> None:
    expected = reference(*run[:2])
    for rank in trained():
        torch.testing.assert_close(flat(rank[run][0]), flat(expected), rtol=1e-5, atol=1e-6)
    said = [any("not used by this rank" in message for message in rank[run][1]) for rank in trained()]
    assert said == {"text only": [False, True], "by rank": [True, True], "alternating": [False, False]}[run[0]]


def _unrecorded(rank: int, world_size: int) -> str:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, _ = zs.shard(copy.deepcopy(BRANCHES), None, stage=3, units=("Sequential",), comm="dist", stall_timeout_s=3.0)
    try:
        model(draw(0, rank)[0], (0, 1, 2) if rank == 0 else (0, 2)).backward()
    except zs.ZeroshardError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.processes
def test_c02_what_no_record_knows_ends_with_a_report() -> None:
    said = run_processes(_unrecorded, 2)
    assert said[0].startswith("StallError") and "branches.1" in said[0], said
    assert "branches.2" in said[1] or "branches.1" in said[1], said
