"""A save in the background copies what the library guards while forward and backward run; who changes a state waits for it.

The copy is held back here until somebody asks for its end. So whatever is changed without asking is written as it became, not
as it was when the save was called.
"""

import copy
import os
import pickle
import threading
import time

import pytest
import torch
from checkpoint_kit import Language, assert_equal, build, read_checkpoint, snapshot, train
from helpers import seeded, token_batches
from recording_streams import RecordingStreams

import zeroshard as zs
from zeroshard.checkpoint.writing import Save, Writing
from zeroshard.engine.comm.messages import encode
from zeroshard.engine.rest import MemoryRest
from zeroshard.testing import run_threads

MODEL = seeded(lambda: Language(tied=True))
BATCHES = [step[0] for step in token_batches(4, 1, 2, 11)]


@pytest.fixture
def late(monkeypatch):
    """Copies wait until they are asked for."""
    plain, ask, end = Writing._copy_rest, Save.wait_copied, Save.wait

    def copy_rest(self, save: Save) -> None:
        assert asked(save).wait(20)
        plain(self, save)

    def wait_copied(self: Save) -> None:
        asked(self).set()
        ask(self)

    def wait(self: Save) -> None:
        asked(self).set()
        end(self)

    monkeypatch.setattr(Writing, "_copy_rest", copy_rest)
    monkeypatch.setattr(Save, "wait", wait)
    monkeypatch.setattr(Save, "wait_copied", wait_copied)


def asked(save: Save) -> threading.Event:
    """Set when the copy's end has been asked for."""
    return save.__dict__.setdefault("asked", threading.Event())


def step(model, optimizer, views, rank, root):
    optimizer.step()


def write_parameter(model, optimizer, views, rank, root):
    model.blocks[0].into.weight.mul_(2.0)


def write_alias(model, optimizer, views, rank, root):
    views["alias"].add_(1.0)


def write_state(model, optimizer, views, rank, root):
    views["state"].zero_()


def write_gathered(model, optimizer, views, rank, root):
    with zs.gathered(model, write=True):
        model.norm.weight.fill_(3.0)


def load_values(model, optimizer, views, rank, root):
    model.load_state_dict({name: torch.zeros(value.shape) for name, value in model.state_dict().items()})


def load_states(model, optimizer, views, rank, root):
    state = copy.deepcopy(views["states"])
    for entries in state["state"].values():
        entries["exp_avg"].fill_(9.0)
    optimizer.load_state_dict(state)


def load(model, optimizer, views, rank, root):
    zs.load(root, model, optimizer, name="other")


def close(model, optimizer, views, rank, root):
    zs.close(model)


CHANGES = [step, write_parameter, write_alias, write_state, write_gathered, load_values, load_states, load, close]
KINDS = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2, masters": {"stage": 2, "precision": "bf16"},
    "stage 3": {"stage": 3},
    "stage 3, masters": {"stage": 3, "precision": "bf16"},
    "states on the host": {"stage": 3, "precision": "bf16", "offload_optimizer": "cpu"},
    "late update": {"stage": 3, "precision": "bf16", "offload_optimizer": "cpu", "delayed_update": 0},
}


@pytest.mark.parametrize(
    ("kind", "own_device"), [*((kind, False) for kind in KINDS), ("stage 3", True), ("states on the host", True)]
)
def test_c12_what_changes_states_waits_for_the_copy(kind, own_device, tmp_path, late, strict_device):
    def rank_run(rank: int) -> dict:
        strict_device(rank, own_device)
        model, optimizer = build("tied", **KINDS[kind])
        train(model, optimizer, rank, BATCHES[:1])
        zs.save(tmp_path, model, optimizer, name="other")
        train(model, optimizer, rank, BATCHES[1:3])
        expected = {}
        for number, change in enumerate(CHANGES):
            weight = model.blocks[0].into.weight
            views = {
                "alias": weight.detach(),
                "state": optimizer.state[weight]["exp_avg"],
                "states": whole_states(model, optimizer),
            }
            before = snapshot(model, optimizer)
            save = zs.save(tmp_path, model, optimizer, name=change.__name__, step=number, asynchronous=True)
            model(*BATCHES[3][rank % len(BATCHES[3])]).backward()
            assert not asked(save).is_set(), "forward and backward wait for the copy"
            with torch.no_grad():
                change(model, optimizer, views, rank, tmp_path)
            if change is not close:
                save.wait()
                optimizer.zero_grad()
                train(model, optimizer, rank, BATCHES[:1])
            expected[change.__name__] = before
        return expected

    expected = run_threads(2, rank_run)[0]
    for name, before in expected.items():
        assert_equal(read_checkpoint(tmp_path, 1, "tied", load_name=name, **KINDS[kind])[0], before, name)


