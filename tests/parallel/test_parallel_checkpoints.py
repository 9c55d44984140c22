"""Checkpoints of meshes with model axes hold whole parameters: what one layout of tensor and pipeline parallelism saves any other loads.

One world of four processes does everything that needs several ranks; this process is the layout of one.
"""

import copy
import os
import re
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from helpers import seeded
from parallel_models import Net, Stage, batch, parallelized, two_groups
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.engine.runtime import runtime_of

pytestmark = pytest.mark.processes
WORLD = 4
LAYOUTS = {"dp2 x tp2": (2, 2), "tp4": (1, 4), "dp4": None}
OPTIONS = {"1": {"stage": 1}, "3 bf16": {"stage": 3, "precision": "bf16"}}
if os.environ.get("ZEROSHARD_SLOW") == "1":
    OPTIONS |= {"0": {"stage": 0}, "2 bf16": {"stage": 2, "precision": "bf16"}}
WITH_WEIGHTS = ("1", "3 bf16")  # are also given to zs.shard
STAGED = {"pp2 x dp2": (2, 2, 1), "pp2 x tp2": (2, 1, 2)}
SEED, OTHER_SEED = 0, 5


def sharded(mesh=None, seed=SEED, tied=True, optimizer=True, **options):
    """A Net over a mesh; None: over all ranks that there are, as data parallelism."""
    model = seeded(lambda: Net(tied), seed)
    if mesh is not None:
        parallelized(model, mesh["tp"])
    return zs.shard(model, two_groups(model) if optimizer else None, mesh=mesh, **options)


def stage_of(mesh, seed=SEED, **options):
    model = Stage(seeded(Net, seed), mesh["pp"].get_local_rank())
    parallelized(model, mesh["tp"])
    return zs.shard(model, two_groups(model), mesh=mesh, **options)


def step(model, optimizer, number, place=0, places=1):
    loss = model() if isinstance(model, Stage) else model(*batch(number, place, places))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def whole(model, optimizer=None):
    """Everything that training goes on with, as exact as it is held."""
    states = zs.full_optimizer_state(model) if runtime_of(model).optimizers.one is not None else {}
    flat = {f"{name}.{key}": torch.as_tensor(value) for name, entries in states.items() for key, value in entries.items()}
    return {**zs.full_state_dict(model, masters=True), **flat}


def loaded(path, model, optimizer, **options):
    zs.load(path, model, optimizer, **options)
    return whole(model)


# -- on the ranks ------------------------------------------------------------------------------------------------------


