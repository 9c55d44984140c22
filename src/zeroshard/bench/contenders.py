"""Each library, set up as its own documentation tells a user to, behind one `step`.

A builder gets the whole model with the weights of the seed and returns a `Trainer`. Imports of the peers are
inside their builders: a worker loads the library that it measures and no other, so that resident memory is
its own.

Choices that favour a peer are made for it: DDP keeps gradients as views of its buckets (measured faster and
smaller than its default), FSDP2 shards per block, DeepSpeed releases what it gathered (its defaults keep a
small model gathered whole, which would make its stage 3 a stage 2) and does not clip.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Callable

import torch
from torch import Tensor, nn

from zeroshard.bench.plan import Contender, Workload
from zeroshard.bench.workload import blocks, build_model, build_optimizer, optimizer_options

Bytes = dict[str, int]


@dataclass
class Trainer:
    """One contender, ready to step.

    Attributes:
        step: (tokens, targets) -> detached loss of this rank's micro-batch; forward, backward, optimizer.
        at_rest: model-state bytes between steps, measured and by the formula, where the library says so.
        settings: what differs from the library's defaults, for the record.
    """

    step: Callable[[Tensor, Tensor], Tensor]
    at_rest: Callable[[], dict[str, Bytes] | None] = lambda: None
    settings: dict[str, object] = field(default_factory=dict)


def build(contender: Contender, workload: Workload) -> Trainer:
    """Set a contender up; the process group exists already."""
    return _BUILDERS[contender.kind](contender, workload)


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, autocast: str | None = None):
    """The ordinary loop of every PyTorch program; `autocast` names the device type for bf16 autocast."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        context = torch.autocast(autocast, torch.bfloat16) if autocast else contextlib.nullcontext()
        with context:
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _autocast(contender: Contender, workload: Workload) -> str | None:
    return workload.device if contender.precision == "bf16" else None


def _build_local(contender: Contender, workload: Workload) -> Trainer:
    """No exchange at all: what computing and a full AdamW take on every rank at once."""
    model = build_model(workload)
    return Trainer(_plain_step(model, build_optimizer(model.parameters(), workload), _autocast(contender, workload)))


def _build_ddp(contender: Contender, workload: Workload) -> Trainer:
    model = nn.parallel.DistributedDataParallel(build_model(workload), gradient_as_bucket_view=True)
    optimizer = build_optimizer(model.parameters(), workload)
    settings = {"gradient_as_bucket_view": True}
    return Trainer(_plain_step(model, optimizer, _autocast(contender, workload)), settings=settings)


def _build_ddp_zero(contender: Contender, workload: Workload) -> Trainer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(build_model(workload), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=True,
        **optimizer_options(workload),
    )
    settings = {"gradient_as_bucket_view": True, "parameters_as_bucket_view": True}
    return Trainer(_plain_step(model, optimizer, _autocast(contender, workload)), settings=settings)


def _build_fsdp2(contender: Contender, workload: Workload) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build_model(workload)
    options: dict[str, object] = {"mesh": init_device_mesh(workload.device, (workload.ranks,))}
    if contender.precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    return Trainer(_plain_step(model, build_optimizer(model.parameters(), workload)))


def _build_deepspeed(contender: Contender, workload: Workload) -> Trainer:
    import deepspeed

    model = build_model(workload)
    optimizer = build_optimizer(model.parameters(), workload)
    settings: dict[str, object] = {
        "train_micro_batch_size_per_gpu": workload.sequences,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": contender.stage, "reduce_bucket_size": int(5e6)},
    }
    if contender.stage == 3:
        settings["zero_optimization"] |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Trainer(step, settings=settings)


def _build_zeroshard(contender: Contender, workload: Workload) -> Trainer:
    import zeroshard as zs

    model = build_model(workload)
    optimizer = build_optimizer(model.parameters(), workload)
    model, optimizer = zs.shard(model, optimizer, stage=contender.stage, precision=contender.precision)

    def at_rest() -> dict[str, Bytes]:
        report = zs.report(model)
        return {"measured": dict(report.at_rest), "formula": dict(report.formula)}

    return Trainer(_plain_step(model, optimizer), at_rest=at_rest)


_BUILDERS = {
    "local": _build_local,
    "ddp": _build_ddp,
    "ddp+zero": _build_ddp_zero,
    "fsdp2": _build_fsdp2,
    "ds": _build_deepspeed,
    "zs": _build_zeroshard,
}
