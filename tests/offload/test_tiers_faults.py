"""Disks that are missing, full or broken (B22): a refusal before anything is changed, or one error on every rank.

At run time a request fails on one rank: every rank raises the same OffloadIOError, which names file, offset and errno,
whatever it is doing; and from then on the model refuses, so that no half-written state is used. Nothing hangs: each test
has a limit.
"""

import contextlib
import copy
import errno
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from faulty_disk import Faulty, calls_of, raised_by
from forked_scenarios import run_forked
from helpers import Branches, OddGPT, Task, adamw, assert_equal_runs, seeded, token_batches, train
from offloading import TINY, offload, tiers
from torch import nn

import zeroshard as zs
from zeroshard.comm import hub
from zeroshard.comm.launch import free_port, run_processes
from zeroshard.comm.rendezvous import Door
from zeroshard.comm.shared_memory import SharedComm
from zeroshard.comm.transport import ProcessTransport, ThreadTransport, ThreadWorld
from zeroshard.config import Offload, Tier
from zeroshard.engine.ledger import STAGING, Ledger
from zeroshard.engine.rest import Rest, Tiers
from zeroshard.engine.runtime import runtime_of
from zeroshard.testing import run_threads
from zeroshard.tiers import storage
from zeroshard.tiers.io import async_file, swap_folder
from zeroshard.tiers.storage import FurtherTiers

pytestmark = pytest.mark.limit(30)
MODEL = seeded(lambda: OddGPT(dim=24, layers=4))
DATA = token_batches(4, 1, 2)


@pytest.fixture
def faulty(monkeypatch):
    """Every engine made from now on can be told to fail."""
    monkeypatch.setattr(async_file, "Syscalls", Faulty)


# -- at run time -------------------------------------------------------------------------------------------------

# name: (parameter, gradient, optimizer), the phase that the call is in, kind of call
FAULTS = {
    "fetch for forward": (("nvme", "none", "none"), "forward", "read"),
    "fetch for backward": (("nvme", "none", "none"), "backward", "read"),
    "gradient": (("none", "nvme", "cpu"), "backward", "write"),
    "gradient that is added to": (("none", "nvme", "cpu"), "second backward", "read"),
    "gradient read by the step": (("none", "nvme", "cpu"), "step", "read"),
    "states read by the step": (("none", "cpu", "nvme"), "step", "read"),
    "states written by the step": (("none", "cpu", "nvme"), "step", "write"),
    "parameters written by the step": (("nvme", "cpu", "cpu"), "step", "write"),
}
PHASES = ("forward", "backward", "second forward", "second backward", "step")


def run_until_it_fails(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, phase: str, arm) -> Exception | None:
    """Two good steps; in the third `arm()` is called before `phase`. What the rank raised."""
    loss = None

    def forward() -> None:
        nonlocal loss
        loss = model(*DATA[0][0][rank])

    phases = dict(zip(PHASES, (forward, lambda: loss.backward(), forward, lambda: loss.backward(), optimizer.step), strict=True))
    for step in range(4):
        for name, run in phases.items():
            if step == 2 and name == phase:
                arm()
            error = raised_by(run)
            if error is not None:
                return error
        optimizer.zero_grad()
    return None


def later_uses(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Exception | None]:
    """What a user may try after it failed."""
    return [
        raised_by(lambda: model(*DATA[0][0][rank])),
        raised_by(optimizer.step),
        raised_by(lambda: zs.full_state_dict(model, masters=True)),
        raised_by(lambda: zs.close(model)),
    ]


