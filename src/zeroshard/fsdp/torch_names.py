"""Names of torch that this door replaces: functions by which torch.distributed.checkpoint moves and copies tensors; and, for a
script that is not changed (`python -m zeroshard.fsdp`), FSDP2's public names.

torch gathers, cuts and stages DTensors alone, and takes any other tensor for a whole one. The functions here see to sharded tensors
first.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.checkpoint import staging

from ..seam import ShardedTensor
from ..utils.torch_compat import replace_state_dict_functions
from .host_slices import Tree, copies_of, in_one_box, mapped, with_copies, without_copies


@functools.cache
def serve_state_dicts() -> None:
    """Let torch's functions on state dictionaries gather and cut sharded tensors, from now on and for the process."""

    def gather(plain: Callable[..., Tree], state_dict: Tree, *args: object, **kwargs: Any) -> Tree:
        return plain(_whole(state_dict, kwargs.get("ranks_only", ()), kwargs.get("cpu_offload", False)), *args, **kwargs)

    def broadcast(
        plain: Callable[..., Any], full: dict[str, Any], local: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any
    ) -> None:
        sharded = {key: local[key] for key in keys if isinstance(local.get(key), ShardedTensor)}
        local.update(dict.fromkeys(sharded, torch.empty(0)))  # torch would take states for DTensors, whose slices are rows
        plain(full, local, keys, *args, **kwargs)
        for key, mine in sharded.items():  # a few at a time, so that no rank has the whole model
            local[key] = torch.empty_like(mine).copy_(local[key])

    replace_state_dict_functions(gather, broadcast, in_one_box)
    _stage_copies()


def _stage_copies() -> None:
    """Let torch's stagers, by which dcp.async_save copies a state dictionary, copy sharded tensors at once, in the thread that calls.

    A staging that goes on in a thread of its own would read slices where they rest, beside the training.
    """
    for name in ("DefaultStager", "BlockingAsyncStager"):
        kind = getattr(staging, name, None)  # the first is there since torch 2.9
        if kind is not None:
            kind.stage = _staging(kind.stage)


def _staging(plain: Callable[..., Tree]) -> Callable[..., Tree]:
    @functools.wraps(plain)
    def stage(self: object, state_dict: Tree, *args: object, **kwargs: object) -> Tree:
        copies = copies_of(state_dict)
        staged = plain(self, without_copies(copies), *args, **kwargs)
        if not isinstance(staged, Future):
            return with_copies(staged, copies)
        whole: Future[Tree] = Future()

        def fill(done: Future[Tree]) -> None:
            try:
                whole.set_result(with_copies(done.result(), copies))
            except BaseException as error:  # it is raised where the program waits
                whole.set_exception(error)

        staged.add_done_callback(fill)
        return whole

    return stage


def _whole(tree: Tree, ranks_only: tuple[int, ...], on_host: bool) -> Tree:
    """Return nested dictionaries and lists with whole tensors in place of sharded ones (collective)."""

    def gathered(value: Tree) -> Tree:
        if not isinstance(value, ShardedTensor):
            return value
        whole = value.full_tensor()
        if ranks_only and torch.distributed.get_rank() not in ranks_only:
            return whole.new_empty(0)  # torch drops it on this rank
        return whole.cpu() if on_host else whole

    return mapped(tree, gathered)


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
