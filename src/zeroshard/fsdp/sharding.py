"""fully_shard of torch.distributed.fsdp, on zeroshard's engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from ..errors import ConfigError
from ..seam import info_of
from ..utils.lightning_compat import show_models
from ..utils.torch_compat import say_fully_sharded
from .calls import STATE, Call
from .configuration import cast
from .meshes import data_parallel
from .module import Misused, become_fsdp, holds_models
from .pipelining import serve_pipelines

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims  # since torch 2.13


def fully_shard(
    module: nn.Module | list[nn.Module], *, mesh: DeviceMesh | None = None, reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None, mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None, ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:  # fmt: skip
    """Let parameters of a module be sharded over the data-parallel ranks, and gathered together; return the module, an FSDPModule.

    Call it on inner modules first and on the whole model at last, as torch.distributed.fsdp.fully_shard. Its parameters (those that
    belong to no inner call) are a unit. Several modules in a list have one policy; each is gathered by its own forward.

    Args:
        mesh: of one axis, over which states are sharded; or of two, replicated along the outer one (HSDP). None: all ranks.
        reshard_after_forward: False: gathered until the backward; a number: the ranks over which a second copy stays sharded (zero_hpz_partition_size).
        shard_placement_fn: called for each parameter; Shard of any axis and None are the same here, since a rank's slice is a range of
            the flattened parameter.
        mp_policy: param_dtype: the dtype in which the unit computes, with fp32 masters; reduce_dtype: in which gradients are sent;
            output_dtype, cast_forward_inputs: whether outputs and inputs of each module are cast.
        offload_policy: CPUOffloadPolicy: parameters and optimizer states rest on the host, which steps.
        ignored_params: parameters that stay whole and the program's own: zeroshard neither moves nor cuts them, nor sums their
            gradients over ranks.
        dp_mesh_dims: names of the data-parallel axes of `mesh`, which then has all axes: over those of `shard` states are sharded, along
            those of `replicate` they are replicated. Parameters may be DTensors over the mesh, whole along these axes.

    Raises:
        ConfigError: the module was given before, has no forward, an argument is not served, or a part of it has run a forward.
    """
    given = module if isinstance(module, list) else [module]
    policy = mp_policy or MixedPrecisionPolicy()
    kept_whole = list(ignored_params or ())  # it may be a generator
    modules = _checked(given, ignored := set(map(id, kept_whole)))
    whole_mesh = None
    if dp_mesh_dims is not None:
        params = [param for each in modules for param in each.parameters() if id(param) not in ignored]
        whole_mesh, mesh = data_parallel(mesh, dp_mesh_dims, params)
    if mesh is not None and (not isinstance(mesh, DeviceMesh) or mesh.ndim > 2):
        got = mesh if isinstance(mesh, DeviceMesh) else type(mesh).__name__
        raise ConfigError(f"mesh: fully_shard expects a 1D or 2D DeviceMesh but got {got}. Slice it: mesh['dp'].")
    kept = reshard_after_forward
    if kept is not None and not isinstance(kept, bool) and not (isinstance(kept, int) and kept > 0):
        raise ConfigError(f"fully_shard: reshard_after_forward: expected None, a bool or a number of ranks, got {kept!r}.")
    if offload_policy is not None and not isinstance(offload_policy, OffloadPolicy):
        raise ConfigError(f"fully_shard: offload_policy: expected an OffloadPolicy, got {type(offload_policy).__name__}.")
    for param in (param for each in modules for param in each.parameters() if id(param) not in ignored):
        placement = None if shard_placement_fn is None else shard_placement_fn(param)
        if placement is not None and not isinstance(placement, Shard):
            raise ConfigError(f"fully_shard: shard_placement_fn: expected None or Shard, got {placement}: one mesh for a model.")
        if placement is not None and not -param.ndim <= placement.dim < max(param.ndim, 1):
            raise Misused(
                f"fully_shard: shard_placement_fn: Shard dim {placement.dim} is invalid for {param.ndim}D tensor of shape {tuple(param.shape)}."
            )
    for inside in dict.fromkeys(inner for outer in modules for inner in outer.modules()):
        earlier = inside.__dict__.get(STATE)
        if earlier is not None and earlier.root is not None and (earlier.root is earlier or earlier.root.joined):
            earlier.root.reopen()
    if any(info_of(param) is not None for each in modules for param in each.parameters()):
        raise ConfigError(
            f"fully_shard: {type(modules[0]).__name__} is a part of a model that is sharded already: call it on inner modules first, and on the whole "
            "model at last, before the first use."
        )
    offload = offload_policy if isinstance(offload_policy, CPUOffloadPolicy) else None
    call = Call(modules, mesh, reshard_after_forward, policy, offload)
    call.whole_mesh = whole_mesh
    call.keep_whole(kept_whole)
    for each in modules:
        become_fsdp(each)
        say_fully_sharded(each)
        each.__dict__[STATE] = call
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            each.register_forward_pre_hook(_casts_inputs(policy.param_dtype), prepend=True, with_kwargs=True)
        if policy.output_dtype is not None:
            each.register_forward_hook(_casts_output(policy.output_dtype))
    call.wait()
    serve_pipelines()
    show_models(holds_models)
    return module


def _checked(given: Sequence[Any], ignored: Collection[int]) -> tuple[nn.Module, ...]:
    """Return the modules of a call; of a list, those that are not inside of another one. Raise ConfigError for what can be no unit.

    ignored: ids of parameters that the program keeps.
    """
    for module in given:
        name = type(module).__name__
        if not isinstance(module, nn.Module):
            raise ConfigError(f"fully_shard: module: expected an nn.Module or a list of them, got {name}.")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ConfigError(
                f"fully_shard does not support containers that do not implement forward: {name}. Call it on the items."
            )
        if STATE in module.__dict__:
            raise Misused(
                f"fully_shard has already been applied to this {name}. Each distinct composable distributed API can only be applied to a "
                "module once. Call it on inner modules first, on the root at last."
            )
        for attribute, param in nn.Module.named_parameters(module):
            if hasattr(param, "fsdp_pre_all_gather") and id(param) not in ignored:
                raise ConfigError(
                    f"fully_shard: parameter {attribute} of {name} is a {type(param.data).__name__} with fsdp_pre_all_gather, FSDP2's hook on what "
                    "is sent. zeroshard gathers plain tensors: use those, and zeroshard.fsdp.configure(zero_quantized_weights=True) to send fewer bytes."
                )
    if not given:
        raise ConfigError("fully_shard: module: expected an nn.Module or a list of them, got an empty list.")
    inside = {child for module in given for child in module.modules() if child is not module}
    return tuple(module for module in dict.fromkeys(given) if module not in inside)


def _casts_inputs(dtype: torch.dtype) -> Callable[[nn.Module, Any, Any], Any]:
    return lambda module, args, kwargs: cast((args, kwargs), dtype)


def _casts_output(dtype: torch.dtype) -> Callable[[nn.Module, Any, Any], Any]:
    return lambda module, args, output: cast(output, dtype)


def _state(module: nn.Module) -> NoReturn:
    """Raise ConfigError: torch.distributed.pipelining asks FSDP2 for its inner state."""
    raise ConfigError(
        f"fully_shard.state({type(module).__name__}): zeroshard.fsdp has no FSDPState. For torch.distributed.pipelining, import it before "
        "the calls of fully_shard."
    )


fully_shard.state = _state  # type: ignore[attr-defined]
