"""B07, disks that are full, broken, read-only or gone: one error on every rank, nothing changed, and the next save works."""

import contextlib
import errno
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_kit import VOCAB, LowRank, assert_equal, build, snapshot, train
from faulty_disk import Faulty, raised_by
from helpers import seeded, token_batches

import zeroshard as zs
from zeroshard.checkpoint import directory, file_writer, saving, writing
from zeroshard.checkpoint import manifest as listing
from zeroshard.checkpoint.saving import saver_of
from zeroshard.engine.runtime import runtime_of
from zeroshard.seam import engine_of
from zeroshard.testing import run_threads
from zeroshard.tiers.io import async_file

pytestmark = pytest.mark.limit(60)
BATCHES = [step[0] for step in token_batches(8, 1, 4, VOCAB)]


# -- B07: the disk ---------------------------------------------------------------------------------------------------


def no_space(ranks: tuple[int, ...], patch: pytest.MonkeyPatch) -> int:
    def full(path, nbytes, **options):
        if any(f"rank-{rank:05d}" in str(path) for rank in ranks):
            raise zs.OffloadIOError(str(path), 0, errno.ENOSPC, f"making {nbytes} bytes")
        return plain(path, nbytes, **options)

    plain = writing.open_file
    patch.setattr(writing, "open_file", full)
    return errno.ENOSPC


def vanishing(patch: pytest.MonkeyPatch) -> int:
    def finish(self) -> None:
        shutil.rmtree(Path(self.file.path).parent, ignore_errors=True)
        plain(self)

    plain = file_writer.FileWriter.finish
    patch.setattr(file_writer.FileWriter, "finish", finish)
    return errno.ENOENT


def no_room_for_the_list(patch: pytest.MonkeyPatch) -> int:
    """Nor for a word about it, as long as the data is there."""

    def write(path: Path, content: bytes, **how: bool) -> None:
        if "rank-00001" in path.name and (path.parent / "rank-00001.distcp").exists():
            raise OSError(errno.EDQUOT, "", str(path))
        plain(path, content, **how)

    plain = directory.write_whole
    patch.setattr(directory, "write_whole", write)
    patch.setattr(writing, "_SMALL_NBYTES", 0)  # as if it were long
    return errno.EDQUOT


def no_room_for_the_layout(patch: pytest.MonkeyPatch) -> int:
    """Which rank 0 does not know yet."""
    plain = writing.Writing._open
    patch.setattr(writing.Writing, "_open", lambda self: (plain(self)[0], []))
    return no_room_for_the_list(patch)


def at_the_end(name: str, number: int) -> Callable[[pytest.MonkeyPatch], int]:
    """Writing one of the last files, or naming the folder, fails on rank 0."""

    def patch_it(patch: pytest.MonkeyPatch) -> int:
        def fail(plain, here):
            def act(source, *rest, **how):
                if here(source, *rest):
                    raise OSError(number, os.strerror(number), str(source))
                return plain(source, *rest, **how)

            return act

        if name == "rename":
            patch.setattr(directory.os, "rename", fail(os.rename, lambda source, target: ".bad." in str(source)))
        elif name == "latest":
            patch.setattr(directory.os, "replace", fail(os.replace, lambda source, target: Path(target).name == "latest"))
        else:
            write = fail(directory.write_whole, lambda path, content: path.name == name)
            patch.setattr(directory, "write_whole", write), patch.setattr(listing, "write_whole", write)
        return number

    return patch_it


