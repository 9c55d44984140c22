"""Optimizers that step each parameter as a whole (Muon, Adafactor, and classes declared with `zs.whole_matrix`).

values/whole_step.py steps them. Here is which classes, and which of their parameters, are declared to need that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..seam import ParamSpec
from ..tensor.part import part_of

Where = Callable[[Tensor, Mapping[str, Any]], bool]
_DECLARED: dict[type, Where] = {}
_STACKS: set[type] = set()  # classes that step each slice of a stack of matrices by itself


def whole_matrix(cls: type[torch.optim.Optimizer] | None = None, *, where: Where | None = None, stacks: bool = False) -> Any:
    """Declare that an optimizer class steps each parameter independently and needs all of it. Return the class: also a decorator.

    Args:
        cls: the class; classes derived from it count as well. Its step of a parameter must depend only on that parameter, its
            gradient, its states and the options of its group: no norm over several parameters, no count on the optimizer itself.
        where: (parameter, options of its group) -> whether the class needs that parameter whole; its step of the others must be
            elementwise. None: it needs all parameters whole.
        stacks: it steps parameters of three dimensions slice by slice along the first, so that ranks may hold some of the slices
            (divided experts).

    torch.optim.Muon, torch.optim.Adafactor and the Adafactor of Transformers are declared already. Raises ConfigError for
    anything but an optimizer class.
    """
    if cls is None:
        return lambda given: whole_matrix(given, where=where, stacks=stacks)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ConfigError(f"zs.whole_matrix: expected a class of torch.optim.Optimizer, got {cls!r}.")
    _DECLARED[cls] = where or (lambda param, options: True)
    _STACKS.update([cls] if stacks else [])
    return cls


for _name in ("Muon", "Adafactor"):
    if hasattr(torch.optim, _name):
        whole_matrix(getattr(torch.optim, _name))


def declared(optimizer: torch.optim.Optimizer) -> Where | None:
    """Return the `where` declared for an optimizer's class or a base of it; None if no such class was declared."""
    for cls in type(optimizer).__mro__:
        if cls in _DECLARED:
            return _DECLARED[cls]
        if cls.__name__ == "Adafactor" and cls.__module__.startswith("transformers."):  # without importing its package
            return lambda param, options: True
    return None


def whole_parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of the parameters that the optimizer steps as a whole."""
    where = declared(optimizer)
    if where is None:
        return set()
    return {id(param) for group in optimizer.param_groups for param in group["params"] if where(param, group)}


def check_whole(optimizer: torch.optim.Optimizer, specs: Sequence[ParamSpec], delayed: bool) -> None:
    """Raise ConfigError for a delayed update, or a parameter stepped whole of which this rank's model has only a part."""
    whole = whole_parameters(optimizer)
    if whole and delayed:
        raise ConfigError(
            f"delayed_update: {type(optimizer).__name__} steps whole parameters, which all ranks gather in the step: leave it out."
        )
    for spec in specs:
        if id(spec.original) in whole and part_of(*spec.owners[0]) is not None:
            raise ConfigError(
                f"{spec.name} is a tile, and {type(optimizer).__name__} steps whole parameters: leave its module out of zs.tile(), or give "
                "the tiles to an elementwise group."
            )
        slices = (
            spec.part is not None
            and spec.part.dim == 0
            and (spec.part.maps, spec.part.around) == (1, None)
            and len(spec.shape) == 3
        )
        if slices and not _STACKS.isdisjoint(type(optimizer).__mro__):
            continue
        if id(spec.original) in whole and spec.part is not None:
            raise ConfigError(
                f"{spec.name} is a DTensor of shape {spec.whole_shape} of which each rank has {spec.shape}, and {type(optimizer).__name__} "
                "steps whole parameters: give it to an elementwise group (AdamW), or leave its module out of tensor parallelism."
            )
