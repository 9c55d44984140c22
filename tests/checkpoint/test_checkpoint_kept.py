"""zs.load verifies while it reads: new states in place, everything else in copies, or read twice; a pool lends what is free."""

from __future__ import annotations

import errno
import threading

import pytest
import torch
from checkpoint_kit import assert_equal, build, read_checkpoint, snapshot, train, write_checkpoint
from helpers import seeded, token_batches
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint import bulk_reader, loading, resolver
from zeroshard.checkpoint.file_writer import FileWriter
from zeroshard.config import Tier
from zeroshard.engine.ledger import Ledger
from zeroshard.engine.runtime import runtime_of
from zeroshard.errors import CheckpointCorrupt
from zeroshard.testing import run_threads
from zeroshard.tiers.pool import BufferPool

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
    """Tensors in use that came from copies, and at least in part from their file a second time."""
    calls, lock = {"copied": 0, "again": 0}, threading.Lock()
    plain = bulk_reader.Bulk.take

    def take(self, stored, start, out):
        with lock:
            copied = sum(copy.numel() for copy in self._copies.get((id(stored), start, out.numel()), ()))
            calls["copied" if copied == out.numel() else "again"] += out.numel() > 0
        plain(self, stored, start, out)

    monkeypatch.setattr(bulk_reader.Bulk, "take", take)
    return calls


@pytest.fixture
def no_more(monkeypatch):
    """There is no memory for copies."""
    monkeypatch.setattr(loading, "available_nbytes", lambda: 0)


@pytest.mark.parametrize(("options", "worlds"), [
    ({"stage": 0}, (2, 3)), ({"stage": 1}, (3, 2)), ({"stage": 2, "precision": "bf16"}, (2, 2)), ({"stage": 3}, (3, 2)),
    ({"stage": 3}, (1, 3)), ({"stage": 3}, (2, 1)), ({"stage": 3, "precision": "bf16"}, (2, 3)),
], ids=lambda value: "-".join(map(str, value.values() if isinstance(value, dict) else value)))  # fmt: skip
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_load_after_a_save_reads_through_its_buffers(options, worlds, asynchronous, tmp_path, counted):
    """Other numbers of ranks, masters, replicated states: the values, and the buffers, are as they were."""
    expected = write_checkpoint(tmp_path / "a", worlds[0], "tied", BATCHES[:2], save_name="x", **options)

    def rank_run(rank: int) -> None:
        model, optimizer = build("tied", seed=5, **options)
        train(model, optimizer, rank, BATCHES[2:3])
        zs.save(tmp_path / "b", model, optimizer, asynchronous=asynchronous)
        pool = runtime_of(model).gate.saver.pool
        count = pool.count
        for _ in range(2):
            zs.load(tmp_path / "a", model, optimizer)
            assert_equal(snapshot(model, optimizer), expected)
            assert pool.count == pool.free == count
            train(model, optimizer, rank, BATCHES[3:])
        zs.close(model)

    run_threads(worlds[1], rank_run)
    assert counted["copied"] >= 2 * worlds[1] and counted["again"] == 0


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
    assert counted["copied"] >= 10 and counted["again"] == 0


@pytest.mark.parametrize("free", [0, 1])
@pytest.mark.parametrize(("options", "worlds"), [
    ({"stage": 0}, (1, 2)), ({"stage": 1, "precision": "bf16"}, (2, 2)), ({"stage": 3}, (2, 2)), ({"stage": 3}, (3, 1)),
    ({"stage": 3, "precision": "bf16"}, (1, 2)),
], ids=lambda value: "-".join(map(str, value.values() if isinstance(value, dict) else value)))  # fmt: skip
def test_what_does_not_fit_memory_is_read_once_more(options, worlds, free, tmp_path, counted, no_more):
    """And read through fewer buffers on the last rank alone; what was lent is given back."""
    expected = write_checkpoint(tmp_path, worlds[0], seeded(Wide), WIDE, save_name="x", **options)

    def rank_run(rank: int) -> None:
        model, optimizer = build(seeded(Wide, 5), **options)
        train(model, optimizer, rank, WIDE)
        zs.save(tmp_path, model, optimizer, name="y", asynchronous=True).wait()
        pool = runtime_of(model).gate.saver.pool
        while rank == worlds[1] - 1 and pool.free > free:
            pool.lose(pool.borrow())
        count = pool.free
        for _ in range(2):
            zs.load(tmp_path, model, optimizer, name="x")
            assert_equal(snapshot(model, optimizer), expected)
            assert pool.free == count
        zs.close(model)

    run_threads(worlds[1], rank_run)
    assert counted["again"] > 0 and (counted["copied"] > 0) == (worlds[1] > 1), "other ranks have buffers of their saves"


