"""Dtypes in which modules compute: `Policy` resolves `Config.dtypes`; hooks cast inputs and outputs where the dtype changes."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..config import Config
from ..errors import ConfigError, did_you_mean
from ..tensor.part import Piece, class_and_name
from ..utils import torch_compat
from ..utils.dtypes import follows_precision, is_narrow
from ..utils.module_names import matches, own_name
from ..utils.tensor_tree import Exchanged, cast_floating, caster
from ..utils.torch_compat import original


class Policy:
    """Dtypes in which modules and parameters compute, by id. Only modules and parameters that `Config.dtypes` determines.

    A key matches a module by the name of its class or of a base, or as a pattern over the module's name. The dtype is that of the
    first key that matches the module, or else its nearest ancestor. Norms with fp32 statistics are fp32 unless a key matches
    them: torch has no kernels for other mixtures. A module that is never called has the dtype of its parent, which reads its
    parameters. A key that matches no module names parameters.
    """

    def __init__(self, model: nn.Module, config: Config) -> None:
        """Resolve `Config.dtypes` for a model. Raise ConfigError for a key that matches no module and no parameter."""
        self.modules: dict[int, torch.dtype] = {}
        by_name: dict[str, torch.dtype | None] = {}
        unmatched = set(config.dtypes)
        for name, module in model.named_modules():
            cls, whole = class_and_name(module, name)
            bases = {base.__name__ for base in cls.__mro__}
            keys = [key for key in config.dtypes if key in bases or matches(model, whole, key)] if is_called(module) else []
            unmatched.difference_update(keys)
            around = by_name[name.rpartition(".")[0]] if name else None
            lowered = (around or config.compute_dtype) in (torch.bfloat16, torch.float16)
            mean = torch_compat.own_buffers(module).get("running_mean") if isinstance(module, torch_compat.NormBase) else None
            own = torch.float32 if lowered and mean is not None and mean.dtype == torch.float32 else around
            by_name[name] = own = config.dtypes[keys[0]] if keys else own
            if own is not None:
                self.modules[id(module)] = own
        keys = [key for key in config.dtypes if key in unmatched]  # the first one that matches a parameter's name counts
        self.parameters: dict[int, torch.dtype] = {}
        known = {type(module).__name__ for module in model.modules()}
        for prefix, module in model.named_modules(remove_duplicate=False) if keys else ():
            known.add(own_name(model, prefix))
            for attribute, param in torch_compat.own_parameters(module).items():
                name = f"{prefix}.{attribute}" if prefix else attribute
                name = module.whole_name(name) if isinstance(module, Piece) else name
                known.add(own_name(model, name))
                floats = param is not None and param.is_floating_point()
                matching = [key for key in keys if floats and matches(model, name, key)]
                unmatched.difference_update(matching)
                if matching:
                    self.parameters.setdefault(id(param), config.dtypes[matching[0]])
        for key in keys:
            if key in unmatched:
                raise ConfigError(
                    f"dtypes: no module of {type(original(model)).__name__} has the class or (as a pattern) the name {key!r}, and no floating-point "
                    f"parameter has the name.{did_you_mean(key, known)}"
                )

    def dtype(self, module: nn.Module, param: nn.Parameter, config: Config) -> torch.dtype:
        """Return the dtype in which a parameter computes: from the key that names it, else its module's, else the precision.

        Integers and fp64 keep their dtype; so do frozen parameters in fp8 or fp4, which a quantizer has made.
        """
        if id(param) in self.parameters:
            return self.parameters[id(param)]
        if not follows_precision(param.dtype) and not (is_narrow(param.dtype) and param.requires_grad):
            return param.dtype
        return self.modules.get(id(module)) or (param.dtype if config.precision == "fp32" else config.compute_dtype)


def input_dtype(model: nn.Module, config: Config, parameters: set[torch.dtype]) -> torch.dtype | None:
    """Return the dtype to which the model's floating-point inputs are cast; None: its forward gets them as the caller gave them.

    The dtype is the model's own in `Config.dtypes`, else that of the precision; None also if all `parameters` are fp32 or fp64, so
    that rounded inputs would serve no module.
    """
    own = Policy(model, config).modules.get(id(model))
    if own is None and config.precision != "fp32" and not parameters <= {torch.float32, torch.float64}:
        own = config.compute_dtype
    return own if config.cast_inputs else None


def casts(model: nn.Module, config: Config) -> list[tuple[nn.Module, torch.dtype, torch.dtype]]:
    """Return (module, its dtype, the dtype around it) for each module with a forward at which they differ, outermost first.

    Around the model itself there is no dtype: `input_dtype` says what becomes of its inputs, and its outputs stay as they are.
    """
    dtypes, found, seen = Policy(model, config).modules, [], set()

    def visit(module: nn.Module, around: torch.dtype) -> None:
        if id(module) in seen:  # a shared module is cast once, as where it is first met
            return
        seen.add(id(module))
        inside = dtypes.get(id(module), config.compute_dtype)
        if has_forward(module) and inside != around:
            found.append((module, inside, around))
        for child in module.children():
            # a ModuleList has no forward: its items are entered from around it
            visit(child, inside if has_forward(module) else around)

    visit(model, dtypes.get(id(model), config.compute_dtype))
    return found


def cast_modules(model: nn.Module, config: Config) -> list[Any]:
    """Let modules compute in their dtypes: register hooks at `casts`, and cast buffers if asked. Return handles that undo it."""
    found = casts(model, config)
    buffers = [_cast_buffers(model, config)] if config.cast_buffers else []  # first: memory may end here, and hooks would stay
    return [*(handle for module, inside, around in found for handle in _cast_at(module, inside, around)), *buffers]


def _cast_at(module: nn.Module, inside: torch.dtype, around: torch.dtype) -> tuple[RemovableHandle, RemovableHandle]:
    """Run a module in the dtype `inside`: register hooks that cast its inputs to it, and its outputs to `around`."""
    running: list[Exchanged] = []  # arguments of the module's running forwards (they nest)

    def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if torch.compiler.is_compiling():  # a trace can not follow `Exchanged`
            return cast_floating((args, kwargs), inside)
        running.append(Exchanged(caster(inside), (args, kwargs)))
        return running[-1].value

    def after(module: nn.Module, args: tuple, output: object) -> object:
        if not torch.compiler.is_compiling() and running:
            running.pop().hand_back()
        return cast_floating(output, around)

    return module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after, always_call=True)


def _cast_buffers(model: nn.Module, config: Config) -> SimpleNamespace:
    """Cast floating-point buffers (not fp64, fp8, fp4) to their modules' dtypes; `remove` of the result undoes it, but for rounding."""
    default, dtypes = None if config.precision == "fp32" else config.compute_dtype, Policy(model, config).modules
    wanted = [
        (torch_compat.own_buffers(module), name, dtype)
        for module in model.modules()
        if (dtype := dtypes.get(id(module), default)) is not None
        for name, buffer in torch_compat.own_buffers(module).items()
        if buffer is not None and follows_precision(buffer.dtype)
    ]
    given = [(buffers, name, buffers[name].dtype) for buffers, name, _ in wanted]
    _cast_entries(wanted)
    return SimpleNamespace(remove=functools.partial(_cast_entries, given))


def _cast_entries(entries: list[tuple[dict, str, torch.dtype]]) -> None:
    """Cast tensors in dictionaries, all or none; a tensor that several dictionaries hold is cast once and stays shared."""
    cast: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}  # holds the original, so that its id is not reused
    for holder, name, dtype in entries:
        given = holder[name]
        cast.setdefault((id(given), dtype), (given, given.to(dtype)))
    for holder, name, dtype in entries:
        holder[name] = cast[id(holder[name]), dtype][1]


def has_forward(module: nn.Module) -> bool:
    """Return whether a module's class has a forward: a ModuleList has none."""
    return type(original(module)).forward is not nn.Module.forward


def is_called(module: nn.Module) -> bool:
    """Return False for the leaf inside nn.MultiheadAttention, whose parent reads its parameters without calling it."""
    return type(module).__name__ != "NonDynamicallyQuantizableLinear"
