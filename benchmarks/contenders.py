"""Each library, set up as its own documentation tells a user to, behind one `step`.

A builder gets the whole model with the weights of the seed and returns a `Trainer`. Imports of the peers are
inside their builders: a worker loads the library that it measures and no other, so that resident memory is
its own.

Choices that favour a peer are made for it: DDP keeps gradients as views of its buckets (measured faster and
smaller than its default), FSDP2 shards per block, DeepSpeed releases what it gathered (its defaults keep a
small model gathered whole, which would make its stage 3 a stage 2) and does not clip. With offload DeepSpeed
steps by its compiled CPUAdam, its default there; peers pin host memory on CUDA and not on CPU ranks, where
there is nothing to pin it for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.utils import torch_compat
from zeroshard.zero.runtime import runtime_of

from . import checkpoint_contenders
from .checkpoint_contenders import Keeper
from .overlap import Recorder
from .plan import Contender, Workload
from .workload import blocks, build_model, build_optimizer, optimizer_options

Bytes = dict[str, int]

# What zeroshard's contenders offload, as options of zs.shard.
OFFLOADS: dict[str, dict[str, str]] = {
    "": {},
    "opthost": {"offload_optimizer": "cpu"},
    "host": {"offload_optimizer": "cpu", "offload_param": "cpu"},
    "disk": {"offload_optimizer": "nvme"},
    "infinity": {"offload_optimizer": "nvme", "offload_gradient": "nvme", "offload_param": "nvme"},
}
_QUIET_S, _QUIET_LIMIT_S = 0.1, 30.0  # no transfer was begun for so long: none is under way; the longest wait


@dataclass
class Trainer:
    """One contender, ready to step.

    Attributes:
        step: (tokens, targets) -> detached loss of this rank's micro-batch; forward, backward, optimizer.
        at_rest: model-state bytes between steps, measured and by the formula, where the library says so.
        settings: what differs from the library's defaults, for the record.
        moved: bytes so far between tiers, by link.
        quiet: waits until this rank neither reads nor writes files.
        keeper: how it saves and loads (checkpoint_contenders.py).
        recorder: a context that records copies and computation on CUDA (overlap.py), where there is something to see.
        close: removes files.
        place: among ranks with batches of their own; None: the rank.
    """

    step: Callable[[Tensor, Tensor], Tensor]
    at_rest: Callable[[], dict[str, Bytes] | None] = lambda: None
    settings: dict[str, object] = field(default_factory=dict)
    moved: Callable[[], Bytes] = dict
    quiet: Callable[[], None] = lambda: None
    recorder: Callable[[], Recorder] | None = None
    close: Callable[[], None] = lambda: None
    keeper: Callable[[], Keeper] | None = None
    place: int | None = None


def _plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, autocast: str | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
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
    if workload.meta:
        _fill(model.to_empty(device=workload.device))
    return Trainer(_plain_step(model, build_optimizer(model.parameters(), workload), _autocast(contender, workload)))


def _build_ddp(contender: Contender, workload: Workload) -> Trainer:
    settings: dict[str, Any] = {"gradient_as_bucket_view": True}
    model = nn.parallel.DistributedDataParallel(build_model(workload), **settings)
    if contender.kind == "ddp":
        optimizer = build_optimizer(model.parameters(), workload)
    else:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        settings["parameters_as_bucket_view"] = True
        options: dict[str, Any] = {"parameters_as_bucket_view": True, **optimizer_options(workload)}
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, **options)
    return Trainer(_plain_step(model, optimizer, _autocast(contender, workload)), settings=settings)


def _build_fsdp2(contender: Contender, workload: Workload) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    model, on_cuda = build_model(workload), workload.device == "cuda"
    options: dict[str, Any] = {"mesh": init_device_mesh(workload.device, (workload.ranks,))}
    if contender.precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if contender.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=on_cuda)
    for block in blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    if workload.meta:
        _fill(model.to_empty(device="cpu" if contender.offload else workload.device))
    settings: dict[str, object] = {"pin_memory": on_cuda} if contender.offload else {}
    optimizer = build_optimizer(model.parameters(), workload)
    keeper = functools.partial(checkpoint_contenders.fsdp2_keeper, model, optimizer)
    return Trainer(_plain_step(model, optimizer), settings=settings, keeper=keeper)


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Some weights for a model from the meta device, of which each rank has a part."""
    from torch.distributed.tensor import DTensor

    for param in model.parameters():
        (torch_compat.local_part(param) if isinstance(param, DTensor) else param).normal_(std=0.02)


