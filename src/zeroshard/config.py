"""What the user may choose, and the table of stages.

A *stage* is a row: the placement of each model state over the data-parallel ranks (ZeRO, arXiv 1910.02054,
section 5). Everything else in the library reads the row, never the stage number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import nn

from .errors import ConfigError, did_you_mean


class Placement(Enum):
    """How one model state lies over the data-parallel ranks."""

    REPLICATED = "replicated"  # every rank holds the whole, reduced
    PARTIAL = "partial"  # every rank has room for the whole; its own shard is reduced
    SHARDED = "sharded"  # every rank holds 1/N


@dataclass(frozen=True)
class Row:
    """Placement of parameters, gradients and optimizer states."""

    parameter: Placement
    gradient: Placement
    optimizer: Placement


_R, _P, _S = Placement.REPLICATED, Placement.PARTIAL, Placement.SHARDED
STAGES: dict[int, Row] = {
    0: Row(_R, _R, _R),  # plain data parallelism
    1: Row(_R, _P, _S),  # Pos
    2: Row(_R, _S, _S),  # Pos+g
    3: Row(_S, _S, _S),  # Pos+g+p
}

PRECISIONS: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
UNIT_CHOICES = ("auto", "model", "leaf")

Units = str | tuple | Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Config:
    """Every option of `zs.shard`. Immutable, validated when built.

    stage:            0, 1, 2 or 3.
    precision:        dtype of parameters, activations and sent gradients: "fp32", "bf16" or "fp16".
    units:            what is gathered and reduced together: "auto" (classes that repeat in a container), "model"
                      (one unit), "leaf" (one per module that owns parameters), a tuple of classes or class names,
                      or a function (name, module) -> bool.
    max_unit_numel:   units of more elements are split at their children.
    min_unit_numel:   neighbouring units are merged until they have this many elements.
    max_grad_norm:    clip the global norm to this before each step.
    overlap:          run reductions and gathers beside the computation; False waits for each (for debugging).
    prefetch_nbytes:  at most so many bytes are gathered ahead of use (one unit always is).
    gradient_dtype:   dtype in which reduced gradients rest and accumulate.
    reduce_dtype:     dtype in which gradients are sent (default: the precision's); sums are fp32 always.
    master_weights:   keep fp32 masters and states when the precision is below fp32 (opting out is logged).
    dtypes:           per-module policy: {class name or name pattern: dtype}, e.g. {"LayerNorm": torch.float32}.
    loss_scale:       fp16: "dynamic" or a fixed number.
    initial_loss_scale, loss_scale_window: fp16 dynamic scale: first value; good steps before it doubles.
    max_skipped_steps: this many non-finite steps in a row stop the run with a diagnosis.
    map_shared:       ranks on one CPU host read each other's shards in place of copying them.
    keep_host_memory: CPU: tell the C allocator to keep freed memory between steps (process-wide; memory/host.py).
    stall_timeout_s:  a wait longer than this raises on every rank, naming who is missing.
    """

    stage: int = 3
    precision: str = "fp32"
    units: Units = "auto"
    max_unit_numel: int | None = None
    min_unit_numel: int = 0
    max_grad_norm: float | None = None
    overlap: bool = True
    prefetch_nbytes: int = 64 << 20
    gradient_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype | None = None
    master_weights: bool = True
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    loss_scale: str | float = "dynamic"
    initial_loss_scale: float = 2.0**16
    loss_scale_window: int = 2000
    max_skipped_steps: int = 50
    map_shared: bool = True
    keep_host_memory: bool = True
    stall_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if isinstance(self.stage, bool) or not isinstance(self.stage, int) or self.stage not in STAGES:
            hint = " Pass the number, not the text." if str(self.stage) in map(str, STAGES) else ""
            raise ConfigError(f"stage: expected one of 0, 1, 2, 3, got {self.stage!r}.{hint}")
        self._normalise_precision()
        if isinstance(self.units, str) and self.units not in UNIT_CHOICES:
            # a bare class name is a natural slip for a tuple of one
            object.__setattr__(self, "units", (self.units,))
        for name in ("max_grad_norm", "max_unit_numel", "stall_timeout_s", "prefetch_nbytes", "min_unit_numel"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, (str, bool)) or not value >= 0):
                raise ConfigError(f"{name}: expected a number of at least 0, got {value!r}.")
        for name in ("overlap", "master_weights", "map_shared", "keep_host_memory"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: expected True or False, got {getattr(self, name)!r}.")
        for name in ("gradient_dtype", "reduce_dtype"):
            value = getattr(self, name)
            if value is not None and value not in PRECISIONS.values():
                raise ConfigError(f"{name}: expected torch.float32, bfloat16 or float16, got {value!r}.")
        if isinstance(self.loss_scale, str) and self.loss_scale != "dynamic":
            raise ConfigError(f"loss_scale: expected 'dynamic' or a number, got {self.loss_scale!r}.")

    def _normalise_precision(self) -> None:
        given = self.precision
        name = str(given).removeprefix("torch.")
        name = _ALIASES.get(name, name)
        if name not in PRECISIONS:
            known = ", ".join(map(repr, PRECISIONS))
            raise ConfigError(f"precision: expected one of {known}, got {given!r}.{did_you_mean(name, PRECISIONS)}")
        object.__setattr__(self, "precision", name)

    @classmethod
    def build(cls, config: Config | None = None, **options: object) -> Config:
        """`config` with `options` laid over it; unknown names are errors with a suggestion."""
        known = {f.name for f in dataclasses.fields(cls)}
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"unknown option {name!r}.{did_you_mean(name, known)} Known: {', '.join(sorted(known))}."
                )
        given = {name: value for name, value in options.items() if value is not None}
        return dataclasses.replace(config, **given) if config is not None else cls(**given)  # type: ignore[arg-type]

    @property
    def row(self) -> Row:
        return STAGES[self.stage]

    @property
    def compute_dtype(self) -> torch.dtype:
        return PRECISIONS[self.precision]

    @property
    def send_dtype(self) -> torch.dtype | None:
        """Dtype of sent gradients, or None for 'that of the parameter'."""
        return self.reduce_dtype
