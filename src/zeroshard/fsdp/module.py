"""FSDPModule: the class of a module that was given to fully_shard, with FSDP2's methods."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import UnshardHandle

from ..errors import ConfigError, ModelChanged
from ..public import register_forward
from ..seam import NOT_SHARDED, Engine, stays_whole
from ..utils.torch_compat import convert_own, disable_dynamo, own_buffers
from .calls import STATE, Call, call_of

if TYPE_CHECKING:
    _Module = nn.Module
else:
    _Module = object  # the program's class, a module, is the next base

_classes: dict[type, type] = {}  # a program's class -> its subclass


def become_fsdp(module: nn.Module) -> None:
    """Change the class of a module to a subclass of FSDPModule and its own class."""
    own = type(module)
    if own not in _classes:
        _classes[own] = cast(Any, type(own))(
            f"FSDP{own.__name__}", (FSDPModule, own), {"_plain_class": own, "__module__": own.__module__}
        )
    module.__class__ = _classes[own]


class Misused(ConfigError, AssertionError):
    """A call that FSDP2 answers with an AssertionError."""


class _Handle(UnshardHandle):
    """Handle of `unshard(async_op=True)`."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait: Callable[[], None] | None = wait

    def wait(self) -> None:
        """Wait for the gather; whole parameters are in the modules then."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()


class FSDPModule(torch_fsdp.FSDPModule, _Module):
    """Mixin of modules that fully_shard was called on; also an instance of torch.distributed.fsdp.FSDPModule.

    The first use of the model's parameters shards the model (calls.py). Methods that only choose how FSDP2 overlaps its own
    collectives are taken: zeroshard learns the order of units in the first step.
    """

    _plain_class: type[nn.Module]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object of the program's class, since nn.Sequential makes its slices by `type(self)(...)`."""
        made = cls._plain_class.__new__(cls._plain_class)
        made.__init__(*args, **kwargs)  # type: ignore[misc]
        return made

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise Misused(
            f"FSDP does not support deepcopy: {type(self).__name__} was given to fully_shard. Copy it before, or load its state_dict()."
        )

    # -- first uses -----------------------------------------------------------------------------------------

    def _ready(self) -> Call:
        call = call_of(self)
        return call.root or call.complete()

    @disable_dynamo
    def _enter(self) -> None:
        call = call_of(self)
        if call.waits:
            call.check_values()
        root = self._ready()
        if root.placed:
            root.take_assigned()
            root.placed = []
        if root.undefined:
            root.check_values()
        root.entered = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._enter()
        return super().__call__(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._ready()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._ready()
        return super().load_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Apply a conversion (`to`, `cuda`, `to_empty`). Before the model is sharded, parameters may be converted to another dtype.

        Raise ModelChanged if the model is sharded, and the conversion would change dtype or device of parameters.
        """
        modules: list[nn.Module] = list(self.modules()) if recurse else [self]
        own = [param for module in modules for _, param in nn.Module.named_parameters(module, recurse=False)]
        if call_of(self).waits and any(_converted(fn, param).dtype != param.dtype for param in own):
            for module in modules:
                whole = [name for name, param in nn.Module.named_parameters(module, recurse=False) if stays_whole(param)]
                convert_own(module, fn)
                for name in whole:  # torch may have put other objects into the modules
                    setattr(getattr(module, name), NOT_SHARDED, True)
            call_of(self).wait()
            return self
        root = self._ready()
        if root.engine is not None:
            root.engine.units(set(modules)).reshard()
        for module in modules:
            for name, param in nn.Module.named_parameters(module, recurse=False):
                if stays_whole(param):
                    continue
                after = _converted(fn, param)
                if after.dtype != param.dtype or (after.device.type != param.device.type and not after.is_meta):
                    raise ModelChanged(
                        f"{type(self).__name__}: parameter {name} would be converted from {param.dtype} on {param.device} to {after.dtype} on "
                        f"{after.device}, and the model is sharded. Convert it before its first use (a forward, a state dict, an optimizer), or "
                        "use mp_policy, or zs.offload_states(model)."
                    )
        for module in modules:
            for name, buffer in module.named_buffers(recurse=False):
                own_buffers(module)[name] = fn(buffer)
            for name, param in nn.Module.named_parameters(module, recurse=False):
                if stays_whole(param):
                    _convert(module, name, param, fn)
        if root.undefined and _gives_memory(fn):
            inside = set(modules)
            root.undefined = {call: each for call, each in root.undefined.items() if not call.managed() & inside}
        return self

    # -- gathering ------------------------------------------------------------------------------------------

    @property
    def _engine(self) -> Engine | None:
        """The model's engine; None if it has no parameters."""
        return self._ready().engine

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the unit's parameters (collective). async_op: return a handle whose `wait` puts them into the modules."""
        engine = self._engine
        handle = _Handle(engine.units(call_of(self).managed()).unshard() if engine is not None else lambda: None)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Release the unit's gathered parameters; no-op while a forward or backward uses them."""
        call = call_of(self)
        if call.root is not None and call.root.engine is not None:
            call.root.engine.units(call.managed()).reshard()

    def reset_iter_state(self) -> None:
        """Clear what a forward or backward that raised has left, and drop the gradients. Call it on the model's root."""
        engine = self._engine
        if engine is not None:
            engine.recover()

    # -- gradients ------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether the backwards that follow reduce the gradients of these units; every rank must set the same."""
        self._set_sync(recurse, reduces=bool(requires_gradient_sync), all_reduces=bool(requires_gradient_sync))

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether gradients are summed over the replicas of a mesh of two axes. Here both sums are held back together."""
        self._set_sync(recurse, all_reduces=bool(requires_all_reduce))

    def _set_sync(self, recurse: bool, **switches: bool) -> None:
        for call in self._calls(recurse):
            vars(call).update(switches)
        self._ready().switch()

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Let the unit's reduced gradients be the sum over ranks divided by `factor`; by default it is their number."""
        if not factor > 0:
            raise ConfigError(f"set_gradient_divide_factor: expected a number above 0, got {factor!r}.")
        call = call_of(self)
        call.factor = factor
        if call.root is not None and call.root.engine is not None:
            call.root.engine.units(call.managed()).divide_gradients(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Deprecated name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Take the setting of torch 2.15's FSDP2. Here each backward ends by itself, and `finalize_backward` does what is left."""

    def finalize_backward(self, *, async_op: bool = False) -> UnshardHandle | None:
        """Reduce the gradients that backwards have held back, but those of units that still hold them back (collective).

        async_op: return a handle; there is nothing left to wait for. No-op before the model's first forward.
        """
        root = call_of(self).root  # not `_engine`, which would be the model's first use
        if root is not None and root.engine is not None and root.entered and root.syncs:
            root.engine.held_gradients.reduce()
        return _Handle(lambda: None) if async_op else None

    # -- what only chooses how FSDP2 overlaps its collectives: taken, without effect on any number --------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Take FSDP2's setting. Here every backward waits for its reductions."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether the unit is released after a forward, or stays gathered until its backward or `reshard`."""
        if not isinstance(reshard_after_forward, bool):
            raise ConfigError(f"set_reshard_after_forward: expected a bool, got {type(reshard_after_forward).__name__}.")
        for call in self._calls(recurse):
            if call.root is None:
                call.reshard_after_forward = reshard_after_forward
            elif call.root.engine is not None:
                call.root.engine.units(call.managed()).stay(False, not reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether the unit is released after a backward, or stays gathered until `reshard` or a step."""
        self._ready()
        for call in self._calls(recurse):
            if call.root is not None and call.root.engine is not None:
                call.root.engine.units(call.managed()).stay(True, not reshard_after_backward)

    def _calls(self, recurse: bool) -> list[Call]:
        return [call_of(module) for module in (self.modules() if recurse else [self]) if STATE in module.__dict__]

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Take FSDP2's setting. Here the order of the first step says what is gathered ahead."""
        _check_modules(modules)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Take FSDP2's setting. Here the order of the first step says what is gathered ahead."""
        _check_modules(modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Take FSDP2's setting. Here a unit is gathered in backward when a gradient reaches it."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Take FSDP2's setting. Here gradients are summed, and scaled as they are added."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Take FSDP2's setting. Here ranks may always use different parameters."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Take FSDP2's setting. Here buffers of constant number and size are sent from."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"set_reduce_scatter_max_input_buffers: expected an int, got {max_input_buffers!r}.")
        if max_input_buffers < 1:
            raise ConfigError(f"set_reduce_scatter_max_input_buffers: expected an int of at least 1, got {max_input_buffers!r}.")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Take FSDP2's setting."""

    def set_post_optim_event(self, event: Any) -> None:
        """Take FSDP2's setting. Here a gather waits for the step that wrote what it reads."""

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Take FSDP2's setting."""

    # -- what has no counterpart ------------------------------------------------------------------------------

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take FSDP2's setting, with a warning: buffers come from torch's allocator."""
        _unused("set_allocate_memory_from_process_group_for_comm")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Take FSDP2's setting, with a warning: buffers come from torch's allocator."""
        _unused("set_symm_mem_for_comm")

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Raise ConfigError if `keep`: a unit has no gathered memory of its own between its uses."""
        if keep:
            _refuse(
                "set_keep_unsharded_storage(True)",
                "with zeroshard.fsdp.configure(stage=2) parameters are whole at rest, and keep their place",
            )

    def set_custom_all_gather(self, comm: Any) -> None:
        """Raise ConfigError: zeroshard's communicators are others (`zeroshard.seam.register(comm=)`)."""
        _refuse("set_custom_all_gather", "register a communicator with zeroshard.seam.register(name, comm=...)")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Raise ConfigError: zeroshard's communicators are others (`zeroshard.seam.register(comm=)`)."""
        _refuse("set_custom_reduce_scatter", "register a communicator with zeroshard.seam.register(name, comm=...)")

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> None:
        """Raise ConfigError: a gradient is whole on no rank."""
        _refuse("set_all_reduce_hook", "use a mesh of two axes for HSDP, or change p.grad before the step")

    def _get_fsdp_state(self) -> NoReturn:
        raise ConfigError(
            f"{type(self).__name__}._get_fsdp_state: this module is sharded by zeroshard.fsdp, which has no FSDPState. For its units and "
            "buffers: zs.report(model), zeroshard.seam.engine_of(model)."
        )


def holds_models(module: object) -> bool:
    """Return whether a module is, or holds, one that fully_shard was called on; these are sharded then (collective)."""
    found = [each for each in module.modules() if isinstance(each, FSDPModule)] if isinstance(module, nn.Module) else []
    for each in found:
        each._ready()
    return bool(found)


def _converted(fn: Callable[[torch.Tensor], torch.Tensor], param: nn.Parameter) -> torch.Tensor:
    return fn(torch.empty(0, dtype=param.dtype, device=param.device))


def _convert(module: nn.Module, name: str, param: nn.Parameter, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Apply a conversion to a parameter that the program keeps; one that leaves the meta device is another object then."""
    with torch.no_grad():
        value = fn(param)
    if value.is_meta == param.is_meta:
        param.data = value
        return
    made = nn.Parameter(value, param.requires_grad)
    setattr(made, NOT_SHARDED, True)
    setattr(module, name, made)


def _gives_memory(fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Return whether a conversion is that of `to_empty`, which takes tensors of the meta device."""
    try:
        return not fn(torch.empty(0, device="meta")).is_meta
    except NotImplementedError:
        return False


def _check_modules(modules: list[Any]) -> None:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ConfigError(f"expected modules that fully_shard was called on, got {type(module).__name__}.")


def _unused(name: str) -> None:
    warnings.warn(f"zeroshard.fsdp: {name} has no effect: buffers for communication come from torch's allocator.", stacklevel=3)


def _refuse(name: str, remedy: str) -> NoReturn:
    raise ConfigError(f"zeroshard.fsdp does not serve {name}: {remedy}.")


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of the module gather its unit as a forward does; no-op for a module that fully_shard was not called on."""
    if isinstance(module, FSDPModule):
        register_forward(module, method_name)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Take FSDP2's setting. Here models of one device share its streams."""
    _check_modules(modules)
