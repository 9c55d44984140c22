"""The contenders: each library, set up as its own documentation tells a user to, behind one function `step`.

A builder makes the whole model with the weights of the seed, shards it and returns a `Trainer`. Builders import
the peers inside, so that a worker loads only the library that it measures, and its resident memory is that
library's.

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
from zeroshard.seam import engine_of
from zeroshard.utils import torch_compat

from .plan import Contender, Workload
from .workload import blocks, build_model, build_optimizer, optimizer_options

Bytes = dict[str, int]
Background = tuple[Callable[[], float], Callable[[], object]]  # seconds that training was held up so far; wait for the end

# What zeroshard's contenders offload, or keep in fewer bits, as options of zs.shard.
OFFLOADS: dict[str, dict[str, str]] = {
    "": {},
    "int8": {"optimizer_states": "int8"},
    "backend": {"sums": "backend"},
    "opthost": {"offload_optimizer": "cpu"},
    "host": {"offload_optimizer": "cpu", "offload_param": "cpu"},
    "host8": {"offload_optimizer": "cpu", "offload_param": "cpu", "optimizer_states": "int8", "master_weights": "split"},
    "disk": {"offload_optimizer": "nvme"},
    "infinity": {"offload_optimizer": "nvme", "offload_gradient": "nvme", "offload_param": "nvme"},
}
_QUIET_S, _QUIET_LIMIT_S = 0.1, 30.0  # files are quiet when no transfer has begun for _QUIET_S; the longest wait for that


@dataclass(frozen=True)
class Keeper:
    """The functions by which a contender saves to, and loads from, a path. in_background: starts a save."""

    save: Callable[[str], object]
    load: Callable[[str], object]
    in_background: Callable[[str], Background] | None = None
    states: Callable[[], list[Tensor]] | None = None  # returns this rank's saved states, as they lie in memory between steps


@dataclass
class Trainer:
    """One contender, ready to step.

    Attributes:
        step: (tokens, targets) -> detached loss of this rank's micro-batch; forward, backward, optimizer.
        at_rest: returns model-state bytes between steps, measured and by the formula, where the library reports them.
        settings: settings that differ from the library's defaults, for results.json.
        moved: returns the bytes moved between tiers so far, by link ("host -> disk").
        quiet: waits until this rank neither reads nor writes files.
        keeper: returns the functions that save and load (`Keeper`).
        close: removes the files of what is offloaded to disk.
        place: the rank's index along dp, which chooses its batches; None: its rank.
    """

    step: Callable[[Tensor, Tensor], Tensor]
    at_rest: Callable[[], dict[str, Bytes] | None] = lambda: None
    settings: dict[str, object] = field(default_factory=dict)
    moved: Callable[[], Bytes] = dict
    quiet: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    keeper: Callable[[], Keeper] | None = None
    place: int | None = None


def at_rest(model: nn.Module) -> dict[str, Bytes]:
    """Return the model-state bytes of a model of zeroshard between steps."""
    report = zs.report(model)
    return {"measured": dict(report.at_rest), "formula": dict(report.formula)}


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, autocast: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a step of the ordinary PyTorch training loop. autocast: compute in bf16 by torch.autocast."""

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _build_ddp(contender: Contender, workload: Workload) -> Trainer:
    """Build DDP, also with ZeroRedundancyOptimizer, or (kind "local") the same without communication: each rank alone."""
    settings: dict[str, Any] = {} if contender.kind == "local" else {"gradient_as_bucket_view": True}
    model = build_model(workload)
    if workload.meta:
        _fill(model.to_empty(device=workload.device))
    if contender.kind != "local":
        model = nn.parallel.DistributedDataParallel(model, **settings)
    if contender.kind == "ddp+zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        settings["parameters_as_bucket_view"] = True
        options: dict[str, Any] = {"parameters_as_bucket_view": True, **optimizer_options(workload)}
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, **options)
    else:
        optimizer = build_optimizer(model.parameters(), workload)
    return Trainer(plain_step(model, optimizer, autocast=contender.precision == "bf16"), settings=settings)


def _build_fsdp2(contender: Contender, workload: Workload) -> Trainer:
    """Build the contender with FSDP2, or (kind "door") with the same calls of zeroshard's module `zeroshard.fsdp`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    door: Any = importlib.import_module("zeroshard.fsdp" if contender.kind == "door" else "torch.distributed.fsdp")
    model, on_cuda = build_model(workload), workload.device == "cuda"
    options: dict[str, Any] = {"mesh": init_device_mesh(workload.device, (workload.ranks,))}
    if contender.precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if contender.kind == "door" and contender.offload != "offload":
        door.configure(**OFFLOADS[contender.offload], offload_path=workload.swap_path if contender.on_disk else None)
    elif contender.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=on_cuda)
    for block in blocks(model):
        door.fully_shard(block, **options)
    door.fully_shard(model, **options)
    if workload.meta:
        _fill(model.to_empty(device="cpu" if "offload_policy" in options else workload.device))
    optimizer = build_optimizer(model.parameters(), workload)
    settings: dict[str, object] = {"pin_memory": on_cuda} if contender.offload else {}
    if contender.kind == "door":
        return Trainer(plain_step(model, optimizer), settings=settings, **_of_engine(model, contender))
    return Trainer(plain_step(model, optimizer), settings=settings, keeper=functools.partial(fsdp2_keeper, model, optimizer))


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Fill a model that came from the meta device with random weights; of a DTensor each rank fills its part."""
    from torch.distributed.tensor import DTensor

    for param in model.parameters():
        (torch_compat.local_part(param) if isinstance(param, DTensor) else param).normal_(std=0.02)


