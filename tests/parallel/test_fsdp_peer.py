"""The same stages and styles of tensor parallelism under FSDP2 and zeroshard: equal losses, and parameters after 6 Adam steps."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import zeroshard as zs
from benchmarks import parallel
from benchmarks.plan import ModelShape, Workload
from benchmarks.workload import batch
from zeroshard.comm.launch import run_processes

STEPS, MICRO, WORLD = 6, 2, 4
SHAPE = ModelShape(vocab_size=64, seq_len=8, dim=16, layers=4, heads=4)
MESHES = ((2, 2, 1), (1, 2, 2))  # pp, dp, tp
STAGES = (1, 2, 3)


def _rank(rank: int, ranks: int) -> dict:
    """By mesh and contender: losses, and the parameters of this rank's stage, whole."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for sizes in MESHES:
        workload = Workload(SHAPE, sequences=MICRO, ranks=ranks, mesh=sizes, micro_batches=MICRO, lr=1e-2)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=parallel.AXES)
        batches = [batch(workload, step, mesh["dp"].get_local_rank()) for step in range(STEPS)]
        module, step, _ = parallel.peer("fsdp2", workload, mesh)
        losses = [step(*pair).item() for pair in batches]
        for each in module.modules():
            if isinstance(each, FSDPModule):
                each.unshard()
        whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in module.named_parameters()}
        found[sizes, "fsdp2"] = losses, {name: value.detach().clone() for name, value in whole.items()}
        for stage in STAGES:
            run = parallel.zeroshard(stage, workload, mesh)
            losses = [run.step(*pair).item() for pair in batches]
            found[sizes, stage] = losses, zs.full_state_dict(run.model)
            run.close()
    return found


@pytest.mark.processes
@pytest.mark.slow  # half a minute beside others
def test_losses_and_parameters_are_those_of_fsdp2_over_the_same_mesh():
    for found in run_processes(_rank, WORLD):
        for sizes in MESHES:
            losses, values = found[sizes, "fsdp2"]
            assert losses[-1] < losses[0] and values
            for stage in STAGES:
                ours, theirs = found[sizes, stage], f"{sizes}: stage {stage} and FSDP2"
                torch.testing.assert_close(ours[0], losses, rtol=0, atol=1e-5, msg=lambda text: f"{theirs}: losses: {text}")
                assert ours[1].keys() == values.keys(), theirs
                for name, value in values.items():
                    message = lambda text: f"{theirs}: {name}: {text}"  # noqa: E731
                    torch.testing.assert_close(ours[1][name], value, rtol=0, atol=1e-5, msg=message)
