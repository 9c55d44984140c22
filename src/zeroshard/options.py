"""The options of `zs.shard` and their types, for editors and type checkers: `**options: Unpack[ShardOptions]`.

They are the fields of `Config`, which says what each does. A test compares the two.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, TypedDict

import torch

from .config import Offload, Units
from .utils.compression import Compression


class ConfigFields(TypedDict, total=False):
    """What `zs.Config` takes. None stands for a field that is not given."""

    stage: int | Literal["auto"] | None
    precision: str | torch.dtype | None
    units: Units | None
    max_unit_numel: float | None
    min_unit_numel: float | None
    max_grad_norm: float | None
    overlap: bool | None
    prefetch_nbytes: float | None
    gradient_dtype: str | torch.dtype | None
    reduce_dtype: str | torch.dtype | None
    master_weights: bool | None
    dtypes: Mapping[str, str | torch.dtype] | None
    cast_buffers: bool | None
    agree_buffers: bool | None
    loss_scale: str | float | None
    initial_loss_scale: float | None
    loss_scale_window: int | None
    loss_scale_delay: float | None
    loss_scale_hysteresis: int | None
    consecutive_hysteresis: bool | None
    min_loss_scale: float | None
    skip_nonfinite: bool | None
    max_skipped_steps: float | None
    hold_schedulers: bool | None
    map_shared: bool | None
    keep_host_memory: bool | None
    offload_optimizer: Offload | str | Mapping[str, object] | None
    offload_gradient: Offload | str | Mapping[str, object] | None
    offload_param: Offload | str | Mapping[str, object] | None
    offload_path: str | os.PathLike[str] | None
    delayed_update: float | None
    param_persistence_threshold: float | None
    model_persistence_threshold: float | None
    max_live_parameters: float | None
    prefetch_bucket_size: float | None
    shard_size: int | None
    mics_shard_size: int | None
    replicate_optimizer: bool | None
    zero_hpz_partition_size: int | None
    zero_quantized_weights: Compression | str | bool | Mapping[str, object] | None
    zero_quantized_gradients: Compression | str | bool | Mapping[str, object] | None
    hierarchical: bool | None
    stall_timeout_s: float | None


class ShardOptions(ConfigFields, total=False):
    """What `zs.shard` takes: the fields, and the name of a preset over which they are laid."""

    preset: str | None
