"""Attaches a runtime to its model: the only place where hooks are registered, and removed again.

Blocks that were compiled before sharding (`block.compile()`) are entered around the compiled call, so nothing of this
library is traced; hooks that a later compilation meets are opaque to it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from .partition import policy_dtype
from .precision import cast_floating
from .runtime import Runtime
from .tiles import Tile
from .unit import ParamGroup, Unit


def attach(runtime: Runtime) -> None:
    """Register all hooks of a runtime; `detach` is the inverse."""
    for name, module in runtime.model.named_modules():
        dtype = policy_dtype(name, module, runtime.config)
        if dtype is not None and dtype != runtime.config.compute_dtype and not isinstance(module, Tile):
            _attach_policy(runtime, module, dtype)
    for unit in runtime.units:
        if unit.sharded:
            for module in unit.modules:
                _attach_unit(runtime, unit, module)
        for group in unit.trainable:
            for index, param in enumerate(group.compute):
                hook = _gradient_hook(runtime, unit, group, index)
                runtime.handles.append(param.register_post_accumulate_grad_hook(hook))
    _attach_root(runtime)


def detach(runtime: Runtime) -> None:
    """Remove every hook."""
    for handle in runtime.handles:
        handle.remove()
    for module, compiled in runtime.compiled:
        module._compiled_call_impl = compiled
    runtime.handles, runtime.compiled = [], []


def _gradient_hook(runtime: Runtime, unit: Unit, group: ParamGroup, index: int) -> Any:
    def hook(param: Tensor) -> None:
        runtime.gradient(unit, group, index, param)

    return hook


def _attach_root(runtime: Runtime) -> None:
    model = runtime.model

    @torch.compiler.disable
    def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return runtime.root_enter(args, kwargs)

    @torch.compiler.disable
    def after(module: nn.Module, args: tuple, output: Any) -> Any:
        return runtime.root_exit(output)

    runtime.handles.append(model.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
    runtime.handles.append(model.register_forward_hook(after))


def _marks(unit: Unit) -> bool:
    """Whether a unit's backward can be over before all its gradients are there: some are frozen, or (tiles) tied."""
    return unit.has_frozen or isinstance(unit.modules[0], Tile)


def _attach_unit(runtime: Runtime, unit: Unit, module: nn.Module) -> None:
    compiled = module._compiled_call_impl
    if compiled is not None:
        runtime.compiled.append((module, compiled))
        module._compiled_call_impl = functools.partial(_call_compiled, runtime, unit, compiled)
        return

    @torch.compiler.disable
    def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        outermost = unit.depth == 0
        runtime.enter(unit)
        return runtime.mark_inputs(unit, args, kwargs) if outermost and _marks(unit) else None

    @torch.compiler.disable
    def after(module: nn.Module, args: tuple, output: Any) -> None:
        runtime.exit(unit, output)

    runtime.handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
    runtime.handles.append(module.register_forward_hook(after, always_call=True))


def _call_compiled(runtime: Runtime, unit: Unit, compiled: Any, *args: Any, **kwargs: Any) -> Any:
    """A unit's forward around a compiled call."""
    outermost = unit.depth == 0
    runtime.enter(unit)
    if outermost and _marks(unit):
        args, kwargs = runtime.mark_inputs(unit, args, kwargs)
    output = None
    try:
        output = compiled(*args, **kwargs)
    finally:
        runtime.exit(unit, output)
    return output


def _attach_policy(runtime: Runtime, module: nn.Module, dtype: torch.dtype) -> None:
    """Run one module in its own dtype: inputs are cast to it, outputs back."""

    def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return cast_floating(args, dtype), cast_floating(kwargs, dtype)

    def after(module: nn.Module, args: tuple, output: Any) -> Any:
        return cast_floating(output, runtime.config.compute_dtype)

    runtime.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
    runtime.handles.append(module.register_forward_hook(after))
