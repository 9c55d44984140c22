"""Calls of fully_shard: each names a unit; the outermost one is the model's root, which zs.shard shards at its first use.

    fully_shard(block) ... fully_shard(model)      recorded: parameters are still the program's own
    a forward, model.state_dict(), to_empty(),     the first of these, on all ranks, shards the model: parameters become sharded
    an optimizer of its parameters                 ones, in place (the same objects)

Until then parameters are `WaitingParameter`s, which show the mesh and placements that they will have: one rank alone may list
them (to count them, say).

A call can not know whether an outer one follows, so the root is found at the first use. A part that was used before, but for
a forward, is a root of its own then; a later call around it closes it, and shards it with the rest.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..api import close, shard
from ..assembly.late_optimizer import expect, watch
from ..errors import ConfigError, ModelChanged
from ..seam import FIRST_USE, NOT_SHARDED, Engine, Shown, engine_of, info_of, masters_shown, stays_whole
from ..utils.setting import setting
from ..utils.tensor_tree import map_tensors
from ..utils.torch_compat import joined_mesh, own_parameters
from ..values import values_to_come
from .configuration import moved, options_of
from .gathered_view import NoMemory, viewed
from .state_dicts import serve_loads

STATE = "_zeroshard_fsdp"  # entry of a module's __dict__: the Call that named it
NOW = "_zeroshard_now"  # entry of the __dict__ of a DTensor that was a parameter: the sharded one in its place
_waiting: weakref.WeakSet[Call] = weakref.WeakSet()
# by address of a parameter that may wait: see `waits`
_at: weakref.WeakValueDictionary[int, Call] = weakref.WeakValueDictionary()
_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # all of the process
_sharded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_lock = threading.RLock()  # ranks may be threads
_numbers = itertools.count()
kept: list[nn.Module] | None = None  # sharded models, if the command will print their reports


class FlatShard(Shard):
    """Placement that a sharded parameter shows: it equals Shard(0), so that distribute_tensor() makes a DTensor that can be loaded.

    A rank's slice is a range of the flattened parameter, which is not the rows that Shard(0) gives it: `to_local()` is 1-D.
    """

    def __repr__(self) -> str:
        return "FlatShard()"


class WaitingParameter(nn.Parameter):
    """A parameter of a model that waits for its first use, whole and plain, with what programs ask of a DTensor."""

    _call: Call

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh over which the parameter will be sharded."""
        return self._call.outermost().shown()[0]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements that the sharded parameter will show."""
        return self._call.outermost().shown()[1]

    def full_tensor(self) -> Tensor:
        """Return a copy of the whole tensor; shard the model (collective)."""
        self._call.complete()
        return self.full_tensor()  # of the sharded parameter that the object is now

    def to_local(self) -> Tensor:
        """Return this rank's slice, flat; shard the model (collective)."""
        self._call.complete()
        return self.to_local()

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple:
        """Pickle as an ordinary parameter."""
        return nn.Parameter(self.data, self.requires_grad).__reduce_ex__(protocol)


