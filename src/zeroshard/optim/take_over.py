"""zs.shard turns AdamW, Adam and Lion of bitsandbytes and torchao, in 32, 8 or 4 bits, into torch's classes or zs.Lion.

Those of 8 and 4 bits divide the tensor that they step into blocks, and keep scales beside the codes. A rank would give them
flat slices: blocks would begin elsewhere at each world size, and zeroshard, which cuts states of one value per element, would
take the scales to be equal on all ranks. So the user's object, to which schedulers refer, gets the other class, and
`optimizer_states` the format of the same width. The packages are not imported.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from typing import Any

import torch
from torch import nn

from ..config import Config
from ..errors import ConfigError
from ..utils import bitsandbytes_compat, torchao_compat
from ..utils.state_format import StateFormat
from .lion import Lion

# the step of bitsandbytes' Adam has decoupled weight decay, as its AdamW has
_CLASSES: dict[str, dict[str, type[torch.optim.Optimizer]]] = {
    "bitsandbytes": {"AdamW": torch.optim.AdamW, "Adam": torch.optim.AdamW, "Lion": Lion},
    "torchao": {"_AdamW": torch.optim.AdamW, "AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam},
}
_ELEMENTWISE = ("SGD", "RMSprop", "Adagrad")  # of bitsandbytes, with states in 32 bits
_WIDTHS = {"32bit": "fp32", "8bit": "int8", "4bit": "int4", "Fp8": "fp8"}  # endings of class names
_NOT_STEPPED: dict[str, tuple[object, str]] = {  # settings that our step lacks -> the value that is off, a remedy
    "max_unorm": (0.0, "leave it out"),
    "skip_zeros": (False, "leave it out"),
    "percentile_clipping": (100, "use zs.shard(max_grad_norm=...)"),
    "bf16_stochastic_round": (False, "leave it out, since fp32 masters keep what it is for"),
}


class TakeOver:
    """The change of an optimizer of bitsandbytes or torchao to a class of torch, or zs.Lion; `undo` is the inverse.

    note: what was changed, in a sentence; "" if nothing was.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer, self.note = optimizer, ""
        self._before: tuple[type, dict[str, Any], list[set[str]]] | None = None

    def begin(self, model: nn.Module, config: Config) -> Config:
        """Change the object's class, and return the configuration with the format of its states, unless it has one.

        Raise ConfigError, with nothing changed, for a class or an option without a counterpart here, and after a first step.
        """
        optimizer = self.optimizer
        theirs = next((cls for cls in type(optimizer).__mro__ if cls.__module__.partition(".")[0] in _CLASSES), None)
        if optimizer is None or theirs is None:
            return config
        library = theirs.__module__.partition(".")[0]
        width = next((width for width in _WIDTHS if theirs.__name__.endswith(width)), "")
        base = theirs.__name__.removesuffix(width).removeprefix("Paged")
        if library == "torchao" and base not in _CLASSES[library]:  # its other optimizers hold an inner one
            return config
        known = _CLASSES[library].get(base) if theirs is type(optimizer) else None
        mine: Any = known or getattr(torch.optim, base, torch.optim.AdamW)
        name, instead = f"{type(optimizer).__name__} of {library}", f"{'zs' if mine is Lion else 'torch.optim'}.{mine.__name__}"
        form, settings, overrides = StateFormat(_WIDTHS.get(width, "fp32")), list[dict[str, Any]](), list[dict[str, Any]]()
        if library == "torchao" and known:
            settings = [torchao_compat.settings_of(optimizer)]
            form = dataclasses.replace(form, block=256 if form.format == "fp32" else settings[0]["block_size"])
        elif library == "bitsandbytes" and (known or base in _ELEMENTWISE):
            settings, overrides = bitsandbytes_compat.settings_of(optimizer)
            packed = [each["min_8bit_size"] for each in settings if each["optim_bits"] == 8]
            form = StateFormat("int8", min_numel=packed[0]) if packed else StateFormat("fp32")
        given = "" if form.format == "fp32" else f", optimizer_states={form.format!r}"
        remedy = f"Write {instead}(...) in its place, and zs.shard(model, optimizer{given}, ...)."
        if base in _ELEMENTWISE and form.format == "fp32" and config.optimizer_states is None:
            return config  # its own step is taken
        if known is None:
            raise ConfigError(
                f"optimizer: {name} would step the flat slices that each rank has otherwise than whole parameters, or keep "
                f"states that cannot be cut. {remedy}"
            )
        if optimizer.state:
            raise ConfigError(
                f"optimizer: {name} has states already, in a format of {library}: call zs.shard() before the first step and "
                f"before load_state_dict(). {remedy}"
            )
        form = dataclasses.replace(form, exempt=_exempt(optimizer, model, name, overrides))
        for option, (off, way) in _NOT_STEPPED.items():
            for value in (each.get(option, off) for each in settings):
                if value != off:
                    raise ConfigError(f"optimizer: {option}={value!r} of {name} has no counterpart in {instead}: {way}. {remedy}")
        options = inspect.signature(mine).parameters
        made = mine([{k: v for k, v in group.items() if k in options} for group in optimizer.param_groups])
        self._before = type(optimizer), optimizer.defaults, [set(group) for group in optimizer.param_groups]
        optimizer.__class__, optimizer.defaults = mine, made.defaults
        for group, completed in zip(optimizer.param_groups, made.param_groups, strict=True):
            for key, value in completed.items():
                group.setdefault(key, value)
        self.note = f"optimizer: {name} is stepped as {instead}"
        if config.optimizer_states is None and form.format != "fp32":
            self.note += f" with optimizer_states=zs.{form}"
            return dataclasses.replace(config, optimizer_states=form)
        return config

    def tell(self, rank: int) -> None:
        """Print the note, on rank 0."""
        if self.note and rank == 0:
            print(f"zeroshard: {self.note}", file=sys.stderr)

    def undo(self) -> None:
        """Give the optimizer its own class and options back."""
        if self.optimizer is None or self._before is None:
            return
        self.optimizer.__class__, self.optimizer.defaults, keys = self._before
        for group, own in zip(self.optimizer.param_groups, keys, strict=True):
            for key in group.keys() - own:
                del group[key]


def _exempt(optimizer: torch.optim.Optimizer, model: nn.Module, name: str, overrides: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return names of parameters whose states bitsandbytes' GlobalOptimManager leaves in 32 bits; raise for other overrides."""
    names, found = {id(param): full for full, param in model.named_parameters()}, []
    members = [param for group in optimizer.param_groups for param in group["params"]]
    for param, given in zip(members, overrides, strict=False):  # those of torchao have none
        if given not in ({}, {"optim_bits": 32}):
            raise ConfigError(
                f"optimizer: bitsandbytes' GlobalOptimManager overrides {given} for {names.get(id(param), 'a parameter')} "
                f"({name}), and zs.shard() takes over optim_bits=32 alone: give it a parameter group of its own instead."
            )
        if given and id(param) in names:
            found.append(names[id(param)])
    return tuple(found)
