"""`deepspeed.initialize`: make an engine from a model, a configuration and perhaps an optimizer."""

from __future__ import annotations

import argparse
import functools
import gc
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from ...comm import backend_select
from ...engine.comm import talking_device
from ...public import close, shard
from ...seam import Comm, engine_of, exchange_values
from ...utils.axes import DP, EP, TP
from . import VERSION, activation, communication, leaf_modules, moe, partition, tensor_parallel
from .ds_config import DeepSpeedConfig
from .engine import DeepSpeedEngine
from .logs import log_dist, set_log_level_from_string
from .lr_schedules import schedule_from_config
from .monitor import MonitorMaster
from .pipe import PipelineModule, check_config
from .sections import DeepSpeedConfigError
from .sequence import SequenceGroups, groups_of
from .shard_options import build_optimizer, cast_buffers, shard_options
from .stand_ins import ZeRORuntimeException
from .topology import mesh_of
from .utilities import RepeatingLoader, set_mesh

T = TypeVar("T")
Initialized = tuple[DeepSpeedEngine, Any, Any, Any]  # engine, optimizer, data loader and scheduler; an editor sees no Optional


def initialize(
    args: Any = None, model: nn.Module | None = None, optimizer: object = None, model_parameters: object = None, training_data: object = None,
    lr_scheduler: object = None, distributed_port: int = 29500, mpu: object = None, dist_init_required: bool | None = None,
    collate_fn: Callable | None = None, config: object = None, mesh_param: object = None, config_params: object = None,
) -> Initialized:  # fmt: skip
    """Return (engine, optimizer, data loader, scheduler), as DeepSpeed's function does (collective).

    Args:
        optimizer: a torch optimizer, or a function that makes one from model_parameters. None: the configuration's.
        model_parameters: tensors or parameter groups for the optimizer. None: the model's trainable parameters.
        lr_scheduler: a scheduler, or a function that makes one from the optimizer. None: the configuration's.
        training_data: a Dataset, for the data loader.
        config, config_params, args.deepspeed_config: a dictionary, a path, or JSON as urlsafe base64; give one of them.
        mpu: object with get_data_parallel_group(), over which the model is sharded; or that of UlyssesSPAttentionHF, which
            shards it over dp x sp.

    Raises:
        AssertionError: no model, no configuration, or two; batch sizes that do not multiply (as in DeepSpeed).
        DeepSpeedConfigError: a key that is not supported, with the remedy.
    """
    log_dist(f"DeepSpeed info: version={VERSION}, git-hash=None, git-branch=None", ranks=[0])
    assert model is not None, "deepspeed.initialize requires a model"
    assert mpu is None or not isinstance(model, PipelineModule), "mpu must be None with pipeline parallelism: leave it out"
    if mesh_param is not None:
        raise DeepSpeedConfigError(
            "mesh_param: sequence parallelism is not served; pass a data-parallel group by mpu, or leave it out."
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"deepspeed.initialize: model: expected a torch.nn.Module, got {type(model).__name__}.")
    if training_data is not None:
        check_dataset(training_data)
    given, in_args = config_params if config is None else config, getattr(args, "deepspeed_config", None)
    if in_args is None and getattr(args, "deepscale_config", None) is not None:  # its name before 2020
        in_args = args.deepspeed_config = args.deepscale_config
    if in_args is not None:
        assert given is None, (
            "two deepspeed configurations: one in args.deepspeed_config, one given to initialize(); leave one out"
        )
        given = in_args
    assert given is not None, "DeepSpeed requires --deepspeed_config to specify configuration file, or initialize(config=...)"
    partition.shutdown_init_context()  # initialize may be called inside zero.Init; it makes ordinary tensors
    try:
        if not communication.is_initialized():
            communication.init_distributed(dist_init_required=dist_init_required, distributed_port=distributed_port)
        return _initialize(args, model, optimizer, model_parameters, training_data, lr_scheduler, mpu, collate_fn, given)
    finally:
        partition.restore_init_context()


