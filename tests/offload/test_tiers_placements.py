"""Wherever states rest, whatever else is chosen with it: no bit of what a run computes changes.

    parameters {device, host, disk} x gradients {...} x optimizer states {...}, at stages 1, 2 and 3

Every placement, and every two choices of all others together. Every run is compared with the same run without offload,
as in test_tiers.py.
"""

import functools
import itertools
import random
from dataclasses import dataclass

import pytest
import torch
from helpers import Branches, OddGPT, Outcome, Task, seeded, token_batches, train
from offloading import DEVICES, LARGE, MODEL, TASK, TINY, assert_same, plain_loop, tiers
from torch import nn

import zeroshard as zs
from zeroshard.testing import run_threads
from zeroshard.tiers import cpu_kernels, slab_step
from zeroshard.tiers import host_step as offloaded_step


@pytest.fixture
def small_pieces(monkeypatch):
    """Slabs and chunks so small that the models here have many of both."""
    monkeypatch.setattr(offloaded_step, "_SLAB_MULTIPLE", 1024)
    monkeypatch.setattr(slab_step, "_CLASS_CHUNK_NUMEL", 512)
    monkeypatch.setattr(cpu_kernels, "CHUNK_NUMEL", 512)
    monkeypatch.setattr(slab_step, "CHUNK_NUMEL", 512)


# -- all pairs of choices ----------------------------------------------------------------------------------------

SCALE = 1024.0
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),  # state from birth
    "lion": lambda params: zs.Lion(params, lr=1e-3, weight_decay=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.9, centered=True),  # has no kernel
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2),  # nor this; its scalars are tensors
}