def test_what_has_no_optimizer_waits_too(tmp_path, late):
    def rank_run(rank: int) -> bool:
        model, _ = zs.shard(copy.deepcopy(MODEL), stage=3)
        save = zs.save(tmp_path, model, asynchronous=True)
        with torch.no_grad():
            model.norm.weight.mul_(3.0)
        save.wait()
        changed = model.norm.weight.full_tensor()
        zs.load(tmp_path, model)
        same = torch.equal(model.norm.weight.full_tensor(), MODEL.norm.weight)
        zs.close(model)
        return same and torch.equal(changed, 3 * MODEL.norm.weight)

    assert all(run_threads(2, rank_run))


def whole_states(model, optimizer) -> dict:
    """The optimizer's state dict with whole tensors."""
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    states = zs.full_optimizer_state(model)
    groups = [{**group, "params": list(range(len(names)))} for group in optimizer.param_groups]
    return {"state": {index: states[name] for index, name in enumerate(names)}, "param_groups": groups}


def test_what_a_step_waits_for_the_copy_is_stall(tmp_path, monkeypatch):
    plain = MemoryRest.read

    def read(self, start, out):
        if threading.current_thread().name == "zeroshard-save" and start == 0:
            time.sleep(0.1)
        return plain(self, start, out)

    def rank_run(rank: int) -> tuple:
        model, optimizer = build("tied", stage=3)
        train(model, optimizer, rank, BATCHES[:1])
        save = zs.save(tmp_path, model, optimizer, asynchronous=True)
        called = save.stall_seconds
        train(model, optimizer, rank, BATCHES[1:2])
        waited = save.stall_seconds
        train(model, optimizer, rank, BATCHES[2:3])
        save.wait()
        zs.close(model)
        return called, waited, save.stall_seconds, save.seconds

    monkeypatch.setattr(MemoryRest, "read", read)
    called, waited, after, seconds = run_threads(1, rank_run)[0]
    assert 0 < called < waited - 0.05 and waited == after <= seconds


def test_a_copy_that_fails_is_told_and_holds_nobody_up(tmp_path, monkeypatch):
    plain = MemoryRest.read

    def read(self, start, out):
        if threading.current_thread().name == "zeroshard-save":
            raise RuntimeError("no more device")
        return plain(self, start, out)

    def rank_run(rank: int) -> str:
        model, optimizer = build("tied", stage=3)
        train(model, optimizer, rank, BATCHES[:1])
        save = zs.save(tmp_path, model, optimizer, asynchronous=True)
        train(model, optimizer, rank, BATCHES[1:3])
        with pytest.raises(zs.CheckpointError) as caught:
            save.wait()
        zs.close(model)
        return str(caught.value)

    monkeypatch.setattr(MemoryRest, "read", read)
    assert all("no more device" in error for error in run_threads(2, rank_run))
    assert not list(tmp_path.iterdir())


def test_the_copy_is_behind_what_the_stream_had_been_given():
    streams, log = RecordingStreams(separate_host=True), []
    streams.run_beside(lambda: log.append("step"))
    mark = streams.mark()
    streams.run_beside(lambda: log.append("next forward"))
    with streams.behind(mark):
        assert log == ["step"]


class Harm:
    """Makes a folder if it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("left", ["a pickle", "nothing", "an error"])
def test_what_a_failed_rank_has_left_is_only_read(left, tmp_path, monkeypatch):
    """Rank 0 takes the reason from a file, in a folder to which others may be able to write: it runs nothing."""
    contents = {
        "a pickle": pickle.dumps(Harm(tmp_path / "made")),
        "nothing": b"",
        "an error": encode(zs.ConfigError("my reason")),
    }
    plain = Writing._background

    def background(self, save: Save) -> None:
        if self.comm.rank == 0:
            return plain(self, save)
        save._copied.set()
        self._file_of(self.comm.rank, "failed").write_bytes(contents[left])

    monkeypatch.setattr(Writing, "_background", background)

    def rank_run(rank: int) -> None:
        model, optimizer = build("tied")
        with pytest.raises(zs.ConfigError if left == "an error" else zs.CheckpointError) as caught:
            zs.save(tmp_path / "run", model, optimizer, asynchronous=True).wait()
        assert ("my reason" if left == "an error" else "a rank failed") in str(caught.value)
        zs.close(model)

    run_threads(2, rank_run)
    assert not (tmp_path / "made").exists()
