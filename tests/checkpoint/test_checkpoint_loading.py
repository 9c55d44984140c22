"""zs.load where one rank, one object or one file does not go along: every rank hears of it at once, and knows what state things are in."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time

import numpy
import pytest
import torch
from checkpoint_kit import assert_equal, build, snapshot, train
from helpers import token_batches
from safetensors.torch import save_file

import zeroshard as zs
from zeroshard.checkpoint import bulk_reader, loading, resolver, safetensors, state_map, writing
from zeroshard.engine.runtime import runtime_of
from zeroshard.state import state_loading
from zeroshard.testing import run_threads

VOCAB = 11
BATCHES = [step[0] for step in token_batches(4, 1, 4, VOCAB)]


class Counter:
    """An object that is asked nothing beforehand; on the ranks `refuses` it does not take its state."""

    def __init__(self, rank: int = 0, value: int = 0, refuses: tuple[int, ...] = ()) -> None:
        self.rank, self.value, self.refuses = rank, value, refuses

    def state_dict(self) -> dict:
        return {"value": self.value}

    def load_state_dict(self, state: dict) -> None:
        if self.rank in self.refuses:
            raise KeyError("valeu")
        self.value = state["value"]


def save_pair(root, extra=lambda rank: {}, world=2):
    def rank_run(rank):
        model, optimizer = build("tied")
        train(model, optimizer, rank, BATCHES[:1])
        zs.save(root, model, optimizer, name="x", extra=extra(rank))
        kept = snapshot(model, optimizer)
        zs.close(model)
        return kept

    return run_threads(world, rank_run)[0]


# -- extras ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [(0, 1), (1,)], ids=["on all ranks", "on one"])
def test_an_extra_that_can_be_asked_refuses_before_anything_changes(where, tmp_path):
    save_pair(tmp_path, lambda rank: {"sampler": zs.ShardedSampler(10)})

    def rank_run(rank):
        model, optimizer = build("tied", seed=5)
        train(model, optimizer, rank, BATCHES[:1])
        before, generator = snapshot(model, optimizer), torch.get_rng_state()
        with pytest.raises(zs.ConfigError) as caught:
            zs.load(tmp_path, model, optimizer, extra={"sampler": zs.ShardedSampler(11 if rank in where else 10)})
        assert_equal(snapshot(model, optimizer), before, "nothing may have changed")
        assert torch.equal(torch.get_rng_state(), generator)
        train(model, optimizer, rank, BATCHES[1:2])
        zs.close(model)
        return str(caught.value)

    words = run_threads(2, rank_run)
    assert words[0] == words[1]
    assert "extra['sampler']" in words[0] and f"rank {where[0]}: " in words[0] and "this sampler has 11" in words[0]
    assert "nothing was changed" in words[0]


def test_an_extra_that_raises_reaches_every_rank_and_all_else_is_loaded(tmp_path):
    """On one rank alone; the others do not wait for it, and what comes after it is loaded too."""
    expected = save_pair(tmp_path, lambda rank: {"first": Counter(rank, 3), "then": Counter(rank, 4)})

    def rank_run(rank):
        model, optimizer = build("tied", seed=5)
        first, then = Counter(rank, refuses=(1,)), Counter(rank)
        torch.manual_seed(9)
        with pytest.raises(zs.CheckpointError) as caught:
            zs.load(tmp_path, model, optimizer, extra={"first": first, "then": then})
        assert_equal(snapshot(model, optimizer), expected)
        assert then.value == 4 and first.value == (0 if rank == 1 else 3)
        train(model, optimizer, rank, BATCHES[1:2])
        zs.close(model)
        return caught.value

    errors = run_threads(2, rank_run)
    assert str(errors[0]) == str(errors[1]) and isinstance(errors[1].__cause__, KeyError)
    assert "extra['first'] did not take its state" in str(errors[0]) and "on rank 1: KeyError: 'valeu'" in str(errors[0])
    assert "the model, the optimizer and all else have been loaded" in str(errors[0])


def test_generators_are_restored_though_an_extra_refuses(tmp_path):
    model, optimizer = build("tied")
    zs.save(tmp_path, model, optimizer, extra={"counter": Counter()})
    expected = torch.rand(3)
    with pytest.raises(zs.CheckpointError, match="KeyError"):
        zs.load(tmp_path, model, optimizer, extra={"counter": Counter(refuses=(0,))})
    assert torch.equal(torch.rand(3), expected)
    zs.close(model)


def test_the_names_of_extras_do_not_tell_whose_they_are(tmp_path):
    """Only `<name>.<rank>` of a name that ranks had differently is one rank's."""
    extra = {"a.config": "shared", "b": 3}
    save_pair(tmp_path, lambda rank: {"a": rank, **extra})

    def rank_run(rank):
        model, optimizer = build("tied")
        found = zs.load(tmp_path, model, optimizer, extra={"a.config": None})
        zs.close(model)
        return found.extra

    assert run_threads(2, rank_run) == [{"a": 0, **extra}, {"a": 1, **extra}]
    assert rank_run(0) == extra  # one rank: none of the two is its own
    assert zs.inspect_checkpoint(tmp_path)[0].extras == ("a", "a.config", "b")
    facts = {"per_rank": ["a"], "world_size": 2}
    owners = [resolver.owner_of(f"extra.{name}", facts) for name in ("a.1", "a.2", "a.01", "a", "b.1", "a.x.1")]
    assert owners == [("a", 1), ("a.2", None), ("a.01", None), ("a", None), ("b.1", None), ("a.x.1", None)]


