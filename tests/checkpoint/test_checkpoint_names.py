"""How checkpoints are named: steps, tags, `latest`, what exists already, what is kept, and what is not there."""

import os

import pytest
import torch
from checkpoint_kit import (
    VOCAB,
    alone,
    assert_equal,
    build,
    names,
    snapshot,
    train,
)
from helpers import token_batches

import zeroshard as zs
from zeroshard.testing import run_threads

BATCHES = [step[0] for step in token_batches(8, 1, 4, VOCAB)]


def test_names_steps_and_what_exists_already(tmp_path):
    model, optimizer = alone()
    train(model, optimizer, 0, BATCHES[:3])
    assert zs.save(tmp_path, model, optimizer).path == tmp_path / "step-00000003"
    assert zs.save(tmp_path, model, optimizer, step=40).path == tmp_path / "step-00000040"
    assert zs.save(tmp_path, model, optimizer, name="best", step=41).path == tmp_path / "best"
    with pytest.raises(zs.CheckpointError, match=r"best exists; save with overwrite=True, another step or name"):
        zs.save(tmp_path, model, optimizer, name="best")
    before = snapshot(model, optimizer)
    train(model, optimizer, 0, BATCHES[3:4])
    zs.save(tmp_path, model, optimizer, name="best", step=42, overwrite=True)
    assert names(tmp_path) == ["best", "latest", "step-00000003", "step-00000040"]
    after = snapshot(model, optimizer)
    assert zs.load(tmp_path, model, optimizer, name="step-00000003").step == 3
    assert_equal(snapshot(model, optimizer), before)
    loaded = zs.load(tmp_path / "best", model, optimizer)
    assert (loaded.step, loaded.facts["world_size"], loaded.path) == (42, 1, tmp_path / "best")
    assert_equal(snapshot(model, optimizer), after)
    zs.close(model)


@pytest.mark.parametrize("name", ["epoch=3", "_last", "val loss 0.5", "[1], (2) & 3", "été", "-x"])
def test_a_name_is_any_component_of_a_path(name, tmp_path):
    model, optimizer = alone()
    train(model, optimizer, 0, BATCHES[:1])
    before = snapshot(model, optimizer)
    for step in (1, 2):  # a second one replaces the first
        zs.save(tmp_path, model, optimizer, name=name, step=step, overwrite=True)
    assert names(tmp_path) == sorted([name, "latest"]) and (tmp_path / "latest").read_text() == f"{name}\n"
    train(model, optimizer, 0, BATCHES[1:2])
    assert zs.load(tmp_path, model, optimizer).step == 2
    assert_equal(snapshot(model, optimizer), before)
    assert zs.load(tmp_path, model, optimizer, name=name).path == tmp_path / name
    zs.close(model)


