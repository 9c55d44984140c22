"""zs.save_safetensors: the bits of the full state dict, in the memory of a chunk, complete or not there at all."""

from __future__ import annotations

import copy
import errno
import os
import threading

import pytest
import torch
import torch.distributed as dist
from helpers import OddGPT, adamw, seeded, token_batches
from residence import Peak
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

import zeroshard as zs
from zeroshard.checkpoint import file_writer, safetensors
from zeroshard.comm.launch import run_processes
from zeroshard.engine.runtime import runtime_of
from zeroshard.testing import run_threads
from zeroshard.tiers.io.async_file import Engine, Syscalls

BATCHES = [step[0] for step in token_batches(2, 1, 3)]


class Buffered(OddGPT):
    """With buffers: one that is saved, of integers, one that is not, and one that is tied."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.register_buffer("seen", torch.arange(5))
        self.register_buffer("scale", torch.full((3,), 0.25))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.blocks[0].register_buffer("scale", self.scale)


MODEL = seeded(Buffered)  # threads share the generator


def trained(rank, **options):
    """A sharded model after two steps."""
    model = copy.deepcopy(MODEL)
    tile = options.pop("tile", None)
    if tile:
        zs.tile(model, max_bytes=tile)
    model, optimizer = zs.shard(model, adamw(model.parameters()), **options)
    for ranks in BATCHES:
        model(*ranks[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def save_and_compare(rank, path, dtype, options):
    model = trained(rank, **options)
    if options.get("offload_path"):
        with torch.no_grad():
            model.norm.weight.mul_(1.5)  # the masters do not know yet
    zs.save_safetensors(model, path, dtype)
    state = zs.full_state_dict(model, masters=dtype is torch.float32)
    zs.close(model)
    return {name: value.to(dtype) if dtype and value.is_floating_point() else value for name, value in state.items()}


CASES = {
    "stage 0": ({"stage": 0}, None),
    "stage 1, masters": ({"stage": 1, "precision": "bf16"}, torch.float32),
    "stage 2, as bf16": ({"stage": 2}, torch.bfloat16),
    "stage 3": ({"stage": 3}, None),
    "stage 3, bf16": ({"stage": 3, "precision": "bf16"}, None),
    "stage 3, private, tiles": ({"stage": 3, "map_shared": False, "tile": 200}, None),
    "all on disk": ({"stage": 3, "offload_optimizer": "nvme", "offload_gradient": "nvme", "offload_param": "nvme"}, None),
    "all on disk, masters": ({"stage": 3, "precision": "bf16", "offload_optimizer": "nvme", "offload_param": "nvme"}, torch.float32),
    "late, masters": ({"stage": 3, "precision": "bf16", "offload_optimizer": "cpu", "delayed_update": 0}, torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_file_holds_the_bits_of_the_full_state_dict(case, tmp_path):
    options, dtype = CASES[case]
    if "nvme" in options.values():
        options = {**options, "offload_path": str(tmp_path)}
    path = tmp_path / "model.safetensors"
    states = run_threads(3, save_and_compare, path, dtype, options)
    got = load_file(path)
    assert set(states[0]) - set(got) == {"head.weight", "blocks.0.scale"}  # ties, once
    for name, value in got.items():
        assert value.dtype == states[0][name].dtype and torch.equal(value, states[0][name]), name
    assert os.listdir(tmp_path) == [path.name]


def test_the_file_is_one_to_safetensors_and_to_zeroshard(tmp_path):
    path = tmp_path / "model.safetensors"
    state = run_threads(2, save_and_compare, path, None, {"stage": 3})[0]
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight", "blocks.0.scale": "scale"}
    plain = Buffered()
    load_model(plain, path)  # knows ties by the metadata
    assert plain.head.weight is plain.embedding.weight
    for name, value in plain.state_dict().items():
        assert torch.equal(value, state[name]), name

    def load(rank):
        with torch.device("meta"):
            model = Buffered()
        model.scratch = torch.zeros(2)  # not in the file
        zs.shard(model, None, stage=3, weights=path)
        return zs.full_state_dict(model)

    for name, value in run_threads(3, load)[2].items():
        assert torch.equal(value, state[name]), name


def test_a_rank_that_does_not_see_the_folder_sends_its_slices(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "CHUNK_NBYTES", 96)  # many rounds, not as many on every rank
    path = tmp_path / "model.safetensors"

    def body(rank):
        model = trained(rank, stage=3)
        zs.save_safetensors(model, path if rank != 1 else "/no/such/folder/model.safetensors")
        return zs.full_state_dict(model)

    state = run_threads(3, body)[1]
    for name, value in load_file(path).items():
        assert torch.equal(value, state[name]), name


# -- failures ------------------------------------------------------------------------------------------------------


def refused(rank, path):
    model = trained(rank, stage=3)
    with pytest.raises(zs.OffloadIOError) as caught:
        zs.save_safetensors(model, path)
    zs.save_safetensors(model, path.parent.parent / "after.safetensors")  # the model is none the worse
    return str(caught.value)


@pytest.mark.parametrize(("call", "rank"), [("posix_fallocate", 0), ("pwritev", 1), ("fsync", 1)])
def test_a_disk_that_refuses_raises_on_every_rank_and_leaves_nothing(call, rank, tmp_path, monkeypatch):
    folder = tmp_path / "full"
    folder.mkdir()
    old = folder / "model.safetensors"
    old.write_text("of an earlier run")
    plain = getattr(os, call)

    def refuse(fd, *arguments):
        if threading.current_thread().name == f"rank{rank}" and "full" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(fd, *arguments)

    class Refusing(Syscalls):
        def pwritev(self, file, buffers, offset):
            if "full" in file.path:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().pwritev(file, buffers, offset)

    def engine():  # writes in threads of its own
        return Engine(calls=Refusing() if threading.current_thread().name == f"rank{rank}" else None)

    if call == "pwritev":
        monkeypatch.setattr(file_writer, "Engine", engine)
    else:
        monkeypatch.setattr(os, call, refuse)
    texts = run_threads(2, refused, old)
    assert texts[0] == texts[1]
    for word in (f"rank {rank}", "full", "ENOSPC", "free space"):
        assert word in texts[0]
    assert os.listdir(folder) == [old.name] and old.read_text() == "of an earlier run"
    assert load_file(tmp_path / "after.safetensors")


def test_a_swap_file_that_can_not_be_read_is_what_every_rank_names(tmp_path):
    """And not the file that was to be written, whose disk is well."""

    class Broken(Syscalls):
        def preadv(self, file, buffers, offset):
            raise OSError(errno.EIO, "Input/output error")

    for folder in ("out", "swap0", "swap1"):
        (tmp_path / folder).mkdir()

    def body(rank):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        offload = zs.Offload("disk", str(tmp_path / f"swap{rank}"), any_filesystem=True)
        model, _ = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=3, offload_param=offload)
        runtime = runtime_of(model)
        if rank == 1:
            engine = runtime.groups[0].values.rest.engine
            engine.rest()
            engine.calls = Broken()
        runtime.comm.exchange(b"", "armed")
        with pytest.raises(zs.OffloadIOError) as caught:
            zs.save_safetensors(model, tmp_path / "out" / "model.safetensors")
        return str(caught.value)

    texts = run_threads(2, body)
    assert all("swap1" in text and "EIO" in text for text in texts) and not os.listdir(tmp_path / "out"), texts


def test_a_rank_without_a_thread_to_write_is_told_to_all_at_once(tmp_path, monkeypatch):
    def write(self, file, offset, source, plain=Engine.write):
        if threading.current_thread().name == "rank1" and "/here/" in file.path:
            raise RuntimeError("can't start new thread")
        return plain(self, file, offset, source)

    (tmp_path / "here").mkdir()
    monkeypatch.setattr(Engine, "write", write)

    def body(rank):
        model = trained(rank, stage=3)
        with pytest.raises(zs.CheckpointError, match="rank 1 failed: RuntimeError: can't start new thread"):
            zs.save_safetensors(model, tmp_path / "here" / "model.safetensors")
        zs.save_safetensors(model, tmp_path / "after.safetensors")

    run_threads(2, body)
    assert not os.listdir(tmp_path / "here") and load_file(tmp_path / "after.safetensors")


@pytest.mark.parametrize("bad", ["a folder", "no such folder", "dtype", "state"])
def test_what_can_not_be_saved_is_said_on_every_rank(bad, tmp_path):
    path = {"a folder": tmp_path, "no such folder": tmp_path / "none" / "x"}.get(bad, tmp_path / "x")
    words = {
        "a folder": "EISDIR",
        "no such folder": "ENOENT",
        "dtype": "floating-point numbers, or None, got torch.int8",
        "state": "_extra_state is a dict",
    }

    def body(rank):
        model = trained(rank, stage=2)
        if bad == "state":
            type(model.norm).get_extra_state = lambda module: {"a": 1}
        with pytest.raises(zs.ZeroshardError, match=words[bad]):
            zs.save_safetensors(model, path, torch.int8 if bad == "dtype" else None)

    try:
        run_threads(2, body)
    finally:
        if bad == "state":
            del nn.LayerNorm.get_extra_state
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 2}, {"stage": 3, "offload_optimizer": "cpu"}], ids=str)
def test_what_was_written_after_the_last_step_is_kept_though_masters_do_not_show_it(options, tmp_path):
    def body(rank):
        model = trained(rank, precision="bf16", **options)
        with torch.no_grad():
            model.norm.weight.fill_(5.0)
        zs.save_safetensors(model, tmp_path / "x", torch.float32)
        masters = zs.full_state_dict(model, masters=True)
        return masters["norm.weight"], zs.close(model).norm.weight.detach()

    five = torch.full_like(MODEL.norm.weight, 5.0)
    for values in run_threads(2, body):
        assert all(torch.equal(value, five) for value in (*values, load_file(tmp_path / "x")["norm.weight"]))


def test_a_model_that_is_saved_can_be_closed_without_coming_back(tmp_path):
    def body(rank, stage):
        model = trained(rank, stage=stage, offload_optimizer="nvme", offload_path=str(tmp_path))
        zs.save_safetensors(model, tmp_path / "model.safetensors")
        zs.close(model, restore=False)
        with pytest.raises(zs.ModelClosed):
            model(*BATCHES[0][rank])

    for stage in (2, 3):
        run_threads(2, body, stage)
        assert os.listdir(tmp_path) == ["model.safetensors"]


# -- memory --------------------------------------------------------------------------------------------------------


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(32))  # 4 MiB each


def save_in_little_memory(rank, world, folder):
    dist.init_process_group("gloo")
    zs.save_safetensors(zs.shard(nn.Linear(4, 4), None, stage=3)[0], folder / "warm.safetensors")
    with torch.device("meta"):
        model = Deep()
    model, _ = zs.shard(model, None, stage=3, offload_param="nvme", offload_path=str(folder))
    with Peak() as peak:
        zs.save_safetensors(model, folder / "model.safetensors")
    return peak.added_nbytes, model.layers[7].weight.to_local().clone()


@pytest.mark.processes
def test_saving_takes_the_memory_of_a_chunk(tmp_path):
    results = run_processes(save_in_little_memory, 1, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert sum(value.nbytes for value in state.values()) == 128 << 20
    assert torch.equal(results[0][1], state["layers.7.weight"].view(-1))
    for added, _ in results:  # two chunks of 16 MiB at most: one being read or written, one that the allocator keeps
        assert added < 40 << 20, f"{added / 2**20:.0f} MiB to save 128 MiB"