@pytest.mark.filterwarnings("ignore:module forward hook")  # the hook that would release the unit says the same
@pytest.mark.parametrize("world_size", [2, 1])
@pytest.mark.parametrize("name", FAULTS)
def test_every_rank_raises_the_same_error_and_goes_no_further(name, world_size, tmp_path, faulty, strict_device):
    places, phase, kind = FAULTS[name]
    number = errno.ENOSPC if kind == "write" else errno.EIO

    def rank_run(rank: int) -> tuple:
        strict_device(rank, "fetch" in name and world_size == 2)
        model = copy.deepcopy(MODEL)
        options = tiers(str(tmp_path), *places, **TINY, fused=False)
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3, **options)
        calls = calls_of(runtime_of(model))
        arm = (lambda: calls.arm(kind, number)) if rank == world_size - 1 else lambda: None
        error = run_until_it_fails(rank, model, optimizer, phase, arm)
        later = later_uses(rank, model, optimizer)
        calls.disarm()  # the disk is well again: what was written is not, and stays refused
        later += later_uses(rank, model, optimizer)
        return error, later, calls.failed

    results = run_threads(world_size, rank_run)
    error, *_ = results[-1]
    for got, later, _failed in results:
        assert isinstance(got, zs.OffloadIOError), repr(got)
        assert (got.file, got.offset, got.errno) == (error.file, error.offset, number)
        assert Path(got.file).parent.parent == tmp_path and errno.errorcode[number] in str(got) and str(got.offset) in str(got)
        assert all(isinstance(other, zs.OffloadIOError) for other in later), later
    assert (error.file, error.offset) in results[-1][2]
    assert not list(tmp_path.iterdir()), "zs.close can not give values back, but it removes the files"


@pytest.mark.parametrize("what", ["a short read", "a file that was cut"])
def test_less_than_was_written_is_an_error(what, tmp_path, faulty):
    """Not zeros, not what was in the buffer before."""

    def rank_run(rank: int) -> Exception:
        model = copy.deepcopy(MODEL)
        options = tiers(str(tmp_path), "none", "cpu", "nvme", **TINY)
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3, **options)
        (folder,) = runtime_of(model).tiers._folders.values()

        def harm() -> None:
            if rank == 0 and what == "a short read":
                folder.engine.calls.arm("read", lambda call: 0)
            elif rank == 0:
                for file in folder.swap.files.values():
                    os.truncate(file.path, 4096)

        return run_until_it_fails(rank, model, optimizer, "step", harm)

    for error in run_threads(2, rank_run):
        assert isinstance(error, zs.OffloadIOError) and error.errno == errno.ENODATA, repr(error)


def test_wrong_bytes_are_noticed_by_checksum(tmp_path):
    """checksum=True: a disk that returns something else than it was given."""

    def rank_run(rank: int) -> Exception:
        model = copy.deepcopy(MODEL)
        options = tiers(str(tmp_path), "nvme", "cpu", "nvme", **TINY, checksum=True)
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3, **options)
        (folder,) = runtime_of(model).tiers._folders.values()

        def harm() -> None:
            (file,) = folder.swap.files.values()
            with open(file.path, "r+b", buffering=0) as other:
                data = other.read(1 << 15)
                other.seek(0)
                other.write(bytes(byte ^ 255 for byte in data))

        return run_until_it_fails(rank, model, optimizer, "forward", harm if rank == 1 else lambda: None)

    for error in run_threads(2, rank_run):
        assert isinstance(error, zs.OffloadIOError) and error.errno == errno.EBADMSG, repr(error)


def rest_on_disk(path: Path) -> tuple[Tiers, Rest, Faulty]:
    """Eight pages of fp32 on disk, without a model."""
    owner = FurtherTiers(SharedComm(ThreadTransport(ThreadWorld(1), 0), torch.device("cpu")), Ledger())
    place = offload("nvme", str(path))
    owner.open_folder(place)
    (folder,) = owner._folders.values()
    return owner, owner.rest("states", place, 8192, torch.float32), folder.engine.calls