def _initialize(
    args: object, model: nn.Module, optimizer: object, model_parameters: object, training_data: object, lr_scheduler: object, mpu: Any,
    collate_fn: Callable | None, given: object,
) -> Initialized:  # fmt: skip
    client = optimizer, lr_scheduler, type(optimizer).__name__
    group = None if mpu is None or isinstance(mpu, SequenceGroups) else mpu.get_data_parallel_group()
    device, local_rank = _device(args)
    comm = backend_select.current(group, talking_device(device), communication.stall_timeout_s())
    stages = model.num_stages if isinstance(model, PipelineModule) else 1
    tensor_ranks = _together(comm, "tensor_parallel", lambda: tensor_parallel.ranks_of(model, given, mpu, comm.world_size))
    cut = mpu is not None or tensor_ranks > 1 or isinstance(model, PipelineModule)
    expert_ranks = _together(comm, "its experts", lambda: moe.ranks_of(model, comm.world_size, cut))
    data_ranks = comm.world_size // (stages * tensor_ranks)  # experts are divided over data-parallel ranks
    if isinstance(mpu, SequenceGroups):
        data_ranks = mpu.get_data_parallel_world_size()
    config = _together(comm, "its configuration", lambda: _config(given, mpu, optimizer, lr_scheduler, data_ranks))
    _compare(comm, config)
    if config.sequence_parallel_size > 1 and mpu is None:
        if cut or expert_ranks > 1:
            raise DeepSpeedConfigError(
                "sequence_parallel_size: ranks along sp share no layers, stages or experts: leave it out, or the other axis."
            )
        mpu = groups_of(config.sequence_parallel_size)
    if "_zeroshard" in model.__dict__:  # the model belongs to an earlier engine
        model_parameters = _renewed(model, optimizer, model_parameters, lambda: _let_go(model))
    _together(comm, "the model", lambda: _move(model, config, mpu, device))
    mesh: Any = mpu.mesh if isinstance(mpu, SequenceGroups) else model.mpu().mesh if isinstance(model, PipelineModule) else None
    for axis, size, action in ((TP, tensor_ranks, tensor_parallel.cut), (EP, expert_ranks, moe.divide)):
        if size > 1:
            sizes = {DP: comm.world_size // size, axis: size}
            # a rank that refuses the model next, and ends, would take the store from ranks that still make their groups
            mesh = _together(comm, "the mesh", functools.partial(mesh_of, sizes))
            model_parameters = _renewed(model, optimizer, model_parameters, functools.partial(action, model, mesh[axis]))
    basic, lr_scheduler, options, monitor = _together(
        comm, "what is to be sharded", lambda: _prepare(model, optimizer, model_parameters, lr_scheduler, config)
    )
    if mesh is not None and not isinstance(mpu, SequenceGroups):
        set_mesh(mesh)
    shard(model, basic, comm=None if group is None else comm, mesh=mesh, **options)
    if isinstance(mpu, SequenceGroups):
        mpu.attend(model)
    engine_of(model).show_as_module()  # engine.module is of the program's own class, as in DeepSpeed
    config.say_notes()
    if config.log_level is not None:
        set_log_level_from_string(config.log_level)
    if config.dump_state and backend_select.rank_and_size()[0] == 0:
        config.print("DeepSpeedEngine configuration")
    kind: type[DeepSpeedEngine] = DeepSpeedEngine
    if isinstance(model, PipelineModule):
        from .pipe_engine import PipelineEngine  # torch.distributed.pipelining takes a second to import

        kind = PipelineEngine
    engine = kind(
        model, basic, config, client=client, device=device, local_rank=local_rank, mpu=mpu, collate_fn=collate_fn, monitor=monitor
    )
    partition.attach(model)
    if expert_ranks > 1:
        moe.show_own(model)
    partition.here.checks_writes = config.zero_config.enable_sanity_checks
    engine.lr_scheduler = lr_scheduler
    if training_data is not None and isinstance(model, PipelineModule):  # the same samples at all stages, over and over
        data: Any = training_data
        sampler: Sampler = DistributedSampler(data, num_replicas=data_ranks, rank=engine_of(model).ranks.rank, shuffle=False)
        engine.set_dataloader(RepeatingLoader(deepspeed_io(engine, data, data_sampler=sampler)))
    elif training_data is not None:
        engine.training_dataloader = deepspeed_io(engine, training_data)
    if config.disable_python_gc:
        engine._gc_was_on = gc.isenabled()
        gc.disable()
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _let_go(model: nn.Module) -> None:
    """Close the model's earlier engine: the model has ordinary parameters again, which may be new objects."""
    partition.detach(model)
    close(model)


def _renewed(model: nn.Module, optimizer: object, given: object, change: Callable[[], object]) -> object:
    """Call `change`, replace in the optimizer the parameters that it has replaced in the model, and return `given` with the new ones."""
    before = dict(model.named_parameters())
    given = list(given) if isinstance(given, Iterable) and not isinstance(given, nn.Module) else given
    change()
    now = {id(before[name]): param for name, param in model.named_parameters()}

    def renewed(entry: object) -> Any:
        if not isinstance(entry, dict):
            return now.get(id(entry), entry)
        params = [entry["params"]] if isinstance(entry["params"], torch.Tensor) else entry["params"]
        return {**entry, "params": [now.get(id(param), param) for param in params]}

    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            group["params"] = renewed(group)["params"]
    return [renewed(entry) for entry in given] if isinstance(given, list) else given


def _together(comm: Comm, what: str, action: Callable[[], T]) -> T:
    """Return an action's result. If it raises on one rank, every rank raises (collective), so that no rank waits for that one."""
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    mine = None if failure is None else f"{type(failure).__name__}: {failure}"
    everyone = [mine] if comm.imagined else exchange_values(comm, mine, f"deepspeed.initialize: {what}")
    if failure is not None:
        raise failure
    for rank, text in enumerate(everyone):
        if text is not None:
            raise DeepSpeedConfigError(f"deepspeed.initialize: rank {rank} failed, at {what}: {text}")
    return result


def _config(given: object, mpu: object, optimizer: object, lr_scheduler: object, world_size: int) -> DeepSpeedConfig:
    config = DeepSpeedConfig(given, mpu, world_size=world_size)
    assert not isinstance(lr_scheduler, LRScheduler) or isinstance(optimizer, torch.optim.Optimizer), (
        "lr_scheduler: a scheduler steps the optimizer that it was made of: pass that one as optimizer=, or a callable as lr_scheduler="
    )
    return config


def _move(model: nn.Module, config: DeepSpeedConfig, mpu: object, device: torch.device) -> None:
    """Cast the model, move it to the device, and let it recompute activations as configured. It may raise on a single rank."""
    if isinstance(model, PipelineModule):
        check_config(config)
    leaf_modules.apply_zero_leaf_module_config(model, config.zero_config.leaf_module)
    cast_buffers(config, model)
    for param in model.parameters() if config.model_dtype is not torch.float32 else ():
        if param.dtype in (torch.float32, torch.float16, torch.bfloat16) and not partition.is_zero_param(param):
            param.data = param.data.to(config.model_dtype)  # so that masters start from rounded values, as DeepSpeed's do
    if device.type != "cpu" and not any(param.is_meta for param in model.parameters()):
        model.to(device)
    activation.apply_config(model, config, mpu)


def _prepare(
    model: nn.Module, optimizer: object, model_parameters: object, lr_scheduler: object, config: DeepSpeedConfig
) -> tuple[torch.optim.Optimizer | None, Any, dict[str, Any], MonitorMaster]:
    """Return optimizer, scheduler, options of zs.shard and monitor. It may raise on a single rank."""
    for name, param in model.named_parameters() if (config.optimizer_name or "").lower() == "muon" else ():
        param.use_muon = param.dim() == 2 and not any(word in name.lower() for word in ("embed", "lm_head"))  # type: ignore[attr-defined]
    basic = _basic_optimizer(model, optimizer, model_parameters, config)
    options = shard_options(config)
    low = options.get("master_weights") == "split" and getattr(basic, "fp32_optimizer_states", None) is False
    options |= {"master_weights": False} if low else {}  # the script's own optimizer asks for states as the bf16 masters
    if basic is None:
        options = {key: value for key, value in options.items() if not key.startswith(("offload_optimizer", "offload_gradient"))}
        options["stage"] = 3 if options["stage"] == 3 else 0  # without an optimizer, stages 1 and 2 have nothing to shard
    # the scheduler is made before sharding, since it may raise
    if lr_scheduler is None and config.scheduler_name is not None and basic is not None:
        lr_scheduler = schedule_from_config(config.scheduler_name, config.scheduler_params, basic)
    elif lr_scheduler is not None and not hasattr(lr_scheduler, "step"):
        if not callable(lr_scheduler):
            raise TypeError(
                f"lr_scheduler: expected a scheduler, or a callable that makes one of the optimizer, got {lr_scheduler!r}."
            )
        lr_scheduler = lr_scheduler(basic)
    try:
        monitor = MonitorMaster(config.monitor_config)
    except OSError as error:  # only rank 0 opens files
        raise DeepSpeedConfigError(f"a monitor: {error}. Name a folder that rank 0 can write (output_path).") from error
    return basic, lr_scheduler, options, monitor


def _device(args: Any) -> tuple[torch.device, int]:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    in_args = getattr(args, "local_rank", None)
    if in_args is not None and in_args >= 0 and in_args != local_rank:
        raise AssertionError(f"Mismatch in local rank setting, args.local_rank={in_args} but env['LOCAL_RANK']={local_rank}.")
    if in_args is not None:
        args.local_rank = local_rank
    if not torch.cuda.is_available():
        return torch.device("cpu"), local_rank
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank), local_rank


