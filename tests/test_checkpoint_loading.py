"""zs.load where one rank, one object or one file does not go along: every rank hears of it at once, and knows what state things are in."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from types import SimpleNamespace

import numpy
import pytest
import torch
from checkpoint_kit import assert_equal, build, snapshot, train
from helpers import token_batches

import zeroshard as zs
from zeroshard import weights
from zeroshard.checkpoint import loading, opening
from zeroshard.optim import restoring
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
        first, then, begin = Counter(rank, refuses=(1,)), Counter(rank), time.monotonic()
        torch.manual_seed(9)
        with pytest.raises(zs.CheckpointError) as caught:
            zs.load(tmp_path, model, optimizer, extra={"first": first, "then": then})
        assert time.monotonic() - begin < 10
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
    owners = [opening.owner_of(f"extra.{name}", facts) for name in ("a.1", "a.2", "a.01", "a", "b.1", "a.x.1")]
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
    (weights, "stage", MemoryError("no room")), (restoring, "stage", torch.OutOfMemoryError("no room\nmore")),
    (opening, "check_sizes", PermissionError(errno.EACCES, "Permission denied", "/x/manifest.json")),
    (opening, "open_own", EOFError("Ran out of input")), (opening, "check_digests", RuntimeError("no reader")),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_whatever_one_rank_meets_reaches_all(module, name, error, tmp_path, monkeypatch):
    save_pair(tmp_path)
    monkeypatch.setattr(module, name, on_rank(1, getattr(module, name), error))

    def rank_run(rank):
        model, optimizer = build("tied", seed=5)
        before, begin = snapshot(model, optimizer), time.monotonic()
        with pytest.raises(zs.CheckpointError) as caught:
            zs.load(tmp_path, model, optimizer)
        assert time.monotonic() - begin < 10
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
        with pytest.raises(zs.CheckpointError, match=r"\.distcp could not be read at byte 0.*EIO: Input/output error; nothing") as caught:
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
    opened = opening.open_any(opening.Alone(), tmp_path)

    def drawn(rank, before):  # generators are the process's, so that ranks in threads would share them
        random.seed(before), numpy.random.seed(before), torch.manual_seed(before)
        one = SimpleNamespace(opened=opened, comm=SimpleNamespace(rank=rank, world_size=3))
        assert loading._Loading._take_generators(one) == "reseeded"
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
