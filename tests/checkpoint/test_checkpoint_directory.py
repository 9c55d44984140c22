"""The folder of a run: what a name may replace, what `latest` names at any moment, and what is kept by a run that went back."""

import os
import shutil
import threading
import time

import pytest
from checkpoint_kit import build

import zeroshard as zs
from zeroshard.checkpoint import directory, file_writer
from zeroshard.checkpoint.manifest import Manifest
from zeroshard.testing import run_threads

pytestmark = pytest.mark.limit(30)


def names(root) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.fixture
def saver(tmp_path):
    """save(step, ...) into the folder, and load() what it then is."""
    model, optimizer = build("tied")

    class Saver:
        def save(self, step: int, **options) -> None:
            zs.save(tmp_path, model, optimizer, step=step, **options)

        def load(self) -> int:
            return zs.load(tmp_path, model, optimizer).step

    yield Saver()
    zs.close(model)


# -- names that are taken ------------------------------------------------------------------------------------------------


def test_a_name_that_was_free_when_a_save_began_is_not_replaced(tmp_path, monkeypatch):
    """Two models save beside each other under one name: the first has it, the second is told, on every rank."""
    first_is_done, plain, begun = threading.Event(), file_writer.FileWriter.finish, []

    def finish(self) -> None:
        begun.append(self)
        assert len(begun) <= 2 or first_is_done.wait(20)
        plain(self)

    def rank_run(rank: int) -> None:
        pairs = [build("tied", seed=seed) for seed in (1, 2)]
        saves = [zs.save(tmp_path, *pair, name="x", step=step, asynchronous=True) for step, pair in enumerate(pairs)]
        saves[0].wait()
        first_is_done.set()
        with pytest.raises(zs.CheckpointError, match="x exists; save with overwrite=True, another step or name"):
            saves[1].wait()
        assert zs.load(tmp_path, *pairs[0]).step == 0
        zs.save(tmp_path, *pairs[1], name="x", step=1, asynchronous=True, overwrite=True).wait()
        assert zs.load(tmp_path, *pairs[0]).step == 1
        for model, _ in pairs:
            zs.close(model)

    monkeypatch.setattr(file_writer.FileWriter, "finish", finish)
    run_threads(2, rank_run)
    assert names(tmp_path) == ["latest", "x"] and (tmp_path / "latest").read_text() == "x\n"


