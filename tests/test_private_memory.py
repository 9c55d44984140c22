"""Ranks that do not share memory (gloo across hosts, NCCL), without processes: a Comm over threads with strict manners.

`PrivateComm` moves copies through a post office and is as unfriendly as a real network may be: what a gather is going
to fill is NaN until it is waited for; a source must be the same bits when its send ends as when it began; and with
`ordered` every rank must start the same collectives in the same order, as NCCL demands. This is where prefetch runs
(ranks that share memory have nothing to prefetch), so its budget is checked here with real numbers.
"""

import itertools
import math
import threading
import time
from collections import defaultdict

import pytest
import torch
from helpers import Branches, OddGPT, Outcome, Task, adamw, assert_equal_runs, reference, seeded, token_batches, train

from zeroshard.comm.base import Comm, Region, Work, sum_in_rank_order
from zeroshard.testing import run_threads

MODEL = seeded(lambda: OddGPT(layers=3))
STAGES = (0, 1, 2, 3)
PATIENCE_S = 10


class PostOffice:
    """Letters by (what, from, to); `collect` waits for one."""

    def __init__(self) -> None:
        self.letters: dict[tuple, object] = {}
        self.changed = threading.Condition()

    def post(self, key: tuple, letter: object) -> None:
        with self.changed:
            assert key not in self.letters, f"sent twice: {key}"
            self.letters[key] = letter
            self.changed.notify_all()

    def collect(self, key: tuple) -> object:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.letters, PATIENCE_S), f"never sent: {key}"
            return self.letters.pop(key)


class Delivery(Work):
    """Receives when waited for; checks that the source was left alone meanwhile.

    streamed: as on a GPU, where draining orders the stream and the host goes on: it never waits for a peer.
    """

    def __init__(self, source: torch.Tensor, finish, arrived, streamed: bool) -> None:
        """finish: receive and use; arrived() tells whether that would not block."""
        self.source, self.before, self.finish, self.streamed = source, source.clone(), finish, streamed
        self.arrived = arrived

    def wait(self) -> None:
        if self.finish is not None:
            assert self.before is None or torch.equal(self.source, self.before), "a source was overwritten too early"
            finish, self.finish = self.finish, None
            self.square_sum = finish()

    def drain(self) -> None:
        if self.streamed:
            self.before = None  # whatever is written from now on is written after the send
        else:
            self.wait()

    def drained(self) -> bool:
        if self.finish is not None and self.arrived():
            self.wait()
        return self.finish is None


class PrivateComm(Comm):
    """One rank of `world_size` threads that see only each other's letters."""

    def __init__(self, office: PostOffice, rank: int, world_size: int, ordered: bool) -> None:
        self.office, self.rank, self.world_size, self.ordered = office, rank, world_size, ordered
        self.device = torch.device("cpu")
        self.waits_on_host = not ordered
        self._turn: dict[object, int] = defaultdict(int)

    def _number(self, kind: object) -> tuple:
        """Which collective this is: the n-th of its kind or (ordered) the n-th of all."""
        stream = "all" if self.ordered else kind
        self._turn[stream] += 1
        return (stream, self._turn[stream])

    def _send(self, number: tuple, label: str, parts: list) -> None:
        for peer in range(self.world_size):
            if peer != self.rank:
                self.office.post((number, self.rank, peer), (label, parts[peer]))

    def _arrived(self, number: tuple) -> bool:
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        return all((number, peer, self.rank) in self.office.letters for peer in peers)

    def _receive(self, number: tuple, label: str, mine: object) -> list:
        parts = []
        for peer in range(self.world_size):
            name, part = (label, mine) if peer == self.rank else self.office.collect((number, peer, self.rank))
            assert name == label, f"collective {number}: {label} on rank {self.rank}, {name} on rank {peer}"
            parts.append(part)
        return parts

    def gather(self, full: torch.Tensor, source: Region, label: str, tag: int | None = None) -> Work:
        mine, rows = source.shards[self.rank], full.view(self.world_size, -1)
        number = self._number("gather" if tag is None else ("gather", tag))
        self._send(number, label, [mine.clone()] * self.world_size)
        for peer, row in enumerate(rows):
            if peer != self.rank:
                row.fill_(math.nan)

        def finish() -> None:
            for row, part in zip(rows, self._receive(number, label, mine.clone()), strict=True):
                row.copy_(part)

        return Delivery(mine, finish, lambda: self._arrived(number), self.ordered)

    def reduce(self, source: Region, out: torch.Tensor, *, scale, accumulate, tag, label) -> Work:
        rows, number = source.tensor.view(self.world_size, -1), self._number(("reduce", tag))
        self._send(number, label, [row.clone() for row in rows])
        own = rows[self.rank].clone()

        def finish() -> float | None:
            parts = self._receive(number, label, own)
            return sum_in_rank_order(parts, out, scale=scale, accumulate=accumulate)

        return Delivery(source.tensor, finish, lambda: self._arrived(number), self.ordered)

    def exchange(self, payload: bytes, label: str) -> list[bytes]:
        self._turn["exchange"] += 1
        number = ("exchange", self._turn["exchange"])
        self._send(number, label, [payload] * self.world_size)
        return self._receive(number, label, payload)


def run_private(world_size: int, ordered: bool, task: Task, cells: list[dict]) -> list[list[Outcome]]:
    office = PostOffice()

    def rank_run(rank: int) -> list[Outcome]:
        comm = PrivateComm(office, rank, world_size, ordered)
        return [train(rank, task, comm=comm, **cell) for cell in cells]

    results = run_threads(world_size, rank_run, timeout_s=50)
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
