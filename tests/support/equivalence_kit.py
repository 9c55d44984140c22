"""The matrix of what a user may combine, each of its cells against one process, for one world size and precision.

    stage {0, 1, 2, 3, 3 mapped} x micro-batches {1, 2, 3} (repeated backward, zs.accumulate) x overlap {on, off}
    x units {leaf, block, model} x clipping {on, off}

Each cell trains two steps: the first unclipped, the second clipped.
Gradients of all steps and the final (master) weights must be the bits of the reference. The tolerance is zero in every
precision: the reference (helpers.py) rounds where the contract says values are rounded (gradients when they are sent,
parameters when they are copied from their masters) and adds in the same order; the loss scale is a power of two.

Only the norm has a tolerance against the reference. It is a sum of squares in fp32 over a shard, in 8 or more lanes:
with n elements each lane's relative error is at most (n / 8) 2^-24, the root halves it. Here n <= 1,500: 5.6e-6.
Between stages, overlap and placements of one unit size the norm has no tolerance.
"""

import functools
import itertools
import os
from dataclasses import dataclass

import pytest
from helpers import OddGPT, Outcome, Task, assert_equal_runs, reference, seeded, token_batches, train

from zeroshard.testing import run_threads

PRECISIONS = ("fp32", "bf16", "fp16")
NORM_TOLERANCE = 5.6e-6
SCALE = {"fp32": 1.0, "bf16": 1.0, "fp16": 1024.0}
STEPS = 2
CLIP = {1: 0.05}  # far below the norms met here, so that it acts
MODEL = seeded(OddGPT)


@dataclass(frozen=True)
class Cell:
    """One combination, but for world and precision."""

    placement: tuple[int, bool]  # the stage, and whether memory of other ranks is mapped
    mode: tuple[int, bool]  # micro-batches, and whether they are summed under zs.accumulate
    units: str
    overlap: bool

    def options(self) -> dict:
        stage, mapped = self.placement
        return {"stage": stage, "units": self.units, "overlap": self.overlap, "map_shared": mapped}

    def task(self, world_size: int) -> Task:
        micro, local_sums = self.mode
        return Task(MODEL, batches(micro, world_size), local_sums=local_sums, clip=CLIP)

    def pairs(self) -> set[tuple]:
        """Every two of its values, each with the name of its factor."""
        return set(itertools.combinations(vars(self).items(), 2))


@functools.cache
def batches(micro: int, world_size: int) -> list:
    return token_batches(STEPS, micro, world_size)


def all_cells() -> list[Cell]:
    placements = [(0, True), (1, True), (2, True), (3, True), (3, False)]
    modes = [(1, False), (2, False), (2, True), (3, False), (3, True)]
    return list(itertools.starmap(Cell, itertools.product(placements, modes, ("leaf", "auto", "model"), (True, False))))


def covering_cells() -> list[Cell]:
    """Cells in which every two values of different factors meet: always the one that brings most of what is missing."""
    cells = all_cells()
    missing, chosen = set().union(*(cell.pairs() for cell in cells)), []
    while missing:
        chosen.append(max(cells, key=lambda cell: len(cell.pairs() & missing)))  # the first of the best
        missing -= chosen[-1].pairs()
    return chosen


def cells_for(precision: str, world_size: int) -> list[Cell]:
    """Whole in fp32 on 1 and 2 ranks and in low precision on one; else each two values meet, as many ranks do what two do, and
    do in low precision what they do in fp32. ZEROSHARD_SLOW=1: whole everywhere."""
    whole = world_size == 1 or (precision == "fp32" and world_size == 2) or os.environ.get("ZEROSHARD_SLOW") == "1"
    return all_cells() if whole else covering_cells()


def run_cells(rank: int, chosen: list[Cell], world_size: int, **options: object) -> list[Outcome]:
    """All cells one after another on one rank: starting threads costs more than a cell."""
    return [train(rank, cell.task(world_size), **cell.options(), **options) for cell in chosen]


def check(chosen: list[Cell], outcomes: list[list[Outcome]], world_size: int, precision: str) -> None:
    expected: dict[tuple, Outcome] = {}
    norms: dict[tuple, tuple] = {}
    for number, cell in enumerate(chosen):
        for rank in range(world_size):
            got = outcomes[rank][number]
            where = f"{cell} rank {rank}:"
            key = (cell.mode, *got.coefficients)
            if key not in expected:
                task = cell.task(world_size)
                expected[key] = reference(task, world_size, precision, got.coefficients, SCALE[precision])
            assert_equal_runs(got, expected[key], where)
            assert got.norms == pytest.approx(expected[key].norms, rel=NORM_TOLERANCE), where
            assert got.coefficients[1] == CLIP[1] / (got.norms[1] + 1e-6) < 1.0 == got.coefficients[0], where
            first = norms.setdefault((cell.units, cell.mode), tuple(got.norms))
            assert tuple(got.norms) == first, f"{where} norms differ between placements of the same units"


def assert_every_cell_equals_one_process(precision: str, world_size: int) -> None:
    chosen = cells_for(precision, world_size)
    options = {"precision": precision}
    if precision == "fp16":
        options["loss_scale"] = SCALE["fp16"]
    outcomes = run_threads(world_size, lambda rank: run_cells(rank, chosen, world_size, **options))
    check(chosen, outcomes, world_size, precision)