def _basic_optimizer(
    model: nn.Module, optimizer: object, model_parameters: Any, config: DeepSpeedConfig
) -> torch.optim.Optimizer | None:
    """Return the torch optimizer to shard: the program's own, the one that its function makes, or the configuration's."""
    if optimizer is None and config.optimizer_name is None:
        return None
    given = model if model_parameters is None else model_parameters
    given = given.parameters() if isinstance(given, nn.Module) or not isinstance(given, Iterable) else given
    parameters = [entry for entry in given if isinstance(entry, dict) or getattr(entry, "requires_grad", True)]
    if isinstance(optimizer, torch.optim.Optimizer):
        basic = optimizer
    elif optimizer is not None:
        if not callable(optimizer):
            raise AssertionError(f"Client Optimizer is of unexpected type {type(optimizer)}")
        basic = optimizer(parameters)
    else:
        try:
            return build_optimizer(config, parameters)
        except TypeError as error:
            raise DeepSpeedConfigError(f"optimizer.params of {config.optimizer_name}: {error}.") from error
    states = config.bfloat16_config.bf16_optimizer_states and config.offloads("offload_optimizer")
    assert not states or not getattr(basic, "fp32_optimizer_states", False), (
        f"bf16.bf16_optimizer_states with offload_optimizer: {type(basic).__name__} was made for fp32 states: "
        "make it with fp32_optimizer_states=False, or leave bf16_optimizer_states out."
    )
    torchs = not type(basic).__module__.startswith("zeroshard")
    if torchs and config.zero_force_ds_cpu_optimizer and config.offloads("offload_optimizer"):
        raise ZeRORuntimeException(
            f"You are using ZeRO-Offload with a client provided optimizer ({type(basic)}). Take deepspeed.ops.adam.DeepSpeedCPUAdam, or an "
            'optimizer of the configuration, or say {"zero_force_ds_cpu_optimizer": false}: it is stepped on the host as it is.'
        )
    return basic


