"""Ranks that do not share memory (gloo across hosts, NCCL), without processes: a Comm over threads with strict manners.

`PrivateComm` moves copies through a post office and is as unfriendly as a real network may be: what a gather is going
to fill is NaN until it is waited for; a source must be the same bits when its send ends as when it began; and with
`ordered` every rank must start the same collectives in the same order, as NCCL demands. This is where prefetch runs
(ranks that share memory have nothing to prefetch), so its budget is checked here with real numbers.
"""

import itertools
import time

import pytest
import torch
from helpers import Branches, OddGPT, Outcome, Task, adamw, assert_equal_runs, reference, seeded, token_batches, train
from private_ranks import PostOffice, PrivateComm

from zeroshard.testing import run_threads

MODEL = seeded(lambda: OddGPT(layers=3))
STAGES = (0, 1, 2, 3)


def run_private(world_size: int, ordered: bool, task: Task, cells: list[dict]) -> list[list[Outcome]]:
    office = PostOffice()

    def rank_run(rank: int) -> list[Outcome]:
        comm = PrivateComm(office, rank, world_size, ordered)
        return [train(rank, task, comm=comm, **cell) for cell in cells]

    results = run_threads(world_size, rank_run)
    assert not office.letters, "sent, but not received"
    return results


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "tagged"])
@pytest.mark.parametrize("world_size, micro, local_sums", [(2, 1, False), (2, 2, False), (2, 2, True), (3, 2, False)])
def test_every_stage_equals_one_process(world_size, micro, local_sums, ordered):
    task = Task(MODEL, token_batches(2, micro, world_size), local_sums=local_sums)  # the second step prefetches as the first went
    cells = [
        {"stage": stage, "units": units, "overlap": overlap, "prefetch_nbytes": budget}
        for stage, units, (overlap, budget) in itertools.product(
            STAGES, ("leaf", "auto"), [(True, 0), (False, 0), (True, 2000), (True, 1 << 30)]
        )
        if stage == 3 or budget == 0
    ]
    expected = reference(task, world_size)
    for rank, outcomes in enumerate(run_private(world_size, ordered, task, cells)):
        for cell, got in zip(cells, outcomes, strict=True):
            assert_equal_runs(got, expected, f"{cell} rank {rank}:")


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "tagged"])
@pytest.mark.parametrize("precision, scale", [("bf16", 1.0), ("fp16", 256.0)])
def test_low_precision_and_clipping(precision, scale, ordered):
    task = Task(MODEL, token_batches(3, 2, 2), clip={1: 0.05})
    options = {"loss_scale": scale} if precision == "fp16" else {}
    cells = [{"stage": stage, "precision": precision, **options} for stage in STAGES]
    results = run_private(2, ordered, task, cells)
    expected = reference(task, 2, precision, results[0][0].coefficients, scale)
    for outcomes in results:
        for cell, got in zip(cells, outcomes, strict=True):
            assert_equal_runs(got, expected, str(cell))


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "tagged"])
def test_ranks_that_use_different_branches_at_replicated_stages(ordered):
    """Parameters are whole everywhere, so ranks may differ; units without gradients join with zeros, in one order.

    (At stage 3 a gather is a collective: ranks that share no memory must use the same units.)
    """
    generator = torch.Generator().manual_seed(5)
    routes = [((0, 1, 2), (0, 1, 2)), ((2, 0), (1,)), ((), (2, 1)), ((1,), ()), ((), ())]
    data = [[[(torch.randn(3, 6, generator=generator), route) for route in ranks]] for ranks in routes]
    task = Task(seeded(Branches), data, adamw, states=True)
    cells = [{"stage": stage, "units": units} for stage in (0, 1, 2) for units in ("auto", "leaf")]
    expected = reference(task, 2)
    for outcomes in run_private(2, ordered, task, cells):
        for cell, got in zip(cells, outcomes, strict=True):
            assert_equal_runs(got, expected, str(cell))


def test_the_strict_comm_notices_what_it_is_for():
    """The test's own test: an overwritten source, and collectives in different orders."""
    office = PostOffice()

    def rank_run(rank: int) -> list[str]:
        comm, errors = PrivateComm(office, rank, 2, ordered=True), []
        source = comm.allocate(4, torch.float32, whole=True)
        work = comm.reduce(source, torch.zeros(2), scale=1.0, accumulate=False, tag=1, label="r")
        source.tensor.fill_(1.0)
        with pytest.raises(AssertionError, match="overwritten too early"):
            work.wait()
        other = comm.gather(source.tensor, source, f"unit {rank}")
        time.sleep(0.01)
        with pytest.raises(AssertionError, match="unit 0 on rank|unit 1 on rank"):
            other.wait()
        return errors

    run_threads(2, rank_run)
