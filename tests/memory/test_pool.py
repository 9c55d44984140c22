"""StagingPool: a buffer is never handed out while it is used or read; `count` of them serve an orderly step."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.comm.fake import FakeComm
from zeroshard.comm.shared_memory import SharedComm
from zeroshard.comm.transport import ThreadTransport, ThreadWorld
from zeroshard.engine.comm.base import Collective
from zeroshard.engine.comm.pool import StagingPool
from zeroshard.engine.ledger import STAGING, Ledger
from zeroshard.testing import run_threads

NBYTES, COUNT, LIMIT = 256, 2, 5


@pytest.fixture(autouse=True, scope="module")
def impatient():
    """Readers end only when a test says so: do not wait seconds for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zeroshard.engine.comm.pool._LONGEST_S", 0.005)
        yield


class Reading(Collective):
    """A reduction that reads its source until somebody drains it (or `end` is called)."""

    def __init__(self) -> None:
        self.over = False

    def drain(self) -> None:
        self.over = True

    def drained(self) -> bool:
        return self.over

    end = drain


def make(comm_kind: str) -> tuple[StagingPool, Ledger]:
    if comm_kind == "shared":
        comm = SharedComm(ThreadTransport(ThreadWorld(1), 0), torch.device("cpu"))
    else:
        comm = FakeComm(0, 4)
    ledger = Ledger()
    return StagingPool(comm, ledger, NBYTES, COUNT, LIMIT), ledger


# what a step does: take a buffer, send one (give it with a reduction under way), let a reduction end
actions = st.lists(st.sampled_from(["take", "take", "give", "give", "end"]), max_size=25)


@pytest.mark.parametrize("comm_kind", ["shared", "private"])
@settings(max_examples=40)
@given(actions)
def test_a_buffer_in_use_or_under_way_is_never_handed_out(comm_kind, actions):
    pool, ledger = make(comm_kind)
    taken: dict[int, int] = {}  # number -> address
    reading: dict[int, Reading] = {}
    for action in actions:
        if action == "take" and len(taken) < LIMIT - 1:
            number, region = pool.take(16, torch.float32)
            address = region.tensor.data_ptr()
            assert number not in taken and address not in taken.values()
            assert number not in reading or reading[number].over  # `take` waited for its readers
            taken[number] = address
        elif action == "give" and taken:
            number, _ = taken.popitem()
            reading[number] = Reading()
            pool.give(number, reading[number])
        elif action == "end" and reading:
            reading.popitem()[1].end()
    assert ledger.now[STAGING] % NBYTES == 0
    pool.close()
    assert ledger.now[STAGING] == 0


@pytest.mark.parametrize("comm_kind", ["shared", "private"])
def test_an_orderly_step_touches_only_the_usual_number(comm_kind):
    """One being filled, one being reduced: the reduction of unit k ends while unit k + 1 is filled."""
    pool, ledger = make(comm_kind)
    previous = None
    for _ in range(20):
        number, _ = pool.take(64, torch.float32)
        if previous is not None:
            previous.end()
        previous = Reading()
        pool.give(number, previous)
    assert ledger.peak[STAGING] == COUNT * NBYTES


def test_what_one_step_needed_beyond_the_usual_number_the_next_takes_without_a_wait(monkeypatch):
    """Ranks with other experts in each step: nobody joins a reduction before the end of backward."""
    monkeypatch.setattr("zeroshard.engine.comm.pool._PATIENCE_S", 0.0)
    monkeypatch.setattr(
        "zeroshard.engine.comm.pool._LONGEST_S", 60.0
    )  # a busy machine shall not end the wait before it is announced
    pool, ledger = make("private")
    announced = []
    monkeypatch.setattr(pool.comm, "announce", announced.append)
    for step in range(3):
        readings = [Reading() for _ in range(COUNT + 2)]
        for reading in readings:
            pool.give(pool.take(64, torch.float32)[0], reading)
        assert len(announced) == 4, f"step {step}: {announced}"  # twice that it waits, and that it does no longer: in the first
        for reading in readings:
            reading.end()
    assert ledger.peak[STAGING] == (COUNT + 2) * NBYTES


def test_buffers_go_round_however_soon_they_are_free():
    for ended in (True, False):  # what was given is over at once, or under way for long
        pool, ledger = make("shared")
        numbers = []
        for _ in range(2 * COUNT):
            reading = Reading()
            numbers.append(pool.take(16, torch.uint8)[0])
            pool.give(numbers[-1], None if ended else reading)
            reading.end()
        assert numbers == 2 * list(range(COUNT)) and ledger.now[STAGING] == COUNT * NBYTES


def test_views_of_any_size_and_dtype_lie_in_the_buffer():
    pool, _ = make("shared")
    number, whole = pool.take(NBYTES // 4, torch.float32)
    pool.give(number, None)
    for _ in range(COUNT - 1):  # the others come first
        pool.give(pool.take(16, torch.float32)[0], None)
    again, half = pool.take(16, torch.bfloat16)
    assert again == number and half.tensor.data_ptr() == whole.tensor.data_ptr()
    assert half.tensor.dtype == torch.bfloat16 and half.tensor.numel() == 16 == half.wholes[0].numel()
    assert half.number == number and half.siblings(number) is half
    other = half.siblings(1 - number)
    assert other.number == 1 - number and other.tensor.data_ptr() != half.tensor.data_ptr()


def test_a_pool_for_nothing_holds_nothing():
    ledger = Ledger()
    pool = StagingPool(FakeComm(0, 2), ledger, 0, 0, 0)
    pool.close()
    assert dict(ledger.peak) in ({}, {STAGING: 0})


def test_more_than_the_buffer_holds_is_refused():
    pool, _ = make("private")
    with pytest.raises(AssertionError):
        pool.take(NBYTES, torch.float32)


def test_a_reduction_finds_the_buffer_that_each_rank_chose():
    """Ranks take free buffers by timing; once a peer's buffer of *this* rank's number was summed instead."""

    def rank_run(rank: int) -> list[float]:
        comm = SharedComm(ThreadTransport(shared, rank), torch.device("cpu"))
        pool = StagingPool(comm, Ledger(), NBYTES, COUNT, LIMIT)
        held = [pool.take(64, torch.float32)[0] for _ in range(rank)]  # rank r goes on with buffer number r
        number, region = pool.take(64, torch.float32)
        region.tensor.fill_(10.0**rank)
        out = torch.empty(32)
        work = comm.reduce(region, out, scale=1.0, accumulate=False, tag=1, label="sum")
        pool.give(number, work)
        work.wait()
        work.drain()
        assert (number, held) == (rank, list(range(rank)))
        return out.unique().tolist()

    shared = ThreadWorld(2)
    assert run_threads(2, rank_run) == [[11.0], [11.0]]
