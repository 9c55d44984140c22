"""Optimizers of the process: a program may make one before fully_shard, and give it the sharded parameters afterwards."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from ..assembly.late_optimizer import expect, watch

_made: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


@functools.cache
def track_optimizers() -> None:
    """From now on remember each optimizer, and complete models whose parameters one is given; once for the process."""
    from .sharding import complete_owners

    watch()
    plain = torch.optim.Optimizer.add_param_group

    @functools.wraps(plain)
    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        given = param_group.get("params")
        if isinstance(given, torch.Tensor):
            given = [given]
        elif given is not None:
            given = param_group["params"] = list(given)  # it may be a generator
        complete_owners([each[1] if isinstance(each, tuple) else each for each in given or ()])
        _made.add(self)
        plain(self, param_group)

    torch.optim.Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


def expect_all() -> None:
    """Let each optimizer made so far become a sharded one at its first use, if it has parameters of a sharded model by then."""
    for optimizer in list(_made):
        expect(optimizer)
