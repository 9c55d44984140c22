"""Objects that one thread at a time may use refuse a second, name both, and go on; what threads share legitimately stays whole."""

import copy
import itertools
import sys
import threading
import time

import pytest
import torch
from helpers import adamw, seeded
from torch import nn

import zeroshard as zs
from zeroshard.comm.fake import FakeComm
from zeroshard.config import Offload, Tier
from zeroshard.engine.comm.base import Collective
from zeroshard.engine.comm.pool import StagingPool
from zeroshard.engine.ledger import Ledger
from zeroshard.engine.runtime import runtime_of
from zeroshard.errors import OffloadIOError
from zeroshard.testing import run_threads
from zeroshard.tiers.host_step import HostStepper
from zeroshard.tiers.pool import Arena, BufferPool
from zeroshard.utils.one_thread import Turn, one_thread

MODEL = seeded(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))


@pytest.fixture(autouse=True)
def _threads_change_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_thread(name: str, work) -> list:
    """What a thread of that name returns or raises, in a list."""
    found: list = []

    def body() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=body, name=name)
    thread.start()
    thread.join()
    assert not thread.is_alive()
    return found


def test_with_a_lock_for_its_turn_an_object_lets_the_second_thread_wait():
    class Desk:
        def __init__(self) -> None:
            self.turn, self.inside, self.served = threading.RLock(), 0, 0

        @one_thread
        def serve(self) -> None:
            self.inside += 1
            assert self.inside == 1
            self.note()
            self.inside -= 1

        @one_thread
        def note(self) -> None:
            self.served += 1

    desk = Desk()
    threads = [threading.Thread(target=lambda: [desk.serve() for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert desk.served == 800 and desk.inside == 0


def test_a_second_thread_is_refused_by_name_and_the_first_goes_on():
    class Desk:
        turn = Turn("the desk")

        @one_thread
        def outer(self) -> int:
            (refused,) = in_thread("visitor", self.inner)
            assert isinstance(refused, zs.ThreadsMet)
            assert f"the desk: thread 'visitor' came in while thread '{threading.current_thread().name}' was inside" in str(
                refused
            )
            return self.inner()  # the same thread may come in again

        @one_thread
        def inner(self) -> int:
            return 7

    desk = Desk()
    assert desk.outer() == 7
    assert in_thread("visitor", desk.inner) == [7]  # nobody is inside any more, also after a refusal


class Transfer(Collective):
    """Is over when it is waited for. Others run meanwhile, as beside a disk."""

    def __init__(self) -> None:
        self.over = False

    def done(self) -> bool:
        time.sleep(0)
        return self.over

    def wait(self) -> None:
        time.sleep(0)
        self.over = True

    join = wait


def memory(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def use_arena():
    arena = Arena(Ledger(), 8 * 4096, 4096, memory, Tier.HOST)
    arena.reserve(8 * 4096)

    def use() -> None:
        piece = arena.take(4096, wait=True)
        if piece is not None:
            arena.give(piece, Transfer())
        arena.drain()

    return use


def use_buffers():
    pool = BufferPool(Ledger(), 2, 4096, memory, Tier.HOST)

    def use() -> None:
        buffer = pool.take(wait=True)
        if buffer is not None:
            pool.give(buffer, Transfer())

    return use


def use_staging():
    pool = StagingPool(FakeComm(0, 1), Ledger(), 4096, 2, 2)

    def use() -> None:
        taken = pool.try_take(1024, torch.float32)
        if taken is not None:
            pool.give(taken[0], None)

    return use


@pytest.mark.parametrize("make", [use_arena, use_buffers, use_staging])
def test_two_threads_in_a_pool_are_told_so_and_never_meet_a_torn_queue(make):
    """Without the check: IndexError, pop from an empty deque; or one piece of memory for two."""
    use, problems, refused = make(), [], []
    begin = threading.Barrier(2)

    def body() -> None:
        begin.wait()
        for number in itertools.count():
            if problems or (refused and number > 1000):  # until they have met: the limit of the test ends it otherwise
                return
            try:
                use()
            except zs.ThreadsMet as met:
                refused.append(met)
            except Exception as error:
                problems.append(error)

    threads = [threading.Thread(target=body, name=f"user {number}") for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def delayed(rank: int, **options):
    model = copy.deepcopy(MODEL)
    return zs.shard(
        model, adamw(model.parameters()), units="leaf", stage=2, delayed_update=0, offload_optimizer=Offload("cpu"), **options
    )


def test_the_ranks_thread_does_not_come_into_a_delayed_step(monkeypatch):
    """It stays out by itself wherever the library calls the stepper; who calls it past the gate is told."""
    inside, go_on = threading.Event(), threading.Event()
    plain = HostStepper._compute

    def compute(self, slab):
        inside.set()
        assert go_on.wait(20)
        plain(self, slab)

    monkeypatch.setattr(HostStepper, "_compute", compute)

    def rank_run(rank: int) -> None:
        model, optimizer = delayed(rank)
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        assert inside.wait(20)
        model(torch.ones(2, 64)).sum().backward()  # reads ahead on its way
        core = runtime_of(model).optimizers.core
        runtime_of(model).gate.read_ahead()
        for call in (core.host.read_ahead, core.host.drop_ahead, core.host.give_back, core.host.pool.drain, core.host.close):
            with pytest.raises(zs.ThreadsMet, match="while thread 'zeroshard-delayed-step' was inside"):
                call()
        go_on.set()
        optimizer.step()
        zs.close(model)

    run_threads(1, rank_run)


def test_a_delayed_step_leaves_it_to_the_ranks_thread_to_tell_the_peers(monkeypatch):
    """The Comm is with a forward meanwhile: a failure that the step meets is raised in it, and told by the next `wait`."""
    told: list[str] = []

    def rank_run(rank: int) -> None:
        model, optimizer = delayed(rank)
        runtime = runtime_of(model)
        monkeypatch.setattr(runtime.tiers.comm, "abort", lambda *_: told.append(threading.current_thread().name))

        def compute(self, slab):
            self.tiers.failure = OffloadIOError("/disk", 0, 5, "reading")  # as one that came before
            self.tiers.check()

        monkeypatch.setattr(HostStepper, "_compute", compute)
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        with pytest.raises(OffloadIOError):
            runtime.gate.wait()

    run_threads(1, rank_run)
    assert told == ["rank0"]


def test_two_threads_do_not_exchange_at_once():
    """Each would take the other's answer for its own."""

    def rank_run(rank: int) -> None:
        model, _ = delayed(rank)
        comm = runtime_of(model).comm
        if rank == 0:
            waiting = threading.Thread(target=lambda: comm.exchange(b"first", "a meeting"), name="first")
            waiting.start()
            while comm.progress.waiting != "a meeting":
                assert waiting.is_alive()
            with pytest.raises(zs.ThreadsMet, match="the communicator of rank 0: thread 'rank0' came in while thread 'first'"):
                comm.exchange(b"second", "another meeting")
            go.set()
            waiting.join()
        else:
            assert go.wait(20)
            assert comm.exchange(b"mine", "a meeting") == [b"first", b"mine"]
        zs.close(model)

    go = threading.Event()
    run_threads(2, rank_run)
