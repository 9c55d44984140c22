"""Public functions: shard and close, accumulate, backward, clip gradients, and gather whole tensors by name.

model, optimizer = zs.shard(model, optimizer, stage=3)     # the one changed line of a training script
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor, nn

from .assembly.auto_stage import choose, is_auto
from .assembly.late_optimizer import AllOptimizers, watch
from .assembly.sharded_optimizer import ShardedOptimizer, shard_optimizer
from .axes import distributed
from .axes.along_axis import check_axes, connect
from .axes.tiled_parameter import join, parts_in
from .checkpoint import safetensors as streaming
from .checkpoint.resolver import open_weights
from .comm import backend_select, topology
from .comm.mesh import Axes, PlannedLayout, attachments, axes_of
from .config import Config, Placement
from .engine import hooks
from .engine.comm import talking_device
from .engine.inner_optimizer import optimizer_groups
from .engine.ledger import Ledger
from .engine.mixed_precision import Progress
from .engine.parameter import ParamHome, ParamSpec
from .engine.rest import Tiers
from .engine.runtime import Runtime, runtime_of
from .engine.shard_model import Inventory, ModelLayout, build_units
from .engine.topology import Topology
from .engine.unit import Phase
from .engine.verbs import begin
from .engine.watch import Watches
from .errors import ConfigError, ZeroshardError
from .formats.state_plans import state_plans
from .guard.attendance import AttendanceRecord
from .guard.model_changes import ModelWatch, ValueWatch
from .guard.out_of_memory import tell, telling_shortage
from .guard.rank_consistency import agree_on_initial_values, check_same_model
from .guard.shared_storage import check_sharing
from .optim.take_over import TakeOver
from .optim.validation import check_optimizer
from .policies import cast_modules, check_lazy, collect, device_of, input_dtype, partition
from .seam import Engine
from .state.parameter_access import whole_states
from .state.slices import named_parts
from .state.state_view import state_by_param
from .tensor.attributes import stays_whole
from .tensor.sharded_tensor import ShardedTensor
from .tiers.room import check_room, farther, given_back_by, needs_of, open_tiers
from .utils.module_names import own_name
from .values import init_context
from .values.closing import close as close
from .values.closing import whole_values
from .values.ddp_interface import accumulate as accumulate
from .values.ddp_interface import give_interface
from .values.model_methods import replace_methods

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    from .config import ShardOptions

_WATCHES = Watches(ValueWatch, AttendanceRecord, tell)
ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


@contextlib.contextmanager
def init(
    config: Config | None = None, *, comm: object = None, dtype: torch.dtype | None = None, **options: Unpack[ShardOptions]
) -> Iterator[None]:
    """Inside this context the parameters of modules are sharded while the model is made: no rank holds the whole model.

    It is for stages that shard parameters. Give the same stage (and comm) to zs.shard afterwards. All ranks enter and leave it
    (collective). A parameter is whole when it is made, and constructors may write it in any way. It is cut, with rank 0's
    values, when a module registers a parameter and more than 64 MiB of others are whole, in `zs.gathered`, or when the context ends.
    A write to a parameter that is cut acts on the
    slices; zs.shard raises ModelMismatch for one that ranks have written differently. Inside, torch's generators have rank 0's
    states, so that values equal, bit for bit, those of one process with rank 0's seed; the other ranks' own states return at
    the end. Parameters are made on torch's default device (`with torch.device("cuda"), zs.init(...)`); a model made on the host
    can be moved by `model.cuda()` before zs.shard. Source: ZeRO-Infinity, arXiv 2104.07857, section 7.2.

    Args:
        dtype: dtype of floating-point parameters, in which they are initialised; None: as the model makes them.

    Raises:
        ModelMismatch: ranks make other parameters than rank 0 (on all ranks).
    """
    config = Config.build(config, **options)
    device = talking_device(torch.get_default_device())
    group = backend_select.current(comm, device, config.stall_timeout_s)  # type: ignore[arg-type]
    with init_context.sharding_births(group, dtype) if config.row.parameter is Placement.SHARDED else contextlib.nullcontext():
        yield


@overload
def shard(
    model: ModelT, optimizer: OptimizerT, *, config: Config | str | os.PathLike | None = None, comm: backend_select.Choice | None = None,
    mesh: DeviceMesh | Mapping[str, int] | None = None, weights: str | os.PathLike | None = None, sample: object = None, **options: Unpack[ShardOptions],
) -> tuple[ModelT, OptimizerT]: ...  # fmt: skip


@overload
def shard(
    model: ModelT, optimizer: None = None, *, config: Config | str | os.PathLike | None = None, comm: backend_select.Choice | None = None,
    mesh: DeviceMesh | Mapping[str, int] | None = None, weights: str | os.PathLike | None = None, sample: object = None, **options: Unpack[ShardOptions],
) -> tuple[ModelT, None]: ...  # fmt: skip


def shard(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, config: Config | str | os.PathLike | None = None,
    comm: backend_select.Choice | None = None, mesh: DeviceMesh | Mapping[str, int] | None = None, weights: str | os.PathLike | None = None,
    sample: object = None, **options: Unpack[ShardOptions],
) -> tuple[nn.Module, torch.optim.Optimizer | None]:  # fmt: skip
    """Shard a model and its optimizer over the data-parallel ranks, in place, and return both.

    Args:
        model: any nn.Module with dense parameters. It may be built under `zs.init()` or on the meta device. A parameter that has the
            attribute `not_sharded = True` stays whole, and the program's: it sums its gradient over ranks, and steps it, itself.
        optimizer: any elementwise torch.optim optimizer over the model's parameters, or a class declared by `zs.whole_matrix`.
            AdamW, Adam and Lion of bitsandbytes and torchao become torch's (or zs.Lion), with `optimizer_states` of their
            width. None for inference, or if the program makes the optimizer of `model.parameters()`, or several, afterwards: they
            become sharded ones at the first step, or when they are loaded, saved or otherwise asked for.
        config: a Config, or the path of a file that `zeroshard plan --auto` wrote. Options given by name override it; they are
            the fields of Config (stage, precision, units, max_grad_norm, ...) and `preset`.
        comm: the ranks over which to shard. "auto", "shared" (ranks of one host, through memory) and "dist" (torch.distributed)
            mean all ranks, as does a name of `zeroshard.seam.register`. A process group, or a 1-D DeviceMesh (mesh["dp"]), means its
            ranks, and only these call shard.
        mesh: a DeviceMesh in the place of `comm`. Axes named "tp", "ep" and "pp" belong to tensor, expert and pipeline
            parallelism, and the model consists of their DTensors or stages. Along "sp" ranks have other tokens of the same
            sequences (`zs.shard_sequence`), and attention is over whole sequences. States are sharded over the other axes,
            sp included, and replicated along "dp_replicate" (HSDP); of two axes with other names, or without names, along the
            outer one. A mapping {"dp": 2, "sp": 2} stands for the mesh of all ranks, where no axis cuts the model.
        weights: a safetensors file or folder, or any other checkpoint that `zs.load` takes. Each rank reads only its slices.
        sample: for stage="auto": an input of the model (or a tuple or mapping of inputs) of the size of a micro-batch. A forward
            on fake tensors measures the activations, and shard chooses the first stage and tiers with which the model fits.

    Raises:
        ConfigError: an option is wrong, the process group was not started, or the optimizer is not the model's.
        ModelMismatch: ranks built different models or optimizers. Every rank raises it, with the first difference.
        HostMemoryError: a host has too little memory for the states that rest there.
        SwapError: a disk has too little space for the states that rest on it, or its folder cannot be used.
        ZeroshardError: the model is sharded already.

    Nothing is changed before all checks have passed. Source: ZeRO, arXiv 1910.02054, section 5.
    """
    init_context.cut_whole()
    if torch.is_inference_mode_enabled():  # parameters made in inference mode could not be trained afterwards
        with torch.inference_mode(False):
            return shard(  # type: ignore[type-var]
                model, optimizer, config=config, comm=comm, mesh=mesh, weights=weights, sample=sample, **options
            )
    planned = PlannedLayout.read(config, mesh, comm) if isinstance(config, (str, os.PathLike)) else None
    auto = is_auto(options.get("stage"), options, sample)
    if auto:
        options["stage"] = None  # `_shard` chooses it; Config has no "auto"
    config = Config.build(config, **options)
    _check_arguments(model, optimizer)
    axes = axes_of(mesh, comm, distributed.find(model))
    local, taken = distributed.Localised(model, optimizer), TakeOver(optimizer)
    try:
        config = taken.begin(model, config)
        _shard(model, optimizer, config, axes, local, weights, (sample,) if auto else None, planned)
    except BaseException:
        taken.undo()
        local.undo()  # put the user's DTensors back
        raise
    taken.tell(runtime_of(model).comm.rank)
    return model, optimizer


def _shard(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, axes: Axes, local: distributed.Localised,
    weights: str | os.PathLike | None, auto: tuple[object] | None, planned: PlannedLayout | None,
) -> None:  # fmt: skip
    """Shard a model. `local` has replaced its DTensors by local shards; until `local.keep()` the caller may undo that.

    auto: (sample,) for stage="auto", else None. planned: the layout that the options are from, or None.
    """
    # checks that need no other rank
    specs = [replace(spec, counts=axes.counts(spec.distribution)) for spec in collect(model, config)]
    check_sharing(model, specs)
    check_axes(model, axes.lines)
    check_optimizer(optimizer, specs, config.delayed_update is not None)
    device = device_of(specs)
    attached = attachments(axes)
    for each in attached:
        if hasattr(each, "check"):
            each.check(model)

    # open communicators; the checks that follow are collective, and make sure of equal models, options and values
    group, peers, world = axes.open(device, config.stall_timeout_s)
    if auto is not None:
        config = choose(config, group, model, specs, optimizer, *auto, axes.parts)
    check_same_model(group, model, specs, config, optimizer, axes.layout)
    asked, config = config, topology.settled(config, group)
    topology.check(config, group, axes.parts)
    if planned is not None:
        planned.compare(group, world)
    if not config.master_weights and config.precision != "fp32" and group.rank == 0:
        print(f"zeroshard: no fp32 master weights: parameters and states are {config.precision}", file=sys.stderr)
    stored, found = open_weights(world, group, weights, model, named_parts(model, specs)) if weights is not None else ({}, {})
    divided = None
    if axes.divided is not None:
        divided = group.subgroup(axes.divided.groups), [spec for spec in specs if axes.divides(spec.distribution)]
    agree_on_initial_values(group, peers, model, specs, parameters=weights is None, buffers=config.agree_buffers, divided=divided)
    made_on_meta = {name for name, param in model.named_parameters() if param.is_meta and not stays_whole(param)}

    states = state_plans(config, optimizer, specs)
    inventory = Inventory(partition(model, config, specs), states, optimizer_groups(optimizer))

    # lay out, build buffers, place parameters in them; from here on the model changes
    local.keep()
    ledger, progress = Ledger(), Progress(config)
    tiers = open_tiers(config, group, ledger)
    comms = Topology.flat(group, peers, world, axes.places, axes.stages, axes.summed)
    if asked.sums != config.sums and group.world_size > 1:
        comms.notes.append(
            "gradients are summed in rank order, not by the backend: ranks that read each other's memory do it at no price"
        )
    comms = topology.open_topology(config, comms, ledger, lambda steps: progress.steps >= steps, axes.parts, axes.divided)
    layout = inventory.lay_out(config, comms)
    units = {unit.name: unit.specs for unit in inventory.units}
    room = _room(layout, tiers, optimizer, telling_shortage(model, config, ledger, group, "zs.shard", units))
    inputs = input_dtype(model, config, {group.sizes.dtype for group in layout.groups})
    build = partial(build_units, optimizer=optimizer, layout=layout, room=room)
    runtime = Runtime(model, config, comms, tiers, progress, build, AllOptimizers, _WATCHES, inputs)

    # attach hooks, initialise or load parameters of the meta device, make the optimizer a sharded one
    runtime.model_watch = ModelWatch(model, runtime.groups)
    object.__setattr__(model, "_zeroshard", runtime)
    connect(runtime, axes.lines)
    runtime.handles += cast_modules(model, config)
    hooks.attach(runtime)
    replace_methods(runtime)
    give_interface(runtime)
    runtime.handles += distributed.in_state_dicts(model)
    engine = Engine(runtime)
    for each in attached:
        each.attach(engine, axes)
    init_context.give_values(model, device, made_on_meta, stored if weights is not None else None)
    if weights is not None:  # last: the initialisation of a buffer may have written its module's parameters
        streaming.stream(engine, engine.slices("value"), found, stored)
    if optimizer is not None:
        runtime.optimizers.add(shard_optimizer(optimizer, runtime))
    watch()


@contextlib.contextmanager
def _room(
    layout: ModelLayout, tiers: Tiers, optimizer: torch.optim.Optimizer | None, telling: contextlib.AbstractContextManager[None]
) -> Iterator[None]:
    """Context in which units are built: raise, on every rank, HostMemoryError or SwapError if they do not fit (collective).

    telling: context that tells of a shortage that occurs all the same.
    """
    config, specs = layout.config, [spec for unit in layout.inventory.units for spec in unit.specs]
    with telling:
        given_back = 0 if tiers.comm.imagined else given_back_by(specs, optimizer)
        try:
            check_room(config, tiers, partial(needs_of, layout), "zs.shard", partial(farther, layout), given_back)
        except BaseException:
            tiers.close()
            raise
        yield


def _check_arguments(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer or None, got {type(optimizer).__name__}. Options are named: "
            "zs.shard(model, optimizer, stage=3)."
        )
    if isinstance(optimizer, ShardedOptimizer):
        if optimizer.core.runtime.closed:
            raise ZeroshardError(
                "this optimizer belonged to a model that was closed with zs.close(): make a new one of its parameters."
            )
        raise ZeroshardError(
            "this optimizer is sharded already: shard() a model with its optimizer once."
            " Further optimizers of it: make them after zs.shard()."
        )
    for name, module in model.named_modules():
        if "_zeroshard" in module.__dict__:
            where = "this model" if module is model else f"its submodule {name}"
            raise ZeroshardError(f"{where} is sharded already: shard() once, or zs.close() it first.")
    check_lazy(model)
    for name, param in model.named_parameters():
        if isinstance(getattr(param, "_home", None), ParamHome):
            raise ZeroshardError(f"{name} belongs to a model that is sharded already: zs.close() that one first.")
        if param.is_inference():
            raise ConfigError(
                f"{name} was made under torch.inference_mode(), and such a tensor can not be moved to other memory: build the model "
                "outside of it, or under torch.no_grad(). zs.shard() itself may be called anywhere."
            )
    if all(map(stays_whole, model.parameters())):
        raise ConfigError(f"{type(model).__name__} has no parameters to shard.")


# -- gradients, states and values by name ------------------------------------------------------------------------


def backward(model: nn.Module, loss: Tensor, *, weight: float) -> None:
    """Run loss.backward() with a weight in the mean over the global batch, such as the number of target tokens.

    The step's gradient is sum(weight * grad) / sum(weight) over all ranks and all calls since zero_grad: every token has the same
    weight, however tokens are distributed over ranks and micro-batches. A step after plain backwards, too, raises ZeroshardError; so does
    one whose gradients were added to some that an earlier step or clip has divided: call zero_grad after each step.
    """
    runtime = runtime_of(model)
    weight = _at_least_0("weight", weight)
    if weight == math.inf:
        raise ConfigError("weight: expected a finite number, got inf: the mean over all weights would not be a number.")
    with runtime.account.weighted(weight):
        (loss * weight).backward()


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Clip the global gradient norm over all ranks, and return the norm before clipping (collective). Tied parameters count once.

    Args:
        max_norm: at least 0. As in torch, 0 makes all gradients zero and inf leaves them as they are.

    If the norm is not finite, gradients are not changed. A program may repair them before the step, so the step computes the norm
    again, and clips as was asked here, or is skipped.
    """
    core = runtime_of(model).optimizers.cores[0]
    return torch.tensor(core.clip(_at_least_0("max_norm", max_norm)))