def test_a_failed_write_that_nobody_waited_for_is_no_secret(tmp_path, faulty):
    """Whatever is read or written next on that rest raises, also elsewhere in it: the value is not on disk."""
    owner, rest, calls = rest_on_disk(tmp_path)
    calls.arm("write", errno.ENOSPC)
    pending = rest.write(0, torch.ones(1024))
    while not pending.done():
        time.sleep(1e-3)
    calls.disarm()
    for use in (lambda: rest.load(4096, 5120), lambda: rest.store(4096, torch.ones(1)), lambda: rest.load(0, 1024)):
        assert isinstance(raised_by(use), zs.OffloadIOError)
    owner.close()
    assert not list(tmp_path.iterdir())


def test_values_of_another_dtype_are_converted_in_a_few_pieces(tmp_path):
    """From any element on, also where a page begins elsewhere; memory for it is constant, and gone afterwards."""
    ledger, numel = Ledger(), 3 * storage._PIECES * storage._PIECE_NBYTES // 4 + 77
    owner = FurtherTiers(SharedComm(ThreadTransport(ThreadWorld(1), 0), torch.device("cpu")), ledger)
    place = offload("nvme", str(tmp_path))
    owner.open_folder(place)
    rest, source = owner.rest("states", place, numel + 1025, torch.float32), torch.randn(numel).bfloat16()
    rest.store(1021, source)
    assert torch.equal(rest.load(0, numel + 1025), torch.cat([torch.zeros(1021), source.float(), torch.zeros(4)]))
    assert (
        ledger.elsewhere_peak[Tier.HOST] == storage._PIECES * storage._PIECE_NBYTES and not ledger.elsewhere[Tier.HOST][STAGING]
    )
    owner.close()


@pytest.mark.parametrize("second", ["read", "write"])
def test_requests_on_the_same_elements_keep_their_order(second, tmp_path, faulty):
    """A write waits for reads and writes under way, a read for writes."""
    owner, rest, calls = rest_on_disk(tmp_path)
    rest.store(0, torch.ones(8192))
    go, order = threading.Event(), []
    slow = "read" if second == "write" else "write"
    calls.arm(slow, lambda call: (go.wait(50), order.append(slow), call())[-1])
    out = torch.zeros(2048)
    first = rest.read(0, out) if slow == "read" else rest.write(0, torch.full((2048,), 2.0))
    threading.Timer(0.1, go.set).start()
    (rest.read(1024, torch.zeros(1024)) if second == "read" else rest.write(1024, torch.full((1024,), 3.0))).wait()
    order.append(second)
    first.wait()
    assert order.index(second) == len(order) - 1, order
    assert slow == "write" or torch.equal(out, torch.ones(2048))
    owner.close()


def test_a_removed_file_serves_to_the_end(tmp_path):
    """The system keeps an open file: nothing is lost, and `close` does not mind."""
    task = Task(MODEL, DATA)

    def rank_run(rank: int) -> tuple:
        expected = train(rank, task, stage=3)
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3, **tiers(str(tmp_path), *["nvme"] * 3, **TINY))
        for step, (ranks,) in enumerate(DATA):
            model(*ranks[rank]).backward()
            if step == 1:
                for file in runtime_of(model).tiers._folders[str(tmp_path)].swap.files.values():
                    os.unlink(file.path)
            optimizer.step()
            optimizer.zero_grad()
        zs.close(model)
        return expected.weights, model.state_dict()

    for expected, got in run_threads(2, rank_run):
        assert all(torch.equal(got[name], value) for name, value in expected.items())
    assert not list(tmp_path.iterdir())


def test_an_error_in_the_delayed_update_reaches_every_rank(tmp_path, faulty):
    """It happens in a thread, beside the next step; that thread must not touch the connections of its rank."""

    def rank_run(rank: int) -> tuple:
        model = copy.deepcopy(MODEL)
        options = tiers(str(tmp_path), "none", "cpu", "nvme", **TINY)
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3, delayed_update=0, **options)
        runtime = runtime_of(model)
        told: list[str] = []
        plain = runtime.comm.abort
        runtime.comm.abort = lambda *args: (told.append(threading.current_thread().name), plain(*args))
        arm = (lambda: calls_of(runtime).arm("write", errno.ENOSPC)) if rank == 0 else lambda: None
        error = run_until_it_fails(rank, model, optimizer, "step", arm)
        return error, later_uses(rank, model, optimizer), told

    results = run_threads(2, rank_run)
    for error, later, _ in results:
        assert isinstance(error, zs.OffloadIOError) and error.errno == errno.ENOSPC, repr(error)
        assert all(isinstance(other, zs.OffloadIOError) for other in later), later
    assert set(results[0][2]) == {"rank0"}


