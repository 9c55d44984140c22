"""Saves where something is slow, or fails in a way of its own: nobody is given up while it works, and nobody is left waiting."""

import errno
import fcntl
import json
import os
import pickle
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_kit import VOCAB, build, train
from faulty_disk import Faulty, calls_of, raised_by
from helpers import seeded, token_batches
from offloading import tiers
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint import bulk_reader, directory, file_writer, resolver, writing
from zeroshard.checkpoint import manifest as listing
from zeroshard.checkpoint.heartbeat import together
from zeroshard.checkpoint.manifest import Manifest
from zeroshard.comm import hub, shared_memory
from zeroshard.comm.backend_select import current
from zeroshard.config import Tier
from zeroshard.engine.ledger import Ledger
from zeroshard.engine.runtime import runtime_of
from zeroshard.testing import run_threads
from zeroshard.tiers.io import async_file

pytestmark = pytest.mark.limit(30)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def made(stall_timeout_s: float = 20.0, **options) -> tuple:
    return build("tied", stall_timeout_s=stall_timeout_s, **options)


# -- ranks that take their time ----------------------------------------------------------------------------------------

STALL_S, SLOW_S = 0.5, 1.3


@pytest.fixture
def impatient(monkeypatch):
    """Ranks that hear nothing from a peer give up after STALL_S, which grows with the time that all else takes on a busy machine."""
    begin, spent = time.monotonic(), time.thread_time()
    while time.thread_time() < spent + 0.05:
        pass
    slower = min((time.monotonic() - begin) / 0.05, 10.0)
    for name in ("STALL_S", "SLOW_S"):
        monkeypatch.setitem(globals(), name, globals()[name] * slower)
    monkeypatch.setattr(hub, "CIRCLE_AFTER_S", STALL_S / 2)
    plain = shared_memory.SharedComm.__init__
    monkeypatch.setattr(shared_memory.SharedComm, "__init__", lambda self, *args, **options: plain(self, *args[:2], STALL_S))


def on_rank_1(self, *_) -> bool:
    """Whether a method of a FileWriter is that of rank 1."""
    return isinstance(self, file_writer.FileWriter) and "rank-00001" in self.file.path


def slow(patch: pytest.MonkeyPatch, owner: type, name: str, where: Callable = on_rank_1) -> None:
    plain = getattr(owner, name)
    patch.setattr(owner, name, lambda self, *args: (time.sleep(SLOW_S if where(self) else 0), plain(self, *args))[1])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("where", [
    (file_writer.FileWriter, "fill"), (file_writer.FileWriter, "finish"), (directory.Draft, "publish", lambda draft: True),
], ids=["copying", "writing", "publishing"])  # fmt: skip
def test_a_slow_disk_of_one_rank_is_waited_for(where, asynchronous, tmp_path, monkeypatch, impatient):
    """Much longer than the stall timeout, and without a sign of the file."""

    def rank_run(rank: int) -> None:
        model, optimizer = made(STALL_S)
        save = zs.save(tmp_path, model, optimizer, name="x", asynchronous=asynchronous)
        assert save.wait() == tmp_path / "x" and names(tmp_path) == ["latest", "x"]
        zs.close(model)

    slow(monkeypatch, *where)
    run_threads(3, rank_run)


@pytest.mark.parametrize(
    "verify, where", [(True, (bulk_reader.Bulk, "read")), ("before", (resolver, "check_digests"))], ids=["read", "verify"]
)
def test_a_slow_disk_is_waited_for_in_a_load(verify, where, tmp_path, monkeypatch, impatient):
    def rank_run(rank: int) -> None:
        model, optimizer = made(STALL_S)
        zs.save(tmp_path, model, optimizer, name="x")
        if rank == 0:
            first = iter([True])
            slow(monkeypatch, *where, lambda _: next(first, False))
        runtime_of(model).comm.exchange(b"", "the load")
        zs.load(tmp_path, model, optimizer, verify=verify)
        zs.close(model)

    run_threads(2, rank_run)


def test_a_slow_disk_is_waited_for_where_there_are_no_locks(tmp_path, monkeypatch, impatient, no_locks):
    """Ranks renew the times of their files; one that does not is lost."""

    def rank_run(rank: int) -> list[Exception | None]:
        model, optimizer = made(STALL_S)
        errors = []
        for name in ("x", "y"):
            errors.append(raised_by(zs.save(tmp_path, model, optimizer, name=name, asynchronous=True).wait))
            if rank == 0:
                monkeypatch.setattr(writing, "_SIGN_S", 60.0)
            runtime_of(model).comm.exchange(b"", "the next")
        zs.close(model)
        return errors

    monkeypatch.setattr(writing, "_SIGN_S", 0.1)
    slow(monkeypatch, file_writer.FileWriter, "finish")
    for first, second in run_threads(2, rank_run):
        assert first is None
        assert isinstance(second, zs.CheckpointError) and "ranks [1] ended before they had written" in str(second), second
    assert names(tmp_path) == ["latest", "x"]


