"""zs.save and zs.load as they are used: beside training, with extras and extra state, and by torch's own tools (names: test_checkpoint_names)."""

import contextlib
import gc
import json
import os
import pickle
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_kit import (
    MODELS,
    VOCAB,
    LowRank,
    alone,
    assert_equal,
    build,
    names,
    read_checkpoint,
    snapshot,
    train,
    write_checkpoint,
)
from helpers import seeded, token_batches
from offloading import tiers
from residence import in_own_process
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import zeroshard as zs
from zeroshard.checkpoint import directory, file_writer, writing
from zeroshard.engine.runtime import runtime_of
from zeroshard.testing import run_threads

BATCHES = [step[0] for step in token_batches(8, 1, 4, VOCAB)]


# -- beside training -------------------------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch):
    """While it is shut, files are not written: what is saved beside training is then surely still in buffers."""
    opened = threading.Event()
    opened.set()
    plain = file_writer.FileWriter.finish

    def later(self) -> None:
        assert opened.wait(30)
        plain(self)

    monkeypatch.setattr(file_writer.FileWriter, "finish", later)
    return opened


@pytest.mark.parametrize("places", [("none", "none", "none"), ("cpu", "cpu", "cpu")], ids=["device", "host"])
def test_c12_an_asynchronous_save_has_the_values_of_its_call(places, tmp_path, gate):
    """Three steps are taken before the first byte is written."""

    def rank_run(rank: int) -> tuple:
        model, optimizer = build("odd", **tiers(str(tmp_path), *places))
        train(model, optimizer, rank, BATCHES[:2])
        save = zs.save(tmp_path, model, optimizer, asynchronous=True, trained_only=False)
        saved = snapshot(model, optimizer)
        train(model, optimizer, rank, BATCHES[2:5])
        assert not save.done() and not (save.path / "manifest.json").exists()
        runtime_of(model).comm.exchange(b"", "all have looked")
        gate.set()
        assert save.wait() == save.path and save.done()
        assert 0 < save.stall_seconds <= save.seconds and save.snapshot_nbytes >= save.nbytes - (1 << 16)
        later = snapshot(model, optimizer)
        zs.close(model)
        return saved, later

    gate.clear()
    saved, later = run_threads(2, rank_run)[0]
    assert not torch.equal(saved.weights["prime"], later.weights["prime"])
    for got in read_checkpoint(tmp_path, 2, "odd", **tiers(str(tmp_path), *places)):
        assert_equal(got, saved)


@pytest.mark.limit(120)
@in_own_process
def test_c12_fifty_asynchronous_saves_do_not_grow(tmp_path):
    """Neither memory, nor files, nor threads, nor descriptors, by two ranks whose parameters and states are offloaded."""
    model = seeded(lambda: LowRank(128))
    for param in model.parameters():
        param.requires_grad_(True)
    batches = [[(torch.randn(4, 128),)]]

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def rank_run(rank: int) -> list:
        module, optimizer = build(model, **tiers(str(tmp_path), "cpu", "none", "cpu"))
        comm, seen = runtime_of(module).comm, []
        for number in range(50):
            train(module, optimizer, rank, batches)
            save = zs.save(tmp_path / "run", module, optimizer, asynchronous=True, keep_last=2)
            if number in (9, 49):
                save.wait()
                comm.exchange(b"", "both have waited")
                seen.append((resident(), set(threading.enumerate()), len(os.listdir("/proc/self/fd"))) if rank == 0 else ())
                comm.exchange(b"", "rank 0 has looked")
        zs.close(module)
        return seen

    before, after = run_threads(2, rank_run)[0]
    assert after[0] < before[0] + (8 << 20), f"{after[0] - before[0]:,} bytes more"
    assert after[2] <= before[2]
    for thread in after[1] - before[1]:
        assert thread.name == "zeroshard-sign"  # it is not waited for, but has been told to end
        thread.join()
        assert not thread.is_alive()
    assert names(tmp_path / "run") == ["latest", "step-00000049", "step-00000050"]


