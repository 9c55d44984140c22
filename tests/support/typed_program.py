"""A program as a user writes it, for mypy: names resolve, options are known by name and type, what comes back has its own class.

It is never run. Each line that is marked is a mistake, which mypy must find: a mark that is not needed is an error, too.
"""

import torch
from torch import nn
from typing_extensions import assert_type

import zeroshard as zs
from zeroshard import deepspeed


class Net(nn.Module):
    def score(self) -> float:
        return 1.0


def train(mesh: torch.distributed.device_mesh.DeviceMesh) -> None:
    built, optimizer = Net(), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert_type(zs.shard(built, optimizer, stage=3, preset="zero-3"), tuple[Net, torch.optim.SGD])
    model, nothing = zs.shard(built, precision="bf16", units=(nn.Linear,), dtypes={"LayerNorm": "fp32"})
    assert_type(nothing, None)
    assert_type(model.score(), float)
    zs.shard(built, optimizer, stage="auto", offload_optimizer=zs.Offload("nvme", path="/tmp"), max_live_parameters=5e8)
    zs.shard(built, optimizer, stag=3)  # type: ignore[call-overload]
    zs.shard(built, optimizer, stage="3")  # type: ignore[call-overload]
    zs.fully_shard(built)  # type: ignore[attr-defined]
    assert_type(zs.Config(offload_param={"device": "cpu"}).offload_param, zs.Offload)
    zs.Config(stage=3, hierarchical=None, zero_quantized_weights=True)
    zs.Config(overlap=2)  # type: ignore[arg-type]
    with zs.init(precision="fp16", dtype=torch.float16), zs.gathered(model):
        pass
    assert_type(zs.parallelize(built, mesh, optimizer=torch.optim.AdamW, micro_batches=2, stage=1), zs.Parallel)
    zs.parallelize(built, mesh, offload_optimiser="cpu")  # type: ignore[call-arg]
    assert_type(zs.plan(Net, ranks=2, batch=(1, 8), stage=3), zs.Plan)
    zs.plan(Net, ranks=2, stage=2.5)  # type: ignore[arg-type]
    zs.tensor_parallel.apply(built, mesh["tp"])
    zs.styles_for(built), zs.cut_stages(built, 2, [0]), zs.stages_of(0, 2, 1, "1F1B")
    engine, *_ = deepspeed.initialize(model=built, config={"train_batch_size": 8})
    assert_type(engine, deepspeed.DeepSpeedEngine)
    deepspeed.comm.get_rank()
    with deepspeed.zero.Init():
        pass