def test_after_a_failure_another_model_can_be_sharded(tmp_path, faulty):
    """In the same process: on one rank at once, on several after they have met anew (threads: another `run_threads`)."""
    task = Task(MODEL, DATA)

    def failing(rank: int) -> None:
        model = copy.deepcopy(MODEL)
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3, **tiers(str(tmp_path), *["nvme"] * 3, **TINY))
        calls_of(runtime_of(model)).arm("write", errno.ENOSPC)
        with pytest.raises(zs.OffloadIOError):
            model(*DATA[0][0][rank]).backward()
            optimizer.step()

    def working(rank: int) -> tuple:
        return train(rank, task, stage=3), train(rank, task, stage=3, **tiers(str(tmp_path), *["nvme"] * 3, **TINY))

    run_threads(2, failing)
    for expected, got in run_threads(2, working):
        assert_equal_runs(got, expected)
    failing(0)
    solo = [[[ranks[0]] for ranks in step] for step in DATA]
    task = Task(MODEL, solo)
    assert_equal_runs(*reversed(working(0)))


# -- before anything is changed ----------------------------------------------------------------------------------


def on_rank_1(plain: Callable, instead: Callable) -> Callable:
    """`plain`, but `instead` in the thread of rank 1."""
    return lambda *args, **kwargs: (instead if threading.current_thread().name == "rank1" else plain)(*args, **kwargs)


def small_disk(path):
    """statvfs of a disk with 4 KiB free."""
    return os.statvfs_result((4096, 4096, 10, 1, 1, 10, 10, 10, 0, 255))


def refuse(*args, **kwargs):
    raise PermissionError(errno.EACCES, "Permission denied")


@contextlib.contextmanager
def made_unusable(how: str, path: Path, monkeypatch: pytest.MonkeyPatch):
    """(path to give, words of the error)."""
    if how == "missing":
        yield path / "nowhere", ["does not exist", str(path / "nowhere")]
    elif how == "no folder":
        (path / "file").touch()
        yield path / "file", ["is not a folder"]
        (path / "file").unlink()
    elif how == "not writable":
        monkeypatch.setattr(swap_folder.Path, "mkdir", refuse)  # whoever runs the tests, also root
        yield path, ["not readable and writable"]
    elif how == "too small":
        monkeypatch.setattr(swap_folder.os, "statvfs", small_disk)
        yield path, ["too small", "bytes", "are needed by all ranks of this host", "4096 bytes", "are free"]
    elif how == "too small on one rank":
        monkeypatch.setattr(swap_folder.os, "statvfs", on_rank_1(os.statvfs, small_disk))
        yield path, ["rank 1", "too small"]
    elif how == "memory":
        monkeypatch.setattr(swap_folder, "filesystem_of", lambda parent: "tmpfs")
        yield path, ["tmpfs", "memory", "any_filesystem=True"]
    else:
        monkeypatch.setattr(swap_folder, "filesystem_of", lambda parent: "nfs4")
        yield path, ["nfs4", "network"]