def read_only(patch: pytest.MonkeyPatch) -> int:
    def refuse(self, *args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    patch.setattr(directory.Path, "mkdir", refuse)  # whoever runs the tests, also root
    return errno.EROFS


def broken_device(patch: pytest.MonkeyPatch) -> int:
    """A write fails in the middle, on rank 1."""
    plain = saver_of

    def armed(engine):
        saver = plain(engine)
        if engine.ranks.rank == 1:
            saver.io.calls.arm("write", errno.EIO)
        return saver

    patch.setattr(saving, "saver_of", armed)
    return errno.EIO


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], int]] = {
    "full on every rank": lambda patch: no_space((0, 1), patch),
    "full on one rank": lambda patch: no_space((1,), patch),
    "quota": no_room_for_the_list,
    "quota, layout": no_room_for_the_layout,
    "read-only": read_only,
    "broken device": broken_device,
    "vanished": vanishing,
    "no room for the manifest": at_the_end("manifest.json", errno.ENOSPC),
    "no room for the pointer": at_the_end("latest", errno.ENOSPC),
    "no rename": at_the_end("rename", errno.EIO),
}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", FAULTS)
def test_b07_a_save_that_fails_fails_on_every_rank_and_changes_nothing(name, asynchronous, tmp_path, monkeypatch):
    """Path, errno, bytes needed and free; training goes on with the same bits; the pointer stands; the next save works."""
    monkeypatch.setattr(writing, "FileEngine", lambda: async_file.Engine(calls=Faulty()))
    met = threading.Barrier(2)

    def rank_run(rank: int) -> None:
        model, optimizer = build("tied", stall_timeout_s=3600.0)  # nobody waits until others are missed
        train(model, optimizer, rank, BATCHES[:2])
        zs.save(tmp_path, model, optimizer, name="good")
        before = snapshot(model, optimizer)
        with monkeypatch.context() if rank == 0 else contextlib.nullcontext() as patch:
            number.append(FAULTS[name](patch)) if rank == 0 else None
            met.wait(20)
            error = raised_by(lambda: zs.save(tmp_path, model, optimizer, name="bad", asynchronous=asynchronous).wait())
            met.wait(20)
        saver_of(engine_of(model)).io.calls.disarm()
        met.wait(20)
        check_write_error(error, number[0], tmp_path, name)
        assert_equal(snapshot(model, optimizer), before, "in memory")
        assert (tmp_path / "latest").read_text() == "good\n" and list(directory.complete(tmp_path)) == ["good"]
        train(model, optimizer, rank, BATCHES[2:4])
        onward = snapshot(model, optimizer)
        met.wait(20)
        zs.save(tmp_path, model, optimizer, name="bad", asynchronous=asynchronous).wait()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["bad", "good", "latest"]
        zs.load(tmp_path, model, optimizer, name="good")
        assert_equal(snapshot(model, optimizer), before, "the one before")
        train(model, optimizer, rank, BATCHES[2:4])
        assert_equal(snapshot(model, optimizer), onward, "as if nothing had been")
        zs.load(tmp_path, model, optimizer)
        assert_equal(snapshot(model, optimizer), onward, "the one after")
        zs.close(model)

    number: list[int] = []
    run_threads(2, rank_run)


def check_write_error(error: Exception | None, number: int, root: Path, name: str) -> None:
    assert isinstance(error, zs.CheckpointWriteError), repr(error)
    assert error.errno == number and errno.errorcode[number] in str(error)
    assert Path(error.path) == root or root in Path(error.path).parents
    assert error.free > 0 and f"{error.free:,} are free" in str(error)
    if name in ("full on every rank", "full on one rank", "quota", "quota, layout", "broken device"):
        assert error.needed > 1000 and f"{error.needed:,} bytes are needed" in str(error)


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem of 1 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("a small filesystem can not be mounted here")  # takes root; "full on every rank" above injects the same error
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_b07_a_filesystem_that_is_really_full(small_disk, asynchronous):
    """The second checkpoint has no room; when the first is gone, it has."""
    model = seeded(lambda: LowRank(128))
    model.base.requires_grad_(True)

    def rank_run(rank: int) -> None:
        module, optimizer = build(model)
        train(module, optimizer, rank, [[(torch.ones(2, 128),)]])
        zs.save(small_disk, module, optimizer, name="first")
        error = raised_by(lambda: zs.save(small_disk, module, optimizer, name="second", asynchronous=asynchronous).wait())
        assert isinstance(error, zs.CheckpointWriteError) and error.errno == errno.ENOSPC, repr(error)
        assert error.needed > error.free >= 0  # nothing, while the other rank's file is about to take it all
        runtime_of(module).comm.exchange(b"", "all have seen it")
        assert sorted(path.name for path in small_disk.iterdir()) == ["first", "latest"]
        runtime_of(module).comm.exchange(b"", "all have looked")
        if rank == 0:
            shutil.rmtree(small_disk / "first")
        zs.save(small_disk, module, optimizer, name="second", asynchronous=asynchronous).wait()
        zs.close(module)

    run_threads(2, rank_run)
    assert list(directory.complete(small_disk)) == ["second"]


