"""torch's DistributedDataParallel left around a sharded model: superfluous at stages 0 to 2, and refused by name at stage 3."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard as zs
from zeroshard.comm.launch import run_processes


def wrapped(rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3)
    with pytest.raises(zs.ShardedAccessError, match=r"DistributedDataParallel around a sharded model: leave it out"):
        DistributedDataParallel(model)
    dist.destroy_process_group()


@pytest.mark.processes
def test_it_is_refused_by_name_at_stage_3():
    run_processes(wrapped, 2)