def _at_least_0(name: str, value: object) -> float:
    """Return `value`, a number or a tensor of one element, as a float. Raise ConfigError if it is below 0 or no number."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, bool) or not isinstance(number, Real) or not float(number) >= 0:
        raise ConfigError(f"{name}: expected a number of at least 0, got {value!r}.")
    return float(number)


def full_state_dict(model: nn.Module, *, masters: bool = False) -> dict[str, Tensor]:
    """Return the model's state dict with whole tensors, on every rank (collective).

    Keys are the model's own names: those of its state dict without the steps into wrappers (`torch.compile(model)`, torch's
    activation wrappers), as other programs know them. The sharded model's `load_state_dict` takes these names too.

    Args:
        masters: return a parameter's fp32 master, if it has one, instead of its rounded value.
    """
    return {own_name(model, name): value for name, value in whole_state(model, masters).items()}


def whole_state(model: nn.Module, masters: bool = False) -> dict[str, Tensor]:
    """Return what `full_state_dict` does, under the names of `model.state_dict()` (collective)."""
    runtime = runtime_of(model)
    begin(runtime, "zs.full_state_dict", *(["masters"] if masters else []))
    whole: dict[int, Tensor] = {}
    for unit in runtime.units:
        unit.cancel_unshard()
        for group in unit.groups:
            values = whole_values(group, runtime, masters)
            if unit.phase is not Phase.READY:  # a unit in use stays gathered
                group.values.release()
            values = [spec.complete(value) for spec, value in zip(group.specs, values, strict=True)]
            whole.update({id(param): value for param, value in zip(group.params, values, strict=True)})
    # matched by object, since hooks may rename entries
    state = runtime.model.state_dict(keep_vars=True)
    found = {name: whole[id(v)] if id(v) in whole else _cloned(v) for name, v in state.items()}
    return join(found, parts_in(runtime.model, state))


def full_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the whole mean gradient of every trainable parameter on every rank (collective).

    Keys are the names in `model.named_parameters()`; None stands for a parameter without a gradient.
    """
    runtime = runtime_of(model)
    begin(runtime, "zs.full_gradients")
    runtime.flush()
    result, named = dict[str, Tensor | None](), _names_of_parameters(model)
    for group in runtime.groups:
        if group.trainable:
            for index, spec in enumerate(group.specs):
                grad = group.gradient(index)
                whole = grad.gathered() if isinstance(grad, ShardedTensor) else _cloned(grad)
                result[named.get(spec.name, spec.name)] = whole if whole is None else spec.complete(whole)
    return result


