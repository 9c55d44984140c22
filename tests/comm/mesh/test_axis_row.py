"""A new axis is a row of utils/axes.py: "xp", along which ranks read other parts of a batch, shards states together with dp.

The model is an MLP for each token, so that ranks need nothing of each other's tokens. Four processes over gloo.
"""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from helpers import MLP, Task, assert_equal_runs, flat, reference, seeded, train
from mesh_kit import expected
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.engine.runtime import runtime_of
from zeroshard.utils.axes import AXES, Axis

WORLD, STEPS, ROWS, TOKENS = 4, 3, 4, 6
MODEL = seeded(MLP)
ROW = Axis("xp", cuts_parameters="no", shards_states=True, cuts_batch=True, gradient="mean")
MESHES = {  # shape, names, ranks that share states
    "dp x xp": ((2, 2), ("dp", "xp"), 4),
    "replicas": ((2, 1, 2), ("dp_replicate", "dp_shard", "xp"), 2),
    "beside model axes": ((1, 2, 1, 2), ("pp", "dp", "tp", "xp"), 4),
    "replicas inside": ((2, 2), ("xp", "dp_replicate"), 2),
    "xp": ((4,), ("xp",), 4),
}
CELLS = [("dp x xp", stage) for stage in range(4)] + [(name, 3) for name in MESHES if name != "dp x xp"]


def whole_batches() -> list:
    generator = torch.Generator().manual_seed(2)
    return [[[tuple(torch.randn(ROWS, TOKENS, n, generator=generator) for n in (5, 3))]] for _ in range(STEPS)]


def task(loss=lambda model, *batch: model(*batch), order=range(WORLD)) -> Task:
    """The batch in quarters: of rank 2 d + s the rows of place d along dp, of these the tokens of place s along xp.

    order: of ranks in a reference, which adds the first two, and the last two.
    """

    def quarter(tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return tensor.chunk(2, 0)[rank // 2].chunk(2, 1)[rank % 2]

    data = [
        [[tuple(quarter(each, rank) for each in batch) for rank in order] for (batch,) in micros] for micros in whole_batches()
    ]
    return Task(MODEL, data, loss=loss)


def shards(mesh) -> int:
    """Ranks over which states are sharded."""
    model, _ = zs.shard(copy.deepcopy(MODEL), None, mesh=mesh, stage=3)
    found = runtime_of(model).topology.shards.world_size
    zs.close(model)
    return found


def slices_have_gradients_of_one(mesh) -> bool:
    """The loss is a sum, to which each rank adds its own slice of each parameter: whatever gradients are over the mesh."""
    model, _ = zs.shard(copy.deepcopy(MODEL), None, mesh=mesh, stage=3)
    sum(param.to_local().sum() for param in model.parameters()).backward()
    found = zs.full_gradients(model)
    zs.close(model)
    return all(torch.equal(each, torch.ones_like(each)) for each in found.values())


def _on_ranks(rank, ranks):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    meshes = {name: init_device_mesh("cpu", shape, mesh_dim_names=names) for name, (shape, names, _) in MESHES.items()}
    assert shards(meshes["dp x xp"]) == 2, "without a row: the inner of two axes alone"
    with pytest.raises(zs.ConfigError, match=r"axes \('dp_replicate', 'dp_shard', 'xp'\)\. Axes not named of .*, got 3"):
        shards(meshes["replicas"])
    with pytest.raises(zs.ConfigError, match=r"mesh: expected a DeviceMesh with axes named of .*, got \('dp', 'xp'\)"):
        zs.parallelize(copy.deepcopy(MODEL), meshes["dp x xp"])
    AXES["xp"] = ROW
    assert slices_have_gradients_of_one(meshes["replicas"])
    assert {name: shards(mesh) for name, mesh in meshes.items()} == {name: each[2] for name, each in MESHES.items()}
    found = {(name, stage): train(rank, task(), mesh=meshes[name], stage=stage) for name, stage in CELLS}
    AXES["xp"] = dataclasses.replace(ROW, gradient="sum")
    assert slices_have_gradients_of_one(meshes["dp x xp"])
    halved = task(lambda model, *batch: model(*batch) / 2)  # its part of the mean over all tokens of a sequence
    return found | {("sum", stage): train(rank, halved, mesh=meshes["dp x xp"], stage=stage) for stage in range(4)}


@pytest.mark.processes
def test_an_axis_that_is_a_row_shards_states_and_equals_one_process():
    for found in run_processes(_on_ranks, WORLD):
        for (name, stage), got in found.items():
            kind = "groups" if name.startswith("replicas") else "plain"
            order = (0, 2, 1, 3) if name == "replicas inside" else range(WORLD)
            one = expected(task(order=order), WORLD, kind, 2, "fp32", got.coefficients, 1.0)
            assert_equal_runs(got, one, f"{name}, stage {stage}:")
    whole = reference(Task(MODEL, whole_batches()), 1)
    assert torch.allclose(flat(got.weights), flat(whole.weights), rtol=1e-5, atol=1e-6)
