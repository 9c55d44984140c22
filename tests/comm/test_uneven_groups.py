"""Process groups that a program makes of some ranks change nothing for those of the library."""

import os

import pytest
import torch
import torch.distributed as dist
from helpers import OddGPT, seeded, token_batches
from torch.distributed.device_mesh import DeviceMesh

import zeroshard as zs
from zeroshard.comm import backend_select
from zeroshard.comm.launch import run_processes
from zeroshard.engine.comm import process_group

pytestmark = pytest.mark.processes
OPTIONS = (
    {"shard_size": 2},
    {"stage": 3, "zero_hpz_partition_size": 2},
    {"sums": "backend"},
    {"shard_size": 2, "sums": "backend"},
)


def _trained(rank: int, world: int, uneven: str) -> list[dict]:
    torch.set_num_threads(1)
    process_group.MANY = 2
    dist.init_process_group("gloo")
    if uneven == "of the first":
        dist.new_group([0])
    elif uneven == "of members" and rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    found, batch = [], token_batches(1, 1, world)[0][0][rank]
    for options in OPTIONS:
        model = seeded(OddGPT)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zs.shard(model, optimizer, **{"stage": 2, "comm": "dist", "stall_timeout_s": 20} | options)
        model(*batch).backward()
        optimizer.step()
        found.append({name: value.numpy() for name, value in zs.full_state_dict(model).items()})
        zs.close(model)
    return found


def test_groups_of_some_ranks_made_before_change_nothing():
    plain, *others = (run_processes(_trained, 4, uneven) for uneven in ("none", "of the first", "of members"))
    for results in others:
        for one, other in zip(plain, results, strict=True):
            for case, same in zip(one, other, strict=True):
                assert all((same[name] == value).all() for name, value in case.items())


def _descending(rank: int, world: int) -> None:
    torch.set_num_threads(1)
    process_group.MANY = 2
    os.environ["ZEROSHARD_COMM"] = "dist"
    dist.init_process_group("gloo")
    comm = backend_select.current("dist", torch.device("cpu"), 20.0)
    group = comm.subgroup([[2, 0, 3, 1]])
    assert group.exchange(b"rank %d" % rank, "a") == [b"rank 2", b"rank 0", b"rank 3", b"rank 1"]
    sums, _ = group.compare(b"", "b", (0.1 ** (rank + 1),))
    assert len({bytes(each) for each in comm.exchange(repr(sums).encode(), "c")}) == 1
    for ranks in ([[3, 2], [1, 0]], [[0, 1], [3, 2]], [[2, 3], [0, 1]]):  # refused on every rank, whatever its own part
        with pytest.raises(zs.ConfigError, match="sums='backend' adds up in ascending order of ranks"):
            zs.shard(seeded(OddGPT), None, stage=2, mesh=DeviceMesh("cpu", ranks), sums="backend")
    model = seeded(OddGPT)
    zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2, mesh=DeviceMesh("cpu", [[3, 2], [1, 0]]))
    for name, value in seeded(OddGPT).state_dict().items():
        assert torch.equal(zs.full_state_dict(model)[name], value), name


def test_ranks_of_a_group_in_another_order():
    run_processes(_descending, 4)
