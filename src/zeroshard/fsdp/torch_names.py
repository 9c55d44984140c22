"""Names of torch that this door replaces: two private functions, by which torch.distributed.checkpoint.state_dict moves tensors;
and, for a script that is not changed (`python -m zeroshard.fsdp`), FSDP2's public names.

torch gathers and cuts DTensors alone, and takes any other tensor for a whole one. The functions here see to sharded tensors first.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from typing import Any

import torch

from ..errors import ConfigError
from ..seam import ShardedTensor

_MODULES = ("torch.distributed._state_dict_utils", "torch.distributed.checkpoint.state_dict")
_NAMES = ("_gather_state_dict", "_broadcast_tensors")


@functools.cache
def serve_state_dicts() -> None:
    """Replace the two functions, once for the process. Raise ConfigError if this release of torch lacks one."""
    import torch.distributed._state_dict_utils as utils
    import torch.distributed.checkpoint.state_dict as state_dict

    missing = [name for name in _NAMES if not hasattr(utils, name)]
    if missing:
        raise ConfigError(
            f"zeroshard.fsdp needs {missing[0]} of torch.distributed._state_dict_utils, which torch {torch.__version__} lacks: without it, "
            "get_model_state_dict would take slices for whole tensors. Use a release from pyproject.toml's range."
        )
    gather, broadcast = utils._gather_state_dict, utils._broadcast_tensors

    @functools.wraps(gather)
    def gather_state_dict(state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        return gather(_whole(state_dict, kwargs.get("ranks_only", ()), kwargs.get("cpu_offload", False)), *args, **kwargs)

    @functools.wraps(broadcast)
    def broadcast_tensors(full: dict[str, Any], local: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any) -> None:
        sharded = {key: local[key] for key in keys if isinstance(local.get(key), ShardedTensor)}
        broadcast(full, local, keys, *args, **kwargs)
        for key, mine in sharded.items():  # a few at a time, so that no rank has the whole model
            local[key] = torch.empty_like(mine).copy_(local[key])

    for module in (utils, state_dict):
        for name, own in (("_gather_state_dict", gather_state_dict), ("_broadcast_tensors", broadcast_tensors)):
            if hasattr(module, name):
                setattr(module, name, own)


def _whole(tree: Any, ranks_only: tuple[int, ...], on_host: bool) -> Any:
    """Return nested dictionaries and lists with whole tensors in place of sharded ones (collective)."""
    if isinstance(tree, ShardedTensor):
        value = tree.full_tensor()
        if ranks_only and torch.distributed.get_rank() not in ranks_only:
            return value.new_empty(0)  # torch drops it on this rank
        return value.cpu() if on_host else value
    if isinstance(tree, dict):
        return type(tree)((key, _whole(value, ranks_only, on_host)) for key, value in tree.items())
    if isinstance(tree, (list, tuple)):
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