def _build_deepspeed(contender: Contender, workload: Workload) -> Trainer:
    """The real one, or (kind "engine") the same program by zeroshard's interface of that name."""
    deepspeed: Any = importlib.import_module("zeroshard.deepspeed" if contender.kind == "engine" else "deepspeed")

    settings = _deepspeed_settings(contender, workload)
    sharded_at_birth = deepspeed.zero.Init(config_dict_or_path=settings) if workload.meta else contextlib.nullcontext()
    with sharded_at_birth:
        model = build_model(dataclasses.replace(workload, meta=False))
    optimizer = None if contender.offload else build_optimizer(model.parameters(), workload)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=model.parameters(), config=settings)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    if contender.offload:
        settings["optimizer, as made"] = type(engine.optimizer.optimizer).__name__
    keeper = None if contender.kind == "engine" else functools.partial(checkpoint_contenders.deepspeed_keeper, engine)
    return Trainer(step, settings=settings, keeper=keeper)


def _deepspeed_settings(contender: Contender, workload: Workload) -> dict[str, object]:
    zero: dict[str, object] = {"stage": contender.stage, "reduce_bucket_size": int(5e6)}
    settings: dict[str, object] = {
        "train_micro_batch_size_per_gpu": workload.sequences,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "zero_optimization": zero,
    }
    if contender.stage == 3:
        zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    if contender.precision == "bf16":
        settings["bf16"] = {"enabled": True}
    if contender.offload:
        host = {"device": "cpu", "pin_memory": workload.device == "cuda"}
        zero |= {"offload_optimizer": host, "offload_param": host}
        options = optimizer_options(workload)
        del options["fused"]  # it makes its own: CPUAdam
        settings["optimizer"] = {"type": "AdamW", "params": options}
    return settings


def _build_zeroshard(contender: Contender, workload: Workload) -> Trainer:
    model = build_model(workload)
    optimizer = build_optimizer(model.parameters(), workload)
    offload = OFFLOADS[contender.offload]
    path = workload.swap_path if contender.on_disk else None
    options: dict[str, Any] = {"stage": contender.stage, "precision": contender.precision, "offload_path": path, **offload}
    model, optimizer = zs.shard(model, optimizer, **options)

    def at_rest() -> dict[str, Bytes]:
        report = zs.report(model)
        return {"measured": dict(report.at_rest), "formula": dict(report.formula)}

    def quiet() -> None:
        """Between steps the next step's states are read; `poll` does what forward and backward would."""
        before, deadline = _file_nbytes(), time.monotonic() + _QUIET_LIMIT_S
        while time.monotonic() < deadline:
            optimizer.core.poll()  # type: ignore[attr-defined]  # of a sharded one
            time.sleep(_QUIET_S)
            if (now := _file_nbytes()) == before:
                return
            before = now

    return Trainer(
        _plain_step(model, optimizer),
        at_rest=at_rest,
        settings=dict(offload),
        moved=lambda: dict(zs.report(model).moved),
        quiet=quiet if contender.on_disk else lambda: None,
        recorder=functools.partial(Recorder, runtime_of(model)) if contender.offload else None,
        keeper=functools.partial(checkpoint_contenders.zeroshard_keeper, model, optimizer),
        close=runtime_of(model).tiers.close,  # nobody wants the values: the files go without being gathered
    )


def _file_nbytes() -> list[str] | None:
    """What this process has read from disks and written to them, as the kernel counts it when a transfer begins."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None  # not Linux: `quiet` waits once
    return [line for line in lines if line.startswith(("read_bytes", "write_bytes"))]


BUILDERS: dict[str, Callable[[Contender, Workload], Trainer]] = {  # each sets a contender up; the process group exists already
    "local": _build_local,
    "ddp": _build_ddp,
    "ddp+zero": _build_ddp,
    "fsdp2": _build_fsdp2,
    "ds": _build_deepspeed,
    "engine": _build_deepspeed,
    "zs": _build_zeroshard,
}
