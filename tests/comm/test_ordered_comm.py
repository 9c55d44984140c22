"""The torch.distributed backend where collectives are matched by order, as on NCCL, tried over gloo.

Units are reduced in one agreed order whatever each rank's own is, and sums run on a side stream: `RecordingStreams`
defers them until they are joined, so a read that is not ordered after its write gives wrong numbers here.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from helpers import seeded
from recording_streams import RecordingStreams
from torch import nn

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.diagnostics.status_server import JudgingDesk
from zeroshard.engine.comm import sums
from zeroshard.engine.comm.base import Region
from zeroshard.engine.comm.process_group import DistComm

pytestmark = pytest.mark.processes
STAGES = (1, 2)
STEPS = 3


class Branches(nn.Module):
    """Three branches in the order that the input asks for, so that ranks complete units in different orders."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for number in order:
            x = self.branches[number](x)
        return x.square().mean()


def _model() -> Branches:
    return seeded(Branches, 3)


def _batch(rank: int, step: int) -> tuple[torch.Tensor, list[int]]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    orders = [[0, 1, 2], [2, 0, 1], [1]]  # rank 2 uses one branch only
    return torch.randn(4, 6, generator=generator), orders[rank]


def _train(rank: int, world_size: int) -> dict[int, tuple[dict, list[str], list[float]]]:
    """Every stage, one after another: starting processes costs more than all that they do here."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return {stage: _train_at(stage, rank) for stage in STAGES}


def _train_at(stage: int, rank: int) -> tuple[dict, list[str], list[float]]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    streams = RecordingStreams()
    comm = DistComm(None, torch.device("cpu"), 30.0, ordered=True, streams=streams, desk=JudgingDesk())
    model, optimizer = zs.shard(model, optimizer, stage=stage, comm=comm)
    norms = []
    for step in range(STEPS):
        model(*_batch(rank, step)).backward()
        optimizer.step()
        norms.append(optimizer.last_step.grad_norm)
        optimizer.zero_grad()
    return zs.full_state_dict(model), streams.log, norms


def _reference(world_size: int) -> dict:
    model = copy.deepcopy(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        sums = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
        for rank in range(world_size):
            model.zero_grad()
            model(*_batch(rank, step)).backward()
            for name, param in model.named_parameters():
                if param.grad is not None:
                    sums[name] += param.grad
        for name, param in model.named_parameters():
            param.grad = sums[name] * (1.0 / world_size)
        optimizer.step()
    return model.state_dict()


@pytest.fixture(scope="module")
def trained() -> list[dict]:
    return run_processes(_train, 3)


@pytest.mark.parametrize("stage", STAGES)
def test_ragged_reductions_are_matched_in_one_order(trained: list[dict], stage: int) -> None:
    """Three ranks, three different orders of completion, one rank without two of the units."""
    expected = _reference(3)
    results = [rank[stage] for rank in trained]
    for state, log, norms in results:
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=0)
        # every sum was begun beside the computation and joined before its result was used
        assert [entry for entry in log if entry.startswith("begin")] and log[-1].startswith("join")
        assert norms == results[0][2]


class PatientStreams(RecordingStreams):
    """The host goes on where a stream joins, and stands only where it waits itself: what a GPU does. (Numbers are not those of a GPU.)"""

    def join(self, ticket: int) -> None:
        self.log.append(f"join {ticket}")

    def finish(self, ticket: int) -> None:
        super().join(ticket)


def _leave_ragged(rank: int, world_size: int) -> float | None:
    """Rank 0 reduces eight units, rank 1 joins seven of them at its end only; gradients leave the device."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(8)))
    comm = DistComm(None, torch.device("cpu"), 15.0, ordered=True, streams=PatientStreams(separate_host=True), desk=JudgingDesk())
    comm.waits_on_host = False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tiers = {"offload_optimizer": "cpu", "offload_gradient": "cpu"}
    units = list(model)
    model, optimizer = zs.shard(model, optimizer, stage=2, units=type(units[0]), comm=comm, **tiers)
    for _ in range(2):
        x = torch.ones(4, 6)
        for unit in units if rank == 0 else units[1:2]:
            x = unit(x)
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer.last_step.grad_norm


def test_ragged_ranks_wait_for_no_gradient_on_its_way_to_the_host() -> None:
    """More of them are under way than there are buffers: waiting for one would be waiting for a peer that waits for this rank."""
    run_processes(_leave_ragged, 2)


def _reduced(rank: int, world_size: int) -> list[tuple[torch.Tensor, float | None, int]]:
    """A reduction whole, then in pieces of 1024 elements, at once and deferred: (sums, sum of squares, bytes sent)."""
    dist.init_process_group("gloo")
    generator, found = torch.Generator().manual_seed(rank), []
    given = torch.randn(world_size * 2500, generator=generator).bfloat16()
    for received_nbytes, streams in ((sums.RECEIVED_NBYTES, None), (1, None), (1, RecordingStreams())):
        sums.RECEIVED_NBYTES = received_nbytes
        comm = DistComm(None, torch.device("cpu"), 30.0, ordered=True, streams=streams, desk=JudgingDesk())
        out = torch.arange(2500.0)
        work = comm.reduce(Region(given), out, scale=0.5, accumulate=True, tag=0, label="reduce")
        work.wait()
        found.append((out, work.square_sum, sum(work.sent)))
    return found


def test_a_reduction_in_pieces_has_the_bits_of_one_that_receives_all_at_once() -> None:
    for found in run_processes(_reduced, 3, timeout_s=60):
        (whole, square, sent), *others = found
        for out, _, nbytes in others:
            assert torch.equal(out, whole) and nbytes == sent
        assert others[0][1] == pytest.approx(square, rel=1e-6)


def test_sums_on_the_host_take_no_memory_of_a_default_device() -> None:
    out = torch.zeros(3)
    with torch.device("meta"):  # a program's own default, e.g. a GPU, while gradients are summed on the host
        sums.sum_in_rank_order([torch.ones(3, dtype=torch.bfloat16, device="cpu")] * 3, out, scale=1.0, accumulate=False)
    assert out.tolist() == [3.0, 3.0, 3.0]