def test_together_gives_all_results_and_goes_on_while_ranks_work(impatient):
    def rank_run(rank: int) -> list:
        comm = world_comm()

        def work() -> int:
            time.sleep(SLOW_S if rank == 1 else 0)
            return rank * 10

        return together(comm, "zs.test: work", work)

    assert run_threads(3, rank_run) == [[0, 10, 20]] * 3


def test_together_one_that_fails_ends_the_work_of_others(impatient):
    """The first is told by name on every rank, with its cause where it was raised; what follows from it is not told."""

    def rank_run(rank: int) -> bool:
        stop = threading.Event()

        def work() -> None:
            if rank == 2:
                raise ValueError("mine")
            assert stop.wait(60)
            raise zs.CheckpointError("stopped")

        with pytest.raises(zs.CheckpointError, match="^zs.test: rank 2 failed: ValueError: mine$") as caught:
            together(world_comm(), "zs.test: work", work, stop.set)
        return isinstance(caught.value.__cause__, ValueError)

    assert run_threads(3, rank_run) == [False, False, True]


@pytest.mark.parametrize("how", ["leaves", "is elsewhere", "is interrupted"])
def test_together_a_peer_that_does_not_come_is_found(how, impatient):
    def rank_run(rank: int) -> None:
        stop = threading.Event()
        if rank == 1 and how == "leaves":
            return
        if rank == 1 and how == "is elsewhere":
            time.sleep(2 * SLOW_S)
            return
        if rank == 1:
            with pytest.raises(KeyboardInterrupt):
                together(world_comm(), "zs.test: work", interrupted)
            return
        kinds = {"leaves": zs.PeerFailed, "is elsewhere": zs.StallError, "is interrupted": zs.CheckpointError}
        stopped: list[bool] = []
        with pytest.raises(kinds[how], match="rank 1 failed|rank 1 left|missing \\[1\\]"):
            together(world_comm(), "zs.test: work", lambda: stopped.append(stop.wait(60)), stop.set)
        assert stopped == [True]  # the work was ended, and not waited for

    def interrupted() -> None:
        raise KeyboardInterrupt

    run_threads(2, rank_run)


def world_comm() -> shared_memory.SharedComm:
    return current(None, torch.device("cpu"), STALL_S)


# -- errors on one rank ------------------------------------------------------------------------------------------------


class Buffered(nn.Module):
    def __init__(self, value: torch.Tensor, extra: object = None) -> None:
        super().__init__()
        self.map, self.extra = nn.Linear(5, 3), extra
        self.register_buffer("odd", value)

    def get_extra_state(self) -> object:
        return self.extra() if self.extra is not None else None

    def set_extra_state(self, state: object) -> None:
        pass


def raises(error: BaseException, when=lambda *args: True):
    """A replacement for a function or method that fails instead."""

    def wrap(plain):
        def act(*args, **options):
            if when(*args):
                raise error
            return plain(*args, **options)

        return act

    return wrap


FAULTS = {  # where, what replaces it, which error is told
    "copying": (
        file_writer.FileWriter,
        "fill",
        raises(RuntimeError("out of the device"), on_rank_1),
        "rank 1 failed: RuntimeError",
    ),
    "memory": (file_writer.BufferPool, "grow", raises(MemoryError()), "rank 0 failed: MemoryError$"),
    "listing": (listing, "join", raises(AssertionError("not covered")), "rank 0 failed: AssertionError: not covered"),
    "manifest": (listing, "write", raises(MemoryError("no room")), "rank 0 failed: MemoryError: no room"),
    "collecting": (writing.holding, "collect", raises(KeyError("place")), "rank 0 failed: KeyError: 'place'"),
    "draft": (directory, "sweep", raises(ValueError("what is that")), "rank 0 failed: ValueError: what is that"),
    "writing": (
        file_writer.FileWriter,
        "finish",
        raises(RuntimeError("no more"), on_rank_1),
        "rank 1 failed: RuntimeError: no more",
    ),
}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", FAULTS)
def test_an_unforeseen_error_reaches_every_rank(name, asynchronous, tmp_path, monkeypatch):
    """By rank and cause; nothing is left, and the next save works."""
    owner, attribute, replacement, words = FAULTS[name]
    plain = getattr(owner, attribute)

    def rank_run(rank: int) -> Exception | None:
        model, optimizer = made()
        comm = runtime_of(model).comm
        zs.save(tmp_path, model, optimizer, name="good")
        if rank == 0:
            monkeypatch.setattr(owner, attribute, replacement(plain))
        comm.exchange(b"", "now")
        error = raised_by(lambda: zs.save(tmp_path, model, optimizer, name="bad", asynchronous=asynchronous).wait())
        comm.exchange(b"", "all have failed")
        if rank == 0:
            assert names(tmp_path) == ["good", "latest"]
            monkeypatch.setattr(owner, attribute, plain)
        comm.exchange(b"", "again")
        zs.save(tmp_path, model, optimizer, name="next", asynchronous=asynchronous).wait()
        zs.close(model)
        return error

    for error in run_threads(2, rank_run):
        assert type(error) is zs.CheckpointError, repr(error)
        assert re.search(words, str(error)), error
    assert names(tmp_path) == ["good", "latest", "next"]


