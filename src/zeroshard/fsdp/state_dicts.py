"""State dictionaries of a model under this door: values in the precision of the optimizer's step; loads of DTensors, and by assign.

    model.state_dict()                       fp32 masters, as sharded tensors
    model.load_state_dict(state, assign=)    whole tensors, sharded ones and DTensors; parameters stay the objects that they are
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..seam import Engine, ShardedTensor, info_of
from ..state import precise_value


def serve_states(model: nn.Module, engine: Engine) -> None:
    """Register the hooks on a sharded model's modules; zs.close removes them."""
    handles = []
    for module in model.modules():
        if any(info_of(param) is not None for param in module.parameters(recurse=False)):
            handles.append(module.register_state_dict_post_hook(_show))
            handles.append(module.register_load_state_dict_pre_hook(_take))
    engine.also_remove(handles)


def _show(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    for name, param in module.named_parameters(recurse=False):
        shown = state.get(prefix + name)
        if isinstance(shown, ShardedTensor) and shown is not param:
            state[prefix + name] = precise_value(param)


def _take(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    metadata["assign_to_params_buffers"] = False
    for name, param in module.named_parameters(recurse=False):
        value = state.get(prefix + name)
        if info_of(param) is None or not isinstance(value, Tensor):
            continue
        if isinstance(value, DTensor):
            with torch.no_grad():
                precise_value(param).copy_(value.full_tensor())
            value = None
        if value is None or value.is_meta:  # a tensor without values is what assign=True brings for a parameter that has them
            state[prefix + name] = precise_value(param)