def test_a_save_while_one_is_under_way_waits_or_refuses(tmp_path, gate):
    def rank_run(rank: int) -> None:
        model, optimizer = build("tied")
        first = zs.save(tmp_path, model, optimizer, name="first", asynchronous=True)
        with pytest.raises(zs.CheckpointError, match="first is still under way; nothing was saved"):
            zs.save(tmp_path, model, optimizer, name="second", asynchronous=True, if_busy="refuse")
        with pytest.raises(zs.ConfigError, match="if_busy: expected 'wait' or 'refuse', got 'no'"):
            zs.save(tmp_path, model, optimizer, if_busy="no")
        assert not first.done()
        runtime_of(model).comm.exchange(b"", "all have looked")
        gate.set()
        second = zs.save(tmp_path, model, optimizer, name="second", asynchronous=True)
        assert first.done() and (tmp_path / "first" / "manifest.json").exists()
        second.wait()
        zs.save(tmp_path, model, optimizer, name="third", if_busy="refuse")
        zs.close(model)

    gate.clear()
    run_threads(2, rank_run)
    assert names(tmp_path) == ["first", "latest", "second", "third"]


def test_closing_a_model_lets_its_save_end(tmp_path):
    def rank_run(rank: int) -> None:
        model, optimizer = build("tied")
        zs.save(tmp_path, model, optimizer, asynchronous=True)
        zs.close(model)

    run_threads(2, rank_run)
    assert names(tmp_path) == ["latest", "step-00000000"]
    assert (tmp_path / "step-00000000" / "manifest.json").is_file()


# -- a model alone, extra state, extras --------------------------------------------------------------------------------


def test_extras_of_equal_values_are_one(tmp_path):
    """Their bytes differ: sets and dictionaries in another order, one object twice, memory laid out otherwise. Others stay each rank's."""

    def values(rank: int) -> dict:
        text, equal = ("".join(each) for each in (["on", "ce"], ["onc", "e"]))  # two objects
        row = torch.arange(12.0).view(3, 4)
        return {
            "sets": {"seen": {0, 8} if rank else {8, 0}, "kept": frozenset([16, 0, 8][:: 1 - 2 * rank])},
            "order": {"a": 1, "b": [2, ({3: None},)]} if rank else {"b": [2, ({3: None},)], "a": 1},
            "twice": [text, text] if rank else [text, equal],
            "tensor": row[:, 1] if rank else row[:, 1].clone(),
        }

    def others(rank: int) -> dict:
        mine: list = [1]
        mine.append(mine)
        return {
            "number": 1 if rank else 1.0, "list": [rank, {0}], "itself": mine if rank else [1], "tensor_of": torch.tensor(rank),
            "nothing": [torch.zeros(2, device="meta"), None] if rank else [1, None],  # without values, on one rank alone
            "history": list(range(rank, 200_000 + rank)),
        }  # fmt: skip

    def save(rank: int) -> dict:
        model, optimizer = build("tied")
        zs.save(tmp_path, model, optimizer, extra=values(rank) | others(rank))
        zs.close(model)
        return {name: pickle.dumps(value) for name, value in values(rank).items()}

    first, second = run_threads(2, save)
    assert all(first[name] != second[name] for name in ("sets", "order", "twice")), "else nothing is tested"
    model, optimizer = alone()
    with pytest.raises(zs.CheckpointError, match=r"trusted=True only.* if .* \(.*frozenset\)"):
        zs.load(tmp_path, model, optimizer, extra={"sets": None})
    found = zs.load(tmp_path, model, optimizer, extra=dict.fromkeys(values(0)), trusted=True)
    for name, value in values(0).items():
        assert torch.equal(found.extra[name], value) if name == "tensor" else found.extra[name] == value, name
    for name in others(0):
        with pytest.raises(zs.CheckpointMismatch, match="each with a state of its own"):
            zs.load(tmp_path, model, optimizer, extra={name: None})
    zs.close(model)


def test_a_model_can_be_saved_and_loaded_without_its_optimizer(tmp_path):
    def rank_run(rank: int) -> None:
        model, optimizer = build("odd")
        train(model, optimizer, rank, BATCHES[:2])
        zs.save(tmp_path, model, name="alone", trained_only=False)
        zs.save(tmp_path, model, optimizer, name="both", trained_only=False)
        saved = snapshot(model)
        zs.close(model)
        model, optimizer = build("odd", seed=5)
        train(model, optimizer, rank, BATCHES[2:3])
        before = snapshot(model, optimizer)
        with pytest.raises(zs.CheckpointMismatch, match="no optimizer states: load it with optimizer=None"):
            zs.load(tmp_path, model, optimizer, name="alone")
        assert_equal(snapshot(model, optimizer), before, "nothing was changed")
        for name in ("alone", "both"):
            zs.load(tmp_path, model, name=name)
            assert_equal(snapshot(model), saved)
            assert_equal(snapshot(model, optimizer), type(before)(saved.weights, before.states, before.groups, saved.extra_state))
        zs.close(model)

    run_threads(2, rank_run)