@pytest.mark.parametrize("memory", [None, 1 << 40, 1000])
@pytest.mark.parametrize("world", [1, 2])
def test_a_first_load_reads_states_into_fresh_tensors(memory, world, tmp_path, counted, monkeypatch):
    """And parameters into copies, as far as there is memory."""
    expected = write_checkpoint(tmp_path, 2, seeded(Wide), WIDE, save_name="x")
    monkeypatch.setattr(loading, "available_nbytes", lambda: memory)

    def rank_run(rank: int) -> None:
        model, optimizer = build(seeded(Wide, 5))
        zs.load(tmp_path, model, optimizer)
        assert_equal(snapshot(model, optimizer), expected)
        assert runtime_of(model).gate.saver.pool.count == 0
        zs.close(model)

    run_threads(world, rank_run)
    assert (counted["again"] > 0) == (memory == 1000) and counted["copied"] > 0  # the least ones fit in any case


def test_a_disk_that_fails_where_it_is_read_once_more_is_told_on_all_ranks(tmp_path, no_more, monkeypatch):
    """The model refuses to run until something has been loaded to its end."""
    expected = write_checkpoint(tmp_path, 2, seeded(Wide), WIDE, save_name="x")
    plain = bulk_reader.Bulk.take
    both, mended = threading.Barrier(2, timeout=60), threading.Event()

    def take(self, stored, start, out):
        if threading.current_thread().name == "rank1" and not mended.is_set():
            raise OSError(errno.EIO, "reading", "rank-00001.distcp")
        return plain(self, stored, start, out)

    monkeypatch.setattr(bulk_reader.Bulk, "take", take)

    def rank_run(rank: int) -> None:
        model, optimizer = build(seeded(Wide, 5))
        train(model, optimizer, rank, WIDE)
        with pytest.raises(zs.CheckpointError, match="rank 1, reading .*rank-00001.distcp"):
            zs.load(tmp_path, model, optimizer, name="x")
        with pytest.raises(zs.ZeroshardError, match="could not be loaded to its end"):
            model(WIDE[0][0][0])
        both.wait()
        mended.set()
        zs.load(tmp_path, model, optimizer, name="x")
        assert_equal(snapshot(model, optimizer), expected)
        zs.close(model)

    run_threads(2, rank_run)


@pytest.mark.parametrize("world", [1, 2])
def test_another_checkpoint_in_its_place_is_not_mixed_with_the_one_that_was_verified(world, tmp_path, no_more, monkeypatch):
    """A run saves over it between the verification and the second read: the load ends with an error, not with parts of both."""
    plain, both = bulk_reader.Bulk.read, threading.Barrier(world, timeout=60)
    for name in ("x", "y"):
        write_checkpoint(tmp_path / name, 2, seeded(Wide, 7 if name == "y" else 0), WIDE, save_name="x")

    def read(self, most):
        plain(self, most)
        if not both.wait():
            (tmp_path / "x" / "x").rename(tmp_path / "old"), (tmp_path / "y" / "x").rename(tmp_path / "x" / "x")
        both.wait()

    def rank_run(rank: int) -> None:
        model, optimizer = build(seeded(Wide, 5))
        with pytest.raises(zs.CheckpointError, match="expected checksum"):
            zs.load(tmp_path / "x", model, optimizer, name="x")
        with pytest.raises(zs.ZeroshardError, match="could not be loaded to its end"):
            model(WIDE[0][0][0])
        zs.close(model)

    monkeypatch.setattr(bulk_reader.Bulk, "read", read)
    run_threads(world, rank_run)


