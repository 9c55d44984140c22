"""The contenders on a mesh of 8 ranks of one host, pipeline 2 x data 2 x tensor 2: zeroshard and PyTorch's FSDP2.

    model --cut_stages--> 2 stages --tensor_parallel.apply--> local shards --+-- zs.shard, ZeRO-1, 2, 3   (zs.parallelize)
                                                                             +-- fully_shard              (FSDP2)
                                                                             +-- replicate                (in place of DDP)

Weights, cuts, styles of tensor parallelism, the schedule (1F1B of torch.distributed.pipelining), micro-batches, AdamW and
batches are the same for all; they differ in the library that shards, gathers and reduces over mesh["dp"]. The peers are set up
as is usual with a pipeline: `fully_shard` on each block and on the stage, with reshard_after_forward=False, so that parameters
stay gathered between micro-batches; `replicate` is FSDP2 without shards, since DistributedDataParallel fails on modules that mix
tensors and DTensors. The peers need not divide gradients by the number of micro-batches, since their losses are divided.

Turns, ratios and memory are those of race.py. Ranks are forked with their imports done (see worker_group.py). Where there are
more ranks than cores, a step takes as long as the work of all ranks on these cores; see the processor time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard as zs

from .contenders import Trainer, at_rest
from .plan import Contender, ModelShape, Workload
from .workload import blocks, build_model, build_optimizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from zeroshard.parallel.parallelize import Parallel

AXES, MESH, MICRO_BATCHES = ("pp", "dp", "tp"), (2, 2, 2), 4
SHAPE = ModelShape(seq_len=32, dim=1024, layers=4, heads=16)  # wide: with narrow layers DTensor's host work dominates a step
WORKLOAD = Workload(shape=SHAPE, sequences=MICRO_BATCHES, ranks=8, mesh=MESH, micro_batches=MICRO_BATCHES)
Step = Callable[[Tensor, Tensor], Tensor]  # (tokens, targets) of one index along dp -> mean loss


def build(contender: Contender, workload: Workload) -> Trainer:
    """Build one contender on the mesh of the workload; the process group exists already."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(workload.device, workload.mesh, mesh_dim_names=AXES)
    place = mesh["dp"].get_local_rank()
    if contender.kind != "zs":
        _, step, settings = peer(contender.kind, workload, mesh)
        return Trainer(step, settings=settings, place=place)
    run = zeroshard(contender.stage, workload, mesh)
    return Trainer(run.step, at_rest=partial(at_rest, run.model), place=place)


def zeroshard(stage: int | None, workload: Workload, mesh: DeviceMesh) -> Parallel:
    """Build zeroshard's contender as a user does, with one call of `zs.parallelize`."""
    optimizer = partial(build_optimizer, workload=workload)
    return zs.parallelize(build_model(workload), mesh, optimizer=optimizer, stage=stage, micro_batches=workload.micro_batches)


def peer(kind: str, workload: Workload, mesh: DeviceMesh) -> tuple[nn.Module, Step, dict[str, object]]:
    """Build a contender of PyTorch; return this rank's stage, its step, and the settings that differ from the defaults."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from zeroshard.parallel.parallelize import next_token_loss
    from zeroshard.parallel.stages import cut_stages
    from zeroshard.parallel.tensor_parallel import apply
    from zeroshard.utils.torch_compat import replicate_with_fsdp

    pp, count = mesh["pp"], workload.micro_batches
    index, stages = pp.get_local_rank(), pp.size()
    model = build_model(workload)
    module = cut_stages(model, stages, [index])[0] if stages > 1 else model
    module, wrap, settings = apply(module, mesh["tp"]), replicate_with_fsdp, dict[str, Any]()
    if kind == "fsdp2":
        wrap, settings = fully_shard, {"reshard_after_forward": False}
    for part in (*blocks(module), module):
        wrap(part, mesh=mesh["dp"], **settings)
    optimizer = build_optimizer(module.parameters(), workload)
    stage = PipelineStage(module, index, stages, torch.device(workload.device), group=pp.get_group())
    mean = lambda logits, targets: next_token_loss(logits, targets) / count  # noqa: E731
    pipeline = Schedule1F1B(stage, count, loss_fn=mean, scale_grads=False)
    last, is_last = dist.get_global_rank(pp.get_group(), stages - 1), index == stages - 1

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        pipeline.step(*([] if index else [tokens]), target=targets if is_last else None, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack([each.detach() for each in losses]).sum() if is_last else torch.zeros(())
        dist.broadcast(loss, last, group=pp.get_group())
        return loss

    return module, step, settings