def _names_of_parameters(model: nn.Module) -> dict[str, str]:
    """Return each parameter's own name -> its name in `model.named_parameters()`."""
    return {own_name(model, name): name for name, _ in model.named_parameters()}


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def full_optimizer_state(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the optimizers' state of every parameter, with whole tensors, on every rank (collective).

    Keys are the names in `model.named_parameters()`.
    """
    named = _names_of_parameters(model)
    found = _whole_optimizer_states(model, "zs.full_optimizer_state")
    return {named.get(spec.name, spec.name): states for spec, _, states in found}


def full_optimizer_state_dict(model: nn.Module, *, every_rank: bool = False) -> dict[str, Any]:
    """Return the optimizer's state dict in torch's own form, whole and on the host, on rank 0; {} on the other ranks
    (collective).

        state = zs.full_optimizer_state_dict(model)     # on all ranks
        if rank == 0:
            torch.save({"optimizer": state, ...}, path)

    The result equals `optimizer.state_dict()` in one process: {"state": {number: {"step": ..., "exp_avg": ...}}, "param_groups":
    [...]}, with numbers in the order of the groups. A plain optimizer of the same groups can load it, and so can a sharded one at
    any stage and number of ranks, if every rank passes it to `load_state_dict`. The states of one parameter are gathered at a
    time. In a pipeline each stage has its own optimizer, and the stage's first rank returns its state dict. Raise ConfigError for a
    model with several optimizers, or one that steps parameters beside it: `full_optimizer_state` serves both.

    Args:
        every_rank: return the state dict on every rank; each rank then holds all states.
    """
    runtime, states = runtime_of(model), {}
    cores = runtime.optimizers.cores
    if len(cores) > 1 or any(cores[0].outside):
        raise ConfigError(
            "zs.full_optimizer_state_dict: the model has several optimizers, or one that also steps parameters beside the model, and so no "
            "state dict of its own. Take zs.full_optimizer_state(model), which has the states by the parameters' names."
        )
    outer = cores[0].outer
    wanted = every_rank or runtime.topology.leads
    for _, param, found in _whole_optimizer_states(model, "zs.full_optimizer_state_dict"):
        if wanted and found:  # copies: torch advances `step` in place, and parameters may share that tensor
            states[id(param)] = {k: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else v for k, v in found.items()}
    # all ranks call state_dict(), since it runs the user's hooks
    params, told = [param for group in outer.param_groups for param in group["params"]], outer.state_dict()
    return {**told, "state": {number: states[id(p)] for number, p in enumerate(params) if id(p) in states}} if wanted else {}


def _whole_optimizer_states(model: nn.Module, verb: str) -> Iterator[tuple[ParamSpec, nn.Parameter, dict[str, Any]]]:
    """Yield each trained parameter with its whole optimizer states (collective)."""
    runtime = runtime_of(model)
    begin(runtime, verb)
    states = {param: each for core in runtime.optimizers.cores for param, each in state_by_param(core).items()}
    for group, index, spec in ((g, i, s) for g in runtime.groups if g.trainable for i, s in enumerate(g.specs)):
        found = whole_states(group, index, states.get(group.params[index], {}))
        for name, value in found.items():
            if isinstance(value, Tensor) and spec.shape != () and tuple(value.shape) == spec.shape:
                found[name] = spec.complete(value)
        yield spec, group.params[index], found