# -- errors on one rank ------------------------------------------------------------------------------------------------


def on_rank(rank: int, action, error: Exception):
    """The action, that raises on one rank."""

    def act(*args, **options):
        if threading.current_thread().name == f"rank{rank}":
            raise error
        return action(*args, **options)

    return act


@pytest.mark.parametrize(("module", "name", "error"), [
    (safetensors, "note", MemoryError("no room")), (state_loading.Restoring, "note", torch.OutOfMemoryError("no room\nmore")),
    (resolver, "check_sizes", PermissionError(errno.EACCES, "Permission denied", "/x/manifest.json")),
    (resolver, "open_own", EOFError("Ran out of input")), (resolver, "check_digests", RuntimeError("no reader")),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_whatever_one_rank_meets_reaches_all(module, name, error, tmp_path, monkeypatch):
    save_pair(tmp_path)
    monkeypatch.setattr(module, name, on_rank(1, getattr(module, name), error))

    def rank_run(rank):
        model, optimizer = build("tied", seed=5)
        before = snapshot(model, optimizer)
        with pytest.raises(zs.CheckpointError) as caught:
            zs.load(tmp_path, model, optimizer)
        assert_equal(snapshot(model, optimizer), before, "nothing may have changed")
        train(model, optimizer, rank, BATCHES[1:2])
        zs.close(model)
        return caught.value

    errors = run_threads(2, rank_run)
    assert str(errors[0]) == str(errors[1]) and errors[1].__cause__ is error and errors[0].__cause__ is None
    assert "rank 1" in str(errors[0]) and "nothing was changed" in str(errors[0])
    what = "EACCES: Permission denied" if isinstance(error, OSError) else f"{type(error).__name__}: {str(error).splitlines()[0]}"
    assert what in str(errors[0]) and ("/x/manifest.json" if isinstance(error, OSError) else str(tmp_path)) in str(errors[0])


@pytest.mark.parametrize("world", [1, 2])
def test_an_io_error_while_everything_is_verified_before_names_file_and_place(world, tmp_path, monkeypatch):
    save_pair(tmp_path)
    plain = os.preadv

    def preadv(fd, buffers, offset):
        if threading.current_thread().name in (f"rank{world - 1}", "MainThread"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)

    def rank_run(rank):
        model, optimizer = build("tied", seed=5)
        with pytest.raises(
            zs.CheckpointError, match=r"\.distcp could not be read at byte 0.*EIO: Input/output error; nothing"
        ) as caught:
            zs.load(tmp_path, model, optimizer, verify="before")
        assert caught.value.errno == errno.EIO and caught.value.offset == 0 and os.path.exists(caught.value.file)
        zs.close(model)
        return str(caught.value)

    said = run_threads(world, rank_run)
    assert len(set(said)) == 1 and (world == 1 or "by rank 1" in said[0])


@pytest.mark.parametrize("trusted", [False, True])
def test_a_damaged_value_is_told_from_one_of_another_class(trusted, tmp_path):
    """Without checksums compared before: the one is damage, with the place, and not for you to trust."""
    model, optimizer = build("tied")
    path = zs.save(tmp_path, model, optimizer, extra={"note": "x" * 5000}).path
    file = path / "rank-00000.distcp"
    content = bytearray(file.read_bytes())
    at = content.index(b"x" * 5000)
    content[at - 40 : at] = bytes(40)
    file.write_bytes(content)
    with pytest.raises(zs.CheckpointCorrupt, match="rank-00000.distcp is damaged at byte 0"):
        zs.load(path, model, optimizer, verify=False, trusted=trusted)
    zs.close(model)


# -- generators --------------------------------------------------------------------------------------------------------


def test_at_another_number_of_ranks_every_generator_is_seeded_anew_from_rank_0(tmp_path):
    save_pair(tmp_path)
    opened = resolver.open_any(resolver.Alone(), tmp_path)

    def drawn(rank, before):  # generators are the process's, so that ranks in threads would share them
        random.seed(before), numpy.random.seed(before), torch.manual_seed(before)
        state_map.seed_generators(opened.generators, rank)
        return random.random(), numpy.random.rand(), float(torch.rand(()))

    first, second = drawn(0, before=1), drawn(1, before=1)
    assert drawn(0, before=2) == first and drawn(1, before=2) == second
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_python_and_numpy_are_seeded_anew_by_a_load(tmp_path):
    save_pair(tmp_path)
    drawn = []
    for before in (1, 2):
        random.seed(before), numpy.random.seed(before)
        model, optimizer = build("tied")
        assert zs.load(tmp_path, model, optimizer).rng == "reseeded"
        drawn.append((random.random(), numpy.random.rand()))
        zs.close(model)
    assert drawn[0] == drawn[1]


# -- ranks that ask for different things -------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "words"), [
    ({"optimizer": "another"}, "optimizer: expected the one that zs.shard"),
    ({"verify": "never"}, "verify: expected True, 'before' or False, got 'never'"),
    ({"path": 3}, "path: expected that of a folder, got 3"),
    ({"verify": "before"}, "ranks 0 and 1 passed different arguments: verify: True and 'before'"),
    ({"name": "y"}, "ranks 0 and 1 passed different arguments: name: 'x' and 'y'"),
    ({"path": "elsewhere"}, "ranks 0 and 1 passed different arguments: path: .* and '.*elsewhere'"),
    ({"optimizer": None}, "ranks 0 and 1 passed different arguments: optimizer: 'given' and None"),
], ids=str)  # fmt: skip
def test_ranks_that_call_it_differently_hear_how(change, words, tmp_path):
    save_pair(tmp_path)

    def rank_run(rank):
        model, optimizer = build("tied", seed=5)
        call = {"path": tmp_path, "optimizer": optimizer, "name": "x", "verify": True} | (change if rank == 1 else {})
        call["optimizer"] = torch.optim.SGD([torch.zeros(1)]) if call["optimizer"] == "another" else call["optimizer"]
        before = snapshot(model, optimizer)
        with pytest.raises(zs.ConfigError, match=words) as caught:
            zs.load(call.pop("path"), model, **call)
        assert_equal(snapshot(model, optimizer), before)
        zs.load(tmp_path, model, optimizer)
        zs.close(model)
        return str(caught.value)

    assert len(set(run_threads(2, rank_run))) == 1