def test_b07_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "run").write_text("mine")

    def rank_run(rank: int) -> None:
        model, optimizer = build("tied")
        for path in (tmp_path / "run", tmp_path / "run" / "deeper"):
            error = raised_by(lambda path=path: zs.save(path, model, optimizer))
            assert isinstance(error, zs.CheckpointWriteError) and error.errno == errno.ENOTDIR and error.path == str(path), repr(
                error
            )
        zs.close(model)

    run_threads(2, rank_run)
    assert (tmp_path / "run").read_text() == "mine"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_b07_a_rank_that_does_not_see_the_folder(asynchronous, tmp_path, monkeypatch):
    """A path of each host's own disk: the rank, and the remedy, on all ranks; nothing is left."""
    blind, plain = [], os.path.isdir
    monkeypatch.setattr(writing.os.path, "isdir", lambda path: threading.get_ident() not in blind and plain(path))

    def rank_run(rank: int) -> None:
        model, optimizer = build("tied")
        if rank == 1:
            blind.append(threading.get_ident())
        error = raised_by(lambda: zs.save(tmp_path, model, optimizer, asynchronous=asynchronous))
        assert isinstance(error, zs.ConfigError) and "rank 1 does not see" in str(error) and "shared" in str(error), repr(error)
        runtime_of(model).comm.exchange(b"", "all have failed")
        assert not any(tmp_path.iterdir())
        blind.clear()
        runtime_of(model).comm.exchange(b"", "again")
        zs.save(tmp_path, model, optimizer, name="x", asynchronous=asynchronous).wait()
        zs.close(model)

    run_threads(2, rank_run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "x"]


def test_b07_a_rank_lost_before_there_is_a_file_spares_the_others_writing(tmp_path, monkeypatch):
    """What is known to be in vain is not written, however slowly the disk gave the space."""
    saves: list[writing.Writing] = []
    ended = threading.Event()
    opened, make = writing.Writing._open, writing.open_file

    def _open(self):
        if self.comm.rank == 1:
            monkeypatch.setattr(self.comm, "exchange", dead)  # also of the thread that says that it is still at it
            self.comm.abort("Broken")
            ended.wait(20)
            raise RuntimeError("mine")
        saves.append(self)
        return opened(self)

    def dead(*arguments: object) -> None:
        raise RuntimeError("mine")

    def slow(path, nbytes, **options):
        deadline = time.monotonic() + 20
        while not saves[0].in_vain and time.monotonic() < deadline:
            time.sleep(0.01)
        return make(path, nbytes, **options)

    def rank_run(rank: int) -> None:
        model, optimizer = build("tied")
        runtime_of(model).comm.exchange(b"", "built")
        if rank == 0:
            monkeypatch.setattr(writing.Writing, "_open", _open), monkeypatch.setattr(writing, "open_file", slow)
        runtime_of(model).comm.exchange(b"", "armed")
        error = raised_by(lambda: zs.save(tmp_path, model, optimizer))
        ended.set()
        assert rank or isinstance(error, zs.PeerFailed), repr(error)

    run_threads(2, rank_run)
    assert saves[0].in_vain and saves[0].writer.digests == []
    assert not any(tmp_path.iterdir())