_EQUAL = (
    "sequence_parallel_size",
    "gradient_accumulation_steps",
    "managed_gradient_accumulation",
    "scheduler_name",
    "scheduler_params",
)


def _compare(comm: Comm, config: DeepSpeedConfig) -> None:
    """Raise DeepSpeedConfigError on every rank if ranks differ in keys of the training loop; zs.shard compares its options."""
    mine = [repr(getattr(config, name)) for name in _EQUAL]
    everyone = [mine] if comm.imagined else exchange_values(comm, mine, "deepspeed.initialize: compare configurations")
    for name, values in zip(_EQUAL, zip(*everyone, strict=True), strict=True):
        if len(set(values)) > 1:
            shown = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise DeepSpeedConfigError(f"{name} differs: {shown}. Give every rank the same configuration.")


# -- the data loader of initialize(training_data=...) ------------------------------------------------------------------


def check_dataset(dataset: object) -> None:
    """Raise ValueError unless an object is a torch Dataset, or has __getitem__ and __len__."""
    if not isinstance(dataset, Dataset) and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ValueError(f"Training data must be a torch Dataset, got {type(dataset).__name__}")


class DeepSpeedDataLoader:
    """Loader of one rank's micro-batches. Without a data_sampler, the data set is shuffled and divided among ranks.

    As in DeepSpeed, every pass has the same order until the program calls `loader.data_sampler.set_epoch`. drop_last: drop the
    last batch if it is not full (the sampler has padded each rank's share with the first samples). num_workers: number of
    processes that load samples, each with its own random generators. None: two, as in DeepSpeed, but zero if ranks are threads,
    which must not fork, or daemonic processes, which may not have children, or for an IterableDataset, which each worker would
    read completely.
    """

    def __init__(
        self, dataset: Any, batch_size: int, *, rank: int, world_size: int, collate_fn: Callable | None = None, drop_last: bool = False,
        num_workers: int | None = None, pin_memory: bool = False, data_sampler: Sampler | None = None, shuffle: bool = True,
    ) -> None:  # fmt: skip
        check_dataset(dataset)
        if num_workers is None:
            alone = backend_select.in_threads() or multiprocessing.current_process().daemon  # neither can have child processes
            num_workers = 0 if isinstance(dataset, IterableDataset) or alone else 2
        sampler = data_sampler
        if sampler is None and not isinstance(dataset, IterableDataset):
            sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle)
        self.dataset, self.sampler, self.batch_size = dataset, sampler, batch_size
        self.data_sampler, self.collate_fn, self.num_local_io_workers = sampler, collate_fn, num_workers
        self.data: Iterator[object] | None = None  # iterator of the current pass
        self.dataloader = DataLoader(
            dataset, batch_size=batch_size, sampler=sampler, collate_fn=collate_fn, drop_last=drop_last,
            num_workers=num_workers, pin_memory=pin_memory,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Any]:
        self.data = iter(self.dataloader)
        return self.data

    def __next__(self) -> Any:
        """Return the next micro-batch of the current pass, beginning one if there is none. Raises StopIteration at its end."""
        if self.data is None:
            iter(self)
        assert self.data is not None
        try:
            return next(self.data)
        except StopIteration:
            self.data = None  # the next call begins a new pass
            raise

    def __len__(self) -> int:
        return len(self.dataloader)