@pytest.mark.parametrize("state", ["param", "gradient", "optimizer"])
@pytest.mark.parametrize(
    "how", ["missing", "no folder", "not writable", "too small", "too small on one rank", "memory", "network"]
)
def test_b22_a_folder_that_can_not_serve_is_refused_on_every_rank(how, state, tmp_path, monkeypatch):
    """With the reason and what to do; model and optimizer are as before and can be trained or sharded."""
    task = Task(MODEL, DATA[:2])

    def rank_run(rank: int, given: Path) -> tuple:
        model = copy.deepcopy(MODEL)
        optimizer = adamw(model.parameters())
        before = [(id(p), type(p), p.data_ptr()) for p in model.parameters()]
        error = raised_by(lambda: zs.shard(model, optimizer, stage=3, **{f"offload_{state}": Offload("nvme", path=str(given))}))
        assert before == [(id(p), type(p), p.data_ptr()) for p in model.parameters()]
        assert type(optimizer) is torch.optim.AdamW and not optimizer.state and "_zeroshard" not in model.__dict__
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), MODEL.parameters(), strict=True))
        model, optimizer = zs.shard(model, optimizer, stage=3)
        for (ranks,) in task.data:
            model(*ranks[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        zs.close(model)
        return error, model.state_dict(), train(rank, task).weights

    with made_unusable(how, tmp_path, monkeypatch) as (given, words):
        results = run_threads(2, rank_run, given)
    for error, got, expected in results:
        assert isinstance(error, zs.SwapError) and isinstance(error, ValueError), repr(error)
        assert all(word in str(error) for word in words), str(error)
        assert str(error) == str(results[0][0])
        assert all(torch.equal(got[name], value) for name, value in expected.items())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["write", "file"])
def test_a_disk_that_fails_while_the_model_is_placed_fails_on_every_rank(kind, tmp_path, faulty, monkeypatch):
    """Between the check and the last initial value. The model is lost, but nobody hangs and nothing is left."""

    def full(*args, **kwargs):
        raise zs.OffloadIOError("somewhere", 0, errno.ENOSPC, "making 1 bytes")

    if kind == "file":
        monkeypatch.setattr(swap_folder, "open_file", on_rank_1(swap_folder.open_file, full))
    else:
        monkeypatch.setattr(Faulty, "pwritev", on_second_engine())

    def rank_run(rank: int) -> Exception | None:
        model = copy.deepcopy(MODEL)
        return raised_by(
            lambda: zs.shard(model, adamw(model.parameters()), stage=3, **tiers(str(tmp_path), "nvme", "nvme", "nvme"))
        )

    for error in run_threads(2, rank_run):
        assert isinstance(error, zs.OffloadIOError) and error.errno == errno.ENOSPC, repr(error)
    gc.collect()
    assert not list(tmp_path.iterdir())


def on_second_engine() -> Callable:
    """The writes of one rank's engine fail, whichever comes second."""
    seen: list[int] = []

    def pwritev(self, file, buffers, offset):
        if id(self) not in seen:
            seen.append(id(self))
        if seen.index(id(self)) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.pwritev(file.fd, buffers, offset)

    return pwritev


@pytest.mark.filterwarnings("ignore:module forward hook")
@pytest.mark.parametrize("parameter", ["cpu", "nvme"])
def test_ranks_that_use_different_units_are_told_so(parameter, tmp_path, strict_device, monkeypatch):
    """Shards that must be fetched are gathered by all ranks together: a limit that is named, not a hang."""
    monkeypatch.setattr(hub, "CIRCLE_AFTER_S", 0.3)

    def rank_run(rank: int) -> Exception | None:
        strict_device(rank, parameter == "cpu")
        model = seeded(lambda: Branches(24))
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3, **tiers(str(tmp_path), parameter))
        error = raised_by(lambda: model(torch.ones(2, 24), (0,) if rank == 0 else (1,)).backward())
        raised_by(lambda: zs.close(model))
        return error

    errors = run_threads(2, rank_run)
    assert any(isinstance(error, zs.StallError) for error in errors), errors
    assert any("branches" in str(error) and "same modules" in str(error) for error in errors), errors


