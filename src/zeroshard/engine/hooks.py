"""Attaches a runtime to its model: registers all module and gradient hooks, and removes them on close.

Around a block that was compiled before sharding (`block.compile()`) the runtime is called outside of the compiled call, so that
torch.compile traces nothing of this library; in a later compilation `torch.compiler.disable` makes the hooks opaque.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils.parametrize import ParametrizationList

from ..utils import torch_compat
from ..utils.module_names import take_own_names
from .reduction import gradient_hook
from .runtime import Runtime
from .unit import ParamGroup, Unit

_attached: weakref.WeakValueDictionary[int, Runtime] = weakref.WeakValueDictionary()


def attach(runtime: Runtime) -> None:
    """Register all hooks of a runtime; `detach` is the inverse."""
    model = runtime.model
    runtime.comm.progress.models.add(model)
    _attached[id(runtime)] = runtime
    torch_compat.watch_backwards((Exception,), _backward_failed)  # once for the process; later calls do nothing
    for unit in runtime.units:
        for module in unit.modules if unit.sharded or unit.entries.distributed else ():
            _attach_unit(runtime, unit, module)
            if unit.sharded:  # so that torch.save(module) raises the runtime's error, not one about hooks
                module.__dict__["__reduce_ex__"] = runtime.__reduce_ex__
        for module in {owner for group in unit.gathered for spec in group.specs for owner, _ in spec.owners}:
            for before in (module.register_state_dict_pre_hook, module.register_load_state_dict_pre_hook):
                runtime.handles.append(before(_give_back))
        for group in unit.trainable:  # by torch's method: a parameter's own one wraps hooks of the program (engine/user_hooks.py)
            for index, param in enumerate(group.compute):
                runtime.handles.append(Tensor.register_post_accumulate_grad_hook(param, gradient_hook(group, index)))
                if group.values.sharded:  # an autograd.Function that is given the sharded parameter returns its gradient there
                    runtime.handles.append(torch_compat.hand_over_gradients(group.params[index], _computed(group, index)))

    def zero_grad(set_to_none: bool = True) -> None:
        """Drop or zero gradients as torch does, and also local sums, weights and norms, which `p.grad` does not show."""
        runtime.zero_grad(set_to_none)
        if type(model).zero_grad is not nn.Module.zero_grad:  # the user's class has one of its own
            type(model).zero_grad(model, set_to_none)

    before = torch.compiler.disable(lambda _module, args, kwargs: runtime.root_enter(args, kwargs))
    after = torch.compiler.disable(lambda _module, _args, output: runtime.root_exit(output))
    runtime.handles.append(model.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
    runtime.handles.append(model.register_forward_hook(after, always_call=True))  # also after a forward that raised
    model.__dict__["zero_grad"] = zero_grad
    model.__dict__["__reduce_ex__"] = runtime.__reduce_ex__
    runtime.handles.append(model.register_load_state_dict_pre_hook(take_own_names))


def _give_back(module: nn.Module, *_: object) -> None:
    """Put a module's sharded parameters back. Copies of a module take this hook along, and have no unit."""
    for unit in (unit for runtime in attached() for unit in runtime.units if unit.entries.swapped):
        if any(owner is module for group in unit.gathered for spec in group.specs for owner, _ in spec.owners):
            unit.give_back()


def _computed(group: ParamGroup, index: int) -> Callable[[], Tensor | None]:
    where = weakref.ref(group)  # not of the tensor: torch swaps no tensor that has a weak reference
    return lambda: None if (found := where()) is None else found.compute[index]


def attached() -> list[Runtime]:
    """Return the runtimes of all models of this process that are sharded now."""
    return [found for where in _attached.valuerefs() if (found := where()) is not None]


def at_rest(params: Iterable[Tensor]) -> list[Tensor]:
    """Return parameters, and of whole ones that a program's unshard() shows in modules, the sharded ones."""
    unsharded = [unit for runtime in attached() for unit in runtime.units if unit.entries.swapped and not unit.in_use]
    groups = [group for unit in unsharded for group in unit.gathered]
    resting = {id(c): param for group in groups for c, param in zip(group.compute, group.params, strict=True)}
    return [resting.get(id(param), param) for param in params]


def detach(runtime: Runtime) -> None:
    """Remove every hook; the inverse of `attach`."""
    runtime.comm.progress.models.discard(runtime.model)
    _attached.pop(id(runtime), None)
    for handle in runtime.handles:
        handle.remove()
    for module, compiled in runtime.compiled:
        torch_compat.set_compiled_call(module, compiled)
    runtime.model.__dict__.pop("zero_grad", None)
    for module in (runtime.model, *(module for unit in runtime.units for module in unit.modules)):
        module.__dict__.pop("__reduce_ex__", None)
    runtime.handles, runtime.compiled = [], []


def _registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    """Ignore that a version counter advances as a forward registers a parametrization (PEFT's LoRA): no value was written."""
    if type(module) is ParametrizationList and param is not None:
        for runtime in attached():
            for unit in runtime.units:
                unit.entries.set_to_itself(param)


def _backward_failed(error: BaseException) -> None:
    """Find the model in whose backward an error was raised, and let its watch replace the error (out of memory, say)."""
    runtimes = [found for found in attached() if not found.closed]
    # on CPUs, where ranks may be threads, it was this thread's; on a GPU threads can not tell, as autograd's hooks run on its own
    running = [(each, each.backward) for each in runtimes if each.backward is not None and each.backward.thread is not None]
    running = [each for each in running if each[0].comm.device.type != "cpu" or each[1].thread == threading.get_ident()]
    for _, backward in running:
        backward.thread = None  # it is over, and a later thread may have the same number
    mine = [runtime for runtime, _ in running]
    if not mine and len(runtimes) == 1:  # it failed before a gradient reached the model's outputs
        mine = runtimes
    if mine:
        mine[-1].watches.tell(error, mine[-1], "the backward")


register_module_parameter_registration_hook(_registered)  # once: torch calls them for every module of the process


def _attach_unit(runtime: Runtime, unit: Unit, module: nn.Module) -> None:
    compiled = torch_compat.compiled_call(module)
    if compiled is not None:
        runtime.compiled.append((module, compiled))
        torch_compat.set_compiled_call(module, functools.partial(runtime.run_inside, unit, compiled))
        return

    @torch.compiler.disable
    def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        outermost = unit.depth == 0
        runtime.enter(unit)
        return runtime.mark_inputs(unit, args, kwargs) if outermost and unit.marked else None

    after = torch.compiler.disable(lambda _module, _args, output: runtime.exit(unit, output))
    runtime.handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
    runtime.handles.append(module.register_forward_hook(after, always_call=True))
