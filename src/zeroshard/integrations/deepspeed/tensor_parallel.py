"""AutoTP: `{"tensor_parallel": {"autotp_size": N}}` and `deepspeed.tp_model_init` cut layers over N neighbouring ranks.

`initialize` cuts a model by the styles that `zs.styles_for` finds for it; embedding and head stay whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .ds_config import read_config
from .pipe import PipelineModule
from .sections import DeepSpeedConfigError

_SIZE = "_zeroshard_tp_size"  # attribute of a model that `tp_model_init` was given


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype, config: object = None, **kwargs: Any) -> nn.Module:
    """Record that `initialize` is to cut the model's layers over `tp_size` ranks; return the model, cast to `dtype`.

    config: no effect. Raises DeepSpeedConfigError for a size below 1, and for tp_group: groups are those of neighbouring ranks.
    """
    if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1 or kwargs.get("tp_group") is not None:
        raise DeepSpeedConfigError(f"tp_model_init: expected a number of ranks and no tp_group, got {tp_size!r}, {kwargs}.")
    model.__dict__[_SIZE] = tp_size
    return model.to(dtype)


def ranks_of(model: nn.Module, given: object, mpu: object, ranks: int) -> int:
    """Return the number of ranks over which layers are cut; 1: they are not. Raises DeepSpeedConfigError for a number that is wrong."""
    section: Any = read_config(given).get("tensor_parallel") or {}
    asked: Any = section.get("autotp_size", 0) if isinstance(section, Mapping) else section
    noted = model.__dict__.get(_SIZE, 0)
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 0 or (asked and noted and asked != noted):
        told = f" (tp_model_init: {noted})" if noted else ""
        raise DeepSpeedConfigError(f"tensor_parallel.autotp_size: expected a number of ranks, got {asked!r}{told}.")
    size = asked or noted or 1
    if size > 1 and (mpu is not None or isinstance(model, PipelineModule)):
        raise DeepSpeedConfigError(
            'tensor_parallel.autotp_size with an mpu, or a PipelineModule: leave the mpu out; zs.parallelize takes a mesh ("pp", "dp", "tp").'
        )
    if ranks % size:
        raise DeepSpeedConfigError(f"tensor_parallel.autotp_size = {size}: expected a divisor of the {ranks} ranks.")
    return size


def cut(model: nn.Module, line: DeviceMesh) -> None:
    """Cut a model's layers over the ranks of an axis, in place (collective). Raises ConfigError, on all ranks, if they do not fit."""
    from ...parallel.tensor_parallel import apply
    from ...public import styles_for

    apply(model, line, styles_for(model, vocabulary=False))
