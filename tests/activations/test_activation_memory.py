"""Where activation checkpoints rest: memory that stays, copies in time, errors by name, ranks that differ.

That numbers are the same bits as without is in test_activations.py.
"""

from __future__ import annotations

import copy
import errno
import gc
import itertools
import multiprocessing
import os
import threading
import traceback
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from activation_kit import DIM, LAYERS, Own, activator, every_place, gradients, store_of
from hypothesis import given
from hypothesis import strategies as st
from recording_streams import RecordingStreams
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from zoo import (
    Case,
    Stack,
    adamw,
    normal_batches,
    reference,
    same,
    seeded,
    square,
)

import zeroshard as zs
from zeroshard.activations.storage import DiskBacking, Space
from zeroshard.comm import backend_select
from zeroshard.comm.launch import free_port, run_processes
from zeroshard.engine.comm.streams import Streams
from zeroshard.engine.ledger import Ledger
from zeroshard.engine.rest import Links
from zeroshard.testing import run_threads
from zeroshard.tiers.io.async_file import Syscalls
from zeroshard.utils.saved_tensors import Saved


@pytest.fixture
def activate(tmp_path):
    return activator(tmp_path)


# -- memory --------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 400)), max_size=40))
def test_space_gives_no_byte_twice_and_loses_none(actions):
    space, taken = Space(1000, 64), []
    for take, number in actions:
        if take:
            offset = space.take(number)
            if offset is not None:
                assert offset % 64 == 0 and offset + number <= space.nbytes
                taken.append((offset, number))
        elif taken:
            space.give(*taken.pop(number % len(taken)))
        edges = sorted((o, o + space.rounded(n)) for o, n in taken)
        assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(edges))
        assert space.used_nbytes == sum(stop - start for start, stop in edges)
    for offset, number in taken:
        space.give(offset, number)
    assert space.take(space.nbytes) == 0


@every_place
def test_varying_shapes_do_not_make_memory_grow(activate, place):
    model = activate(seeded(Stack, 64, 6), place)
    arenas, allocations, resident = [], [], []
    for step in range(40):
        # few shapes: where all differ, the allocator's heap grows slowly with the plain model too
        rows = (100, 400, 900, 250, 700)[step % 5]
        square(model, (torch.randn(rows, 64),)).backward()
        model.zero_grad()
        report = zs.activation_report(model)
        arenas.append(sum(report.arena.values()))
        allocations.append(report.allocations)
        resident.append(_resident_nbytes())
    largest = 6 * 900 * 64 * 4
    assert arenas[-1] == arenas[3], arenas
    if place == "nvme":  # host buffers are made when there is use for one more, up to five; files get larger sisters
        assert allocations[-1] <= allocations[3] + 5 and report.staging["host"] <= 5 * largest // 6
        assert largest <= arenas[-1] <= 3 * largest
    else:
        assert allocations[-1] == allocations[3] and arenas[-1] == largest
    # a step needs up to 1.4 MB: not to give it back would show
    assert resident[-1] - resident[10] < 8 << 20, resident
    before = zs.activation_report(model).allocations
    square(model, (torch.randn(1800, 64),)).backward()  # more than ever: served at once, and the arena is larger afterwards
    assert zs.activation_report(model).allocations > before
    square(model, (torch.randn(10, 64),)).backward()
    assert sum(zs.activation_report(model).arena.values()) >= 2 * largest


def _resident_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_an_arena_of_given_size_serves_the_first_step(activate, capsys):
    nbytes = 3 * 512
    model, ((batch,), (large,)) = activate(seeded(Stack, DIM), "cpu", arena_nbytes=nbytes), normal_batches(2, 1, 16, DIM)
    square(model, batch).backward()
    report = zs.activation_report(model)
    assert report.allocations == 1 and report.arena == {"device": 0, "host": nbytes, "disk": 0}
    assert report.formula == report.peak["host"] == nbytes and report.messages == ()
    loss = square(model, large) + square(model, batch)
    loss.backward()
    square(model, batch).backward()
    assert "arena for activation checkpoints (host): 1,536 -> 3,072 bytes" in capsys.readouterr().err
    assert "host" in str(zs.activation_report(model)) and zs.activation_report(model).to_dict()["offload"] == "host"