def _build_deepspeed(contender: Contender, workload: Workload) -> Trainer:
    """Build the contender with DeepSpeed, or (kind "engine") with the same calls of zeroshard's module `zeroshard.deepspeed`."""
    deepspeed: Any = importlib.import_module("zeroshard.deepspeed" if contender.kind == "engine" else "deepspeed")
    zero: dict[str, object] = {"stage": contender.stage, "reduce_bucket_size": int(5e6)}
    settings: dict[str, object] = {
        "train_micro_batch_size_per_gpu": workload.sequences, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9, "zero_optimization": zero,
    }  # fmt: skip
    if contender.stage == 3:
        zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    if contender.precision == "bf16":
        settings["bf16"] = {"enabled": True}
    if contender.offload:
        host = {"device": "cpu", "pin_memory": workload.device == "cuda"}
        zero |= {"offload_optimizer": host, "offload_param": host}
        options = optimizer_options(workload)
        del options["fused"]  # DeepSpeed makes its own optimizer: CPUAdam
        settings["optimizer"] = {"type": "AdamW", "params": options}
    with deepspeed.zero.Init(config_dict_or_path=settings) if workload.meta else contextlib.nullcontext():  # sharded at birth
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
    keeper = None if contender.kind == "engine" else functools.partial(deepspeed_keeper, engine)
    return Trainer(step, settings=settings, keeper=keeper)


def _build_zeroshard(contender: Contender, workload: Workload) -> Trainer:
    model = build_model(workload)
    optimizer = build_optimizer(model.parameters(), workload)
    offload = OFFLOADS[contender.offload]
    path = workload.swap_path if contender.on_disk else None
    options: dict[str, Any] = {"stage": contender.stage, "precision": contender.precision, "offload_path": path, **offload}
    model, optimizer = zs.shard(model, optimizer, **options)

    return Trainer(
        plain_step(model, optimizer),
        settings=dict(offload),
        keeper=functools.partial(zeroshard_keeper, model, optimizer),
        **_of_engine(model, contender),
    )


def _of_engine(model: nn.Module, contender: Contender) -> dict[str, Any]:
    """Return what a Trainer asks of a sharded model."""

    def quiet() -> None:
        """Wait until prefetching of the next step's states has ended; `poll` drives it, as forward and backward would."""
        before, deadline = None, time.monotonic() + _QUIET_LIMIT_S
        while time.monotonic() < deadline:
            engine_of(model).read_ahead()
            # the kernel counts when a transfer begins; rchar and wchar count what this reading of the file adds
            now = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith(("read_b", "write_b"))]
            if now == before:
                return
            before = now
            time.sleep(_QUIET_S)

    return {
        "at_rest": functools.partial(at_rest, model),
        "moved": lambda: dict(zs.report(model).moved),
        "quiet": quiet if contender.on_disk else lambda: None,
        "close": engine_of(model).abandon,  # nobody needs the values: remove the files without reading them back
    }


BUILDERS: dict[str, Callable[[Contender, Workload], Trainer]] = {  # by kind; each needs the process group to exist already
    "local": _build_ddp,
    "ddp": _build_ddp,
    "ddp+zero": _build_ddp,
    "fsdp2": _build_fsdp2,
    "ds": _build_deepspeed,
    "door": _build_fsdp2,
    "engine": _build_deepspeed,
    "zs": _build_zeroshard,
}


# ------------------------------------------------------------------------------------------------ saving and loading


def zeroshard_keeper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Keeper:
    """Return the Keeper of a model that `zs.shard` has sharded."""

    def in_background(path: str) -> Background:
        saving = zs.save(path, model, optimizer, asynchronous=True, overwrite=True)
        return lambda: saving.stall_seconds, saving.wait

    def states() -> list[Tensor]:
        held = [each for each in engine_of(model).slices("master", "optimizer") if not each.single]
        return [each.host(0, each.stop - each.start) for each in held]

    return Keeper(
        save=lambda path: zs.save(path, model, optimizer, overwrite=True),
        load=lambda path: zs.load(path, model, optimizer),
        in_background=in_background,
        states=states,
    )


def fsdp2_keeper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Keeper:
    """Return the Keeper of a model that `fully_shard` has sharded."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    beside = torch.distributed.new_group(backend="gloo")  # async_save's thread must not mix with training's collectives

    def state() -> dict[str, Any]:
        values, states = get_state_dict(model, optimizer)
        return {"model": values, "optim": states}

    def load(path: str) -> None:
        found = state()
        dcp.load(found, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"])

    def in_background(path: str) -> Background:
        begin = time.monotonic()
        future: Any = dcp.async_save(state(), checkpoint_id=path, process_group=beside)
        stall_s = time.monotonic() - begin
        return lambda: stall_s, getattr(future, "upload_completion", future).result

    return Keeper(lambda path: dcp.save(state(), checkpoint_id=path), load, in_background)


def deepspeed_keeper(engine: Any) -> Keeper:
    """Return the Keeper of a DeepSpeed engine."""

    def load(path: str) -> None:
        found, _ = engine.load_checkpoint(path, tag="bench")
        assert found is not None, f"DeepSpeed found no checkpoint in {path}"

    return Keeper(lambda path: engine.save_checkpoint(path, tag="bench"), load)