@pytest.mark.parametrize("how", ["refused", "little", "enough"])
def test_a_load_does_without_memory_that_the_system_refuses_or_that_is_not_granted(how, tmp_path, counted, monkeypatch):
    """It reads twice then; 5 MiB of each rank are in use."""
    expected = write_checkpoint(tmp_path, 2, seeded(Wide), WIDE, save_name="x")
    plain, made = bulk_reader.empty, []

    def empty(numel, dtype, *device):
        made.append(numel)
        if how == "refused" and numel > 1 << 20:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")  # as mmap does under `ulimit -v`
        return plain(numel, dtype, *device)

    (
        monkeypatch.setattr(bulk_reader, "empty", empty),
        monkeypatch.setattr(bulk_reader, "_COPIED_NBYTES", {"little": 2 << 20}.get(how, 1 << 30)),
    )
    monkeypatch.setattr(bulk_reader, "BUFFER_NBYTES", 2 << 20), monkeypatch.setattr(bulk_reader, "WINDOW_NBYTES", 1 << 20)
    monkeypatch.setattr(bulk_reader, "SLOTS", 2)

    def rank_run(rank: int) -> None:
        model, optimizer = build(seeded(Wide, 5), stage=0)
        zs.load(tmp_path, model, optimizer, name="x")
        assert_equal(snapshot(model, optimizer), expected)
        zs.close(model)

    run_threads(2, rank_run)
    assert max(made) == 2 << 20 and (counted["again"] > 0) == (how != "enough") and (counted["copied"] > 0) == (how != "refused")


def test_copies_lie_in_the_free_buffers_of_saves(tmp_path, monkeypatch):
    """After a save in the background these have room for everything: a load takes no memory beside them, and gives them back."""
    made, plain = [], bulk_reader.empty
    monkeypatch.setattr(bulk_reader, "empty", lambda numel, *options: (made.append(numel), plain(numel, *options))[1])
    model = nn.Sequential(*(nn.Linear(1500, 1500, bias=False) for _ in range(3)))  # 27 MB each: values and two states
    model, optimizer = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=2)
    model(torch.ones(1, 1500)).sum().backward()
    optimizer.step()
    zs.save(tmp_path, model, optimizer, name="x", asynchronous=True).wait()
    expected, pool = snapshot(model, optimizer), runtime_of(model).gate.saver.pool
    pool.grow(pool.count + 2)  # for the reads
    count = pool.free
    optimizer.step()
    zs.load(tmp_path, model, optimizer, name="x")
    assert_equal(snapshot(model, optimizer), expected)
    assert max(made) == 0 and pool.free == pool.count == count
    zs.close(model)


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
        pool, comm = runtime_of(model).gate.saver.pool, runtime_of(model).comm
        before, count = snapshot(model, optimizer), pool.count
        if rank == 0:
            at = int(where * (len(content) - 1))
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        comm.exchange(b"", "damaged")
        with pytest.raises(CheckpointCorrupt, match="rank-00001.distcp"):
            zs.load(tmp_path, model, optimizer)
        assert_equal(snapshot(model, optimizer), before)
        assert pool.count == pool.free == count
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
                state["before"] = {"one": state["now"], "expanded": nothing, "parameter": param.detach()}.get(
                    self.how, nothing.clone()
                )
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
    assert counted["copied"] >= 2 and counted["again"] == 2  # the mark of each rank, which is verified by itself


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
        runtime_of(model).gate.saver.pool.give_back()
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

    def fill(self, most=None):
        if failing.is_set() and "rank-00001" in self.file.path:
            raise OSError(errno.EIO, "broken")
        return plain(self, most)

    monkeypatch.setattr(FileWriter, "fill", fill)

    def rank_run(rank: int) -> None:
        model, optimizer = build("tied", stage=1)
        train(model, optimizer, rank, BATCHES[:1])
        zs.save(tmp_path, model, optimizer, name="x", asynchronous=True).wait()
        expected, pool, comm = snapshot(model, optimizer), runtime_of(model).gate.saver.pool, runtime_of(model).comm
        comm.exchange(b"", "saved")
        failing.set()
        for _ in range(pool.count + 1):
            with pytest.raises(zs.CheckpointError, match="broken"):
                zs.save(tmp_path, model, optimizer, name="y", asynchronous=True)
            assert pool.free == pool.count
        comm.exchange(b"", "failed")
        failing.clear()
        train(model, optimizer, rank, BATCHES[1:2])
        zs.load(tmp_path, model, optimizer)
        assert_equal(snapshot(model, optimizer), expected)
        zs.close(model)

    run_threads(2, rank_run)


