"""Plans of optimizer states: which states an optimizer keeps of each parameter, and the format in which each rests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from ..config import Config
from ..engine.parameter import ParamSpec
from ..errors import ConfigError, did_you_mean
from ..tensor.state_column import StateColumn, StatePlan, declared_columns
from ..utils.state_format import StateFormat
from .state_codecs import Formats

_ADAM = ("exp_avg", "exp_avg_sq")
# names of states as large as the parameter, by class of optimizer (subclasses included) and its options
_COLUMNS: dict[str, Callable[[dict], tuple[str, ...]]] = {
    "Adagrad": lambda options: ("sum",),
    "ASGD": lambda options: ("ax",),
    "Lion": lambda options: ("exp_avg",),
    "Muon": lambda options: ("momentum_buffer",) if options.get("use_muon", True) else _ADAM,
    "SGD": lambda options: ("momentum_buffer",) * (options.get("momentum", 0) != 0),
    "RMSprop": lambda options: (
        "square_avg",
        *("momentum_buffer",) * (options.get("momentum", 0) > 0),
        *("grad_avg",) * bool(options.get("centered")),
    ),
    "Adam": lambda options: _ADAM + ("max_exp_avg_sq",) * bool(options.get("amsgrad")),
    "AdamW": lambda options: _ADAM + ("max_exp_avg_sq",) * bool(options.get("amsgrad")),
}


def state_plans(config: Config, optimizer: torch.optim.Optimizer | None, specs: list[ParamSpec]) -> dict[int, StatePlan]:
    """Return id of each parameter -> its plan of states; for an unknown class, two of a first step's states.

    Without an optimizer only `optimizer_states` plans any: those of an optimizer that is made later, of a class not yet known. Raise
    ConfigError if `optimizer_states` names a state that a known class does not keep.
    """
    known = next((_COLUMNS[cls.__name__] for cls in type(optimizer).__mro__ if cls.__name__ in _COLUMNS), None)
    declared, given = tuple(declared_columns(optimizer).values()), config.optimizer_states
    by_name = tuple(given.items()) if isinstance(given, Mapping) else ()
    others = given if isinstance(given, StateFormat) else None
    spec_of = {id(spec.original): spec for spec in specs}
    plans: dict[int, StatePlan] = {}
    later = [{"params": [spec.original for spec in specs if spec.requires_grad]}] if given is not None else []
    for group in later if optimizer is None else optimizer.param_groups:
        unknown = tuple(column.name for column in declared) or (*dict(by_name), "", "")[: max(2, len(by_name))]
        names = known(group) if known is not None else unknown
        for name, _ in by_name:
            if known is not None and name not in names:
                raise ConfigError(
                    f"optimizer_states: {type(optimizer).__name__} keeps {', '.join(names) or 'no such states'}, not {name!r}."
                    f"{did_you_mean(name, names)}"
                )
        for param in group["params"]:
            spec = spec_of.get(id(param))
            kept = [] if spec is None else [(name, form) for name, form in by_name if not _spared(form, spec)]
            rest = None if others is None or spec is None or _spared(others, spec) else others
            codes = any(form.format != "fp32" for form in (*dict(kept).values(), *filter(None, (rest,))))
            make = Formats(declared, tuple(kept), rest) if declared or codes else None
            plans[id(param)] = StatePlan(tuple(StateColumn(n) if make is None else make(n) for n in names), make)
    return plans


def _spared(form: StateFormat, spec: ParamSpec) -> bool:
    """Return whether a parameter keeps fp32 states: a small one, no matrix, one that the format exempts, or an embedding."""
    embeds = any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module, _ in spec.owners)
    embeds |= getattr(spec.original, "unit_of_its_own", False)  # tied to another pipeline stage's, which may be an embedding
    return embeds or form.spares(spec.whole_name, math.prod(spec.whole_shape), len(spec.whole_shape))
