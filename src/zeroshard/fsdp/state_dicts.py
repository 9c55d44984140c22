"""Loads of a model under this door: of whole tensors, sharded ones and DTensors, also by assign=True; parameters stay the objects
that optimizers refer to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..seam import NOT_SHARDED, Engine, info_of, stays_whole


def serve_loads(model: nn.Module, engine: Engine) -> None:
    """Register the hooks on a sharded model's modules; zs.close removes them."""
    holders = [
        module
        for module in model.modules()
        if any(info_of(param) or stays_whole(param) for param in module.parameters(recurse=False))
    ]
    engine.also_remove([module.register_load_state_dict_pre_hook(_take) for module in holders])


def _take(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    assigns = metadata.get("assign_to_params_buffers", False)
    metadata["assign_to_params_buffers"] = False
    for name, param in list(module.named_parameters(recurse=False)):
        value = state.get(prefix + name)
        alike = isinstance(value, Tensor) and value.shape == param.shape  # else torch says what differs
        if stays_whole(param) and isinstance(value, Tensor) and alike and assigns:  # torch's object would not be marked
            given = nn.Parameter(value.detach(), param.requires_grad)
            setattr(given, NOT_SHARDED, True)
            setattr(module, name, given)
        if info_of(param) is None or not isinstance(value, Tensor):
            continue
        if isinstance(value, DTensor):
            with torch.no_grad():
                param.copy_(value.full_tensor())
        if isinstance(value, DTensor) or value.is_meta:  # what assign=True brings for a parameter that has no values
            state[prefix + name] = param
