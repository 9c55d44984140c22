"""zs.load in a process that has saved: what is read goes into the buffers of saves, and from there into place."""

from __future__ import annotations

import errno
import threading

import pytest
import torch
from checkpoint_kit import assert_equal, build, read_checkpoint, snapshot, train, write_checkpoint
from helpers import seeded, token_batches
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint import bulk
from zeroshard.checkpoint.datafile import BUFFER_NBYTES, FileWriter, Ring
from zeroshard.errors import CheckpointCorrupt
from zeroshard.runtime import runtime_of
from zeroshard.testing import run_threads

BATCHES = [step[0] for step in token_batches(4, 1, 4, 11)]
WIDE = [[(torch.randn(2, 1500, generator=torch.Generator().manual_seed(rank)),) for rank in range(3)]]


class Wide(nn.Module):
    """Of a dozen windows, and a few bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1500, 1500), nn.Linear(1500, 700), nn.Linear(700, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.fixture
def counted(monkeypatch):
    """How often everything was read: into buffers that stay, and into fresh tensors."""
    calls = {"keep": 0, "run": 0}
    for name in calls:
        plain = getattr(bulk.Bulk, name)

        def wrapped(self, buffers, name=name, plain=plain):
            calls[name] += 1
            return plain(self, buffers)

        monkeypatch.setattr(bulk.Bulk, name, wrapped)
    return calls


@pytest.mark.parametrize(("options", "worlds"), [
    ({"stage": 0}, (2, 3)), ({"stage": 1}, (3, 2)), ({"stage": 2, "precision": "bf16"}, (2, 2)), ({"stage": 3}, (3, 2)),
    ({"stage": 3}, (1, 3)), ({"stage": 3}, (2, 1)), ({"stage": 3, "precision": "bf16"}, (2, 3)),
], ids=lambda value: "-".join(map(str, value.values() if isinstance(value, dict) else value)))  # fmt: skip
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_load_after_a_save_reads_into_its_buffers(options, worlds, asynchronous, tmp_path, counted):
    """Other numbers of ranks, masters, replicated states: the values, and the buffers, are as they were."""
    expected = write_checkpoint(tmp_path / "a", worlds[0], "tied", BATCHES[:2], save_name="x", **options)

    def rank_run(rank: int) -> None:
        model, optimizer = build("tied", seed=5, **options)
        train(model, optimizer, rank, BATCHES[2:3])
        zs.save(tmp_path / "b", model, optimizer, asynchronous=asynchronous)
        ring = runtime_of(model).saver.ring
        count = ring.count
        for _ in range(2):
            zs.load(tmp_path / "a", model, optimizer)
            assert_equal(snapshot(model, optimizer), expected)
            assert ring.count == ring._free.qsize() == count
            train(model, optimizer, rank, BATCHES[3:])
        zs.close(model)

    run_threads(worlds[1], rank_run)
    assert counted == {"keep": 2 * worlds[1], "run": 0}


@pytest.mark.parametrize("world", [1, 2])
def test_many_windows_and_states_that_are_written_over(world, tmp_path, counted):
    expected = write_checkpoint(tmp_path / "a", 3, seeded(Wide), WIDE, save_name="x")

    def rank_run(rank: int) -> None:
        model, optimizer = build(seeded(Wide, 5))
        train(model, optimizer, rank, WIDE)
        runs = [run for runs in optimizer.core.runs for run in runs]
        before = sorted(value.data_ptr() for run in runs for value in run.states.load().values() if run.holds(value))
        zs.save(tmp_path / "b", model, optimizer, asynchronous=True).wait()
        zs.load(tmp_path / "a", model, optimizer)
        runs = [run for runs in optimizer.core.runs for run in runs]
        after = sorted(value.data_ptr() for run in runs for value in run.states.load().values() if run.holds(value))
        assert before == after and before, "states take no fresh memory"
        assert_equal(snapshot(model, optimizer), expected)
        zs.close(model)

    run_threads(world, rank_run)
    assert counted == {"keep": world, "run": 0}


def test_what_does_not_fit_the_buffers_of_saves_goes_into_fresh_tensors(tmp_path, counted):
    """Those of one rank alone are too few; what was lent is given back."""
    expected = write_checkpoint(tmp_path, 2, seeded(Wide), WIDE, save_name="x")

    def rank_run(rank: int) -> None:
        model, optimizer = build(seeded(Wide, 5))
        train(model, optimizer, rank, WIDE)
        zs.save(tmp_path, model, optimizer, name="y", asynchronous=True).wait()
        ring = runtime_of(model).saver.ring
        if rank == 1:
            ring.release(keep=1)
        count = ring.count
        zs.load(tmp_path, model, optimizer, name="x")
        assert_equal(snapshot(model, optimizer), expected)
        assert ring.count == ring._free.qsize() == count
        zs.close(model)

    run_threads(2, rank_run)
    assert counted == {"keep": 0, "run": 2}


@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
def test_a_damaged_block_is_found_before_anything_has_changed(where, tmp_path, counted):
    write_checkpoint(tmp_path, 2, seeded(Wide), WIDE, save_name="x")
    expected = read_checkpoint(tmp_path, 2, seeded(Wide, 5))[0]
    path = tmp_path / "x" / "rank-00001.distcp"
    content = bytearray(path.read_bytes())

    def rank_run(rank: int) -> None:
        model, optimizer = build(seeded(Wide, 5))
        train(model, optimizer, rank, WIDE)
        zs.save(tmp_path / "b", model, optimizer, asynchronous=True).wait()
        ring, comm = runtime_of(model).saver.ring, runtime_of(model).comm
        before, count = snapshot(model, optimizer), ring.count
        if rank == 0:
            at = int(where * (len(content) - 1))
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        comm.exchange(b"", "damaged")
        with pytest.raises(CheckpointCorrupt, match="rank-00001.distcp"):
            zs.load(tmp_path, model, optimizer)
        assert_equal(snapshot(model, optimizer), before)
        assert ring.count == ring._free.qsize() == count
        if rank == 0:
            path.write_bytes(content)
        comm.exchange(b"", "mended")
        zs.load(tmp_path, model, optimizer)
        assert_equal(snapshot(model, optimizer), expected)
        zs.close(model)

    run_threads(2, rank_run)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_states_given_to_an_optimizer_may_be_its_own(stage):
    """Only a load writes over states: here each parameter gets what the other had."""
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)))
    model, optimizer = build(model, stage=stage)
    model(torch.randn(3, 5, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    optimizer.step()
    states = optimizer.state_dict()
    whole = lambda value: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()  # noqa: E731
    before = [{key: whole(value) for key, value in states["state"][i].items()} for i in (0, 1)]
    states["state"] = {0: states["state"][1], 1: states["state"][0]}
    optimizer.load_state_dict(states)
    after = optimizer.state_dict()["state"]
    for i in (0, 1):
        for key, value in before[1 - i].items():
            assert torch.equal(whole(after[i][key]), value), (i, key)
    zs.close(model)


class Odd(torch.optim.Optimizer):
    """Keeps the last two gradients; what it has for the one before the first is `how` it is made."""

    def __init__(self, params: list, how: str) -> None:
        super().__init__(params, {"lr": 0.1})
        self.how = how

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            state = self.state[param]
            if state:
                state["before"], state["now"] = state["now"], param.grad.clone()
            else:
                state["now"] = param.grad.clone()
                nothing = torch.zeros(()).expand(param.numel()).view(param.shape)
                state["before"] = {"one": state["now"], "expanded": nothing, "parameter": param.detach()}.get(self.how, nothing.clone())
            param.add_(state["now"] + 0.5 * state["before"], alpha=-0.1)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("how", ["one", "expanded", "parameter", "inference", "plain"])
def test_states_are_written_over_only_where_the_memory_is_theirs_alone(how, stage, verify, tmp_path):
    """Two states that are one tensor, rows that share memory, a parameter's memory, tensors of inference."""

    def made(seed: int, how: str) -> tuple:
        module = seeded(lambda: nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3)), seed)
        return zs.shard(module, Odd(list(module.parameters()), how), stage=stage)

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for step in range(steps):
            model(torch.full((2, 5), float(step + 1))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = made(0, "plain")
    trained(model, optimizer, 3)
    zs.save(tmp_path, model, optimizer, name="x")
    values, states = zs.full_state_dict(model), zs.full_optimizer_state(model)
    zs.close(model)
    model, optimizer = made(1, how)
    trained(model, optimizer, 1)
    if how == "inference":
        with torch.inference_mode():
            optimizer.load_state_dict(optimizer.state_dict())
    if verify:
        zs.save(tmp_path, model, optimizer, name="y", asynchronous=True).wait()
    zs.load(tmp_path, model, optimizer, name="x", verify=verify)
    for name, value in zs.full_state_dict(model).items():
        assert torch.equal(value, values[name]), name
    for name, state in zs.full_optimizer_state(model).items():
        assert all(torch.equal(value, states[name][key]) for key, value in state.items()), name
    zs.close(model)


class Marked(Wide):
    """With extra state that is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.mark = torch.zeros(3)

    def get_extra_state(self) -> torch.Tensor:
        return self.mark

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.mark = state


def test_extra_state_that_is_a_tensor(tmp_path, counted):
    def rank_run(rank: int) -> None:
        model, optimizer = build(seeded(Marked))
        train(model, optimizer, rank, WIDE)
        model.mark = torch.arange(3.0)
        zs.save(tmp_path, model, optimizer, name="x", asynchronous=True).wait()
        model.mark = torch.zeros(3)
        zs.load(tmp_path, model, optimizer)
        assert torch.equal(model.mark, torch.arange(3.0))
        zs.close(model)

    run_threads(2, rank_run)
    assert counted == {"keep": 2, "run": 0}


@pytest.mark.parametrize("kept", [False, True])
def test_damage_in_states_of_a_shape_of_their_own_is_found(kept, tmp_path):
    """They are read to be compared, before everything else."""

    class Histogram(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None) -> None:
            super().step()
            for param in self.param_groups[0]["params"]:
                self.state[param]["histogram"] = torch.ones(700, 500)  # more than a block

    model = seeded(lambda: nn.Linear(7, 5))
    model, optimizer = zs.shard(model, Histogram(model.parameters(), lr=0.1, momentum=0.9), stage=1)
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    path = zs.save(tmp_path, model, optimizer, name="x", asynchronous=kept).wait() / "rank-00000.distcp"
    if not kept:
        runtime_of(model).saver.ring.release()
    content = path.read_bytes()
    for at in range(1000, len(content), len(content) // 9):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(CheckpointCorrupt, match="rank-00000.distcp"):
            zs.load(tmp_path, model, optimizer)
    path.write_bytes(content)
    zs.load(tmp_path, model, optimizer)
    zs.close(model)


def test_buffers_of_a_save_that_failed_while_it_copied_are_there_for_a_load(tmp_path, monkeypatch):
    plain = FileWriter.fill
    failing = threading.Event()

    def fill(self, contents, blobs=None):
        if failing.is_set() and "rank-00001" in self.file.path:
            raise OSError(errno.EIO, "broken")
        return plain(self, contents, blobs)

    monkeypatch.setattr(FileWriter, "fill", fill)

    def rank_run(rank: int) -> None:
        model, optimizer = build("tied", stage=1)
        train(model, optimizer, rank, BATCHES[:1])
        zs.save(tmp_path, model, optimizer, name="x", asynchronous=True).wait()
        expected, ring, comm = snapshot(model, optimizer), runtime_of(model).saver.ring, runtime_of(model).comm
        comm.exchange(b"", "saved")
        failing.set()
        for _ in range(ring.count + 1):
            with pytest.raises(zs.CheckpointError, match="broken"):
                zs.save(tmp_path, model, optimizer, name="y", asynchronous=True)
            assert ring.free == ring.count
        comm.exchange(b"", "failed")
        failing.clear()
        train(model, optimizer, rank, BATCHES[1:2])
        zs.load(tmp_path, model, optimizer)
        assert_equal(snapshot(model, optimizer), expected)
        zs.close(model)

    run_threads(2, rank_run)


# -- the pieces --------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, BUFFER_NBYTES), max_size=12))
def test_windows_take_as_many_buffers_as_was_said_and_do_not_overlap(sizes):
    count = bulk._Carver([]).count(sizes)
    carver, seen = bulk._Carver([]), []
    for nbytes in sizes:
        number, at = carver._place(nbytes)
        assert at % 4096 == 0 and at + nbytes <= BUFFER_NBYTES and number < count
        seen.append((number, at, at + nbytes))
    assert all(a[0] < b[0] or (a[0] == b[0] and a[2] <= b[1]) for a, b in zip(seen, seen[1:], strict=False))


def test_a_ring_lends_and_takes_back():
    ring = Ring(lambda nbytes: torch.empty(1))
    ring.grow(2)
    with ring.lent(1) as buffers:
        assert len(buffers) == 1 and ring._free.qsize() == 1 and ring.count == 2
    with pytest.raises(KeyError), ring.lent(5) as buffers:
        assert len(buffers) == ring.count == 5 and ring._free.qsize() == 0
        raise KeyError
    assert ring.count == ring._free.qsize() == 2
    ring.release(keep=1)
    assert ring.count == ring._free.qsize() == 1