def two_groups(make):
    """Matrices and vectors in groups of their own, with other options."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        params = list(model.parameters())
        vectors = {"params": [p for p in params if p.dim() < 2], "lr": 3e-3}
        return make([{"params": [p for p in params if p.dim() >= 2]}, vectors])

    return build


def frozen_model() -> nn.Module:
    model = OddGPT(dim=32, layers=1)
    model.embedding.requires_grad_(False)  # and with it the head
    model.blocks[0].norm.requires_grad_(False)
    return model


def routes(steps: int, micro: int, ranks: int, ragged: bool) -> list:
    """data[step][micro][rank] for Branches: some branches take no part in a step, on one rank (ragged) or on all."""
    generator = torch.Generator().manual_seed(3)
    chosen = itertools.cycle([(0, 1, 2), (2, 0), (1,), ()])
    data = []
    for _ in range(steps):
        same = [next(chosen) for _ in range(micro)]
        data.append([
            [(torch.randn(3, 24, generator=generator), next(chosen) if ragged else route) for _ in range(ranks)]
            for route in same
        ])  # fmt: skip
    return data


MODELS = {
    "tied": seeded(lambda: OddGPT(dim=32, layers=1)),
    "frozen": seeded(frozen_model),
    "ragged": seeded(lambda: Branches(24)),
    "unused": seeded(lambda: Branches(24)),
}
FACTORS = {
    "world": (2, 3, 1),
    "place": ((3, "nvme"), (3, "cpu"), (3, "none"), (2, "none"), (1, "none")),
    "gradient": DEVICES,
    "optimizer": DEVICES,
    "precision": ("fp32", "bf16", "fp16"),
    "micro": ((2, False), (2, True), (1, False)),  # backwards a step, under zs.accumulate
    "clip": (None, "option", "call"),
    "overlap": (True, False),
    "units": ("auto", "leaf", "model"),
    "buffers": ("tiny", "large"),
    "kind": tuple(OPTIMIZERS),
    "groups": (1, 2),
    "schedule": (None, "early", "late"),
    "model": tuple(MODELS),
}


@dataclass(frozen=True)
class Cell:
    """One combination of FACTORS."""

    world: int
    place: tuple[int, str]
    gradient: str
    optimizer: str
    precision: str
    micro: tuple[int, bool]
    clip: str | None
    overlap: bool
    units: str
    buffers: str
    kind: str
    groups: int
    schedule: str | None
    model: str

    @property
    def allowed(self) -> bool:
        stage, parameter = self.place
        return (stage > 1 or self.gradient == "none") and (self.model != "ragged" or parameter != "nvme")

    def task(self) -> Task:
        micro, local = self.micro
        branches = self.model in ("ragged", "unused")
        data = routes(3, micro, self.world, self.model == "ragged") if branches else token_batches(2, micro, self.world)
        make = OPTIMIZERS[self.kind]
        scheduler = (lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)) if self.schedule else None
        return Task(
            MODELS[self.model], data, two_groups(make) if self.groups == 2 else make, by_model=self.groups == 2,
            local_sums=local, clip={1: 0.05} if self.clip == "call" else {}, scheduler=scheduler,
            early=self.schedule == "early", states=True,
        )  # fmt: skip

    def options(self) -> dict:
        options = {"stage": self.place[0], "precision": self.precision, "overlap": self.overlap, "units": self.units}
        options |= {"max_grad_norm": 0.05} if self.clip == "option" else {}
        return options | ({"loss_scale": SCALE} if self.precision == "fp16" else {})

    def offload(self, disk: str) -> dict:
        buffers = TINY if self.buffers == "tiny" else LARGE
        return tiers(disk, self.place[1], self.gradient, self.optimizer, **buffers)


def pairs_of(row: dict) -> set[tuple]:
    return set(itertools.combinations(row.items(), 2))


@functools.cache
def covering_cells() -> list[Cell]:
    """Cells in which every two choices of different factors meet, if they are allowed to; greedy, always the same."""
    draw = random.Random(7)
    missing = {
        pair for a, b in itertools.combinations(FACTORS, 2) for x in FACTORS[a] for y in FACTORS[b] for pair in [((a, x), (b, y))]
    }
    missing = {pair for pair in missing if _can_meet(dict(pair))}
    cells = []
    while missing:
        rows = [_row_around(min(missing, key=repr), draw) for _ in range(60)]
        best = max(rows, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        cells.append(Cell(**best))
    return cells


def _can_meet(some: dict) -> bool:
    stage, parameter = some.get("place", (3, "none"))
    return not (stage == 1 and some.get("gradient", "none") != "none") and not (
        parameter == "nvme" and some.get("model") == "ragged"
    )


def _row_around(pair: tuple, draw: random.Random) -> dict:
    while True:
        row = {name: draw.choice(values) for name, values in FACTORS.items()} | dict(pair)
        if Cell(**row).allowed:
            return row


@pytest.mark.parametrize("part", range(3))
def test_every_two_choices_together_change_no_bit(part, disk, small_pieces):
    cells = covering_cells()
    for world_size in FACTORS["world"]:
        chosen = [cell for cell in cells if cell.world == world_size][part::3]

        def rank_run(rank: int, chosen=chosen) -> list[tuple[Outcome, Outcome]]:
            return [
                (train(rank, c.task(), **c.options()), train(rank, c.task(), **c.options(), **c.offload(disk))) for c in chosen
            ]

        for outcomes in run_threads(world_size, rank_run):
            for cell, (plain, offloaded) in zip(chosen, outcomes, strict=True):
                assert_same(offloaded, plain, f"{cell}:")


# -- every placement ---------------------------------------------------------------------------------------------


def placements(stages=(1, 2, 3)) -> list[tuple[int, str, str, str]]:
    """Every (stage, parameter, gradient, optimizer) that a stage allows."""
    return [
        (stage, *devices)
        for stage in stages
        for devices in itertools.product(DEVICES, repeat=3)
        if (stage == 3 or devices[0] == "none") and (stage >= 2 or devices[1] == "none")
    ]


def test_placements_that_nobody_looks_at_change_no_bit(disk):
    """Half of parameter x gradient x optimizer (each two meet; the whole of it: test_a_device_of_its_own_...), with buffers that hold a part of a shard and larger ones."""
    half = [cell for cell in placements() if sum(map(DEVICES.index, cell[1:])) % 2 == 0]
    cells = [(*cell, TINY if number % 2 else LARGE) for number, cell in enumerate(half)]

    def rank_run(rank: int) -> dict:
        options = {"precision": "bf16"}
        expected = {stage: plain_loop(rank, TASK, stage=stage, **options) for stage in (1, 2, 3)}
        return [
            (expected[stage], plain_loop(
                rank, TASK, devices[2] != "none", stage=stage, **options, **tiers(disk, *devices, **buffers)
            ))
            for stage, *devices, buffers in cells
        ]  # fmt: skip

    for outcomes in run_threads(2, rank_run):
        for cell, (expected, got) in zip(cells, outcomes, strict=True):
            assert_same(got, expected, f"{cell}")


def test_a_device_of_its_own_changes_no_bit(disk, strict_device, small_pieces):
    """Sums travel to the host in the dtype in which gradients are sent, fp32 here. Not fused: the same loop everywhere."""
    cells = [(*cell, number % 3 > 0) for number, cell in enumerate(placements())]
    task = Task(MODEL, TASK.data, clip=TASK.clip, states=True)

    def rank_run(rank: int) -> list:
        strict_device(rank, False)
        expected = {stage: train(rank, task, stage=stage) for stage in (1, 2, 3)}
        strict_device(rank)
        return [
            (expected[stage], run(rank, task, stage=stage, **tiers(disk, *devices, **TINY, fused=False)))
            for stage, *devices, inspect in cells
            for run in [train if inspect else plain_loop]
        ]

    for outcomes in run_threads(2, rank_run):
        for cell, (expected, got) in zip(cells, outcomes, strict=True):
            if not got.gradients:
                got.gradients = expected.gradients
            assert_same(got, expected, f"{cell}")