class Call:
    """One call of fully_shard. modules: of the unit.

    root: the call of the model's root, once the model is sharded; engine: the model's, at the root alone. number: of calls before it,
    the order in which every rank sees to several calls.
    """

    root: Call | None = None
    engine: Engine | None = None
    entered = False  # a forward has begun
    joined: list[Call]  # of a holder of several models (`Several`): their roots
    reduces = all_reduces = True  # `set_requires_gradient_sync`, `set_requires_all_reduce`
    syncs = True  # of the root: backwards reduce gradients of some unit
    factor: float | None = None  # `set_gradient_divide_factor`
    whole_mesh: DeviceMesh | None = None  # with the axes that cut parameters, if the program has said which are data-parallel

    def __init__(
        self, modules: tuple[nn.Module, ...], mesh: DeviceMesh | None, reshard_after_forward: bool | int | None,
        mp_policy: MixedPrecisionPolicy, offload: CPUOffloadPolicy | None,
    ) -> None:  # fmt: skip
        self.modules, self.mesh, self.mp_policy, self.offload = modules, mesh, mp_policy, offload
        self.joined, self._shown = list[Call](), mesh
        self._places: dict[Any, tuple[DeviceMesh, tuple[Placement, ...]]] = {}  # see `place`
        self.reshard_after_forward = reshard_after_forward
        self.number = next(_numbers)  # ranks shard models in the order of their calls: a set has another order on each
        self.undefined: dict[Call, tuple[int, list[str]]] = {}  # of the root: see `check_values`
        self.placed: list[tuple[nn.Module, str, nn.Parameter]] = []  # of the root, until its first forward: see `take_assigned`

    @property
    def sync(self) -> bool:
        """True if backwards reduce gradients."""
        return self.reduces and self.all_reduces

    @property
    def module(self) -> nn.Module:
        """The first module of the unit."""
        return self.modules[0]

    @property
    def lowers(self) -> bool:
        """True if parameters, not sharded yet, will compute in a dtype below the one in which the program gave them."""
        dtype, given = self.mp_policy.param_dtype, self.given_dtype
        return dtype is not None and given is not None and dtype.itemsize < given.itemsize

    @property
    def given_dtype(self) -> torch.dtype | None:
        """The widest dtype of the unit's floating-point parameters."""
        own = [param.dtype for _, _, param in self.unit_parameters()]
        return max((dtype for dtype in own if dtype.is_floating_point), key=lambda dtype: dtype.itemsize, default=None)

    @property
    def waits(self) -> bool:
        """True until the model is sharded: parameters are the program's own."""
        return self.root is None

    def own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all parameters of the unit's modules, by name, as they are now; not those that the program keeps."""
        for module in self.modules:
            yield from (each for each in nn.Module.named_parameters(module) if not stays_whole(each[1]))

    def unit_parameters(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        """Yield (module, attribute, parameter) of the unit, without units inside of it; not those that the program keeps."""
        for module in self.managed():
            for attribute, param in nn.Module.named_parameters(module, recurse=False):
                if not stays_whole(param):
                    yield module, attribute, param

    def addresses(self) -> set[int]:
        """Return the addresses of the memory of the unit's parameters that wait for its first use."""
        waiting = [param for _, _, param in self.unit_parameters() if isinstance(param, WaitingParameter) and not param.is_meta]
        return {param.untyped_storage().data_ptr() for param in waiting}

    def keep_whole(self, ignored: Collection[nn.Parameter]) -> None:
        """Leave those of these parameters that would be of the unit to the program (`ignored_params`)."""
        ids = set(map(id, ignored))
        for _, _, param in self.unit_parameters():
            if id(param) in ids and not isinstance(param, WaitingParameter):  # an inner call, by another name, shards it
                setattr(param, NOT_SHARDED, True)

    def check_values(self) -> None:
        """Raise ConfigError, naming parameters, if some came on the meta device and nothing has given them values (at the root).

        undefined: for each call with such parameters, the number of writes to its unit when it was sharded, and their names.
        """
        names = {id(param): name for name, param in self.own_parameters() if param.is_meta} if self.waits else {}
        inside = dict.fromkeys(call_of(module) for each in self.modules for module in each.modules() if STATE in module.__dict__)
        held = [{id(param) for _, _, param in call.unit_parameters()} for call in inside if names]
        units = [[name for key, name in names.items() if key in ids] for ids in held]
        for call, (writes, each) in self.undefined.items():
            assert self.engine is not None
            units += [each] if self.engine.units(call.managed()).writes == writes else []
        if found := list(filter(None, units)):
            raise ConfigError(
                f"{type(self.module).__name__}: FSDP parameters should be materialized from meta device before training, but the following were "
                f"still on meta device: {', '.join(map(str, found))}. Call model.to_empty(device=...) after fully_shard and initialise them, "
                "or load them: model.load_state_dict(state, assign=True)."
            )
        self.undefined = {}

    def take_assigned(self) -> None:
        """Take the values of parameters that the program has assigned since the model was sharded, before its first forward (collective).

        The sharded parameters go back into the modules, and take the places of the assigned ones in optimizers (`_now`).
        """
        assert self.engine is not None
        gathered = {id(whole) for _, whole in self.engine.computed_parameters()}  # that unshard() has put into modules
        for module, attribute, param in self.placed:
            given = own_parameters(module).get(attribute)
            # what can not be taken raises when used
            if given is None or given is param or id(given) in gathered or given.is_meta or given.shape != param.shape:
                continue
            if (info := info_of(given)) is not None:
                raise ModelChanged(
                    f"{type(module).__name__}.{attribute} was tied to {info.name} after the model's first use (a state_dict(), to_empty(), an optimizer), "
                    "which has laid both out. Tie them before it, as by assigning right after fully_shard."
                )
            with torch.no_grad():
                param.copy_(given.full_tensor() if isinstance(given, DTensor) else given)
            param.requires_grad_(given.requires_grad)
            given.__dict__[NOW] = own_parameters(module)[attribute] = param

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

    def wait(self) -> None:
        """Wait for the first use of the model."""
        for module in self.modules:
            module.__dict__[FIRST_USE] = self.model
        for _, param in self.own_parameters():
            copied = type(param) is WaitingParameter and "_call" not in param.__dict__
            if type(param) is nn.Parameter or copied:
                param.__class__ = WaitingParameter
                param.__dict__["_call"] = self
        with _lock:
            _waiting.add(self)

    def model(self) -> nn.Module:
        """Shard the model of this call, unless that has been done (collective); return the module that is asked about its states."""
        root = self.complete()
        return root.module if self in root.joined else self.module

    def shown(self) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Return the mesh and the placements that parameters show."""
        if self._shown is None:
            if not dist.is_initialized():
                raise AttributeError("there is no process group, and so no device_mesh")
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self._shown = init_device_mesh(device, (dist.get_world_size(),))
        return self._shown, (Replicate(),) * (self._shown.ndim - 1) + (FlatShard(0),)

    def place(self, distribution: Any) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Return the mesh and placements of a parameter. distribution: its own along model axes, which the mesh has, too."""
        mesh, placements = self.shown()
        if distribution is None:
            return mesh, placements
        if distribution not in self._places:
            whole = self.whole_mesh or _with_axes_of([mesh, distribution.mesh])
            known = dict(zip(distribution.mesh.mesh_dim_names, distribution.placements, strict=True))
            known |= dict(zip(mesh.mesh_dim_names or (), placements, strict=True))
            self._places[distribution] = whole, tuple(known.get(name, Replicate()) for name in whole.mesh_dim_names or ())
        return self._places[distribution]

    def outermost(self) -> Call:
        """Return the call, of those that wait, whose model holds this unit and no other holds."""
        with _lock:
            around = [call for call in _waiting if call is not self and self.module in call.tree()]
        return max(around, key=lambda call: (len(call.tree()), -call.number), default=self)

    def complete(self) -> Call:
        """Shard the model of this call, unless that has been done (collective); return the call of its root."""
        with _lock:
            if self.root is not None:
                return self.root
            root = self.outermost()
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
        for call in inner:
            if outside := [module for module in call.modules if module not in inside]:
                raise ConfigError(
                    f"fully_shard([...]): {type(outside[0]).__name__} is not inside of the model, {type(root.module).__name__}, of which others of the "
                    "list are parts. Give it to a call of its own."
                )
            if call.mesh is not None and call.mesh != root.shown()[0]:
                raise ConfigError(
                    f"fully_shard: {type(call.module).__name__} was given another mesh than the model, {type(root.module).__name__}: all units of "
                    "a model are sharded over one mesh. Give both the same one."
                )
        for _, param in root.own_parameters():
            if isinstance(param, WaitingParameter):
                param.__class__ = nn.Parameter  # type: ignore[assignment]
                param.__dict__.pop("_call", None)
        for call in (root, *inner):  # first: zs.shard lists the parameters, too
            call.root = root
        try:
            _shard(root, inner)
        except BaseException:
            for call in (*inner, root):
                call.root = None
                if not call.joined:
                    call.wait()
            if root.joined:  # the program can make an optimizer for each part
                with _lock:
                    _waiting.discard(root)
            raise
        with _lock:
            for call in (root, *inner):
                _waiting.discard(call)
        root.switch()
        for call in (root, *inner):
            if call.factor is not None:
                root.engine.units(call.managed()).divide_gradients(call.factor)  # type: ignore[union-attr]
            if call.reshard_after_forward is False:
                root.engine.units(call.managed()).stay(False, True)  # type: ignore[union-attr]
        expect_late_optimizers()
        return root

    def switch(self) -> None:
        """Let backwards of this root's model reduce gradients as its units say: of all, of some, or of none."""
        calls = {call_of(module) for module in self.tree() if STATE in module.__dict__}
        still = [call for call in calls if not (call.sync or call.joined)]
        if self.engine is not None:
            self.syncs = len(still) < len(calls) - bool(self.joined)
            self.module.require_backward_grad_sync = self.syncs  # type: ignore[assignment]
            self.engine.units({module for call in still for module in call.managed()} if self.syncs else ()).pause()

    def reopen(self) -> None:
        """Close the model of this root, whose parameters become the program's own again (collective): an outer call follows."""
        if self.entered:
            raise ConfigError(
                f"fully_shard: {type(self.module).__name__}, a part of this module, has run a forward as a model of its own: call fully_shard on the "
                "whole model, the inner modules first, before the first forward."
            )
        if self.undefined:
            raise ConfigError(
                f"fully_shard: parameters of {type(self.module).__name__}, a part of this module that was used before, have no values yet. Call "
                "fully_shard on the whole model before its first use."
            )
        before = dict(self.own_parameters())
        close(self.module)
        with _lock:
            _sharded.discard(self.module)
            if kept is not None:
                kept[:] = [model for model in kept if model is not self.module]
        self.engine, self.placed = None, []
        if any(param is not before[name] for name, param in self.own_parameters()):
            raise ConfigError(
                f"fully_shard: parameters of {type(self.module).__name__}, a part of this module that was used before, could not be put back, "
                "since something holds weak references to them. Call fully_shard on the whole model before its first use."
            )
        for module in self.tree():
            call = module.__dict__.get(STATE)
            if call is not None:
                call.root = None
                if not call.joined:
                    call.wait()


def _shard(root: Call, inner: Sequence[Call]) -> None:
    """Shard a model (collective), and let it serve what programs ask of FSDP2's."""
    model = root.module
    names = {id(module): name for name, module in model.named_modules()}
    options = options_of(root, inner, names)
    on_meta = [name for name, param in root.own_parameters() if param.is_meta]
    given = {name: param for name, param in root.own_parameters() if isinstance(param, DTensor)}
    for cut, whole in _wholes(root, given.values()).items():
        for module in model.modules():
            entries = own_parameters(module)
            entries.update({name: whole for name, each in entries.items() if each is cut})
    mesh = root.mesh
    if mesh is None and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:  # as fully_shard of FSDP2
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if mesh is not None:
        params = [param for _, param in root.own_parameters()]
        options |= _ranks_of(mesh, params) if root.whole_mesh is None else {"mesh": root.whole_mesh}
    elif dist.is_initialized():
        mesh, _ = root.shown()
    if mesh is not None and mesh.device_type != "cpu":
        moved(model, torch.device(mesh.device_type, torch.cuda.current_device()))
    with setting(values_to_come, True), setting(masters_shown, True):
        shard(model, None, **options)
    for name, param in nn.Module.named_parameters(model) if given else ():  # torch can not turn a DTensor into another tensor
        if name in given:
            given[name].__dict__[NOW] = param
    root.engine = engine_of(model)
    own = ((module, *each) for module in model.modules() for each in nn.Module.named_parameters(module, recurse=False))
    root.placed = [each for each in own if not stays_whole(each[2])]
    if mesh is not None:
        root.engine.show(Shown(root.place, viewed, NoMemory, DTensor, waits))
    serve_loads(model, root.engine)
    root.engine.draw_alike()
    for call in (root, *inner) if on_meta else ():
        held = {
            f"{names[id(module)]}.{attribute}".lstrip(".") for module in call.managed() for attribute in own_parameters(module)
        }
        if mine := [name for name in on_meta if name in held]:
            root.undefined[call] = root.engine.units(call.managed()).writes, mine
    if mesh is not None and mesh.device_type != "cpu":
        device = torch.device(mesh.device_type, torch.cuda.current_device())
        entered = [part.module for part in root.joined] or [model]
        hooks = [each.register_forward_pre_hook(_moves_inputs(device), prepend=True, with_kwargs=True) for each in entered]
        root.engine.also_remove(hooks)
    with _lock:
        _sharded.add(model)
        if kept is not None:
            kept.append(model)


def _wholes(root: Call, given: Iterable[DTensor]) -> dict[DTensor, nn.Parameter]:
    """Return whole parameters for DTensors, cut as parameters show themselves, that the program has assigned (collective)."""
    cut = [param for param in given if (param.device_mesh, param.placements) == root.shown()]
    return {param: nn.Parameter(param.full_tensor().detach(), param.requires_grad) for param in cut}


def waits(tensor: Tensor) -> bool:
    """Return whether a whole tensor is a parameter of a model that waits for its first use, or shares the memory of one (`p.data`)."""
    if isinstance(tensor, WaitingParameter):
        return True
    address = tensor.untyped_storage().data_ptr() if type(tensor) is Tensor and not tensor.is_meta else 0
    if not address:
        return False
    with _lock:
        call = _at.get(address)
        if call is None or address not in call.addresses():  # the unit was sharded, or its parameters have moved
            _at.clear()
            _at.update({each: call for call in _waiting for each in call.addresses()})
        return address in _at


def _moves_inputs(device: torch.device) -> Callable[[nn.Module, Any, Any], Any]:
    return lambda module, args, kwargs: map_tensors(lambda tensor: tensor.to(device, non_blocking=True), (args, kwargs))


def _ranks_of(mesh: DeviceMesh, params: Sequence[nn.Parameter]) -> dict[str, Any]:
    """Return the argument of zs.shard that says which ranks shard a model of these parameters."""
    distributed = any(isinstance(param, DTensor) for param in params)
    if mesh.ndim == 1 and not distributed and mesh.mesh.tolist() == list(range(dist.get_world_size())):
        return {}  # all ranks: of one host, they share memory
    if not distributed:
        return {"comm": mesh} if mesh.ndim == 1 else {"mesh": mesh}
    return {"mesh": _with_axes_of([mesh, *(param.device_mesh for param in params if isinstance(param, DTensor))])}


def _with_axes_of(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return one mesh with the axes of these meshes: first the data-parallel one, then those along which DTensors of a model are cut.

    It is their root, sliced to these axes. Where an axis is none of the root's, since it was made by flattening or unflattening some, it
    is these meshes side by side: a flattened axis is one axis here, too. The first one's root if roots differ, or axes have no names.
    Along any other axis, such as pp, each rank has a model of its own, with an optimizer of its own.

    Raise ConfigError if meshes share ranks along an axis: a rank's data-parallel peers would hold other parts of a parameter.
    """
    root = meshes[0]._get_root_mesh()
    of_axis = {name: each for each in meshes for name in each.mesh_dim_names or ()}
    if not all(each.mesh_dim_names and each._get_root_mesh() == root for each in meshes):
        return root
    names = tuple(name for name in root.mesh_dim_names or () if name in of_axis)
    if len(names) < len(of_axis):
        try:
            return joined_mesh([each if each.ndim == 1 else each[name] for name, each in of_axis.items()])
        except RuntimeError as error:
            raise ConfigError(
                f"mesh: the data-parallel axes {meshes[0].mesh_dim_names} given to fully_shard overlap with axes of {tuple(of_axis)} along "
                "which parameters are cut. Flatten data-parallel axes alone, or give fully_shard a slice such as mesh['dp']."
            ) from error
    return root[names] if len(names) < root.ndim else root


class Several(nn.Module):
    """Holder of models that one optimizer steps, which are units of one sharded model then. Nobody calls it."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        for number, model in enumerate(models):
            self.add_module(str(number), model)


def _complete_owners(optimizer: torch.optim.Optimizer, params: Iterable[Any]) -> None:
    """Complete the models whose parameters an optimizer holds or is given; several become one sharded model (collective).

    Raise ConfigError if there are several, and one has run a forward, or they are sharded over different ranks.
    """
    wanted = {id(param) for param in params}
    wanted |= {id(param) for group in optimizer.param_groups for param in group["params"]}
    with _lock:
        waiting, calls = list(_waiting) if wanted else [], {call_of(model) for model in _sharded}
    inside = {module for call in waiting for module in call.tree() - set(call.modules)}
    calls |= {call for call in waiting if call.module not in inside}
    owners = [call for call in calls if any(id(param) in wanted for _, param in call.own_parameters())]
    roots = sorted(owners, key=lambda call: call.number)
    if len(roots) > 1:
        kinds = ", ".join(type(root.module).__name__ for root in roots)
        if any(root.entered for root in roots) or len({root.mesh for root in roots}) > 1:
            raise ConfigError(
                f"optimizer: this {type(optimizer).__name__} is given parameters of several models, {kinds}, which have run forwards or have "
                "different meshes. Call fully_shard on the module that holds them, or make an optimizer for each."
            )
        for root in roots:
            if root.engine is not None:
                root.reopen()
        parts = [part for root in roots for part in root.joined or [root]]
        joint = Call((Several(part.module for part in parts),), parts[0].mesh, None, parts[0].mp_policy, None)
        joint.joined, joint.module.__dict__[STATE] = parts, joint
        joint.wait()
        roots = [joint]
    for root in roots:
        root.complete().take_assigned()


@functools.cache
def track_optimizers() -> None:
    """From now on remember each optimizer, and complete models whose parameters one is given; once for the process.

    A program may make an optimizer before fully_shard, and give it the sharded parameters afterwards.
    """
    watch()
    plain = torch.optim.Optimizer.add_param_group

    @functools.wraps(plain)
    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        given = param_group.get("params")
        if given is not None and not isinstance(given, (Tensor, set)):  # torch refuses a set
            given = param_group["params"] = list(given)  # it may be a generator
        listed = [given] if isinstance(given, Tensor) else given or ()
        _complete_owners(self, [each[1] if isinstance(each, tuple) else each for each in listed])
        if isinstance(given, (Tensor, list)):
            now = [(each[0], _now(each[1])) if isinstance(each, tuple) else _now(each) for each in listed]
            param_group["params"] = now[0] if isinstance(given, Tensor) else now
        with _lock:
            _optimizers.add(self)
        plain(self, param_group)

    torch.optim.Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


def expect_late_optimizers() -> None:
    """Let each optimizer made so far become a sharded one at its first use, if it has parameters of a sharded model by then."""
    with _lock:
        made = list(_optimizers)
    for optimizer in made:
        for group in optimizer.param_groups:
            if any(NOW in param.__dict__ for param in group["params"]):
                group["params"] = [_now(param) for param in group["params"]]
        expect(optimizer)


def _now(param: Any) -> Any:
    """Return the sharded parameter in the place of a DTensor that was one, or what is given."""
    return getattr(param, "__dict__", {}).get(NOW, param)


def call_of(module: nn.Module) -> Call:
    """Return the Call that named a module."""
    return module.__dict__[STATE]