def test_extra_state_of_modules_is_saved_and_given_back(tmp_path):
    """What get_extra_state gives: values, and a tensor."""

    def rank_run(rank: int) -> None:
        model, optimizer = build("odd")
        train(model, optimizer, rank, BATCHES[:2])
        model.noted.note, model.stamped.stamp = "seen", torch.tensor([1.0, 2.0, 3.0])
        zs.save(tmp_path, model, optimizer, trained_only=False)
        zs.close(model)
        model, optimizer = build("odd", seed=5)
        zs.load(tmp_path, model, optimizer)
        assert (model.noted.calls, model.noted.note) == (2, "seen")
        assert torch.equal(model.stamped.stamp, torch.tensor([1.0, 2.0, 3.0]))
        zs.close(model)

    run_threads(2, rank_run)


class Position:
    """The place of a rank in its data."""

    def __init__(self, samples: int = 0) -> None:
        self.samples = samples

    def state_dict(self) -> dict:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict) -> None:
        self.samples = state["samples"]


def test_b11_extras_of_each_rank_come_back_or_are_refused_by_name(tmp_path):
    """Those that are the same everywhere load at any world size; a rank's own only at the same, and are never dropped unseen."""

    def save_it(rank: int) -> None:
        model, optimizer = build("tied")
        zs.save(tmp_path, model, optimizer, extra={"position": Position(10 + rank), "epoch": 3, "tensor": torch.arange(3)})
        zs.close(model)

    def load_it(rank: int, world: int) -> None:
        model, optimizer = build("tied", seed=5)
        before = snapshot(model, optimizer)
        position = Position()
        if world == 3:
            found = zs.load(tmp_path, model, optimizer, extra={"position": position, "epoch": None})
            assert position.samples == 10 + rank and found.extra["position"] == {"samples": 10 + rank}
        else:
            with pytest.raises(zs.CheckpointMismatch, match=r"extra\['position'\] was saved by 3 ranks.*there are 2 now"):
                zs.load(tmp_path, model, optimizer, extra={"position": position})
            assert_equal(snapshot(model, optimizer), before)
            found = zs.load(tmp_path, model, optimizer)
            assert position.samples == 0 and "position" not in found.extra
        assert found.extra["epoch"] == 3 and torch.equal(found.extra["tensor"], torch.arange(3))
        assert zs.load(tmp_path, model, optimizer, extra={"epoch": 4, "tensor": torch.zeros(1)}).extra["epoch"] == 3
        with pytest.raises(zs.ConfigError, match="nothing not in"):
            zs.load(tmp_path, model, optimizer, extra={"nothing": None})
        zs.close(model)

    run_threads(3, save_it)
    run_threads(3, load_it, 3)
    run_threads(2, load_it, 2)


class Told:
    """Tells a state and does not take one."""

    def state_dict(self) -> dict:
        return {"seen": 7}


def test_what_could_not_get_its_state_back_is_refused_before_anything_changes(tmp_path):
    model, optimizer = build("tied")
    schedulers = [torch.optim.lr_scheduler.ConstantLR(optimizer)]
    zs.save(tmp_path, model, optimizer, extra={"told": Told(), "schedulers": [each.state_dict() for each in schedulers]})
    before = snapshot(model, optimizer)
    for name, given, words in (
        ("told", Told(), "Told has a state_dict and no load"),
        ("schedulers", schedulers, "would not load the ConstantLR inside it: give that a name"),
    ):
        with pytest.raises(zs.ConfigError, match=words):
            zs.load(tmp_path, model, optimizer, extra={name: given})
        assert_equal(snapshot(model, optimizer), before)
    assert zs.load(tmp_path, model, optimizer, extra={"told": None}).extra["told"] == {"seen": 7}  # the remedies
    zs.save(tmp_path, model, optimizer, step=1, extra={"first": schedulers[0]})
    zs.load(tmp_path, model, optimizer, extra={"first": schedulers[0]})
    zs.close(model)