def test_a_save_that_is_refused_leaves_a_delayed_update_as_it_is(tmp_path):
    """Nothing has changed: training goes on with the bits of a run that did not ask."""

    def rank_run(rank: int) -> list:
        found = []
        for asks in (False, True):
            model, optimizer = build("tied", stage=2, offload_optimizer="cpu", delayed_update=0)
            zs.save(tmp_path, model, optimizer, name="x", overwrite=True)
            train(model, optimizer, rank, BATCHES[:3])
            if asks:
                with pytest.raises(zs.CheckpointError, match="exists"):
                    zs.save(tmp_path, model, optimizer, name="x")
            train(model, optimizer, rank, BATCHES[3:6])
            found.append(snapshot(model, optimizer))
            zs.close(model)
        return found

    for plain, asked in run_threads(2, rank_run):
        assert_equal(asked, plain)


def test_b07_a_failed_save_beside_training_is_told_once_by_the_next(tmp_path, monkeypatch):
    """Who does not wait learns it from the next save, which does nothing; the one after saves."""

    def rank_run(rank: int) -> None:
        model, optimizer = build("tied")
        zs.save(tmp_path, model, optimizer, name="first")
        saver = saver_of(engine_of(model))
        saver.io.close()
        saver.io = file_writer.Engine(calls=(calls := Faulty()))
        calls.arm("write", errno.EIO) if rank == 1 else None
        zs.save(tmp_path, model, optimizer, name="second", asynchronous=True)
        error = raised_by(lambda: zs.save(tmp_path, model, optimizer, name="third"))
        assert isinstance(error, zs.CheckpointWriteError) and "rank 1" in str(error)
        calls.disarm()
        zs.save(tmp_path, model, optimizer, name="third")
        zs.close(model)

    run_threads(2, rank_run)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "latest", "third"]


def test_a_folder_that_is_removed_while_a_save_begins_is_a_write_error(tmp_path, monkeypatch):
    """On every rank, also where rank 0 itself no longer sees what it has made."""
    plain = writing.os.path.isdir

    def isdir(path) -> bool:
        if "bad" in str(path):
            shutil.rmtree(path, ignore_errors=True)
        return plain(path)

    def rank_run(rank: int) -> None:
        model, optimizer = build("tied", stall_timeout_s=20.0)
        error = raised_by(lambda: zs.save(tmp_path, model, optimizer, name="bad"))
        assert isinstance(error, zs.CheckpointWriteError) and error.errno == errno.ENOENT, repr(error)
        zs.close(model)

    monkeypatch.setattr(writing.os.path, "isdir", isdir)
    run_threads(2, rank_run)


def test_a_reason_that_takes_long_to_write_is_what_is_told(tmp_path, monkeypatch):
    """Meanwhile rank 0, which looks fifty times a second, does not take that rank for dead."""
    plain, plain_finish = directory.write_whole, file_writer.FileWriter.finish

    def write_whole(path, *args, **options) -> None:
        time.sleep(0.5 if path.suffix == ".failed" else 0)
        plain(path, *args, **options)

    def finish(self) -> None:
        if "rank-00001" in self.file.path:
            raise RuntimeError("no more")
        plain_finish(self)

    def rank_run(rank: int) -> Exception | None:
        model, optimizer = build("tied", stall_timeout_s=20.0)
        error = raised_by(zs.save(tmp_path, model, optimizer, asynchronous=True).wait)
        zs.close(model)
        return error

    monkeypatch.setattr(directory, "write_whole", write_whole)
    monkeypatch.setattr(file_writer.FileWriter, "finish", finish)
    for error in run_threads(2, rank_run):
        assert "rank 1 failed: RuntimeError: no more" in str(error), repr(error)
    assert list(tmp_path.iterdir()) == []
