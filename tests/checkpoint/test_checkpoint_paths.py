"""Where a path leads: `..` behind a link, links to checkpoints, links to nowhere. What links lead to is never removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard.testing import run_threads


@pytest.fixture
def model():
    made, _ = zs.shard(nn.Linear(2, 2), stage=0)
    yield made
    zs.close(made)


def marked(model: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def hidden(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_dots_behind_a_link_mean_the_same_to_save_and_load_and_export(asynchronous, model, tmp_path, monkeypatch):
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True), (tmp_path / "run").mkdir()
    (tmp_path / "run" / "link").symlink_to(tmp_path / "elsewhere" / "deep")
    monkeypatch.chdir(tmp_path / "run")
    for value in (1.0, 2.0):  # the second replaces, and what it replaces is removed
        save = zs.save("link/../ck", marked(model, value), name="x", overwrite=True, keep_last=1, asynchronous=asynchronous)
        monkeypatch.chdir(tmp_path)  # a path is as it was meant when it was given
        save.wait()
        monkeypatch.chdir(tmp_path / "run")
    real = tmp_path / "elsewhere" / "ck"
    assert sorted(os.listdir(real)) == ["latest", "x"] and os.path.samefile(save.path, real / "x")
    assert sorted(os.listdir(tmp_path / "run")) == ["link"]
    zs.load("link/../ck", marked(model, 0.0))
    assert model.weight.eq(2.0).all()
    zs.export("link/../ck", "link/../out")
    assert (tmp_path / "elsewhere" / "out" / "model.safetensors").is_file()


def test_paths_are_compared_as_they_are_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(rank: int) -> Path:
        model, _ = zs.shard(nn.Linear(2, 2), stage=2)
        path = zs.save(("ck", tmp_path / "ck")[rank], model).path
        zs.load(("./ck/", str(tmp_path / "ck"))[rank], model)
        zs.close(model)
        return path

    assert run_threads(2, run) == [tmp_path / "ck" / "step-00000000"] * 2


def test_a_checkpoint_that_is_a_link_is_replaced_and_what_it_leads_to_stays(model, tmp_path):
    real = zs.save(tmp_path / "real", marked(model, 1.0), name="x").path
    (root := tmp_path / "root").mkdir()
    (root / "best").symlink_to(os.path.relpath(real, root))
    zs.save(root, marked(model, 2.0), name="best", overwrite=True)
    assert sorted(os.listdir(root)) == ["best", "latest"] and not (root / "best").is_symlink()
    for path, value in ((root, 2.0), (real, 1.0)):
        zs.load(path, model)
        assert model.weight.eq(value).all()


def test_a_checkpoint_that_is_a_link_is_pruned_and_what_it_leads_to_stays(model, tmp_path, monkeypatch):
    real = zs.save(tmp_path / "real", marked(model, 1.0), name="x").path
    (root := tmp_path / "root").mkdir()
    for name in ("a", "b"):
        (root / name).symlink_to(real)
    unlink = Path.unlink

    def no_links(path: Path, missing_ok: bool = False) -> None:
        if path.is_symlink():
            raise PermissionError
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:  # renamed, but not removed: the next save does that
        patch.setattr(Path, "unlink", no_links)
        zs.save(root, model, name="c", step=1, keep_last=1)
        assert len(hidden(root)) == 2
    zs.save(root, model, name="d", step=2, keep_last=1)
    assert sorted(os.listdir(root)) == ["d", "latest"]
    zs.load(real, model)


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_link_to_nowhere_is_named(below, tmp_path):
    (tmp_path / "link").symlink_to("nowhere")

    def run(rank: int) -> None:
        model, _ = zs.shard(nn.Linear(2, 2), stage=2)
        with pytest.raises(
            zs.CheckpointError, match="link is a link to nowhere, which does not exist: make that folder, or remove"
        ):
            zs.save(tmp_path / "link" / below, model)
        zs.close(model)

    run_threads(2, run)
    assert os.listdir(tmp_path) == ["link"]


def test_a_name_that_a_link_to_nowhere_has_is_taken(model, tmp_path):
    (tmp_path / "x").symlink_to("nowhere")
    with pytest.raises(zs.CheckpointError, match="x exists and is not a checkpoint"):
        zs.save(tmp_path, model, name="x", overwrite=True)
    assert os.listdir(tmp_path) == ["x"]