@pytest.mark.parametrize("given, words", [
    ({"name": "../up"}, "name: expected one component"), ({"name": "latest"}, "name: expected one"), ({"name": ".hidden"}, "name"),
    ({"name": ".."}, "name"), ({"name": "a\nb"}, "name"), ({"name": "a\\b"}, "name"), ({"name": " a"}, "name"),
    ({"name": "a" * 250}, "name"),
    ({"name": ""}, "name"), ({"step": -1}, "step: expected an integer"), ({"step": 1.5}, "step"), ({"keep_last": 0}, "keep_last"),
    ({"keep_every": 2}, "without keep_last"), ({"extra": {"a/b": 1}}, "extra: expected names"),
    ({"extra": {"m": lambda: 1}}, r"extra\['m'\] can not be saved"), ({"step": True}, "step"), ({"name": 5}, "got 5"),
    ({"extra": [1]}, r"extra: expected a dictionary.*got \[1\]"), ({"extra": {3: 1}}, "extra: expected names.*got 3"),
])  # fmt: skip
def test_what_can_not_be_is_refused_before_anything_is_written(given, words, tmp_path):
    model, optimizer = alone()
    with pytest.raises(zs.ConfigError, match=words):
        zs.save(tmp_path, model, optimizer, **given)
    with pytest.raises(zs.ConfigError, match="expected the one that zs.shard"):
        zs.save(tmp_path, model, torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)]
    with pytest.raises(zs.ConfigError, match="Give the LambdaLR in it a name of its own"):
        zs.save(tmp_path, model, optimizer, extra={"all": schedulers})
    for call in (zs.save, zs.load):
        with pytest.raises(TypeError, match="model: expected a torch.nn.Module .*, got PosixPath"):
            call(model, tmp_path)
        with pytest.raises(zs.ConfigError, match="path: expected that of a folder, got b'"):
            call(os.fsencode(tmp_path), model)
    with pytest.raises(zs.ConfigError, match=r"zs.load: extra: expected a dictionary.*got \['s'\]"):
        zs.load(tmp_path, model, optimizer, extra=["s"])
    assert names(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(zs.CheckpointNotFound, match="file: expected a folder with a complete checkpoint, found a file"):
        zs.load(tmp_path / "file", model)
    zs.close(model)


def test_ranks_that_ask_for_different_things_are_told(tmp_path):
    def rank_run(rank: int) -> None:
        model, optimizer = build("tied")
        with pytest.raises(zs.ConfigError, match="ranks 0 and 1 passed different arguments: step: 0 and 1"):
            zs.save(tmp_path, model, optimizer, name="x", step=rank)
        with pytest.raises(zs.ConfigError, match="ranks 0 and 1 passed different arguments: optimizer: 'given' and None"):
            zs.save(tmp_path, model, None if rank else optimizer, name="x", step=0)
        with pytest.raises(zs.ConfigError, match=r"extra: rank 0 gave \['a0'\], rank 1 \['a1'\]"):
            zs.save(tmp_path, model, optimizer, extra={f"a{rank}": 1})
        zs.close(model)

    run_threads(2, rank_run)
    assert names(tmp_path) == []


def test_the_last_are_kept_and_every_so_many(tmp_path):
    model, optimizer = alone()
    for step in range(1, 8):
        zs.save(tmp_path, model, optimizer, step=step, keep_last=2, keep_every=3)
    assert names(tmp_path) == ["latest", *(f"step-{step:08d}" for step in (3, 6, 7))]
    broken = tmp_path / "step-00000003" / "manifest.json"  # no reason to fail, nor to remove it
    before = broken.stat()
    broken.write_text("{}")
    os.utime(broken, ns=(before.st_atime_ns, before.st_mtime_ns))
    zs.save(tmp_path, model, optimizer, step=8, keep_last=2, keep_every=4)
    assert names(tmp_path) == ["latest", *(f"step-{step:08d}" for step in (3, 7, 8))]
    zs.close(model)


def test_what_has_a_name_of_its_own_is_removed_by_its_like_alone(tmp_path):
    model, optimizer = alone()
    zs.save(tmp_path, model, optimizer, step=1, name="best", keep_last=1)
    for step in (1, 2, 3):
        zs.save(tmp_path, model, optimizer, step=step, keep_last=2)
    assert names(tmp_path) == ["best", "latest", "step-00000002", "step-00000003"]
    zs.save(tmp_path, model, optimizer, step=3, name="better", keep_last=1)
    assert names(tmp_path) == ["better", "latest", "step-00000002", "step-00000003"]
    zs.close(model)


@pytest.mark.parametrize("content", [None, "step-00000009\n", "", "../../etc"])
def test_without_a_good_pointer_the_newest_complete_one_counts(content, tmp_path):
    model, optimizer = alone()
    for step in (1, 2):
        zs.save(tmp_path, model, optimizer, step=step)
    assert (tmp_path / "latest").read_text() == "step-00000002\n"
    (tmp_path / ".step-00000003.abcdef.draft").mkdir()
    (tmp_path / "step-00000004").mkdir()  # no manifest: no checkpoint
    (tmp_path / "latest").unlink()
    if content is not None:
        (tmp_path / "latest").write_text(content)
    assert zs.load(tmp_path, model, optimizer).step == 2
    zs.close(model)


def test_what_is_not_there_is_said(tmp_path):
    model, optimizer = alone()
    with pytest.raises(zs.CheckpointNotFound, match="no such folder"):
        zs.load(tmp_path / "nowhere", model, optimizer)
    with pytest.raises(zs.CheckpointNotFound, match="expected a folder with a complete checkpoint, found none"):
        zs.load(tmp_path, model, optimizer)
    (tmp_path / ".step-00000003.abcdef.draft").mkdir()
    with pytest.raises(FileNotFoundError, match="only 1 unfinished"):
        zs.load(tmp_path, model, optimizer)
    zs.save(tmp_path, model, optimizer, name="good")
    with pytest.raises(zs.CheckpointNotFound, match="no complete checkpoint 'bad'; there are: good"):
        zs.load(tmp_path, model, optimizer, name="bad")
    assert not (tmp_path / ".step-00000003.abcdef.draft").exists(), "the next save removes what is left"
    zs.close(model)