def deepspeed_io(engine: DeepSpeedEngine, dataset: Any, batch_size: int | None = None, **options: Any) -> DeepSpeedDataLoader:
    """Return a loader of this rank's micro-batches (`engine.deepspeed_io`)."""
    route = options.pop("route", "train")
    options = {
        "num_workers" if key == "num_local_io_workers" else key: value for key, value in options.items() if value is not None
    }
    comm = engine_of(engine.module).ranks  # ranks that share layers read the same
    pinned = options.pop("pin_memory", True) and torch.cuda.is_available()
    return DeepSpeedDataLoader(
        dataset, batch_size or engine.train_micro_batch_size_per_gpu(), rank=comm.rank, world_size=comm.world_size,
        collate_fn=options.pop("collate_fn", engine.collate_fn), drop_last=engine.dataloader_drop_last(), shuffle=route == "train",
        pin_memory=pinned, **options,
    )  # fmt: skip


DeepSpeedEngine.deepspeed_io = deepspeed_io  # type: ignore[attr-defined]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config, as scripts for DeepSpeed expect them."""
    ours = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    ours.add_argument("--deepspeed", default=False, action="store_true", help="Enable DeepSpeed (for user code; no effect here)")
    ours.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed json configuration file.")
    ours.add_argument("--deepscale", default=False, action="store_true", help=argparse.SUPPRESS)
    ours.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser
