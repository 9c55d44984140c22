"""Aborting: a rank that fails on its own, while peers may wait for it, sends them its error."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from torch import nn

from ..engine.comm.control import Control
from ..engine.parameter import ParamHome


def abort_peers(error: Exception, comms: Iterable[Control], models: Iterable[nn.Module]) -> None:
    """Send an error to all ranks that may wait for this one: those of `comms`, and those that share parameters of the models now."""
    found = list(comms)
    for model in models:
        runtimes = [module.__dict__.get("_zeroshard") for module in model.modules()]
        found += [runtime.comm for runtime in runtimes if runtime is not None]
        homes = [getattr(param, "_home", None) for param in model.parameters()]
        found += [home.group.comm.control for home in homes if isinstance(home, ParamHome)]
    for comm in {id(comm): comm for comm in found}.values():
        if comm.world_size > 1:  # a copy of the error has no traceback, which would keep buffers alive
            comm.abort(f"rank {comm.rank}: {error}", copy.copy(error))