def test_swap_that_can_not_be_read_ends_the_save_and_the_run(tmp_path, monkeypatch):
    """The error of the file on every rank. The save tells it; nothing else is sent while its beats are."""
    monkeypatch.setattr(async_file, "Syscalls", Faulty)
    plain, told = shared_memory.SharedComm.abort, []
    monkeypatch.setattr(shared_memory.SharedComm, "abort", lambda *args: (told.append(args[1]), plain(*args))[1])
    (tmp_path / "swap").mkdir()
    batches = [step[0] for step in token_batches(3, 1, 2, VOCAB)]

    def rank_run(rank: int) -> list[Exception | None]:
        model, optimizer = made(**tiers(str(tmp_path / "swap"), "none", "none", "nvme"))
        train(model, optimizer, rank, batches[:1])
        calls_of(runtime_of(model)).arm("read", errno.EIO) if rank == 1 else None
        errors = [raised_by(lambda: zs.save(tmp_path / "run", model, optimizer))]
        assert not told
        runtime_of(model).comm.exchange(b"", "all have looked")
        errors.append(raised_by(lambda: train(model, optimizer, rank, batches[1:])))
        raised_by(lambda: zs.close(model))
        return errors

    for errors in run_threads(2, rank_run):
        for error in errors:
            assert isinstance(error, zs.OffloadIOError) and error.errno == errno.EIO and "swap" in error.file, repr(error)
    assert names(tmp_path / "run") == []


def unpicklable() -> object:
    return threading.Lock()


def broken() -> object:
    raise LookupError("no state")


@pytest.mark.parametrize("value, extra, kind, words", [
    (torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8), None, zs.ConfigError, "model.odd is torch.qint8"),
    (torch.zeros(3), unpicklable, zs.ConfigError, "model._extra_state can not be saved: cannot pickle"),
    (torch.zeros(3), broken, zs.CheckpointError, "rank 0 failed: LookupError: no state"),
], ids=["dtype", "unpicklable", "broken"])  # fmt: skip
def test_a_module_that_can_not_be_saved_is_told_on_every_rank(value, extra, kind, words, tmp_path):
    """Only rank 0 looks at buffers and extra state."""
    module = seeded(lambda: Buffered(value, extra))

    def rank_run(rank: int) -> None:
        model, optimizer = build(module, stall_timeout_s=20.0)
        for asynchronous in (False, True):
            with pytest.raises(kind) as caught:
                zs.save(tmp_path, model, optimizer, asynchronous=asynchronous)
            assert type(caught.value) is kind and words in str(caught.value)
        runtime_of(model).comm.exchange(b"", "all have seen it")
        assert names(tmp_path) == []

    run_threads(2, rank_run)


def test_arguments_and_extras_that_only_one_rank_gives_wrong_are_told_on_every_rank(tmp_path):
    def rank_run(rank: int) -> None:
        model, optimizer = made()
        mine = threading.Lock() if rank else 1
        for given, words in (({"extra": {"m": mine}}, r"extra\['m'\] can not be saved"), ({"step": 1 - 2 * rank}, "got -1")):
            with pytest.raises(zs.ConfigError, match=words):
                zs.save(tmp_path, model, optimizer, **given)
        zs.close(model)

    run_threads(2, rank_run)
    assert names(tmp_path) == []