def test_the_first_example_of_the_documentation_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "resume.md").read_text()
    example = text.split("```python\n")[1].split("```")[0]

    def rank_run(rank: int) -> None:
        model = torch.nn.Linear(8, 4)
        model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        dataset = torch.utils.data.TensorDataset(torch.ones(48, 8))
        told = {"zs": zs, "torch": torch, "model": model, "optimizer": optimizer, "scheduler": scheduler, "dataset": dataset}
        exec(example, told)
        assert "found" not in told, "there is no checkpoint yet"
        told["save"].wait()
        exec(example, told)
        assert told["epoch"] == 2 and told["found"].extra["scheduler"] == scheduler.state_dict()
        zs.close(model)

    run_threads(2, rank_run)


def test_names_of_extras_that_would_be_taken_for_one_another_are_refused(tmp_path):
    """'a' of rank 0, and 'a.0'."""

    def rank_run(rank: int) -> None:
        model, optimizer = build("tied")
        with pytest.raises(zs.ConfigError, match=r"extra\['a.0'\]: the checkpoint uses this name for rank 0's 'a'"):
            zs.save(tmp_path, model, optimizer, extra={"a": rank, "a.0": "shared"})
        zs.save(tmp_path, model, optimizer, extra={"a": 1, "a.0": "shared"})
        assert zs.load(tmp_path, model, optimizer).extra == {"a": 1, "a.0": "shared"}
        zs.close(model)

    run_threads(2, rank_run)


def test_objects_of_other_classes_are_loaded_only_on_your_word(tmp_path):
    def rank_run(rank: int) -> None:
        model, optimizer = build("tied")
        zs.save(tmp_path, model, optimizer, extra={"path": Path("/somewhere"), "plain": 1})
        zs.close(model)
        model, optimizer = build("tied", seed=5)
        before = snapshot(model, optimizer)
        with pytest.raises(zs.CheckpointError, match="with trusted=True only.*if you trust whoever wrote"):
            zs.load(tmp_path, model, optimizer, extra={"path": None})
        assert_equal(snapshot(model, optimizer), before)
        assert zs.load(tmp_path, model, optimizer, extra={"plain": None}).extra == {"plain": 1}
        assert zs.load(tmp_path, model, optimizer, trusted=True).extra["path"] == Path("/somewhere")
        zs.close(model)

    run_threads(2, rank_run)


def test_extra_state_of_other_classes_is_refused_before_anything_changes(tmp_path):
    def rank_run(rank: int) -> None:
        model, optimizer = build("odd")
        model.noted.note = Path("/somewhere")
        zs.save(tmp_path, model, optimizer, trained_only=False)
        zs.close(model)
        model, optimizer = build("odd", seed=5)
        train(model, optimizer, rank, BATCHES[:1])
        before = snapshot(model, optimizer)
        with pytest.raises(zs.CheckpointError, match="with trusted=True only"):
            zs.load(tmp_path, model, optimizer)
        assert_equal(snapshot(model, optimizer), before)
        assert not runtime_of(model).gate.unusable
        zs.load(tmp_path, model, optimizer, trusted=True)
        assert model.noted.note == Path("/somewhere")
        zs.close(model)

    run_threads(2, rank_run)


# -- torch's own tools -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A checkpoint of an odd model by three ranks, and what is in it."""
    root = tmp_path_factory.mktemp("foreign")
    saved = write_checkpoint(root, 3, "odd", BATCHES[:2], save_trained_only=False, save_name="x", save_extra={"note": {"a": 1}})
    return root / "x", saved


def test_torch_converts_it(foreign, tmp_path):
    path, saved = foreign
    dcp_to_torch_save(path, tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=False)
    weights = {n: t for n, t in saved.weights.items() if isinstance(t, torch.Tensor)}
    assert found["model"].keys() - {"noted._extra_state", "stamped._extra_state"} == weights.keys() - {"stamped._extra_state"}
    for name, value in weights.items():
        assert torch.equal(found["model"][name], value), name
    for name, state in saved.states.items():
        for key, value in state.items():
            assert torch.equal(found["optim"]["state"][name][key], torch.as_tensor(value)), (name, key)
    assert found["optim"]["param_groups"][0]["lr"] == 1e-2 and found["extra"] == {"note": {"a": 1}}


def test_torch_loads_it_into_an_ordinary_model(foreign):
    """Which asks for both names of its tied parameter."""
    path, saved = foreign
    model = seeded(MODELS["odd"], 9)
    wanted = {n: t.detach().clone().float() if "narrow" in n else t for n, t in model.state_dict().items()}  # masters are fp32
    target = {"model": {n: t for n, t in wanted.items() if isinstance(t, torch.Tensor)}}
    dcp.load(target, checkpoint_id=str(path), no_dist=True)
    for name, value in target["model"].items():
        assert torch.equal(value, saved.weights[name]), name
    assert "head.weight" in target["model"]