def test_a_name_that_is_taken_between_look_and_rename_is_not_replaced(saver, tmp_path, monkeypatch):
    saver.save(1, name="other")
    plain = os.rename

    def rename(source, target) -> None:
        if target == tmp_path / "x":
            shutil.copytree(tmp_path / "other", target)  # by somebody else
        plain(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(zs.CheckpointError, match="x exists; save with overwrite=True, another step or name"):
            saver.save(2, name="x")
    assert names(tmp_path) == ["latest", "other", "x"] and directory.find(tmp_path).name == "x"
    saver.save(3, name="y")
    assert (tmp_path / "latest").read_text() == "y\n" and saver.load() == 3


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_checkpoint_is_never_replaced(saver, tmp_path, overwrite):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("data", "file"):
        with pytest.raises(zs.CheckpointError, match=f"{name} exists and is not a checkpoint.* another step or name"):
            saver.save(1, name=name, overwrite=overwrite)
    assert names(tmp_path) == ["data", "file"] and names(tmp_path / "data") == ["precious.txt"]


def test_a_checkpoint_is_no_folder_of_checkpoints(tmp_path):
    """It would hide what is saved in it: a load takes what a folder is before what it holds."""

    def rank_run(rank: int) -> None:
        model, optimizer = build("tied")
        inner = zs.save(tmp_path, model, optimizer, step=1).path
        with pytest.raises(zs.CheckpointError, match=f"is a checkpoint itself; save into the folder that holds it: {tmp_path}"):
            zs.save(inner, model, optimizer, step=2)
        zs.close(model)

    run_threads(2, rank_run)
    assert names(tmp_path) == ["latest", "step-00000001"]


# -- latest --------------------------------------------------------------------------------------------------------------


def test_a_pointer_of_any_bytes_is_no_reason_to_fail(saver, tmp_path):
    for step in (1, 2):
        saver.save(step)
    (tmp_path / "latest").write_bytes(b"\xff\xfe\x00step")
    assert saver.load() == 2
    saver.save(3)
    assert (tmp_path / "latest").read_text() == "step-00000003\n"


class Killed(BaseException):
    """As far as the folder goes, the end of the process."""


@pytest.mark.parametrize("times", [1, 2])
def test_killed_before_the_rename_the_one_saved_last_still_counts(saver, tmp_path, monkeypatch, times):
    """Not the highest step, which a run that went back has left behind."""
    for step in (100, 200, 300, 150):
        saver.save(step)

    def rename(source, target) -> None:
        raise Killed

    for _ in range(times):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(os, "rename", rename)
            saver.save(160)
        assert (tmp_path / "latest").read_text() == "step-00000160\nstep-00000150\n"
        assert directory.find(tmp_path).name == "step-00000150"
    assert saver.load() == 150
    saver.save(160)
    assert (tmp_path / "latest").read_text() == "step-00000160\n" and saver.load() == 160


def test_a_run_that_went_back_keeps_what_it_can_fall_back_to(saver, tmp_path):
    """Steps beyond its own belong to the branch that it has left: they go first."""
    for step in (100, 200, 300):
        saver.save(step, keep_last=3)
    kept = []
    for step in (110, 120, 130):
        saver.save(step, keep_last=3)
        kept.append([int(name.removeprefix("step-")) for name in names(tmp_path) if name != "latest"])
    assert kept == [[100, 110, 300], [100, 110, 120], [110, 120, 130]]
    assert directory.previous(tmp_path / "step-00000130").name == "step-00000120"


def test_a_part_is_written_though_rank_0_renames_the_draft_at_once(tmp_path, monkeypatch):
    """Rank 0 publishes as soon as it sees the last part's name, which may be before its writer goes on."""
    draft, plain = tmp_path / "draft", os.replace

    def replace(source, target):
        plain(source, target)
        draft.rename(tmp_path / "step")

    draft.mkdir()
    monkeypatch.setattr(os, "replace", replace)
    directory.write_whole(draft / "rank-00001.json", b"a part")
    assert {path.name: path.read_bytes() for path in (tmp_path / "step").iterdir()} == {"rank-00001.json": b"a part"}


# -- what a save finds in the folder, and leaves there -----------------------------------------------------------------


def test_a_clock_that_was_set_back_does_not_cost_what_has_just_been_saved(tmp_path):
    """The newest is that of the highest step, whatever the times of files say; the one just saved is always kept."""
    model, optimizer = build("tied")
    for step in (1, 2, 3):
        path = zs.save(tmp_path, model, optimizer, step=step).path
        later = time.time() + 3600 * (4 - step)
        os.utime(path / "manifest.json", (later, later))
    assert list(directory.complete(tmp_path)) == [f"step-{step:08d}" for step in (1, 2, 3)]
    (tmp_path / "latest").unlink()
    assert zs.load(tmp_path, model, optimizer).step == 3
    zs.save(tmp_path, model, optimizer, step=4, keep_last=2)
    assert names(tmp_path) == ["latest", "step-00000003", "step-00000004"]
    zs.save(tmp_path, model, optimizer, step=2, keep_last=1)  # a run that went back
    assert names(tmp_path) == ["latest", "step-00000002"] and zs.load(tmp_path, model, optimizer).step == 2
    zs.close(model)


def test_of_one_step_the_latest_time_counts(tmp_path):
    model, optimizer = build("tied")
    for name, at in (("a", "2026-01-02T00:00:00Z"), ("b", "2026-01-01T00:00:00Z")):
        path = zs.save(tmp_path, model, optimizer, name=name, step=1).path
        manifest = Manifest.read(path)
        manifest.facts["time"] = at
        (path / "manifest.json").write_bytes(manifest.to_json())
    assert list(directory.complete(tmp_path)) == ["b", "a"]
    zs.close(model)


def test_a_save_removes_drafts_and_nothing_else(tmp_path):
    """Hidden folders of the user, and what an export is writing, are no business of it."""
    for name in (".mine.tmp", ".model.abcdef.tmp", ".drafts", ".x.draft", ".x.abcdef.draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text("x")
    model, optimizer = build("tied")
    zs.save(tmp_path, model, optimizer, name="x")
    assert names(tmp_path) == [".drafts", ".mine.tmp", ".model.abcdef.tmp", ".x.draft", "latest", "x"]
    zs.close(model)


def test_folders_that_are_made_are_there_for_good(tmp_path, monkeypatch):
    """Each one's entry is synced in the one above."""
    synced, plain = [], directory.sync
    monkeypatch.setattr(directory, "sync", lambda path: (synced.append(path), plain(path))[1])
    directory.make_folders(tmp_path / "a" / "b" / "c")
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"] and (tmp_path / "a" / "b" / "c").is_dir()
    directory.make_folders(tmp_path / "a")
    assert len(synced) == 3
    directory.Draft(tmp_path / "d" / "e", "x").discard()
    assert synced[3:] == [tmp_path, tmp_path / "d"]