@pytest.mark.parametrize("extras, taken", [({"a": None, "a.7": "s7"}, "a.7"), ({"a": None, "a.0": None}, "a.0"),
                                           ({"a": 1, "a.7": 2}, ""), ({"a": None, "a.b": 1, "a.": 2}, "")])  # fmt: skip
def test_names_of_extras_like_those_of_other_ranks_are_refused(extras, taken, tmp_path):
    """Also of ranks that there are not: a load at another number of them, and listings, could not tell them apart."""

    def rank_run(rank: int) -> None:
        model, optimizer = made()
        given = {name: rank if value is None else value for name, value in extras.items()}
        if taken:
            with pytest.raises(
                zs.ConfigError, match=rf"extra\['{taken}'\]: the checkpoint uses this name for rank {taken[2:]}'s 'a'"
            ):
                zs.save(tmp_path, model, optimizer, extra=given)
        else:
            zs.save(tmp_path, model, optimizer, extra=given)
            assert zs.load(tmp_path, model, optimizer).extra == given
        zs.close(model)

    run_threads(2, rank_run)


# -- what is said of the disk ------------------------------------------------------------------------------------------


def test_a_folder_that_may_not_be_looked_at(tmp_path, monkeypatch):
    """The error is the system's, with the space of the nearest folder above that tells, or without."""
    closed = tmp_path / "closed"
    closed.mkdir()
    plain_stat, plain_usage, known = os.stat, shutil.disk_usage, True

    def stat(path, *args, **options):
        if str(path).startswith(f"{closed}/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return plain_stat(path, *args, **options)

    def usage(path):
        if not known or str(path).startswith(f"{closed}/"):
            raise PermissionError(errno.EACCES, "", str(path))
        return plain_usage(path)

    monkeypatch.setattr(os, "stat", stat), monkeypatch.setattr(shutil, "disk_usage", usage)

    def rank_run(rank: int) -> Exception | None:
        model, optimizer = made()
        error = raised_by(lambda: zs.save(closed / "run", model, optimizer))
        zs.close(model)
        return error

    for known in (True, False):
        for error in run_threads(2, rank_run):
            assert isinstance(error, zs.CheckpointWriteError) and error.errno == errno.EACCES, repr(error)
            assert (error.free is not None) == known and ("how many are free is unknown" in str(error)) != known
            assert str(pickle.loads(pickle.dumps(error))) == str(error)


# -- the writer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("where", ["write", "digest"])
def test_whatever_ends_the_writer_ends_the_save(where, asynchronous, tmp_path, monkeypatch):
    """More data than buffers: they all come back, for the filler and for the next save."""
    monkeypatch.setattr(writing, "BUFFER_NBYTES", 1 << 20)
    model = seeded(lambda: nn.Linear(1500, 1500))  # 9 MB
    model, optimizer = build(model)
    with monkeypatch.context() as patch:
        if where == "write":
            patch.setattr(file_writer.Engine, "write", raises(RuntimeError("can't start new thread"))(file_writer.Engine.write))
        else:
            patch.setattr(file_writer.xxhash, "xxh3_64_hexdigest", raises(MemoryError("digest"))(None))
        with pytest.raises(zs.CheckpointError, match="rank 0 failed: (RuntimeError: can't start|MemoryError: digest)"):
            zs.save(tmp_path, model, optimizer, name="x", asynchronous=asynchronous).wait()
    pool = runtime_of(model).gate.saver.pool
    assert names(tmp_path) == [] and pool.free == pool.count
    path = zs.save(tmp_path, model, optimizer, name="x", asynchronous=asynchronous).wait()
    assert len(Manifest.read(path).files[0].digests) == file_writer.digest_count((path / "rank-00000.distcp").stat().st_size)
    zs.close(model)


def test_a_file_of_which_not_all_was_written_is_not_published(tmp_path, monkeypatch):
    model, optimizer = made()
    monkeypatch.setattr(file_writer, "digests_of", lambda memory: ())
    with pytest.raises(zs.CheckpointError, match="only 0 of 1 MiB were written"):
        zs.save(tmp_path, model, optimizer)
    assert names(tmp_path) == []
    zs.close(model)


def test_a_manifest_with_too_few_checksums_is_damaged(tmp_path):
    model, optimizer = made()
    path = zs.save(tmp_path, model, optimizer).path
    manifest = Manifest.read(path)
    manifest.files[0] = replace(manifest.files[0], digests=())
    (path / "manifest.json").write_bytes(manifest.to_json())
    with pytest.raises(zs.CheckpointCorrupt, match="expected 1 checksums of the .* bytes of rank-00000.distcp, found 0"):
        zs.load(tmp_path, model, optimizer)
    zs.close(model)


def test_buffers_are_counted_as_they_are_made():
    made = []

    def make(nbytes: int) -> torch.Tensor:
        if len(made) == 2:
            raise MemoryError
        made.append(torch.empty(1))
        return made[-1]

    pool = file_writer.BufferPool(Ledger(), 0, file_writer.BUFFER_NBYTES, make, Tier.HOST)
    with pytest.raises(MemoryError):
        pool.grow(4)
    assert pool.count == pool.free == 2
    made.clear()
    pool.grow(3)
    assert pool.count == pool.free == 3


def test_a_buffer_goes_round_only_when_all_reads_into_it_have_ended(tmp_path, monkeypatch):
    """One of them fails."""
    model, optimizer = made()
    ended = []

    class Reading:
        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self) -> None:
            ended.append(self.number)
            if self.number == 0:
                raise zs.OffloadIOError("swap", 0, errno.EIO, "read")

    monkeypatch.setattr(writing.holding.StateSlice, "read", lambda self, start, out: Reading(len(ended) + reads.pop()))
    reads = list(range(1000))[::-1]
    with pytest.raises(zs.OffloadIOError):
        zs.save(tmp_path, model, optimizer)
    assert len(ended) > 1
    zs.close(model)


