"""Names of torch that this door replaces: functions by which torch.distributed.checkpoint.state_dict moves tensors; and, for a
script that is not changed (`python -m zeroshard.fsdp`), FSDP2's public names.

torch gathers and cuts DTensors alone, and takes any other tensor for a whole one. The functions here see to sharded tensors first.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..seam import ShardedTensor
from ..utils.torch_compat import replace_state_dict_functions


@functools.cache
def serve_state_dicts() -> None:
    """Let torch's functions on state dictionaries gather and cut sharded tensors, from now on and for the process."""

    def gather(plain: Callable[..., Any], state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        return plain(_whole(state_dict, kwargs.get("ranks_only", ()), kwargs.get("cpu_offload", False)), *args, **kwargs)

    def broadcast(
        plain: Callable[..., Any], full: dict[str, Any], local: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any
    ) -> None:
        sharded = {key: local[key] for key in keys if isinstance(local.get(key), ShardedTensor)}
        plain(full, local, keys, *args, **kwargs)
        for key, mine in sharded.items():  # a few at a time, so that no rank has the whole model
            local[key] = torch.empty_like(mine).copy_(local[key])

    replace_state_dict_functions(gather, broadcast)


def _whole(tree: Any, ranks_only: tuple[int, ...], on_host: bool) -> Any:
    """Return nested dictionaries and lists with whole tensors in place of sharded ones (collective)."""
    if isinstance(tree, ShardedTensor):
        value = tree.full_tensor()
        if ranks_only and torch.distributed.get_rank() not in ranks_only:
            return value.new_empty(0)  # torch drops it on this rank
        return value.cpu() if on_host else value
    if isinstance(tree, dict):
        return {key: _whole(value, ranks_only, on_host) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_whole(value, ranks_only, on_host) for value in tree)
    return tree


_SHOWN = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp", "torch.distributed._composable.fsdp.fully_shard")


def install() -> None:
    """Put this door's names in the place of FSDP2's in the modules of torch that show them. Call it before programs import them."""
    from . import module, sharding

    own = {name: getattr(module, name) for name in ("FSDPModule", "register_fsdp_forward_method", "share_comm_ctx")}
    own["fully_shard"] = sharding.fully_shard
    for where in _SHOWN:
        with contextlib.suppress(ImportError):
            shown = importlib.import_module(where)
            for name, value in own.items():
                if name in vars(shown) and not inspect.ismodule(vars(shown)[name]):
                    setattr(shown, name, value)