def _on_ranks(rank, ranks, root):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = defaultdict(dict)
    meshes = {name: shape and init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")) for name, shape in LAYOUTS.items()}
    for name in OPTIONS:
        _layouts(rank, meshes, root, name, found[name])
    _beside_the_weights(rank, meshes, root, found["beside"])
    found["refused"] = _refused(rank, meshes["dp2 x tp2"], root)
    for name, shape in STAGED.items():
        _stages(rank, init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp")), root / name, found[name])
    dist.barrier()
    return dict(found)


def _layouts(rank, meshes, root, name, found):
    """Save at one layout; load that, and what one process has saved, at each."""
    mesh, options = meshes["dp2 x tp2"], OPTIONS[name]
    model, optimizer = sharded(mesh, **options)
    for number in range(2):
        step(model, optimizer, number, mesh["dp"].get_local_rank(), 2)
    zs.save(root / name, model, optimizer, extra={"of_rank": rank, "name": name})
    zs.save_safetensors(model, root / f"{name}.safetensors", dtype=torch.float32)
    zs.save_safetensors(model, root / ("here" if rank == 0 else "not here") / f"{name}.safetensors", dtype=torch.float32)
    found["saved"] = whole(model)
    found["streamed"] = {k: v for part in zs.stream_full_tensors(model, max_nbytes=500, masters=True) for k, v in part.items()}
    for where, mesh in meshes.items():
        place = (rank, WORLD) if mesh is None else (mesh["dp"].get_local_rank(), mesh["dp"].size())
        model, optimizer = sharded(mesh, OTHER_SEED, **options)
        found["one", where] = loaded(root / f"one {name}", model, optimizer)
        result = zs.load(
            root / name, model, optimizer, extra={"name": None, **({"of_rank": None} if where == "dp2 x tp2" else {})}
        )
        found["itself", where] = whole(model)
        found["told", where] = result.rng, result.extra
        found["loss", where] = step(model, optimizer, 2, *place)
        if name in WITH_WEIGHTS:
            model, _ = sharded(mesh, OTHER_SEED, optimizer=False, weights=root / f"{name}.safetensors", stage=options["stage"])
            found["weights", where] = zs.full_state_dict(model)


def _beside_the_weights(rank, meshes, root, found):
    """In the background, averages, and what is not trained, left out."""

    def frozen(mesh, seed=SEED):
        model = seeded(Net, seed)
        model.emb.requires_grad_(False)
        model.blocks["0"].requires_grad_(False)
        if mesh is not None:
            parallelized(model, mesh["tp"])
        return zs.shard(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), mesh=mesh, stage=3)

    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    model, optimizer = frozen(mesh)
    average = zs.ema(model, decay=0.5)
    step(model, optimizer, 0, mesh["dp_replicate"].get_local_rank(), 2)
    zs.save(root / "frozen", model, optimizer, extra={"ema": average}, asynchronous=True).wait()
    found["saved"], found["average"] = whole(model), average.full_state_dict()
    for where, other in [*meshes.items(), ("groups x tp2", mesh)]:
        model, optimizer = frozen(other)
        average = zs.ema(model, decay=0.5)
        zs.load(root / "frozen", model, optimizer, extra={"ema": average})
        found["loaded", where], found["averaged", where] = whole(model), average.full_state_dict()
        average.load_state_dict({name: torch.zeros_like(value) for name, value in found["averaged", where].items()})
        average.load_state_dict(found["averaged", where])
        found["given", where] = average.full_state_dict()
        with pytest.raises(zs.BaseModelMismatch, match="of another base model"):
            zs.load(root / "frozen", *frozen(mesh, OTHER_SEED))


def _refused(rank, mesh, root):
    """What goes wrong in one place is raised on every rank, and nothing has changed."""
    model, optimizer = sharded(mesh, stage=1)
    before, found = whole(model), []
    if mesh["tp"].get_local_rank() == 1 and mesh["dp"].get_local_rank() == 1:
        with torch.no_grad():
            model.blocks["0"].norm.bias += 1
    for action in (
        lambda: zs.save(root / "refused", model, optimizer),
        lambda: zs.save(root / "refused", model, optimizer, step=mesh["tp"].get_local_rank()),
        lambda: zs.load(root / "1", model, optimizer, extra={"of_rank": None}, name="of nobody"),
        lambda: zs.load(root / "narrow", model, optimizer),
    ):
        try:
            action()
            found.append("nothing")
        except zs.ZeroshardError as error:
            found.append(f"{type(error).__name__}: {error}")
        if mesh["tp"].get_local_rank() == 1 and mesh["dp"].get_local_rank() == 1 and len(found) == 1:
            with torch.no_grad():
                model.blocks["0"].norm.bias -= 1
    other, other_optimizer = sharded(init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp")), stage=1)
    try:
        zs.load(root / "1", other, other_optimizer, extra={"of_rank": None})
    except zs.ZeroshardError as error:
        found.append(f"{type(error).__name__}: {error}")
    after = whole(model)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert not (root / "refused").exists() or not any((root / "refused").iterdir())
    return found


def _stages(rank, mesh, root, found):
    model, optimizer = stage_of(mesh, stage=1)
    for number in range(2):
        step(model, optimizer, number)
    zs.save(root / "saved", model, optimizer)
    zs.save_safetensors(model, root / "whole.safetensors")
    found["saved"] = whole(model)
    for what in ("saved", "one", "tied"):
        model, optimizer = stage_of(mesh, OTHER_SEED, stage=2)
        found["loaded", what] = loaded(root / what, model, optimizer)
        found["stepped", what] = step(model, optimizer, 2)
    with pytest.raises(zs.CheckpointMismatch, match=r"unexpected: blocks\.2\.norm\.bias"):
        zs.load(root / "deeper", model, optimizer)
    model = Stage(seeded(Net), mesh["pp"].get_local_rank())
    optimizer = two_groups(model)
    if mesh["pp"].get_local_rank():
        optimizer.add_param_group({"params": []})
    model, optimizer = zs.shard(model, optimizer, mesh=mesh)
    with pytest.raises(zs.ConfigError, match=r"stages have \[2, 3\] parameter groups"):
        zs.save(root / "refused", model, optimizer)
    equal_ends(found, root, mesh)


def equal_ends(found, root, mesh):
    """Embedding and head with the same values, stepped alike: one parameter to a process that ties them."""
    net = seeded(lambda: Net(True))
    net.head = copy.deepcopy(net.head)
    model = Stage(net, mesh["pp"].get_local_rank())
    model, optimizer = zs.shard(model, two_groups(model), mesh=mesh, stage=1)
    step(model, optimizer, 0)
    zs.save(root / "ends", model, optimizer)
    found["ends"] = whole(model)


# -- in this process ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(folder, what this process has saved, what each rank has found)."""
    root, mine = tmp_path_factory.mktemp("meshes"), {}
    (root / "here").mkdir()
    for name, options in OPTIONS.items():
        model, optimizer = sharded(**options)
        for number in range(2):
            step(model, optimizer, number)
        zs.save(root / f"one {name}", model, optimizer)
        mine[name] = whole(model)
    narrow = seeded(Net)
    narrow.head = torch.nn.Linear(8, 7, bias=False)
    zs.save(root / "narrow", *zs.shard(narrow, two_groups(narrow)))
    for name in STAGED:
        for what, tied in (("one", False), ("tied", True)):
            model, optimizer = sharded(tied=tied, stage=1)
            step(model, optimizer, 0)
            zs.save(root / name / what, model, optimizer)
            mine[what] = whole(model)
        deeper = seeded(Net)
        deeper.blocks["2"] = copy.deepcopy(deeper.blocks["1"])
        zs.save(root / name / "deeper", *zs.shard(deeper, two_groups(deeper)))
    return root, mine, run_processes(_on_ranks, WORLD, root)


def assert_equal(got, want, what=""):
    assert got.keys() == want.keys(), (what, got.keys() ^ want.keys())
    differing = [key for key in want if not torch.equal(got[key], want[key])]
    assert not differing, (what, differing)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_layout_loads_the_same_bits(name, results):
    root, mine, everyone = results
    for found in (each[name] for each in everyone):
        for where in LAYOUTS:
            assert_equal(found["itself", where], everyone[0][name]["saved"], where)
            assert_equal(found["one", where], mine[name], where)
    model, optimizer = sharded(seed=OTHER_SEED, **OPTIONS[name])
    assert_equal(loaded(root / name, model, optimizer), everyone[0][name]["saved"])
    expected = step(model, optimizer, 2)
    for where in LAYOUTS:
        mean = sum(each[name]["loss", where] for each in everyone) / WORLD
        assert mean == pytest.approx(expected, rel=1e-2 if "bf16" in name else 1e-5), where


@pytest.mark.parametrize("name", OPTIONS)
def test_whole_tensors_leave_a_mesh_as_files_and_as_a_stream(name, results):
    root, _, everyone = results
    saved = everyone[0][name]["saved"]
    file = load_file(root / f"{name}.safetensors")
    assert (root / "here" / f"{name}.safetensors").read_bytes() == (root / f"{name}.safetensors").read_bytes()  # what ranks sent
    assert file.keys() == {key for key in saved if key in everyone[0][name]["streamed"]} - {"head.weight"}
    for each in everyone:
        for key, value in each[name]["streamed"].items():
            assert torch.equal(value, saved[key]), key
    exported = zs.export(root / name, root / f"exported {name}")
    for key, value in load_file(root / f"exported {name}" / exported.files[0]).items():
        assert torch.equal(value, saved[key]) and torch.equal(file[key], value.float()), key
    for where in LAYOUTS if name in WITH_WEIGHTS else ():
        for key, value in everyone[3][name]["weights", where].items():
            assert torch.equal(value.float(), file["emb.weight" if key == "head.weight" else key]), (where, key)


def test_torch_reads_it(results):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    root, _, everyone = results
    folder = next(path for path in (root / "3 bf16").iterdir() if path.is_dir())
    dcp_to_torch_save(folder, root / "state.pt")
    state, saved = torch.load(root / "state.pt", weights_only=False), everyone[0]["3 bf16"]["saved"]
    assert torch.equal(state["model"]["blocks.0.down.weight"], saved["blocks.0.down.weight"])
    assert torch.equal(state["optim"]["state"]["blocks.1.up.weight"]["exp_avg"], saved["blocks.1.up.weight.exp_avg"])
    assert float(state["optim"]["state"]["blocks.1.norm.bias"]["step"]) == 2


def test_each_rank_gets_its_own_back_where_the_mesh_is_the_same(results):
    for rank, each in enumerate(results[2]):
        assert each["1"]["told", "dp2 x tp2"] == ("restored", {"of_rank": rank, "name": "1"})
        assert each["1"]["told", "dp4"] == each["1"]["told", "tp4"] == ("reseeded", {"name": "1"})


def test_averages_and_trained_parameters_alone(results):
    for found in (each["beside"] for each in results[2]):
        for where in (*LAYOUTS, "groups x tp2"):
            assert_equal(found["loaded", where], found["saved"], where)
            assert_equal(found["averaged", where], found["average"], where)
            assert_equal(found["given", where], found["average"], where)


def test_what_is_wrong_is_told_on_every_rank(results):
    expected = (
        r"ModelMismatch: ranks have written different values.*norm\.bias",
        r"ConfigError: zs\.save: ranks 0 and 1 passed different arguments: .*step: 0 and 1",
        "CheckpointNotFound: ",
        r"CheckpointMismatch: .*head\.weight: saved \(7, 8\), wanted \(10, 8\)",
        r"CheckpointMismatch: extra\['of_rank'\] was saved by 4 ranks.*there are as many in another mesh now",
    )
    for each in results[2]:
        assert each["refused"] == results[2][0]["refused"]
        for message, pattern in zip(each["refused"], expected, strict=True):
            assert re.search(pattern, message, re.DOTALL), message


@pytest.mark.parametrize("name", STAGED)
def test_stages_of_a_pipeline_are_one_model(name, results):
    root, mine, everyone = results
    union = {key: value for each in everyone for key, value in each[name]["saved"].items()}
    assert "emb.weight.exp_avg" in union and "head.weight.exp_avg" in union
    model, optimizer = sharded(tied=False, seed=OTHER_SEED, stage=3)
    assert_equal(loaded(root / name / "saved", model, optimizer), union)
    file = load_file(root / name / "whole.safetensors")
    assert_equal(file, {key: value for key, value in union.items() if key in file})
    assert file.keys() == model.state_dict().keys()
    for each in everyone:
        assert_equal(each[name]["loaded", "saved"], each[name]["saved"])
        of_one = {key: mine["one"][key] for key in each[name]["saved"]}
        assert_equal(each[name]["loaded", "one"], of_one)
        alias = {key: mine["tied"][key if key in mine["tied"] else key.replace("head", "emb")] for key in each[name]["saved"]}
        assert_equal(each[name]["loaded", "tied"], alias)


@pytest.mark.parametrize("name", STAGED)
def test_copies_at_two_stages_are_one_where_they_are_tied(name, results):
    root, _, everyone = results
    union = {key: value for each in everyone for key, value in each[name]["ends"].items()}
    model, optimizer = sharded(tied=True, seed=OTHER_SEED, stage=2)
    got = loaded(root / name / "ends", model, optimizer)
    assert_equal(got, {key: value for key, value in union.items() if not key.startswith("head.weight.")})
    with pytest.raises(zs.CheckpointMismatch, match="untied: head.weight: saved with other values than emb.weight"):
        zs.load(root / name / "saved", model, optimizer)
