"""Methods of the engine that return its configuration: `engine.train_batch_size()`, `engine.zero_optimization_stage()`, ..."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from .ds_config import DeepSpeedConfig

_QUESTIONS: dict[str, str | Callable[[DeepSpeedConfig], object]] = {  # method of the engine -> attribute path in the configuration, or function
    **{name: name for name in (
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "managed_gradient_accumulation",
        "optimizer_params", "scheduler_name", "scheduler_params", "gradient_clipping", "steps_per_print",
        "gradient_predivide_factor", "dump_state", "memory_breakdown", "wall_clock_breakdown", "dataloader_drop_last",
        "checkpoint_tag_validation_enabled", "checkpoint_tag_validation_fail", "load_universal_checkpoint",
        "use_node_local_storage", "torch_autocast_enabled", "torch_autocast_dtype", "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer", "log_level",
    )},
    **{f"zero_{name}": f"zero_config.{name}" for name in (
        "reduce_scatter", "overlap_comm", "offload_optimizer", "offload_param", "sub_group_size", "reduce_bucket_size",
        "allgather_bucket_size", "compute_grad_norm", "contiguous_gradients", "load_from_fp32_weights", "elastic_checkpoint",
        "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size", "param_persistence_threshold",
        "model_persistence_threshold", "legacy_stage1", "ignore_unused_parameters", "hpz_partition_size",
        "quantized_weights", "quantized_gradients", "allgather_partitions", "round_robin_gradients",
    )},
    "zero_gather_16bit_weights_on_model_save": "zero_config.gather_16bit_weights_on_model_save",
    "zero_optimization": "zero_enabled",
    "zero_optimization_stage": "zero_optimization_stage",
    "loss_scale": "float16_config.loss_scale",
    "dynamic_loss_scale": lambda config: config.float16_config.loss_scale == 0,
    "zero_optimization_partition_gradients": lambda config: config.zero_optimization_stage >= 2,
    "zero_optimization_partition_weights": lambda config: config.zero_optimization_stage >= 3,
    **dict.fromkeys(("zero_use_cpu_optimizer", "zero_cpu_offload"), lambda config: config.offloads("offload_optimizer")),
    "zero_nvme_offload_optimizer": lambda config: getattr(config.zero_config.offload_optimizer, "device", None) == "nvme",
    "postscale_gradients": lambda config: not config.prescale_gradients,
    "get_sequence_parallel_group": lambda config: None,
    # dtypes of parameters, and in which gradients accumulate
    "get_data_types": lambda config: (config.model_dtype, config.gradient_dtype),
    # global batch, micro-batch of a rank, micro-batches of a step
    "get_batch_info": lambda config: (
        config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps,
    ),
    **dict.fromkeys((  # features that are never on: their keys in a configuration are refused
        "autotuning_enabled", "elasticity_enabled", "curriculum_learning_enabled", "curriculum_enabled_legacy",
        "data_efficiency_enabled", "random_ltd_enabled", "pld_enabled", "eigenvalue_enabled", "sparse_gradients_enabled", "amp_enabled",
        "flops_profiler_enabled", "is_deepcompile_enabled", "is_deepcompile_active",
    ), lambda config: False),
    "fp16_enabled": "float16_config.enabled",
    "bfloat16_enabled": "bfloat16_config.enabled",
    "fp16_auto_cast": "float16_config.auto_cast",
}  # fmt: skip


class Settings:
    """Mixin of the engine: methods that return values of its configuration."""

    _config: DeepSpeedConfig

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of the engine, or one of the methods of _QUESTIONS."""

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

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the micro-batch size of a rank, and keep the number of micro-batches per step."""
        self._config.train_micro_batch_size_per_gpu = micro_batch_size
        steps, world = self._config.gradient_accumulation_steps, self.dp_world_size
        self._config.train_batch_size = micro_batch_size * steps * world

    def get_lr(self) -> list[float]:
        return [group.get("lr", 0.0) for group in self._groups()]

    def get_mom(self) -> list[float | tuple[float, float]]:
        """Return the momentum, or the betas, of each parameter group."""
        return [group.get("momentum", group.get("betas", 0.0)) for group in self._groups()]

    def get_type(self) -> list[object]:
        return [group.get("type", 0.0) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def optimizer_name(self) -> str | None:
        """Return the class name of the optimizer that `initialize` was given, else the name in the configuration."""
        return self._config.optimizer_name if self.client_optimizer is None else self._client_name


def _question(source: str | Callable[[DeepSpeedConfig], object]) -> Callable[[Settings], object]:
    read = attrgetter(source) if isinstance(source, str) else source
    return lambda self: read(self._config)


for _name, _source in _QUESTIONS.items():
    setattr(Settings, _name, _question(_source))
