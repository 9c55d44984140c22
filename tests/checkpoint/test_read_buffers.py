"""The buffers of zs.load: borrowed from saves, allocated where that is faster than to read again, never two windows in one place."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.checkpoint import bulk_reader
from zeroshard.checkpoint.bulk_reader import SLOTS, WINDOW_NBYTES, Room
from zeroshard.checkpoint.rank_file import BUFFER_NBYTES
from zeroshard.comm.pool import BufferPool
from zeroshard.config import Tier
from zeroshard.memory.io.aligned import ALIGN, empty_aligned
from zeroshard.memory.ledger import Ledger


def pool_of(make: Callable[[int], torch.Tensor]) -> BufferPool:
    return BufferPool(Ledger(), 0, BUFFER_NBYTES, make, Tier.HOST)


class Memory:
    """A pool whose buffers cost `seconds` each to make, by a clock that only they move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float, free: int = 0) -> None:
        self.now, self.seconds, self.made = 0.0, seconds, 0
        monkeypatch.setattr(bulk_reader.time, "monotonic", lambda: self.now)
        self.pool = pool_of(lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8))
        self.pool.grow(free)
        self.pool.make = self.make

    def make(self, nbytes: int) -> torch.Tensor:
        self.made, self.now = self.made + 1, self.now + self.seconds
        return torch.empty(nbytes, dtype=torch.uint8)


@pytest.mark.parametrize(("seconds", "pace", "windows"), [
    (0.016, 1e-9, 12), (0.032, 1e-9, 0), (0.032, 2e-9, 12), (60.0, None, 12), (0.0, 1e-12, 12),
])  # fmt: skip
def test_a_buffer_is_made_where_that_is_faster_than_to_read_it_twice(seconds, pace, windows, monkeypatch):
    memory = Memory(monkeypatch, seconds)
    room = Room(memory.pool)
    room.plan([WINDOW_NBYTES] * 12, True, 3 * BUFFER_NBYTES)
    before = memory.made
    assert before == 2  # for what goes round, where what there is does not do
    got = [room.lasting(WINDOW_NBYTES, lambda: pace) for _ in range(16)]
    assert sum(window is not None for window in got) == windows and got[windows:] == [None] * (16 - windows)
    assert memory.made - before == (3 if windows else 1), "no more after one that took too long"


def test_a_room_gives_back_what_it_borrowed_and_keeps_apart_what_lasts(monkeypatch):
    memory = Memory(monkeypatch, 1e9, free=5)
    room = Room(memory.pool)
    spare = [room.lasting(WINDOW_NBYTES, None) for _ in range(20)]
    assert sum(window is not None for window in spare) == 12, "two buffers are left"
    room.plan([WINDOW_NBYTES] * 9, False, 0)
    assert memory.pool.free == 0 and memory.made == 0
    assert room.lasting(WINDOW_NBYTES, lambda: None) is None
    passing = [room.passing(WINDOW_NBYTES) for _ in range(2 * SLOTS)]
    for number, window in enumerate([*spare[:12], *passing[:SLOTS]]):
        window.fill_(number)
    assert all((window == number).all() for number, window in enumerate([*spare[:12], *passing[SLOTS:]]))
    room.close()
    assert memory.pool.free == memory.pool.count == 5


@given(st.lists(st.integers(1, WINDOW_NBYTES), max_size=40), st.integers(2, 12))
def test_windows_that_last_do_not_overlap(sizes, free):
    pool = pool_of(empty_aligned)  # as saves make it: other memory is aligned as it comes
    pool.grow(free)
    room = Room(pool)
    room.plan(sizes, True, 0)
    apart = free - pool.free
    found = sorted((w.data_ptr(), w.numel()) for nbytes in sizes if (w := room.lasting(nbytes, lambda: None)) is not None)
    assert all(a % ALIGN == b % ALIGN and a + n <= b for (a, n), (b, _) in itertools.pairwise(found))
    assert apart in (0, 2) and (apart or len(found) == len(sizes)), "where all fit nothing is set apart"


def test_a_pool_lends_what_it_has_and_takes_it_back():
    pool = pool_of(lambda nbytes: torch.empty(1))
    pool.grow(2)
    one, two = pool.borrow(), pool.borrow()
    assert one is not None and two is not None and pool.borrow() is None and pool.count == 2
    pool.give(one)
    pool.give(two)
    assert pool.count == pool.free == 2
    assert pool.borrow() is two, "the one that was given last"