def test_a_peer_that_says_why_and_leaves_is_heard():
    """Writing to a closed connection fails while the reason still waits to be read."""
    ends: dict[int, ProcessTransport] = {}
    doors = [Door(), Door()]
    places = [door.address for door in doors]
    connect = lambda rank: ends.update({rank: ProcessTransport(rank, doors[rank], places, 5.0)})  # noqa: E731
    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends[0].send(1, ("never read",))
    ends[1].send(0, ("failed", "why", None))
    for sock in ends[1]._peers.values():
        sock.close()  # as the end of its process does
    ends[0].send(1, ("in vain",))
    assert [ends[0].receive(0.1)[1][0] for _ in range(2)] == ["failed", "lost"]
    ends[0].close()


# -- processes ---------------------------------------------------------------------------------------------------


def equality_over_gloo(path: str):
    """Ranks that do not share memory, and a network."""

    def run(rank: int, world: int):
        torch.distributed.init_process_group("gloo")
        task = Task(seeded(lambda: OddGPT(dim=24, layers=4)), DATA[:3])
        outcomes = [
            train(rank, task, stage=stage, comm="dist", **tiers(path, *places, **TINY))
            for stage, places in (
                (3, ()),
                (3, ("nvme", "nvme", "nvme")),
                (3, ("cpu", "cpu", "nvme")),
                (1, ("none", "none", "nvme")),
            )
        ]
        for got in outcomes[1:]:
            assert_equal_runs(got, outcomes[0])
            assert got.norms == outcomes[0].norms
        return len(outcomes)

    return run


def fault_in_a_process(kind: str, path: str):
    def run(rank: int, world: int):
        torch.distributed.init_process_group("gloo")
        async_file.Syscalls = Faulty
        model = seeded(lambda: OddGPT(dim=24, layers=4))
        options = tiers(path, "none", "nvme", "nvme", **TINY)
        # told, not missed
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3, stall_timeout_s=3600.0, **options)
        act = errno.EIO if kind == "error" else lambda call: os.kill(os.getpid(), signal.SIGKILL)
        arm = (lambda: calls_of(runtime_of(model)).arm("write", act, after=2)) if rank == 1 else lambda: None
        error = run_until_it_fails(rank, model, optimizer, "step", arm)
        if kind == "killed":
            raise error
        return type(error).__name__, getattr(error, "errno", None), getattr(error, "file", None), str(error)

    return run


SCENARIOS = {
    "equal": equality_over_gloo,
    "error": lambda path: fault_in_a_process("error", path),
    "killed": lambda path: fault_in_a_process("killed", path),
}


def _scenarios(rank: int, world: int, ports: dict[str, int], path: str) -> dict:
    return run_forked(rank, world, ports, {kind: make(path) for kind, make in SCENARIOS.items()})


@pytest.mark.processes
@pytest.mark.limit(120)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_are_equal_fail_together_and_when_killed_leave_nothing(tmp_path):
    """Over gloo; then, over shared memory, an I/O error, and a SIGKILL, of rank 1 in the middle of its step."""
    pair = run_processes(_scenarios, 2, {kind: free_port() for kind in SCENARIOS}, str(tmp_path))
    assert [rank["equal"].value for rank in pair] == [4, 4], [rank["equal"].text for rank in pair]
    errors = [rank["error"].value for rank in pair]
    assert [name for name, *_ in errors] == ["OffloadIOError"] * 2, errors
    assert errors[0] == errors[1] and errors[0][1] == errno.EIO
    survivor, killed = (rank["killed"] for rank in pair)
    assert killed.exitcode == -signal.SIGKILL
    assert survivor.exitcode == 1 and "PeerFailed: rank 1 failed" in survivor.text
    left = list(tmp_path.iterdir())  # the survivor of a fork ends without cleaning up as well
    assert len(left) == 2 and all(any(file.name.startswith("states") for file in folder.iterdir()) for folder in left)
    model = copy.deepcopy(MODEL)
    zs.shard(model, adamw(model.parameters()), stage=3, **tiers(str(tmp_path), "none", "nvme", "nvme"))
    assert not any(folder.exists() for folder in left), "the next run removes them"
    zs.close(model)
    assert not list(tmp_path.iterdir())
