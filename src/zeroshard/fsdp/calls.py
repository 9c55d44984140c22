"""Calls of fully_shard: each names a unit; the outermost one is the model's root, which zs.shard shards at its first use.

    fully_shard(block) ... fully_shard(model)      recorded: parameters are still the program's own
    model.parameters(), model.state_dict(),        the first of these shards the model: parameters become sharded ones, in place
    a forward, an optimizer of its parameters      (the same objects)

A call can not know whether an outer one follows, so the root is found at the first use. A part that was used before (its
parameters were listed, say) is a root of its own then; a later call around it closes it, and shards it with the rest.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..api import close, shard
from ..assembly.late_optimizer import expect, watch
from ..errors import ConfigError
from ..seam import FIRST_USE, Engine, engine_of, showing_masters
from ..utils.torch_compat import tree_map_only
from ..values import values_to_come
from .configuration import moved, options_of
from .state_dicts import serve_loads

STATE = "_zeroshard_fsdp"  # entry of a module's __dict__: the Call that named it
_waiting: weakref.WeakSet[Call] = weakref.WeakSet()
_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # all of the process
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
    """One call of fully_shard. modules: of the unit. given_dtype: the widest dtype of its floating-point parameters.

    root: the call of the model's root, once the model is sharded; engine: the model's, at the root alone. number: of calls before it,
    the order in which every rank sees to several calls.
    """

    root: Call | None = None
    engine: Engine | None = None
    entered = False  # a forward has begun
    joined: list[Call]  # of a holder of several models (`Several`): their roots
    sync = True  # `set_requires_gradient_sync`
    factor: float | None = None  # `set_gradient_divide_factor`

    def __init__(
        self, modules: tuple[nn.Module, ...], mesh: DeviceMesh | None, reshard_after_forward: bool | int | None,
        mp_policy: MixedPrecisionPolicy, offload: CPUOffloadPolicy | None,
    ) -> None:  # fmt: skip
        self.modules, self.mesh, self.mp_policy, self.offload = modules, mesh, mp_policy, offload
        self.number, self.joined = next(_numbers), []
        self.reshard_after_forward = reshard_after_forward
        own = [param for module in self.managed() for param in module.parameters(recurse=False) if param.is_floating_point()]
        self.given_dtype = max((param.dtype for param in own), key=lambda dtype: dtype.itemsize, default=None)

    @property
    def module(self) -> nn.Module:
        """The first module of the unit."""
        return self.modules[0]

    @property
    def lowers(self) -> bool:
        """True if parameters compute in a dtype below the one in which the program gave them."""
        dtype = self.mp_policy.param_dtype
        return dtype is not None and self.given_dtype is not None and dtype.itemsize < self.given_dtype.itemsize

    def tree(self) -> set[nn.Module]:
        """Return the unit's modules and all inside of them."""
        return {inside for module in self.modules for inside in module.modules()}

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return all parameters of the unit's modules, without using the model, as FSDPModule.parameters() does."""
        for module in self.modules:
            for _, param in nn.Module.named_parameters(module):
                yield param

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
            module.__dict__[FIRST_USE] = self.complete
        with _lock:
            _waiting.add(self)

    def outermost(self) -> Call:
        """Return the call, of those that wait, whose model holds this unit and no other holds."""
        around = [call for call in _waiting if call is not self and self.module in call.tree()]
        return max(around, key=lambda call: len(call.tree()), default=self)

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
        for call in (root, *inner):
            _waiting.discard(call)
            if call.factor is not None:
                root.engine.divide_gradients(call.managed(), call.factor)  # type: ignore[union-attr]
        expect_late_optimizers()
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
                if not call.joined:
                    _waiting.add(call)


def _shard(root: Call, inner: Sequence[Call]) -> None:
    """Shard a model (collective), and let it serve what programs ask of FSDP2's."""
    model = root.module
    names = {id(module): name for name, module in model.named_modules()}
    options = options_of(root, inner, names)
    mesh = root.mesh
    if mesh is None and dist.is_initialized():
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    elif mesh is not None:
        options |= _ranks_of(mesh, model)
    if mesh is not None and mesh.device_type != "cpu":
        moved(model, torch.device(mesh.device_type, torch.cuda.current_device()))
    with values_to_come(), showing_masters():
        shard(model, None, **options)
    root.engine = engine_of(model)
    if mesh is not None:
        root.engine.show(mesh, (Replicate(),) * (mesh.ndim - 1) + (FlatShard(0),))
    serve_loads(model, root.engine)
    with _lock:
        _sharded.add(model)


def _ranks_of(mesh: DeviceMesh, model: nn.Module) -> dict[str, Any]:
    """Return the argument of zs.shard that says which ranks shard a model."""
    distributed = any(isinstance(param, DTensor) for param in model.parameters())
    if mesh.ndim == 1 and not distributed and mesh.mesh.tolist() == list(range(dist.get_world_size())):
        return {}  # all ranks: of one host, they share memory
    if mesh.ndim == 1:
        return {"comm": mesh}
    return {"mesh": mesh._get_root_mesh() if distributed else mesh}


class Several(nn.Module):
    """Holder of models that one optimizer steps, which are units of one sharded model then. Nobody calls it."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        for number, model in enumerate(models):
            self.add_module(str(number), model)


def _cast_inputs_to(dtype: torch.dtype) -> Callable[[nn.Module, Any, Any], Any]:
    def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))

    return cast


def _complete_owners(optimizer: torch.optim.Optimizer, params: Iterable[Any]) -> None:
    """Complete the models whose parameters an optimizer holds or is given; several become one sharded model (collective).

    Raise ConfigError if there are several, and one has run a forward, or they are sharded over different ranks.
    """
    wanted = {id(param) for param in params}
    wanted |= {id(param) for group in optimizer.param_groups for param in group["params"]}
    with _lock:
        calls = {call_of(model) for model in _sharded} | {call.outermost() for call in _waiting}
    owners = [call for call in calls if any(id(param) in wanted for param in call.parameters())]
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
            dtype = root.mp_policy.param_dtype if root.mp_policy.cast_forward_inputs else None
            if dtype is not None and not root.joined:  # the engine casts what a model's root gets
                root.module.register_forward_pre_hook(_cast_inputs_to(dtype), with_kwargs=True)
        parts = [part for root in roots for part in root.joined or [root]]
        joint = Call((Several(part.module for part in parts),), parts[0].mesh, None, parts[0].mp_policy, None)
        joint.joined, joint.module.__dict__[STATE] = parts, joint
        joint.wait()
        roots = [joint]
    for root in roots:
        root.complete()


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
        if given is not None and not isinstance(given, Tensor):
            given = param_group["params"] = list(given)  # it may be a generator
        listed = [given] if isinstance(given, Tensor) else given or ()
        _complete_owners(self, [each[1] if isinstance(each, tuple) else each for each in listed])
        _optimizers.add(self)
        plain(self, param_group)

    torch.optim.Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


def expect_late_optimizers() -> None:
    """Let each optimizer made so far become a sharded one at its first use, if it has parameters of a sharded model by then."""
    for optimizer in list(_optimizers):
        expect(optimizer)


def sharded_models() -> list[nn.Module]:
    """Return the models of this process that this door has sharded, and that are not closed."""
    return list(_sharded)


def call_of(module: nn.Module) -> Call:
    """Return the Call that named a module."""
    return module.__dict__[STATE]
