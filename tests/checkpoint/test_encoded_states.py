"""Checkpoints with encoded optimizer states: damage, ranks that die, other worlds, stages and formats, other libraries' states.

What is expected is plain arithmetic on one process: a state that is loaded into a format is encode(its values), decoded.
"""

import copy
import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from helpers import differences, state_differences
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from zeroshard.checkpoint import directory
from zeroshard.checkpoint.manifest import Manifest
from zeroshard.comm.launch import run_processes
from zeroshard.formats.state_codecs import coded_column
from zeroshard.testing import run_threads
from zeroshard.tiers.io.async_file import Syscalls

sys.path.insert(0, str(DATA := Path(__file__).parent / "data" / "deepspeed"))
import make_deepspeed as recorded

WORLD, KEYS = 4, ("exp_avg", "exp_avg_sq")
FORMS = {name: zs.StateFormat(name, block=64, min_numel=100) for name in ("bf16", "fp8", "int8", "int4")}
FORMS |= {None: None, "all int8": zs.StateFormat("int8", block=32, min_numel=0)}
torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(13, 37), nn.Tanh(), nn.Linear(37, 29, bias=False), nn.Tanh(), nn.Linear(29, 3))
BATCHES = [[torch.randn(4, 13) for _ in range(WORLD)] for _ in range(3)]


def made(model=MODEL, stage=3, form="int8", **options):
    model = copy.deepcopy(model) if model is MODEL else model
    groups = recorded.groups_of(model) if isinstance(model, recorded.Net) else model.parameters()
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return zs.shard(model, optimizer, stage=stage, optimizer_states=FORMS[form], **options)


def step(model, optimizer, number, rank=0):
    model(BATCHES[number][rank]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model):
    return zs.full_state_dict(model, masters=True), zs.full_optimizer_state(model)


def assert_same(got, expected):
    assert not differences(got[0], expected[0]) and not state_differences(got[1], expected[1])


def encoded(states, form):
    """What states are after they have been loaded into a format: those of matrices are rounded, those of embeddings are not."""
    found = {name: dict(state) for name, state in states.items()}
    for name, state in found.items() if FORMS[form] is not None else ():
        for key in KEYS:
            value = state[key]
            if value.dim() < 2 or value.numel() < FORMS[form].min_numel or "embedding" in name:
                continue
            column = coded_column(key, FORMS[form])
            flat = F.pad(value.reshape(-1), (0, -value.numel() % column.elements))
            rested = column.decode(column.encode(flat).to(column.dtype)).float()
            state[key] = rested[: value.numel()].view(value.shape)
    return found


def write(root, world=WORLD, steps=(0, 1), name="x", **options):
    """Save a run; return what it held."""

    def rank_run(rank):
        model, optimizer = made(**options)
        for number in steps:
            step(model, optimizer, number, rank)
        zs.save(root, model, optimizer, name=name)
        found = whole(model)
        zs.close(model)
        return found

    return run_threads(world, rank_run)[0]


def read(path, world, base=MODEL, **options):
    """Load into a run of other values; return what it then holds."""

    def rank_run(rank):
        model, optimizer = made(copy.deepcopy(base), **options)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        zs.load(path, model, optimizer)
        found = whole(model)
        zs.close(model)
        return found

    return run_threads(world, rank_run)[0]


def relabel(folder, old, new):
    """Change the labels of encoded states in a manifest, whose checksum is then right again."""
    manifest = Manifest.read(folder)
    for name in [name for name in manifest.tensors if "m4/64" in name]:
        entry = manifest.tensors.pop(name)
        keys = (*entry.keys[:-1], entry.keys[-1].replace(old, new))
        manifest.tensors[".".join(keys)] = replace(entry, keys=keys)
    (folder / "manifest.json").write_bytes(manifest.to_json())


def flip(folder):
    """A bit in the middle of an encoded blob."""
    at = next(entry.boxes[0] for name, entry in Manifest.read(folder).tensors.items() if "2.weight.exp_avg@e3m4/64" in name)
    path, middle = folder / Manifest.read(folder).files[at.file].name, at.data + at.box.numel // 2
    content = path.read_bytes()
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