# -- locks -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_locks(monkeypatch):
    def flock(fd, operation) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    directory._said.clear()


def test_a_filesystem_without_locks(tmp_path, no_locks, capfd):
    """Saves work, and it is said once. Only what surely is nobody's is removed."""

    def rank_run(rank: int) -> None:
        model, optimizer = made()
        for number, asynchronous in enumerate((False, True, False)):
            zs.save(tmp_path, model, optimizer, name=f"{number}", asynchronous=asynchronous).wait()
        zs.close(model)

    mine, elsewhere = directory._this_process(), {"place": ["another host"], "pid": 1, "started": "1"}
    notes = {"alive": mine, "ended": {**mine, "started": "1"}, "elsewhere": elsewhere, "old": elsewhere, "strange": 3}
    for name, note in notes.items():
        (tmp_path / f".{name}.abcdef.draft").mkdir()
        (tmp_path / f".{name}.abcdef.draft" / "lock").write_text(json.dumps(note))
    days = time.time() - 3 * 24 * 3600
    for path in (tmp_path / ".old.abcdef.draft" / "lock", tmp_path / ".old.abcdef.draft"):
        os.utime(path, (days, days))
    run_threads(2, rank_run)
    assert names(tmp_path) == [".alive.abcdef.draft", ".elsewhere.abcdef.draft", ".strange.abcdef.draft", "0", "1", "2", "latest"]
    assert capfd.readouterr().err.count("has no file locks") == 1


def test_locks_are_taken_on_files_that_can_be_written(tmp_path, monkeypatch):
    """As NFS wants it. All ranks' locks are seen, so one that ends is noticed at once."""
    plain, seen = fcntl.flock, []

    def flock(fd, operation) -> None:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        plain(fd, operation)

    def rank_run(rank: int) -> None:
        model, optimizer = made()
        for asynchronous in (False, True):
            zs.save(tmp_path, model, optimizer, name=f"{asynchronous}", asynchronous=asynchronous).wait()
        zs.close(model)

    monkeypatch.setattr(fcntl, "flock", flock)
    background = writing.Writing._background
    monkeypatch.setattr(writing.Writing, "_background", lambda self, save: (seen.append(self.locked), background(self, save))[1])
    (tmp_path / ".left.abcdef.draft").mkdir()
    (tmp_path / ".left.abcdef.draft" / "lock").touch()
    run_threads(2, rank_run)
    assert names(tmp_path) == ["False", "True", "latest"] and seen == [True, True]


def test_closing_a_model_whose_save_failed_leaves_nothing(tmp_path, monkeypatch, capfd):
    """Neither the draft nor its lock's descriptor; and it is said."""

    def rank_run(rank: int) -> None:
        model, optimizer = made()
        zs.save(tmp_path, model, optimizer, name="x", asynchronous=True)
        zs.close(model)

    monkeypatch.setattr(file_writer.FileWriter, "finish", raises(MemoryError("mine"), on_rank_1)(file_writer.FileWriter.finish))
    before = len(os.listdir("/proc/self/fd"))
    run_threads(2, rank_run)
    assert names(tmp_path) == [] and len(os.listdir("/proc/self/fd")) <= before  # less: what an earlier test left
    assert capfd.readouterr().err.count("x was not saved: zs.save: rank 1 failed: MemoryError: mine") == 1