def test_slots_are_free_as_soon_as_a_block_is_done(activate):
    """No cycle keeps them: with the collector off, steps use the same slots."""
    gc.collect()
    gc.disable()
    try:
        model, ((batch,),) = activate(seeded(Stack, DIM)), normal_batches(1, 1, 4, DIM)
        counts = []
        for _ in range(4):
            square(model, batch).backward()
            counts.append(zs.activation_report(model).allocations)
        assert counts == [3, 4, 4, 4]  # ordinary memory for each block, then the arena
    finally:
        gc.enable()


def test_a_dropped_graph_of_own_checkpoints_is_freed(activate):
    """Outside of checkpoints an operation that saves its own output must not hold itself."""

    class Token:
        pass

    model, ((batch,),) = activate(seeded(Own, DIM), blocks=None), normal_batches(1, 1, 4, DIM)
    token = Token()
    alive = weakref.ref(token)
    kept = [token]

    def hold(module, args, output):
        token = kept.pop()
        output.register_hook(lambda grad, token=token: None)

    model.first.register_forward_hook(hold)
    del token
    gc.disable()
    try:
        loss = square(model, batch)
        assert alive() is not None
        del loss
        assert alive() is None
    finally:
        gc.enable()


class Late(RecordingStreams):
    """Every copy on a stream of its own, late until somebody joins that one: a missing join is a wrong number."""

    def join(self, ticket):
        work = self._deferred.pop(ticket, None)
        if work is not None:
            work()


