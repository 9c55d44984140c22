"""deepspeed.comm over torch.distributed: how it starts, what it calls, what it counts."""

import os

import pytest
import torch
import torch.distributed as torch_dist

import zeroshard as zs
from zeroshard.comm.launch import free_port, run_processes
from zeroshard.integrations.deepspeed import communication as dist


def _operations(rank, world_size):
    dist.init_distributed(dist_backend="gloo", verbose=False)
    dist.init_distributed()  # a second time: nothing
    seen = {"rank": (dist.get_rank(), dist.get_world_size(), dist.get_local_rank(), torch_dist.get_backend())}
    dist.configure(enabled=True, prof_ops=["mine"])
    tensor = torch.full((2,), float(rank + 1))
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, prof=True)
    seen["all_reduce"] = dist.inference_all_reduce(tensor, log_name="mine") or tensor.tolist()
    whole = torch.zeros(4)
    dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)))
    dist.allgather_fn(numbers := torch.zeros(2), torch.tensor(float(rank)))
    assert numbers.tolist() == [0.0, 1.0]
    seen["gather"] = whole.tolist()
    part = torch.zeros(2)
    dist.reduce_scatter_fn(part, torch.arange(4.0))
    seen["scatter"] = part.tolist()
    parts = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(parts, torch.tensor([float(rank)]))
    seen["all_gather"] = [t.item() for t in parts]
    swapped = torch.zeros(2)
    dist.all_to_all_single(swapped, torch.tensor([10.0 * rank, 10.0 * rank + 1]))
    seen["all_to_all"] = swapped.tolist()
    objects = ["from 0"] if rank == 0 else [None]
    dist.broadcast_object_list(objects, src=0)
    dist.broadcast(tensor := torch.tensor([float(rank)]), 1)
    dist.reduce(total := torch.tensor([1.0]), 0)
    seen["rooted"] = (objects[0], tensor.item(), total.item() if rank == 0 else 2.0)
    if rank == 0:
        dist.send(torch.tensor([5.0]), dst=1)
    else:
        dist.recv(tensor, src=0)
        assert tensor.item() == 5.0
    group = dist.new_group([1])
    seen["group"] = (dist.get_rank(group), dist.get_global_rank(None, 1))
    dist.barrier()
    dist.monitored_barrier()
    assert dist.get_backend() == "gloo" and dist.P2POp is torch_dist.P2POp  # torch's own
    stats = dist.log_summary(show_straggler=True, return_dict=True)
    seen["counted"] = (stats["summary"]["mine"][8]["count"], len(stats["summary"]) >= 10, "barrier" in stats["summary"])
    dist.destroy_process_group()
    return seen, dist.is_initialized()


@pytest.mark.processes
def test_operations_by_deepspeeds_names():
    for rank, (seen, left) in enumerate(run_processes(_operations, 2)):
        assert seen == {
            "rank": (rank, 2, rank, "gloo"),
            "all_reduce": [4.0, 4.0],
            "gather": [0.0, 0.0, 1.0, 1.0],
            "scatter": [0.0, 2.0] if rank == 0 else [4.0, 6.0],
            "all_gather": [0.0, 1.0],
            "all_to_all": [float(rank), 10.0 + rank],
            "rooted": ("from 0", 1.0, 2.0),
            "group": (-1 if rank == 0 else 0, 1),
            "counted": (1, True, True),
        }
        assert left is False


def _alone(rank, world_size, port):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    dist.init_distributed(auto_mpi_discovery=False, distributed_port=port)
    return (
        dist.get_rank(),
        dist.get_world_size(),
        [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "LOCAL_WORLD_SIZE")],
    )


@pytest.mark.processes
def test_one_process_without_a_launcher_is_a_world_of_one():
    port = free_port()
    assert run_processes(_alone, 1, port) == [(0, 1, ["0", "1", "0", str(port), None])]  # the last is not set by DeepSpeed either


@pytest.fixture
def bare(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_half_set_environment_is_refused_by_name(bare):
    bare.setenv("WORLD_SIZE", "2")
    with pytest.raises(zs.ConfigError, match="RANK, MASTER_ADDR must be set as well as WORLD_SIZE.*torchrun"):
        dist.init_distributed()
    bare.setenv("OMPI_COMM_WORLD_RANK", "1")
    with pytest.raises(zs.ConfigError, match="dist_init_required=False"):
        dist.init_distributed(dist_init_required=False)
    assert not torch_dist.is_initialized()


def test_open_mpis_variables_are_understood(bare):
    for name, value in (("RANK", "3"), ("SIZE", "4"), ("LOCAL_RANK", "1")):
        bare.setenv(f"OMPI_COMM_WORLD_{name}", value)
    bare.setenv("MASTER_ADDR", "10.0.0.1")
    with bare.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
            patch.setenv(name, "kept for undoing")
            del os.environ[name]
        dist._complete_environment(True, 29500)
        assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")] == ["3", "4", "1", "29500"]


def test_before_it_starts(bare):
    assert not dist.is_initialized() and dist.is_available()
    bare.setenv("RANK", "0")
    assert not dist.is_initialized()
    with pytest.raises(zs.ZeroshardError, match="init_distributed"):
        dist.get_rank()
    with pytest.raises(AttributeError, match="no comm.frobnicate"):
        dist.frobnicate  # noqa: B018