DAMAGES = {  # what is done to the folder, which file is named, what else is said
    "flipped": (flip, "rank-0000.", "checksum"),
    "truncated": (lambda folder: os.truncate(folder / "rank-00002.distcp", 1000), "rank-00002", "found 1,000 bytes"),
    "missing": (lambda folder: (folder / "rank-00003.distcp").unlink(), "rank-00003", "found no file"),
    "block": (lambda folder: relabel(folder, "/64", "/128"), "manifest.json", "blocks of 128"),
    "format": (lambda folder: relabel(folder, "m4", "m9"), "manifest.json", "another checkpoint"),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    return root, [write(root, steps=(number,), name=name) for number, name in enumerate(("first", "second"))]


@pytest.mark.parametrize("verify", [True, "before"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_told_on_every_rank_with_the_file_and_a_remedy(damage, verify, pair, tmp_path):
    shutil.copytree(pair[0], tmp_path / "run")
    change, file, words = DAMAGES[damage]
    change(tmp_path / "run" / "second")

    def rank_run(rank):
        model, optimizer = made()
        step(model, optimizer, 2, rank)
        before = whole(model)
        with pytest.raises(zs.CheckpointError, match=f"second/{file}.*{words}") as caught:
            zs.load(tmp_path / "run", model, optimizer, verify=verify)
        assert_same(whole(model), before)
        if damage != "format":  # the remedy, which is in the words
            assert f"The complete checkpoint before it: {tmp_path / 'run' / 'first'}" in str(caught.value)
        zs.load(tmp_path / "run", model, optimizer, name="first")
        assert_same(whole(model), pair[1][0])
        zs.close(model)
        return str(caught.value)

    assert len(set(run_threads(2, rank_run))) == 1


def die(rank, root, asynchronous):
    """Rank 1 is killed when it writes the second checkpoint."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
    model, optimizer = made(stall_timeout_s=60.0)
    step(model, optimizer, 0, rank)
    zs.save(f"{root}/run", model, optimizer, name="first")
    found = whole(model)
    if rank == 0:
        torch.save(found, f"{root}/noted")
    step(model, optimizer, 1, rank)
    if rank == 1:
        Syscalls.pwritev = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    try:
        zs.save(f"{root}/run", model, optimizer, name="second", asynchronous=asynchronous).wait()
    except (zs.PeerFailed, zs.CheckpointError):
        os._exit(0)


def start(rank, world, root, asynchronous):
    children = []
    for number in range(2):
        if not (child := os.fork()):
            try:
                die(number, root, asynchronous)
            finally:
                os._exit(1)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


@pytest.mark.processes
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_dies_in_a_save_leaves_the_checkpoint_before(asynchronous, tmp_path):
    assert run_processes(start, 1, str(tmp_path), asynchronous) == [[0, -signal.SIGKILL]]
    assert list(directory.complete(tmp_path / "run")) == ["first"]
    assert_same(read(tmp_path / "run", 3), torch.load(tmp_path / "noted"))


@pytest.mark.parametrize(("saved", "world", "stage", "form"), [
    ("int8", 1, 3, "int8"), ("int8", 2, 1, "int8"), ("int8", 3, 2, "int8"), ("int8", 2, 0, "int8"), ("int8", 3, 3, None),
    ("int8", 2, 3, "fp8"), (None, 3, 1, "int8"), ("bf16", 2, 3, "int4"), ("int4", 1, 0, "bf16"),
])  # fmt: skip
@pytest.mark.parametrize("device", ["none", "cpu"])
def test_a_load_rounds_states_once_into_any_other_layout(saved, world, stage, form, device, tmp_path):
    weights, states = write(tmp_path, form=saved)
    offload = {} if device == "none" or stage == 0 else {"offload_optimizer": device}
    assert_same(read(tmp_path, world, stage=stage, form=form, **offload), (weights, encoded(states, form)))


@pytest.mark.parametrize("masters", [("split", True), (True, "split"), ("split", "split")])
@pytest.mark.parametrize(("world", "stage"), [(1, 3), (3, 1)])
def test_split_masters_load_as_fp32_and_back(masters, world, stage, tmp_path):
    weights, states = write(tmp_path, precision="bf16", master_weights=masters[0])
    got = read(tmp_path, world, stage=stage, precision="bf16", master_weights=masters[1])
    if masters == (True, "split"):  # half-way above an even bf16 number the last bit is lost
        every = {name: value.view(torch.int32) for name, value in weights.items()}
        weights = {name: (bits - (bits & 0x1FFFF == 0x8000).int()).view(torch.float32) for name, bits in every.items()}
    assert_same(got, (weights, states))


@pytest.fixture(scope="module")
def plain():
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(3):
        step(model, optimizer, number)
    return model, optimizer, {name: dict(optimizer.state[param]) for name, param in model.named_parameters()}


@pytest.mark.parametrize("form", ["int8", "int4", "bf16"])
@pytest.mark.parametrize("library", ["torch", "dcp"])
def test_states_of_torch_are_encoded(library, form, plain, tmp_path):
    model, optimizer, states = plain
    both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if library == "torch":
        torch.save(both, tmp_path / "x.pt")
    else:
        dcp.save(both, checkpoint_id=tmp_path / "x", no_dist=True)
    path = tmp_path / ("x.pt" if library == "torch" else "x")
    assert_same(read(path, 3, form=form), (model.state_dict(), encoded(states, form)))


@pytest.mark.parametrize("case", ["stage1", "stage3"])
def test_states_of_deepspeed_are_encoded(case):
    torch.manual_seed(1)
    base = recorded.Net()
    values, states = read(DATA / case, 2, base, form=None)
    rounded = encoded(states, "all int8")
    assert_same(read(DATA / case, 3, base, form="all int8"), (values, rounded))
    assert {text.split(":")[0] for text in state_differences(rounded, states)} >= {f"hidden.weight.{key}" for key in KEYS}


# -- tensor parallelism --------------------------------------------------------------------------------------------------

ROWS, COLUMNS = "0.weight", "2.weight"  # (64, 32): two parts of whole blocks; (32, 64), cut across its rows: blocks of its own


def net():
    return nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 32, bias=False))


def cut(rank, world, root, form):
    """Save at tp2; return what was held, and what the same layout loads."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    mesh, found = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), []
    for seed in range(2):
        torch.manual_seed(seed)
        model = parallelize_module(net(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        model, optimizer = made(model, form=form, mesh=mesh)
        if seed:
            zs.load(root, model, optimizer)
        else:
            model(torch.ones(2, 32)).square().mean().backward()
            optimizer.step()
            zs.save(root, model, optimizer, name="x")
        found.append(whole(model))
    return found


@pytest.mark.processes
@pytest.mark.parametrize("form", ["int8", "bf16"])
def test_parts_of_whole_blocks_are_saved_as_they_rest_and_others_decoded(form, tmp_path):
    for held, again in run_processes(cut, 2, str(tmp_path), form):
        assert_same(again, held)
    tensors = json.loads((tmp_path / "x" / "manifest.json").read_text())["tensors"]
    kinds = {name.partition("exp_avg")[2]: tensor["dtype"] for name, tensor in tensors.items() if f"{ROWS}.exp_avg" in name}
    others = {tensor["dtype"] for name, tensor in tensors.items() if f"{COLUMNS}.exp_avg" in name}
    kept, kind, other = {
        "int8": (("@e3m4/64", "_sq@e4m4/64"), "uint8", "float32"), "bf16": (("", "_sq"), "bfloat16", "bfloat16")
    }[form]  # fmt: skip
    assert kinds == dict.fromkeys(kept, kind) and others == {other}
    assert_same(read(tmp_path, 3, net(), form=form), (held[0], encoded(held[1], form)))


# -- states that are read in chunks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {"form": "int8"}, {"form": "int8", "stage": 1}, {"form": None, "precision": "bf16", "master_weights": "split"},
], ids=["encoded", "replicated weights", "split"])  # fmt: skip
@pytest.mark.parametrize("world", [1, 2])
def test_damage_inside_a_large_state_in_columns_is_found_before_anything_changes(options, world, tmp_path):
    """A block that has nothing else: no comparison of small blocks, and no read in bulk, passes by it."""

    def rank_run(rank):
        torch.manual_seed(rank + 1)
        model, optimizer = made(nn.Sequential(nn.Linear(2000, 1800, bias=False)), **options)
        model(torch.ones(1, 2000)).square().mean().backward()
        optimizer.step()
        zs.save(tmp_path, model, optimizer, name="x")
        entries = Manifest.read(tmp_path / "x")
        box = next(entry.boxes[-1] for name, entry in entries.tensors.items() if "0.weight.exp_avg" in name)
        path = tmp_path / "x" / entries.files[box.file].name
        optimizer.step()
        before, content = whole(model), path.read_bytes()
        if rank == 0:
            middle = box.offset + box.nbytes // 2
            path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        with pytest.raises(zs.CheckpointCorrupt, match=f"{path.name}.*checksum"):
            zs.load(tmp_path, model, optimizer, name="x")
        assert_same(whole(model), before)
        zs.close(model)

    run_threads(world, rank_run)
