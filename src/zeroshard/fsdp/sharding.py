"""fully_shard: each call names a unit; the outermost one is the model's root, which zs.shard shards at its first use.

    fully_shard(block) ... fully_shard(model)      recorded: parameters are still the program's own
    model.parameters(), model.state_dict(),        the first of these shards the model: parameters become sharded ones, in place
    a forward, an optimizer of its parameters      (the same objects)

A call can not know whether an outer one follows, so the root is found at the first use. A part that was used before (its
parameters were listed, say) is a root of its own then; a later call around it closes it, and shards it with the rest.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..api import close, shard
from ..errors import ConfigError
from ..seam import Engine, engine_of
from ..utils.tensor_tree import map_tensors
from ..utils.torch_compat import own_parameters
from ..values import values_to_come
from .configuration import cast, moved, options_of
from .state_dicts import serve_states
from .tracking import expect_all

if TYPE_CHECKING:
    from .module import FSDPModule

STATE = "_zeroshard_fsdp"  # entry of a module's __dict__: the Call that named it
_waiting: weakref.WeakSet[Call] = weakref.WeakSet()
_sharded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_lock = threading.RLock()  # ranks may be threads
_numbers = itertools.count()


class FlatShard(Shard):
    """Placement that a sharded parameter shows: it equals Shard(0), so that distribute_tensor() makes a DTensor that can be loaded.

    A rank's slice is a range of the flattened parameter, which is not the rows that Shard(0) gives it: `to_local()` is 1-D.
    """

    def __repr__(self) -> str:
        return "FlatShard()"


class Call:
    """One call of fully_shard. modules: of the unit.

    root: the call of the model's root, once the model is sharded; engine: the model's, at the root alone.
    """

    root: Call | None = None
    engine: Engine | None = None
    entered = False  # a forward has begun
    sync = True  # `set_requires_gradient_sync`
    factor: float | None = None  # `set_gradient_divide_factor`

    def __init__(
        self, modules: tuple[nn.Module, ...], mesh: DeviceMesh | None, reshard_after_forward: bool | int | None,
        mp_policy: MixedPrecisionPolicy, offload: CPUOffloadPolicy | None,
    ) -> None:  # fmt: skip
        self.modules, self.mesh, self.mp_policy, self.offload = modules, mesh, mp_policy, offload
        self.reshard_after_forward = reshard_after_forward
        self.number = next(_numbers)  # ranks shard models in the order of their calls: a set has another order on each
        self.undefined: dict[Call, tuple[int, list[str]]] = {}  # of the root: see `check_values`

    @property
    def module(self) -> nn.Module:
        """The first module of the unit."""
        return self.modules[0]

    @property
    def lowers(self) -> bool:
        """True if parameters, not sharded yet, will compute in a dtype below the one in which the program gave them."""
        dtype = self.mp_policy.param_dtype
        own = [param for module in self.managed() for _, param in nn.Module.named_parameters(module, recurse=False)]
        return dtype is not None and any(dtype.itemsize < param.dtype.itemsize for param in own if param.is_floating_point())

    @property
    def waits(self) -> bool:
        """True until the model is sharded: parameters are the program's own."""
        return self.root is None

    def own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters in the tree of the call's first module, by name, as they are now."""
        yield from nn.Module.named_parameters(self.module)

    def check_values(self) -> None:
        """Raise ConfigError, naming parameters, if some came on the meta device and nothing has given them values (at the root).

        undefined: for each call with such parameters, the number of writes to its unit when it was sharded, and their names.
        """
        names = [name for name, param in self.own_parameters() if param.is_meta] if self.waits else []
        for call, (writes, each) in self.undefined.items():
            assert self.engine is not None
            names += each if self.engine.writes(call.managed()) == writes else []
        if names:
            raise ConfigError(
                f"{type(self.module).__name__}: a forward needs values, and these parameters are on the meta device: {names}. Call "
                "model.to_empty(device=...) after fully_shard and initialise them, or load them: model.load_state_dict(state, assign=True)."
            )
        self.undefined = {}

    def tree(self) -> set[nn.Module]:
        """Return the unit's modules and all inside of them."""
        return {inside for module in self.modules for inside in module.modules()}

    def managed(self) -> set[nn.Module]:
        """Return the modules of the unit, without those of units inside of it."""
        found: set[nn.Module] = set()

        def visit(module: nn.Module) -> None:
            found.add(module)
            for child in module.children():
                if STATE not in child.__dict__ and child not in found:
                    visit(child)

        for module in self.modules:
            visit(module)
        return found

    def complete(self) -> Call:
        """Shard the model of this call, unless that has been done (collective); return the call of its root."""
        with _lock:
            if self.root is not None:
                return self.root
            around = [call for call in _waiting if call is not self and self.module in call.tree()]
            root = max(around, key=lambda call: len(call.tree()), default=self)
            inside = root.tree()
            inner = [call for call in _waiting if call is not root and call.module in inside]
        if len(root.modules) > 1:
            kinds = ", ".join(type(module).__name__ for module in root.modules)
            raise ConfigError(
                f"fully_shard([{kinds}]): these modules are used, and no fully_shard has been called on a model that holds them. Call "
                "fully_shard(model) before its first use."
            )
        if next(root.own_parameters(), None) is None:
            return root  # nothing to shard; an outer call may follow
        order = {module: number for number, module in enumerate(root.module.modules())}
        inner.sort(key=lambda call: order[call.module])
        for call in (root, *inner):  # first: zs.shard lists the parameters, too
            call.root = root
        try:
            _shard(root, inner)
        except BaseException:
            for call in (root, *inner):
                call.root = None
            raise
        with _lock:
            for call in (root, *inner):
                _waiting.discard(call)
        for call in (root, *inner):
            if call.factor is not None:
                root.engine.divide_gradients(call.managed(), call.factor)  # type: ignore[union-attr]
        expect_all()
        return root

    def reopen(self) -> None:
        """Close the model of this root, whose parameters become the program's own again (collective): an outer call follows."""
        if self.entered:
            raise ConfigError(
                f"fully_shard: {type(self.module).__name__}, a part of this module, has run a forward as a model of its own: call fully_shard on the "
                "whole model, the inner modules first, before the first forward."
            )
        close(self.module)
        _sharded.discard(self.module)
        self.engine = None
        for module in self.tree():
            call = module.__dict__.get(STATE)
            if call is not None:
                call.root = None
                with _lock:
                    _waiting.add(call)


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
        reshard_after_forward: False: gathered until the backward, if it is False of all units (else the unit is gathered again, unless it
            is the next one to be used); a number: the ranks over which a second copy stays sharded (zero_hpz_partition_size).
        shard_placement_fn: called for each parameter; Shard of any axis and None are the same here, since a rank's slice is a range of
            the flattened parameter.
        mp_policy: param_dtype: the dtype in which the unit computes, with fp32 masters; reduce_dtype: in which gradients are sent;
            output_dtype, cast_forward_inputs: whether outputs and inputs of each module are cast.
        offload_policy: CPUOffloadPolicy: parameters and optimizer states rest on the host, which steps.
        ignored_params, dp_mesh_dims: not served.

    Raises:
        ConfigError: the module was given before, has no forward, an argument is not served, or a part of it has run a forward.
    """
    given = module if isinstance(module, list) else [module]
    policy = mp_policy or MixedPrecisionPolicy()
    modules = _checked(given)
    if ignored_params:
        raise ConfigError(
            "fully_shard: ignored_params: parameters that are not sharded stay outside of the module here: keep them in a module of "
            "their own, beside the one that is sharded."
        )
    if dp_mesh_dims is not None:
        raise ConfigError("fully_shard: dp_mesh_dims: give the data-parallel axes as mesh=mesh['dp'], and DTensors over the others.")
    if mesh is not None and (not isinstance(mesh, DeviceMesh) or mesh.ndim > 2):
        got = f"{mesh.ndim} axes" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
        raise ConfigError(f"fully_shard: mesh: expected a DeviceMesh of 1 or 2 axes, got {got}. Slice it: mesh['dp'].")
    kept = reshard_after_forward
    if kept is not None and not isinstance(kept, bool) and not (isinstance(kept, int) and kept > 0):
        raise ConfigError(
            f"fully_shard: reshard_after_forward: expected None, a bool or a number of ranks, got {kept!r}."
        )
    if offload_policy is not None and not isinstance(offload_policy, OffloadPolicy):
        raise ConfigError(f"fully_shard: offload_policy: expected an OffloadPolicy, got {type(offload_policy).__name__}.")
    for param in (param for each in modules for param in each.parameters()) if shard_placement_fn is not None else ():
        placement = shard_placement_fn(param)
        if placement is not None and not isinstance(placement, Shard):
            raise ConfigError(f"fully_shard: shard_placement_fn: expected None or Shard, got {placement}: one mesh for a model.")
        if placement is not None and not -param.ndim <= placement.dim < max(param.ndim, 1):
            raise ConfigError(
                f"fully_shard: shard_placement_fn: {placement} of a parameter of shape {tuple(param.shape)}, which has no such axis."
            )
    from .module import become_fsdp

    for each in dict.fromkeys(inside for outer in modules for inside in outer.modules()):
        earlier = each.__dict__.get(STATE)
        if earlier is not None and earlier.engine is not None:
            earlier.reopen()
    offload = offload_policy if isinstance(offload_policy, CPUOffloadPolicy) else None
    call = Call(modules, mesh, reshard_after_forward, policy, offload)
    for each in modules:
        each.__dict__[STATE] = call
        become_fsdp(each)
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            each.register_forward_pre_hook(_casts_inputs(policy.param_dtype), prepend=True, with_kwargs=True)
        if policy.output_dtype is not None:
            each.register_forward_hook(_casts_output(policy.output_dtype))
    with _lock:
        _waiting.add(call)
    return module


def _checked(given: Sequence[Any]) -> tuple[nn.Module, ...]:
    """Return the modules of a call; of a list, those that are not inside of another one. Raise ConfigError for what can be no unit."""
    for module in given:
        name = type(module).__name__
        if not isinstance(module, nn.Module):
            raise ConfigError(f"fully_shard: module: expected an nn.Module or a list of them, got {name}.")
        if type(module).forward is nn.Module.forward:
            raise ConfigError(f"fully_shard does not support containers that do not implement forward: {name}. Call it on the items.")
        if STATE in module.__dict__:
            raise ConfigError(f"fully_shard has already been applied to this {name}: call it once on each module, the root at last.")
        for attribute, param in nn.Module.named_parameters(module):
            if hasattr(param, "fsdp_pre_all_gather"):
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


def _moves_inputs(device: torch.device) -> Callable[[nn.Module, Any, Any], Any]:
    return lambda module, args, kwargs: map_tensors(lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs))


def _casts_output(dtype: torch.dtype) -> Callable[[nn.Module, Any, Any], Any]:
    return lambda module, args, output: cast(output, dtype)


def _shard(root: Call, inner: Sequence[Call]) -> None:
    """Shard a model (collective), and let it serve what programs ask of FSDP2's."""
    model = root.module
    names = {id(module): name for name, module in model.named_modules()}
    options = options_of(root, inner, names)
    on_meta = {name for name, param in root.own_parameters() if param.is_meta}
    mesh = root.mesh
    if mesh is None and dist.is_initialized():
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    elif mesh is not None:
        options |= _ranks_of(mesh, model)
    if mesh is not None and mesh.device_type != "cpu":
        moved(model, torch.device(mesh.device_type, torch.cuda.current_device()))
    with values_to_come():
        shard(model, None, **options)
    root.engine = engine_of(model)
    if mesh is not None:
        root.engine.show(mesh, (Replicate(),) * (mesh.ndim - 1) + (FlatShard(0),))
    serve_states(model, root.engine)
    for call in (root, *inner) if on_meta else ():
        held = {f"{names[id(module)]}.{attribute}".lstrip(".") for module in call.managed() for attribute in own_parameters(module)}
        if mine := sorted(held & on_meta):
            root.undefined[call] = root.engine.writes(call.managed()), mine
    if mesh is not None and mesh.device_type != "cpu":
        device = torch.device(mesh.device_type, torch.cuda.current_device())
        root.engine.also_remove([model.register_forward_pre_hook(_moves_inputs(device), prepend=True, with_kwargs=True)])
    _sharded.add(model)