def test_torch_lists_it(foreign):
    path, saved = foreign
    metadata = dcp.FileSystemReader(path).read_metadata()
    manifest = json.loads((path / "manifest.json").read_text())
    aliases = {f"model.{alias}" for alias in manifest["ties"]}
    assert metadata.state_dict_metadata.keys() == manifest["tensors"].keys() | manifest["objects"].keys() | aliases
    shape = metadata.state_dict_metadata["model.prime"].size
    assert tuple(shape) == tuple(saved.weights["prime"].shape)
    assert metadata.planner_data["optim.state.prime.exp_avg"] == ("optim", "state", "prime", "exp_avg")


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("small_nbytes", [0, 1 << 16], ids=["by files", "by messages"])
def test_what_is_in_the_files_is_told_where_it_is_not_as_before(small_nbytes, asynchronous, tmp_path, monkeypatch):
    """States that come, no optimizer, a save that fails after it was told: what is loaded is what was saved."""
    told: list[str] = []
    write = directory.write_whole
    monkeypatch.setattr(
        directory, "write_whole", lambda path, content, **how: (told.append(path.name), write(path, content, **how))[1]
    )
    monkeypatch.setattr(writing, "_SMALL_NBYTES", small_nbytes)

    def fail(*arguments: object) -> None:
        raise MemoryError("mine")

    def rank_run(rank: int) -> None:
        model, optimizer = build("tied")
        comm = runtime_of(model).comm

        def save(name: str, optimizer, tells: bool) -> None:
            comm.exchange(b"", "begin")
            told.clear()
            comm.exchange(b"", "none yet")
            zs.save(tmp_path, model, optimizer, name=name, asynchronous=asynchronous).wait()
            comm.exchange(b"", "all have saved")
            assert sorted(n for n in told if n.endswith("tensors.json")) == [
                f"rank-{r:05d}.tensors.json" for r in range(2) if tells
            ]
            expected = snapshot(model, optimizer)
            zs.load(tmp_path, model, optimizer, name=name)
            assert_equal(snapshot(model, optimizer), expected)

        save("a", optimizer, True)
        save("b", optimizer, False)
        train(model, optimizer, rank, BATCHES[:1])
        save("c", optimizer, True)
        save("d", optimizer, False)
        save("e", None, True)
        save("f", optimizer, True)
        with monkeypatch.context() if rank == 0 else contextlib.nullcontext() as patch:
            if rank == 0:
                patch.setattr(writing.listing, "join", fail)
            comm.exchange(b"", "armed")
            with pytest.raises(zs.CheckpointError, match="mine"):
                zs.save(tmp_path, model, None, name="g", asynchronous=asynchronous).wait()
            comm.exchange(b"", "failed")
        save("g", None, False)
        zs.close(model)

    run_threads(2, rank_run)
    assert {name for name in names(tmp_path / "d") if name.endswith("json")} == {"manifest.json"}


def test_a_save_that_is_waited_for_copies_little_ahead(tmp_path, monkeypatch):
    """Of the many buffers that a snapshot has left it uses as many as a first save: copying on would only hold up the writing."""
    monkeypatch.setattr(writing, "BUFFER_NBYTES", 1 << 20)
    used: list[int] = []
    plain = file_writer.FileWriter.buffer

    def buffer(self):
        found = plain(self)
        used.append(self.pool.count - self.pool.free)
        return found

    monkeypatch.setattr(file_writer.FileWriter, "buffer", buffer)

    plain_model = torch.nn.Linear(1024, 2048)
    model, optimizer = zs.shard(plain_model, torch.optim.AdamW(plain_model.parameters()))
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    zs.save(tmp_path, model, optimizer, name="a", asynchronous=True).wait()
    assert runtime_of(model).gate.saver.pool.count > 2 * file_writer.ROTATING and max(used) > file_writer.ROTATING
    used.clear()
    zs.save(tmp_path, model, optimizer, name="b")
    assert len(used) > 2 * file_writer.ROTATING and max(used) <= file_writer.ROTATING
    expected = snapshot(model, optimizer)
    zs.close(model)
    monkeypatch.undo()
    model, optimizer = zs.shard(plain_model, torch.optim.AdamW(plain_model.parameters()))
    zs.load(tmp_path, model, optimizer, name="b")
    assert_equal(snapshot(model, optimizer), expected)
    zs.close(model)
