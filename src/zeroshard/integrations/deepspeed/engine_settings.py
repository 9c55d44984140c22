"""Methods of the engine that return its configuration: `engine.train_batch_size()`, `engine.zero_optimization_stage()`, ..."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from .accelerator import always
from .config_keys import keys_of
from .ds_config import DeepSpeedConfig

_VALUES = (  # methods with the name of the configuration's attribute
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation optimizer_params "
    "scheduler_name scheduler_params gradient_clipping steps_per_print gradient_predivide_factor dump_state memory_breakdown "
    "wall_clock_breakdown dataloader_drop_last load_universal_checkpoint torch_autocast_enabled torch_autocast_dtype "
    "zero_optimization_stage log_level"
)
_NEVER = (  # features that are never on: their keys in a configuration are refused
    "autotuning_enabled elasticity_enabled curriculum_learning_enabled curriculum_enabled_legacy data_efficiency_enabled "
    "random_ltd_enabled pld_enabled eigenvalue_enabled sparse_gradients_enabled amp_enabled flops_profiler_enabled "
    "is_deepcompile_enabled is_deepcompile_active"
)
_METHODS: dict[str, Callable[[DeepSpeedConfig], object]] = {
    **{name: attrgetter(name) for name in _VALUES.split()},
    **dict.fromkeys(_NEVER.split(), always(False)),
    **{f"zero_{key.field.removeprefix('zero_')}": attrgetter(f"zero_config.{key.field}") for key in keys_of("zero_optimization")},
    "zero_optimization": attrgetter("zero_enabled"),
    "zero_optimization_partition_gradients": lambda config: config.zero_optimization_stage >= 2,
    "zero_optimization_partition_weights": lambda config: config.zero_optimization_stage >= 3,
    "zero_cpu_offload": lambda config: config.offloads("offload_optimizer"),
    "fp16_enabled": attrgetter("float16_config.enabled"),
    "bfloat16_enabled": attrgetter("bfloat16_config.enabled"),
    "fp16_auto_cast": attrgetter("float16_config.auto_cast"),
    "loss_scale": attrgetter("float16_config.loss_scale"),
    "dynamic_loss_scale": lambda config: config.float16_config.loss_scale == 0,
    "get_sequence_parallel_group": always(None),
    "get_data_types": attrgetter("model_dtype", "gradient_dtype"),  # of parameters, and in which gradients accumulate
    # global batch, micro-batch of a rank, micro-batches of a step
    "get_batch_info": attrgetter("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
}


class Settings:
    """Mixin of the engine: methods that return values of its configuration."""

    _config: DeepSpeedConfig

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of the engine, or one of the methods of _METHODS."""

    @property
    def communication_data_type(self) -> torch.dtype:
        given = self._config.communication_data_type
        return self._config.model_dtype if given is None else given

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the global batch by changing the number of micro-batches per step. Raise ValueError if this is no whole number."""
        micro = self._config.train_micro_batch_size_per_gpu * self.dp_world_size
        if train_batch_size % micro:
            raise ValueError(
                f"Train batch size must be divisible by micro-batch data parallelism ({micro}), got {train_batch_size}"
            )
        self._config.train_batch_size = train_batch_size
        self._config.gradient_accumulation_steps = train_batch_size // micro

    def get_lr(self) -> list[float]:
        return [options.get("lr", 0.0) for options in self._groups()]

    def get_mom(self) -> list[float | tuple[float, float]]:
        """Return the momentum, or the betas, of each parameter group."""
        return [options.get("momentum", options.get("betas", 0.0)) for options in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def optimizer_name(self) -> str | None:
        """Return the class name of the optimizer that `initialize` was given, else the name in the configuration."""
        return self._config.optimizer_name if self.client_optimizer is None else self._client_name


for _name, _read in _METHODS.items():
    setattr(Settings, _name, functools.partialmethod(lambda self, read: read(self._config), _read))