# -- a save of the same model that is still under way ------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_a_load_takes_what_this_model_was_saving_in_the_background(world, tmp_path, monkeypatch):
    """Also the first one, and with nothing else kept."""
    plain = writing.FileWriter.finish
    monkeypatch.setattr(writing.FileWriter, "finish", lambda self: (time.sleep(0.2), plain(self))[1])

    def rank_run(rank):
        model, optimizer = build("tied", seed=5)
        for step in (1, 2):
            train(model, optimizer, rank, BATCHES[:1])
            save = zs.save(tmp_path, model, optimizer, asynchronous=True, keep_last=1)
            assert zs.load(tmp_path, model, optimizer).step == step and save.done()
        zs.close(model)

    run_threads(world, rank_run)


def test_a_save_in_the_background_that_failed_is_told_by_the_next_save(tmp_path, monkeypatch):
    """And does not keep a load from going back to the one before."""
    save_pair(tmp_path)

    def fail(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def rank_run(rank):
        model, optimizer = build("tied", seed=5)
        with monkeypatch.context() as patch:
            patch.setattr(writing.FileWriter, "finish", fail)
            zs.save(tmp_path, model, optimizer, asynchronous=True)
            assert zs.load(tmp_path, model, optimizer).path == tmp_path / "x"
        with pytest.raises(zs.CheckpointWriteError, match="ENOSPC"):
            zs.save(tmp_path, model, optimizer)
        zs.close(model)

    rank_run(0)


# -- checkpoints that a run removes while they are read ----------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("owner", "name", "verify"), [
    (resolver.Manifest, "read", True), (resolver, "check_sizes", True), (resolver, "check_digests", "before"),
    (resolver, "open_own", False), (loading._Loading, "compare", False), (bulk_reader.Bulk, "read", True), (safetensors, "stream", "before"),
    (state_loading.Restoring, "put", "before"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_the_next_is_taken_where_one_is_removed_while_it_is_read(owner, name, verify, world, tmp_path, monkeypatch):
    expected = save_pair(tmp_path)

    def write(rank):
        model, optimizer = build("tied", seed=7)
        train(model, optimizer, rank, BATCHES[:1])
        zs.save(tmp_path, model, optimizer, name="y", step=9)
        zs.close(model)

    run_threads(1, write)
    plain = getattr(owner, name)

    def pruned(*args, **options):
        if threading.current_thread().name == "rank0":
            shutil.rmtree(tmp_path / "y", ignore_errors=True)
        return plain(*args, **options)

    monkeypatch.setattr(owner, name, pruned)

    def rank_run(rank):
        model, optimizer = build("tied", seed=5)
        assert zs.load(tmp_path, model, optimizer, verify=verify).path == tmp_path / "x"
        assert_equal(snapshot(model, optimizer), expected)
        train(model, optimizer, rank, BATCHES[:1])
        zs.close(model)

    run_threads(world, rank_run)


def test_buffers_lent_to_the_reading_of_one_that_is_removed_serve_the_next(tmp_path, monkeypatch):
    model, optimizer = build("tied")
    for name in ("x", "y"):
        zs.save(tmp_path, model, optimizer, name=name)
    expected, plain, free = snapshot(model, optimizer), bulk_reader.Bulk.read, []

    def pruned(self, most):
        shutil.rmtree(tmp_path / "y", ignore_errors=True)
        free.append(runtime_of(model).gate.saver.pool.free)
        return plain(self, most)

    monkeypatch.setattr(bulk_reader.Bulk, "read", pruned)
    before = runtime_of(model).gate.saver.pool.free
    assert zs.load(tmp_path, model, optimizer).path == tmp_path / "x"
    assert_equal(snapshot(model, optimizer), expected)
    assert len(free) == 2 and free[0] == free[1] < before == runtime_of(model).gate.saver.pool.free
    zs.close(model)


def test_one_that_was_asked_for_by_name_and_is_removed_is_said_to_be_gone(tmp_path, monkeypatch):
    model, optimizer = build("tied")
    for name in ("a", "b"):
        zs.save(tmp_path, model, optimizer, name=name)
    plain = resolver.check_sizes
    monkeypatch.setattr(resolver, "check_sizes", lambda *args: (shutil.rmtree(tmp_path / "b"), plain(*args)))
    with pytest.raises(zs.CheckpointNotFound, match="no complete checkpoint 'b'; there are: a"):
        zs.load(tmp_path, model, optimizer, name="b")
    zs.close(model)


# -- modules and other things that raise at the end --------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_a_module_that_does_not_take_its_state_reaches_every_rank_and_can_be_loaded_again(world, tmp_path, monkeypatch):
    def rank_run(rank):
        model, optimizer = build("odd")
        train(model, optimizer, rank, BATCHES[:1])
        zs.save(tmp_path, model, optimizer, name="x", trained_only=False)
        model.noted.calls = 7
        take = model.noted.set_extra_state

        def refuse(state):
            raise ValueError("not mine")

        model.noted.set_extra_state = refuse if rank == world - 1 else take
        words = rf"noted .* on rank {world - 1} did not take its state: ValueError: not mine"
        with pytest.raises(zs.CheckpointError, match=words) as caught:
            zs.load(tmp_path, model, optimizer)
        with pytest.raises(zs.CheckpointError, match="load a checkpoint again"):
            model(*BATCHES[0][rank])
        model.noted.set_extra_state = take
        zs.load(tmp_path, model, optimizer)
        assert model.noted.calls == 1
        train(model, optimizer, rank, BATCHES[1:2])
        zs.close(model)
        return caught.value

    errors = run_threads(world, rank_run)
    assert len(set(map(str, errors))) == 1 and isinstance(errors[-1].__cause__, ValueError)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no room")], ids=repr)
@pytest.mark.parametrize("world", [1, 2])
def test_what_ends_a_load_half_way_says_what_to_do(error, world, tmp_path, monkeypatch):
    """A process by itself loads again; ranks are not in step any more, so they have to be started again."""
    save_pair(tmp_path)
    plain = loading._Loading._take_own

    def rank_run(rank):
        model, optimizer = build("tied", seed=5)
        monkeypatch.setattr(loading._Loading, "_take_own", on_rank(world - 1, plain, error))
        with pytest.raises((zs.CheckpointError, KeyboardInterrupt)) as caught:
            zs.load(tmp_path, model, optimizer)
        remedy = "load a checkpoint again" if world == 1 else "the ranks ended with it; start them again"
        told = f"could not be loaded to its end ({type(error).__name__}"
        assert told in str(runtime_of(model).gate.unusable) or rank != world - 1
        if rank != world - 1 or isinstance(error, Exception):
            assert told in str(caught.value) and remedy in str(caught.value)
        if world == 1:
            monkeypatch.setattr(loading._Loading, "_take_own", plain)
            zs.load(tmp_path, model, optimizer)
            train(model, optimizer, rank, BATCHES[:1])

    run_threads(world, rank_run)


def test_a_load_in_inference_mode_leaves_states_that_can_be_trained(tmp_path):
    expected = save_pair(tmp_path)
    model, optimizer = build("tied", seed=5)
    with torch.inference_mode():
        zs.load(tmp_path, model, optimizer)
    assert_equal(snapshot(model, optimizer), expected)
    train(model, optimizer, 0, BATCHES[1:2])
    zs.close(model)


def written_and_partly_loaded(folder, rank, write, **options):
    """A model in bf16 whose first weight a program has written before a load of the other one; its optimizer keeps values."""
    save_file({"1.weight": torch.ones(2, 4)}, folder / f"part{rank}.safetensors")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = zs.shard(model, optimizer, precision="bf16", units="model", **options)
    with torch.no_grad():
        write(model[0].weight)
    zs.load(folder / "part0.safetensors", model, strict=False)
    return model, optimizer


@pytest.mark.parametrize(
    "options", [{"stage": 1}, {"stage": 3}, {"stage": 3, "master_weights": "split"}], ids=["1", "3", "split"]
)
def test_what_a_program_wrote_before_a_partial_load_stays(tmp_path, options):
    """The load passes over a parameter that was just written: its master follows, and the next step does not undo the write."""

    def run(rank):
        model, optimizer = written_and_partly_loaded(tmp_path, rank, lambda weight: weight.mul_(3), **options)
        written = zs.full_state_dict(model)
        model(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
        stepped, masters = zs.full_state_dict(model), zs.full_state_dict(model, masters=True)
        zs.close(model)
        return written, stepped, masters

    for written, stepped, masters in run_threads(2, run):
        assert torch.equal(written["1.weight"].float(), torch.ones(2, 4)) and written["0.weight"].float().abs().max() > 1
        for name, value in written.items():
            assert torch.equal(stepped[name], value) and torch.equal(masters[name].to(value.dtype), value), name


@pytest.mark.parametrize("stage", [1, 3])
def test_masters_that_were_read_ahead_do_not_undo_a_load_of_the_model_alone(tmp_path, stage):
    """The host's step has read the next step's masters from the disk when a load without an optimizer replaces them."""

    def built(value):
        torch.manual_seed(value)
        return torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])

    def run(rank):
        given = zs.shard(built(1), stage=1)[0]
        zs.save(tmp_path / "given", given)
        zs.close(given)
        model = built(2)
        offload = zs.Offload("nvme", path=str(tmp_path / f"swap{rank}"), any_filesystem=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
        model, optimizer = zs.shard(model, optimizer, stage=stage, units=["Linear"], precision="bf16", offload_optimizer=offload)

        def step():
            model(torch.ones(2, 8) * (rank + 1)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        with torch.no_grad():
            model(torch.ones(1, 8))  # reads ahead meanwhile
        zs.load(tmp_path / "given", model)
        before = {name: value.clone() for name, value in zs.full_state_dict(model, masters=True).items()}
        step()
        after = zs.full_state_dict(model, masters=True)
        zs.close(model)
        return max((after[name] - value).abs().max().item() for name, value in before.items())

    (tmp_path / "swap0").mkdir()
    assert max(run_threads(1, run)) <= 0.0101  # Adam's step is at most the learning rate


@pytest.mark.parametrize("stage", [0, 2])
def test_a_partial_load_does_not_forget_that_ranks_wrote_differently(tmp_path, stage):

    def run(rank):
        model, optimizer = written_and_partly_loaded(tmp_path, rank, lambda weight: weight.fill_(rank + 1.0), stage=stage)
        model(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum().backward()
        with pytest.raises(zs.ModelMismatch, match="0.weight"):
            optimizer.step()

    run_threads(2, run)
