"""A checkpoint without its manifest: an older one is not taken in its place, and nothing begun anew, without a word."""

import contextlib
import io
import os
import shutil
import threading

import pytest
import torch.distributed as dist
from checkpoint_kit import build

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.testing import run_threads

pytestmark = pytest.mark.limit(30)


@pytest.fixture
def saver(tmp_path):
    """save(step, ...) into the folder, and load() what it then is."""
    model, optimizer = build("tied")

    class Saver:
        def save(self, *steps: int, **options) -> None:
            for step in steps:
                zs.save(tmp_path, model, optimizer, step=step, **options)

        def load(self, path=tmp_path, **options) -> int:
            return zs.load(path, model, optimizer, **options).step

    yield Saver()
    zs.close(model)


def strip(folder) -> None:
    (folder / "manifest.json").unlink()


# -- an older one in its place ------------------------------------------------------------------------------------


def saved_and_loaded(rank: int, root, **options) -> tuple[int, str]:
    """Steps 100 and 200 saved, the manifest of the second lost: the step that a load then finds, and what it says."""
    model, optimizer = build("tied", **options)
    for step in (100, 200):
        zs.save(root, model, optimizer, step=step)
    if rank == 0:
        strip(root / "step-00000200")
    with said_here() as said:
        step = zs.load(root, model, optimizer).step  # its ranks meet before any looks: the file is gone by then
        text = said()
    zs.close(model)
    return step, text


@contextlib.contextmanager
def said_here():
    """What this rank says on stderr: of a process, or of the thread that runs it."""
    if threading.current_thread() is threading.main_thread():
        with contextlib.redirect_stderr(io.StringIO()) as stream:
            yield stream.getvalue
    else:
        yield lambda: ""


SENTENCE = (
    "zeroshard: {root}: latest names step-00000200, which has no manifest.json and so is not complete: step-00000100 "
    "is taken in its place, and 100 steps are lost. Put the manifest.json back from a copy, or move the folder away: "
    "no save takes its name.\n"
)


def test_the_fall_back_is_said_once_with_the_steps_lost(tmp_path, capsys):
    assert [step for step, _ in run_threads(3, saved_and_loaded, tmp_path)] == [100] * 3
    assert capsys.readouterr().err == SENTENCE.format(root=tmp_path)


def _both_transports(rank: int, world: int, root) -> dict[str, tuple[int, str]]:
    dist.init_process_group("gloo")
    found = {}
    for comm in ("shared", "dist"):
        found[comm] = saved_and_loaded(rank, root / comm, comm=comm)
    dist.destroy_process_group()
    return found


@pytest.mark.processes
@pytest.mark.limit(120)
def test_the_fall_back_is_said_by_rank_0_alone_on_both_transports(tmp_path):
    first, second = run_processes(_both_transports, 2, tmp_path)
    for comm in ("shared", "dist"):
        assert first[comm] == (100, SENTENCE.format(root=tmp_path / comm))
        assert second[comm] == (100, "")


TAKEN = "step-00000100 is taken in its place"


@pytest.mark.parametrize("pointer, words", [
    ("step-00000300\n", f"latest names step-00000300, which is not there: {TAKEN}, and 200 steps are lost.\n"),
    ("best\n", f"latest names best, which is not there: {TAKEN}, and the steps since are lost.\n"),
    (None, f"step-00000200 has no manifest.json and so is not complete: {TAKEN}, and 100 steps are lost."),
    ("\0\n", f"step-00000200 has no manifest.json and so is not complete: {TAKEN}, and 100 steps are lost."),
    ("step-00000200\nstep-00000100\n", "latest names step-00000200, which has no manifest.json"),
    ("step-00000050\n", f"latest names step-00000050, which is not there: {TAKEN}.\n"),
    # a save that was killed before its last rename: it never said that it had saved
    ("step-00000300\nstep-00000100\n", ""),
    ("step-00000100\n", ""),
])  # fmt: skip
def test_whatever_the_pointer_names(saver, tmp_path, capsys, pointer, words):
    saver.save(100, 200)
    strip(tmp_path / "step-00000200")
    (tmp_path / "latest").unlink() if pointer is None else (tmp_path / "latest").write_text(pointer)
    capsys.readouterr()
    assert saver.load() == 100
    said = capsys.readouterr().err
    assert words in said if words else not said


def test_of_what_is_complete_nothing_is_said(saver, tmp_path, capsys):
    """Nor of one that is replaced just now, or of folders that are no checkpoints."""
    saver.save(100, 200)
    (tmp_path / "step-00000900").mkdir()
    (tmp_path / "notes").mkdir()
    capsys.readouterr()
    assert saver.load() == 200
    os.rename(tmp_path / "step-00000200", tmp_path / ".step-00000200.abcdef.old")
    assert saver.load() == 200
    assert saver.load(tmp_path / "step-00000100") == 100
    assert saver.load(name="step-00000100") == 100
    assert not capsys.readouterr().err


# -- nothing else there -------------------------------------------------------------------------------------------


def test_the_only_checkpoint_is_named_with_what_it_lacks(saver, tmp_path):
    saver.save(7)
    strip(tmp_path / "step-00000007")
    for options in ({}, {"name": "step-00000007"}):
        with pytest.raises(zs.CheckpointNotFound, match=r"step-00000007 lacks its manifest\.json.*Put the") as caught:
            saver.load(**options)
        assert isinstance(caught.value, zs.CheckpointIncomplete)
    (tmp_path / "step-00000007" / ".metadata").unlink()
    with pytest.raises(zs.CheckpointIncomplete, match=r"step-00000007 lacks its manifest\.json"):
        saver.load(tmp_path / "step-00000007")
    with pytest.raises(zs.CheckpointIncomplete, match=r"step-00000007 lacks its manifest\.json"):
        zs.inspect_checkpoint(tmp_path)
    shutil.rmtree(tmp_path / "step-00000007")
    with pytest.raises(zs.CheckpointNotFound, match="found none") as caught:
        saver.load()
    assert not isinstance(caught.value, zs.CheckpointIncomplete)


def test_of_several_the_newest_is_named_and_the_others_are_told(saver, tmp_path):
    saver.save(7, 12, 9)
    for step in (7, 9, 12):
        strip(tmp_path / f"step-{step:08d}")
    with pytest.raises(zs.CheckpointIncomplete, match=r"step-00000012 lacks.*\(so do: step-00000007, step-00000009\)"):
        saver.load()
    saver.save(13)
    with pytest.raises(zs.CheckpointIncomplete, match=r"step-00000009 lacks.*\(complete are: step-00000013\)"):
        saver.load(name="step-00000009")


def test_every_rank_hears_it(tmp_path):
    def rank_run(rank: int) -> str:
        model, optimizer = build("tied")
        zs.save(tmp_path, model, optimizer, step=7)
        if rank == 0:
            strip(tmp_path / "step-00000007")
        with pytest.raises(zs.CheckpointIncomplete) as caught:
            zs.load(tmp_path, model, optimizer)
        zs.close(model)
        return str(caught.value)

    first, second = run_threads(2, rank_run)
    assert first == second and str(tmp_path / "step-00000007") in first