@pytest.mark.parametrize("place", ["cpu", "nvme"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_device_of_its_own(activate, monkeypatch, place, prefetch):
    streams = Late(separate_host=True)
    monkeypatch.setattr("zeroshard.activations.checkpoint.streams_for", lambda device: streams)
    plain, batches = seeded(Stack, DIM, 5), normal_batches(3, 1, 4, DIM)
    model = activate(copy.deepcopy(plain), place, prefetch=prefetch)
    for (batch,) in batches:
        loss, again = square(model, batch), square(model, batch)
        mine, wanted = gradients(model, loss), gradients(plain, square(plain, batch))
        del loss, again  # the second one had been fetched ahead
        for name in wanted:
            same(mine[name], wanted[name], name, 0.0)
    moved, nbytes = zs.activation_report(model).moved, 4 * DIM * 4
    assert moved["device -> host"] == 3 * 2 * 5 * nbytes and moved["host -> device"] >= 3 * 5 * nbytes
    assert moved["host -> device"] <= 3 * (5 + prefetch) * nbytes
    if place == "nvme":
        assert moved["host -> disk"] >= moved["device -> host"] - nbytes  # the last one was dropped before its write
        assert zs.activation_report(model).staging["host"] <= (prefetch + 3) * nbytes
    zs.checkpoint_activations(model, off=True)


def test_reads_run_ahead_in_the_reverse_order(activate, monkeypatch):
    model, ((batch,),) = activate(seeded(Stack, DIM, 6), "nvme", prefetch=2), normal_batches(1, 1, 4, DIM)
    backing, order = store_of(model).backing, []
    read, get = backing.engine.read, backing.get

    def noted_read(file, offset, out):
        order.append(("read", file, offset))
        return read(file, offset, out)

    def noted_get(kept):
        order.append(("use", kept.file, kept.offset))
        return get(kept)

    monkeypatch.setattr(backing.engine, "read", noted_read)
    monkeypatch.setattr(backing, "get", noted_get)
    loss = square(model, batch)
    places = [(kept.file, kept.offset) for kept in store_of(model)._live.values()]
    for kept in store_of(model)._live.values():
        kept.writing.wait()
    loss.backward()
    named = [(what, places.index((file, offset))) for what, file, offset in order]
    assert named[:4] == [("read", 5), ("read", 4), ("read", 3), ("use", 5)]
    assert [n for what, n in named if what == "read"] == [n for what, n in named if what == "use"] == [5, 4, 3, 2, 1, 0]
    for number in range(3):
        assert named.index(("read", number)) < named.index(("use", number + 1))


# -- errors --------------------------------------------------------------------------------------------------------


def test_errors_name_the_remedy(activate, tmp_path):
    model = seeded(Stack, DIM)
    act = zs.checkpoint_activations
    for options, text in [
        ({"offload": "disc"}, "expected 'none', 'cpu' or 'nvme', got 'disc'. Did you mean 'disk'"),
        ({"offload": "nvme"}, "needs a path"),
        ({"offload": "nvme", "path": str(tmp_path / "no")}, "does not exist"),
        ({"offload": "cpu", "path": str(tmp_path)}, "is for offload='nvme'"),
        ({"prefetch": -1}, "prefetch: expected a whole number of at least 0"),
        ({"partition": 3}, "process group has not been started"),
        ({"blocks": ("Blok",)}, "Did you mean 'Block'"),
        ({"blocks": lambda name, module: False}, "nothing to checkpoint in this Stack"),
        ({"blocks": lambda name, module: name == "blocks"}, "no forward of its own"),
    ]:
        with pytest.raises(zs.ConfigError, match=text):
            act(model, **options)
        assert "forward" not in model.__dict__ and "forward" not in model.blocks[0].__dict__
    with pytest.raises(zs.ConfigError, match="nothing to checkpoint in this Linear"):
        act(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="expected a torch.nn.Module"):
        act([model])
    with pytest.raises(zs.ZeroshardError, match="call that first"):
        act(model, off=True)
    act(model)
    for again in (model, nn.Sequential(model), model.blocks):
        with pytest.raises(zs.ZeroshardError, match="has zs.checkpoint_activations already"):
            act(again, blocks=None)
    with pytest.raises(zs.ZeroshardError, match="can not be pickled"):
        torch.save(model, tmp_path / "model.pt")


def test_off_waits_for_no_backward(activate):
    model, ((batch,),) = activate(seeded(Stack, DIM)), normal_batches(1, 1, 4, DIM)
    loss = square(model, batch)
    with pytest.raises(zs.ZeroshardError, match="3 activation checkpoints wait for their backward"):
        zs.checkpoint_activations(model, off=True)
    loss.backward()
    assert zs.checkpoint_activations(model, off=True) is model
    assert "forward" not in model.blocks[0].__dict__ and not model._forward_pre_hooks
    activate(model)


def test_files_go_with_the_model(activate, tmp_path):
    model, ((batch,),) = activate(seeded(Stack, DIM), "nvme"), normal_batches(1, 1, 4, DIM)
    square(model, batch).backward()
    assert len(list(tmp_path.iterdir())) == 1
    zs.checkpoint_activations(model, off=True)
    assert not list(tmp_path.iterdir())


def test_a_forward_without_checkpoints_says_so(activate, capsys):
    model, ((batch,),) = activate(seeded(Stack, DIM), blocks=None), normal_batches(1, 1, 4, DIM)
    for _ in range(2):
        square(model, batch).backward()
    assert capsys.readouterr().err.count("it called no torch.utils.checkpoint") == 1


def test_a_saved_tensor_whose_memory_was_released_is_named():
    weight = torch.randn(4).requires_grad_()
    saved = Saved(weight)
    assert saved.restore() is weight
    weight.untyped_storage().resize_(0)
    with pytest.raises(zs.ShardedAccessError, match="read the parameter from its module"):
        saved.restore()


@pytest.mark.parametrize("offload, packed", [("cpu", 3), ("nvme", 0)])
def test_fake_tensors_are_stored_in_memory_and_pass_real_disks(activate, offload, packed):
    """Planning runs the model on tensors without memory. Without imagined ranks the files are real, and take none of them."""
    with FakeTensorMode():
        model = activate(Stack(DIM), offload)
        square(model, (torch.randn(4, DIM),)).backward()
    assert zs.activation_report(model).packed == packed and model.first.weight.grad.shape == (DIM, DIM)


@pytest.mark.parametrize("blocks, free, needed", [("auto", 0, 3 * 4096), ("auto", 3 * 4096, None), (None, 4096, 4096)])
def test_a_disk_that_is_too_small_is_refused_when_the_first_pass_is_known(activate, monkeypatch, tmp_path, blocks, free, needed):
    """Blocks of one class: before the first of them is written. The model's own checkpoints: before the one that does not fit."""
    model = activate(seeded(Own if blocks is None else Stack, DIM), "nvme", blocks=blocks)
    plain = os.statvfs

    def statvfs(path):
        taken = sum(file.stat().st_blocks * 512 for file in tmp_path.glob("*/checkpoints-*"))
        found = plain(path)
        return SimpleNamespace(f_bavail=(free - taken) // 4096, f_frsize=4096, f_flag=found.f_flag)

    monkeypatch.setattr(os, "statvfs", statvfs)

    def forward():
        return square(model, (torch.ones(4, DIM),))

    backing = store_of(model).backing
    write = backing.engine.write
    # as if the disk were as fast as memory: what was written is taken
    monkeypatch.setattr(backing.engine, "write", lambda *request: (handle := write(*request), handle.wait())[0])
    if needed is None:
        forward().backward()
        return
    for _ in range(2):
        error = caught(forward)
        assert isinstance(error, zs.errors.SwapError) and f"{needed} bytes (0.00 GiB) are needed, 0 bytes" in str(error)
        assert str(tmp_path) in str(error) and not any(zs.activation_report(model).held.values())
    zs.checkpoint_activations(model, off=True)


def test_a_disk_without_room_for_all_ranks_of_the_host(activate, monkeypatch, tmp_path):
    """All are told, whoever asks first."""
    plain = seeded(Stack, DIM)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    small = SimpleNamespace(f_bavail=5, f_frsize=4096, f_flag=0)
    monkeypatch.setattr(os, "statvfs", lambda path: small)

    def body(rank):
        model = activate(copy.deepcopy(plain), "nvme" if rank else "none")
        model, _ = zs.shard(model, adamw(model.parameters()), stage=1)
        return caught(lambda: square(model, (torch.ones(4, DIM),)).backward())

    for error in run_threads(2, body):
        assert isinstance(error, zs.errors.SwapError), repr(error)
        assert f"{6 * 4096} bytes (0.00 GiB) are needed by all ranks of this host, {3 * 4096} by this one" in str(error)


# -- ranks that differ ---------------------------------------------------------------------------------------------


def caught(fn):
    try:
        fn()
    except zs.ZeroshardError as error:
        error.__context__ = None
        return error.with_traceback(None)  # which holds the graph
    return None


@every_place
def test_ranks_with_different_shapes_are_named_on_every_rank(activate, place):
    plain = seeded(Stack, DIM)

    def body(rank):
        model = activate(copy.deepcopy(plain), place, partition="auto")
        loss = square(model, (torch.ones(4 + rank, DIM),))
        error = caught(loss.backward)
        del loss
        model.zero_grad()
        square(model, (torch.ones(4, DIM),)).backward()  # and training can go on
        assert not any(zs.activation_report(model).held.values())
        return error, model.first.weight.grad

    results = run_threads(2, body)
    for error, _ in results:
        assert isinstance(error, zs.CollectiveMismatch)
        assert "checkpoint 1 of a forward" in str(error) and "leave out partition=" in str(error)
        assert "rank 0: blocks.0: (4, 8) float32; rank 1: blocks.0: (5, 8) float32" in str(error)
    same(results[0][1], results[1][1], "gradient", 0.0)


def test_ranks_with_different_values_are_found_if_asked(activate):
    plain = seeded(Stack, DIM)

    def body(rank, check_equal):
        model = activate(copy.deepcopy(plain), partition="auto", check_equal=check_equal)
        batch = torch.ones(4, DIM)
        batch[3, 7] += rank
        return caught(square(model, (batch,)).backward)

    assert run_threads(2, body, False) == [None, None]
    for error in run_threads(2, body, True):
        assert "with the content" in str(error)


def test_a_backward_that_fails_on_one_rank_leaves_nothing_to_be_met_later(activate):
    """One rank has sent a slice that the other never asks for; later gathers must not take it for theirs."""

    plain = seeded(Stack, DIM)
    square(plain, (torch.ones(4, DIM),)).backward()

    def body(rank):
        model = activate(copy.deepcopy(plain), partition="auto")
        batch, comm = torch.ones(4, DIM), backend_select.current(None, torch.device("cpu"), 60.0)
        square(model, (batch,)).backward()
        slices = store_of(model).slices
        if rank == 0:
            slices.gathers += 1
            pool = slices._staging
            number, region = pool.take(32, torch.float32, whole=False)
            region.tensor.fill_(torch.nan)
            pool.give(number, comm.gather(torch.empty(64), region, "left behind", tag=slices._tag))
        for _ in range(2):
            model.zero_grad()
            square(model, (batch,)).backward()
        assert slices.gathers == 10
        return model.first.weight.grad

    for grad in run_threads(2, body):
        same(grad, plain.first.weight.grad, "gradient", 0.0)


def test_a_disk_that_fails_is_reported_on_every_rank(activate):
    plain = seeded(Stack, DIM)

    def body(rank):
        model = activate(copy.deepcopy(plain), "nvme", partition="auto")
        square(model, (torch.ones(4, DIM),)).backward()
        loss = square(model, (torch.ones(4, DIM),))
        if rank == 1:
            for kept in store_of(model)._live.values():
                kept.writing.wait()
                os.ftruncate(kept.file.fd, 0)
        return caught(loss.backward)

    for error in run_threads(2, body):
        assert type(error).__name__ == "OffloadIOError" and "/checkpoints-" in str(error)


@pytest.mark.parametrize("stage, checkpoints_first, units", [(3, True, "auto"), (1, False, "auto"), (3, False, "one")])
def test_a_disk_that_fails_ends_the_step_of_all_data_parallel_ranks(activate, stage, checkpoints_first, units):
    """Else the others would take the failed rank's next step for this one."""
    plain, units = seeded(Stack, DIM), "auto" if units == "auto" else lambda name, module: False

    def body(rank):
        model = copy.deepcopy(plain)
        model = activate(model, "nvme") if checkpoints_first else model
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=stage, units=units)
        model = model if checkpoints_first else activate(model, "nvme")

        def step(fail=False):
            loss = square(model, (torch.ones(4, DIM),))
            if fail:
                for kept in store_of(model)._live.values():
                    kept.writing.wait()
                    os.ftruncate(kept.file.fd, 0)
            loss.backward()
            optimizer.step()

        step()
        error, later = caught(lambda: step(fail=rank == 1)), caught(step)
        return error, later, optimizer.core.runtime.progress.steps

    for error, later, steps in run_threads(2, body):
        for raised in (error, later):
            assert isinstance(raised, zs.OffloadIOError), repr(raised)
            assert "/checkpoints-" in raised.file and raised.offset % 4096 == 0 and raised.errno == errno.ENODATA
        assert steps == 1 and (error.file, error.offset) == (later.file, later.offset)


def test_one_rank_goes_on_after_its_disk_failed(activate):
    """Nothing that rests there outlives a backward, and no peer waits: the next step is as good as any."""
    model = activate(seeded(Stack, DIM), "nvme")
    model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3)
    loss = square(model, (torch.ones(4, DIM),))
    file = store_of(model).backing._files[0][0]
    for kept in store_of(model)._live.values():
        kept.writing.wait()
    os.ftruncate(file.fd, 0)
    assert isinstance(caught(loss.backward), zs.OffloadIOError)
    del loss
    os.ftruncate(file.fd, file.nbytes)
    optimizer.zero_grad()
    square(model, (torch.ones(4, DIM),)).backward()
    assert optimizer.step() is None and zs.full_state_dict(model)["first.weight"].isfinite().all()
    zs.close(model)


# -- process groups ------------------------------------------------------------------------------------------------


def forked(rank, ranks, fn, count, *args):
    """fn(rank, *args) in `count` forks of a fresh process, as starting processes costs more than all that they do."""
    import torch._dynamo  # noqa: F401  once, not in each of them

    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def body(rank):
        os.environ.update(address, RANK=str(rank))
        dist.init_process_group("gloo")
        try:
            queue.put((rank, fn(rank, *args)))
        except BaseException:
            queue.put((rank, traceback.format_exc()))

    workers = [context.Process(target=body, args=(rank,), daemon=True) for rank in range(count)]
    for worker in workers:
        worker.start()
    return [text for _, text in sorted(queue.get() for _ in range(count))]


def two_by_two(rank, path):
    """Two data-parallel ranks, each of which is two model-parallel ones, over sockets."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data_rank = mesh["dp"].get_local_rank()
    case = Case(seeded(Stack, DIM), normal_batches(2, 2, 4, DIM), square)
    try:
        zs.checkpoint_activations(copy.deepcopy(case.model), partition=mesh)
    except zs.ConfigError as error:
        assert "mesh['tp']" in str(error)
    for comm, text in ((mesh, "comm: expected a 1-D DeviceMesh, got one of shape (2, 2)"), (7, "comm: expected a DeviceMesh")):
        assert text in str(caught(lambda comm=comm: zs.shard(copy.deepcopy(case.model), None, comm=comm)))
    groups = {"mesh": mesh["tp"], "group": mesh["tp"].get_group()}
    for number, (place, name) in enumerate([("none", "mesh"), ("cpu", "group"), ("nvme", "mesh")]):
        options = {"offload": place, "path": path if place == "nvme" else None, "min_numel": 1}
        model = zs.checkpoint_activations(copy.deepcopy(case.model), partition=groups[name], **options)
        comm = mesh["dp"] if number else mesh["dp"].get_group()
        model, optimizer = zs.shard(model, adamw(model.parameters()), stage=3 if number else 2, comm=comm)
        for batches in case.batches:
            square(model, batches[data_rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        for key, value in reference(case)[0].state.items():
            same(zs.full_state_dict(model)[key], value, key, 0.0)
        report = zs.activation_report(model)
        assert report.gathers.count == 2 * LAYERS == sum(report.gathers.units.values()) and report.world_size == 2
        assert report.gathers.between == 0  # the ranks of tp are on one node
        zs.close(model)
    model = zs.checkpoint_activations(copy.deepcopy(case.model), partition=mesh["tp"], min_numel=1)
    error = caught(square(model, (torch.ones(4 + rank % 2, DIM),)).backward)
    dist.barrier()
    return repr(error)


@pytest.mark.processes
def test_a_mesh_of_data_and_model_parallel_ranks(tmp_path):
    (texts,) = run_processes(forked, 1, two_by_two, 4, str(tmp_path))
    assert len(texts) == 4
    for text in texts:
        assert "CollectiveMismatch" in text and "rank 1: blocks.0: (5, 8) float32" in text, text


def test_a_slice_that_is_read_in_vain_keeps_its_place_until_then(tmp_path):
    """Another slice written there meanwhile would not match the checksum of what is read, and end the run for nothing."""

    class Held(Syscalls):
        go_on = threading.Event()

        def preadv(self, fd, buffers, offset):
            self.go_on.wait(20)
            return super().preadv(fd, buffers, offset)

    links = Links(torch.device("cpu"), Streams(), Ledger())
    backing = DiskBacking(zs.Offload("nvme", path=str(tmp_path), checksum=True), links, 1 << 20, 0, 0)
    backing.engine.calls = Held()
    first = backing.put(torch.full((4096,), 1.0), 4096)
    first.writing.wait()
    backing.fetch(first, wait=True)
    backing.drop(first)
    second = backing.put(torch.full((4096,), 2.0), 4096)
    assert second.offset != first.offset
    backing.engine.calls.go_on.set()
    for value in range(4):
        last = backing.put(torch.full((4096,), float(value)), 4096)
    assert torch.equal(backing.get(last), torch.full((4096,), 3.0))
    backing.close()


def test_a_read_in_vain_keeps_its_slot(tmp_path):
    """Backward in another order gives back a copy whose read still runs: the slot is not written again before that read is over."""

    class Held(Syscalls):
        def preadv(self, file, buffers, offset):
            done = super().preadv(file, buffers, offset)
            if offset == held:
                assert go.wait(10)
            return done

    go, held = threading.Event(), None
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    offload = zs.Offload("nvme", path=str(tmp_path), checksum=True, any_filesystem=True)
    zs.checkpoint_activations(model, blocks=["Linear"], offload=offload, min_numel=1, prefetch=1, arena_nbytes=3 * 4096)
    store = store_of(model)
    store.backing.engine.calls = Held()
    store.begin_forward(model)
    packed = [store.pack(torch.full((1024,), float(i), requires_grad=True), "x") for i in range(3)]
    for kept in store._live.values():
        kept.writing.wait()
    held = slot = packed[1].kept.offset
    store.unpack(packed[2])  # starts to read packed[1]
    store.unpack(packed[0])  # another order: packed[1]'s copy is given back while it is read
    del packed[1]
    gc.collect()
    store.begin_forward(model)
    again = store.pack(torch.full((1024,), 9.0, requires_grad=True), "y")
    assert again.kept.offset != slot
    go.set()
    for number in range(6):
        store.pack(torch.full((1024,), float(number), requires_grad=True), "z")  # no error of the read's checksum