def test_a_pool_lends_what_it_has_and_takes_it_back():
    pool = BufferPool(Ledger(), 0, 64, lambda nbytes: torch.empty(1), Tier.HOST)
    pool.grow(2)
    one, two = pool.borrow(), pool.borrow()
    assert one is not None and two is not None and pool.borrow() is None and pool.count == 2
    pool.give(one)
    pool.give(two)
    assert pool.count == pool.free == 2
    assert pool.borrow() is two, "the one that was given last"


class Apart(nn.Module):
    """Extra states that are tensors, one before and one behind some MiB; a buffer whose rows share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = State(), State()
        self.layer = nn.Linear(900, 900)
        self.register_buffer("wide", torch.arange(400_000.0))
        self.register_buffer("rows", torch.arange(300_000.0).expand(3, 300_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


class State(nn.Module):
    def get_extra_state(self) -> torch.Tensor:
        return torch.arange(200_000.0)

    def set_extra_state(self, state: torch.Tensor) -> None:
        assert torch.equal(state, torch.arange(200_000.0))


@pytest.mark.parametrize("verify", [True, "before"])
@pytest.mark.parametrize("worlds", [(1, 1), (2, 2)])
def test_damage_is_told_as_damage_whoever_would_have_read_it_first(worlds, verify, tmp_path):
    """In each MiB of every file: extra states that lie apart, expanded buffers, plain values."""

    def made() -> tuple:
        module = seeded(Apart)
        return zs.shard(module, torch.optim.AdamW(module.parameters()), stage=3)

    def write(rank: int) -> None:
        model, optimizer = made()
        model(torch.ones(2, 900)).backward()
        optimizer.step()
        zs.save(tmp_path, model, optimizer, name="x")
        zs.close(model)

    run_threads(worlds[0], write)
    files = [(path, path.read_bytes()) for path in sorted((tmp_path / "x").glob("*.distcp"))]
    places = [(path, content, at) for path, content in files for at in range(777, len(content), 1 << 20)]

    def rank_run(rank: int) -> None:
        model, optimizer = made()
        comm = runtime_of(model).comm
        for path, content, at in places:
            if rank == 0:
                path.write_bytes(content[:at] + bytes([content[at] ^ 64]) + content[at + 1 :])
            comm.exchange(b"", "damaged")
            with pytest.raises(CheckpointCorrupt, match=path.name):
                zs.load(tmp_path, model, optimizer, verify=verify)
            if rank == 0:
                path.write_bytes(content)
            comm.exchange(b"", "mended")
        zs.load(tmp_path, model, optimizer, verify=verify)
        zs.close(model)

    run_threads(worlds[1], rank_run)
    assert len(places) > 15


def test_blocks_that_lie_apart_are_all_compared(tmp_path, monkeypatch):
    """Not as many from the first on."""
    seen = []
    monkeypatch.setattr(resolver, "_check_blocks", lambda path, entry, first, count, buffer: seen.append((first, count)))
    file = resolver.FileEntry("a", 20 << 20, tuple(f"{n:016x}" for n in range(20)))
    resolver._check(tmp_path, [(file, number) for number in (0, 1, 3, 7, 8, 9, 10, 11, 19)])
    assert seen == [(0, 2), (3, 1), (7, 4), (11, 1), (19, 1)]
