"""Groups of ranks over gloo, in four processes: numbers of one process, few groups of processes, failures in the middle of a hop."""

import copy
import os
import time

import pytest
import torch
import torch.distributed as dist
from helpers import OddGPT, Task, adamw, assert_equal_runs, seeded, token_batches, train
from mesh_kit import expected
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from zeroshard.comm.launch import run_processes
from zeroshard.engine.runtime import runtime_of

WORLD, SIZE, STALL_S = 4, 2, 6.0
NEVER_S = 3600.0  # longer than any test may take: what ends sooner was told, and not missed
MODEL = seeded(OddGPT)
CELLS = {
    "mesh": {"stage": 3},
    "states": {"stage": 3, "replicate_optimizer": False},
    "groups": {"stage": 1, "shard_size": SIZE},
    "hpz": {"stage": 3, "zero_hpz_partition_size": SIZE, "max_grad_norm": 0.05},
}
KIND = {"mesh": "groups", "states": "states", "groups": "groups", "hpz": "hpz"}


def task() -> Task:
    return Task(MODEL, token_batches(2, 1, WORLD))


def _all(rank, ranks):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, SIZE))
    found, groups = {}, []
    for name, options in CELLS.items():
        where = {"mesh": mesh} if name in ("mesh", "states") else {"comm": "dist"}
        if name in ("mesh", "states"):
            os.environ["ZEROSHARD_COMM"] = "dist"
        found[name] = train(rank, task(), **where, **options)  # the same nodes: groups of processes are made once
        groups.append(len(dist.distributed_c10d._world.pg_map))
    model = copy.deepcopy(MODEL)
    with pytest.raises(zs.ConfigError, match="mesh: expected a DeviceMesh of 1 or 2 axes, got one of shape"):
        zs.shard(model, None, mesh=init_device_mesh("cpu", (2, 1, 2)))
    with pytest.raises(zs.ConfigError, match="shard_size=2 with a mesh"):
        zs.shard(model, None, mesh=mesh, shard_size=2)
    with pytest.raises(zs.ConfigError, match="zero_hpz_partition_size=2 with a mesh of two axes"):
        zs.shard(model, None, mesh=mesh, zero_hpz_partition_size=2)
    return found, groups


@pytest.mark.processes
def test_numbers_of_one_process_and_few_groups():
    results = run_processes(_all, WORLD)
    for found, groups in results:
        assert groups == groups[:1] * len(CELLS), groups
        for name, got in found.items():
            one = expected(task(), WORLD, KIND[name], SIZE, "fp32", got.coefficients, 1.0)
            assert_equal_runs(got, one, name)


def _failing(rank, ranks, what):
    """Rank 2 fails (or sleeps) before the backward of block 0: others are in the hops of later units."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = copy.deepcopy(MODEL)
    options = {
        "stage": 3,
        "comm": "dist",
        "zero_hpz_partition_size": SIZE,
        "stall_timeout_s": STALL_S if what == "sleep" else NEVER_S,
    }
    model, optimizer = zs.shard(model, adamw(model.parameters()), **options)
    runtime = runtime_of(model)
    batch = token_batches(1, 1, WORLD)[0][0][rank]
    model(*batch).backward()
    optimizer.step()

    def act(_):
        if what == "fail":
            raise ValueError("the loss of rank 2 is out of sorts")
        time.sleep(3 * STALL_S)

    if rank == 2:
        next(iter(model.blocks[1].parameters())).register_hook(act)
    try:
        model(*batch).backward()  # a rank on a busy core is still in its forward when rank 2 fails, and is told there
        optimizer.step()
        return "went on"
    except Exception as error:
        if what == "fail" and isinstance(error, ValueError):
            raise
        return f"{type(error).__name__}: {error}"
    finally:
        assert runtime is not None


@pytest.mark.processes
def test_a_rank_that_fails_in_the_middle_of_a_hop_is_told_on_all():
    results = run_processes(_failing, WORLD, "fail", check=False)
    for rank, result in enumerate(results):
        text = result.error if rank == 2 else result.value
        assert "the loss of rank 2 is out of sorts" in str(text), result
        assert rank == 2 or ("PeerFailed" in text and "rank 2" in text), result


@pytest.mark.slow  # 20 s, most of it waiting; stalls between nodes: test_two_nodes
@pytest.mark.processes
def test_a_stall_in_the_middle_of_a_hop_is_explained():
    results = run_processes(_failing, WORLD, "sleep", check=False)
    for rank, result in enumerate(results):
        assert result.value is not None, result
        text = result.value
        assert text.startswith("StallError") and "rank 2" in text and "in act (test_mesh_processes.py:" in text, (rank, text)