def _ranks_of(mesh: DeviceMesh, model: nn.Module) -> dict[str, Any]:
    """Return the argument of zs.shard that says which ranks shard a model."""
    distributed = any(isinstance(param, DTensor) for param in model.parameters())
    if mesh.ndim == 1 and not distributed and mesh.mesh.tolist() == list(range(dist.get_world_size())):
        return {}  # all ranks: of one host, they share memory
    if not distributed:
        return {"comm": mesh} if mesh.ndim == 1 else {"mesh": mesh}
    return {"mesh": _with_axes_of(mesh, model)}


def _with_axes_of(mesh: DeviceMesh, model: nn.Module) -> DeviceMesh:
    """Return the root mesh of `mesh`, sliced to its axes and those along which DTensors of a model are cut.

    Along any other axis, such as pp, each rank has a model of its own, with an optimizer of its own.
    """
    root = mesh._get_root_mesh()
    meshes = [mesh, *(param.device_mesh for param in model.parameters() if isinstance(param, DTensor))]
    used = {name for each in meshes for name in each.mesh_dim_names or (None,)}
    names = tuple(name for name in root.mesh_dim_names or () if name in used)
    return root[names] if len(names) == len(used) and len(names) < root.ndim else root


def complete_owners(params: Iterable[Any]) -> None:
    """Complete each model that waits for its first use, if one of these is its parameter."""
    wanted = {id(param) for param in params}
    with _lock:
        waiting = sorted(_waiting, key=lambda call: call.number) if wanted else []
    for call in waiting:
        if call.waits and any(id(param) in wanted for module in call.modules for _, param in nn.Module.named_parameters(module)):
            call.complete()


def sharded_models() -> list[nn.Module]:
    """Return the models of this process that this door has sharded, and that are not closed."""
    return list(_sharded)


def call_of(module: nn.Module | FSDPModule) -> Call:
    """Return the Call that named a module."""
    return module.__dict__[STATE]  # type: ignore[no-any-return]
