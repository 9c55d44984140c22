"""The seam: all that code outside of the engine uses of a sharded model, as documented objects that nobody reaches behind.

engine = engine_of(model)
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from .comm.control import Control
from .comm.mesh.axes import Parts
from .zero.along_axis import Line
from .zero.parameter import ParamHome
from .zero.runtime import Runtime, runtime_of


class Engine:
    """A sharded model as other parts of the package, and programs, see it; `engine_of(model)` returns it.

    The rank's own thread uses it, outside of forwards and backwards of the model unless a method says otherwise.

    model: the sharded model itself. ranks: the data-parallel ranks that hold the same part of it; they may exchange messages at any
    time. note(text): add a line to the notes of `zs.report`.
    """

    __slots__ = ("_runtime", "model", "note", "ranks")

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self.model, self.ranks, self.note = runtime, runtime.model, runtime.comm, runtime.schedule.note

    @property
    def weight(self) -> float | None:
        """The weight of the backward that runs (`zs.backward`); None if it has none."""
        return self._runtime.account.weighing

    def line(self, axis: str, ranks: Parts) -> Line:
        """Open the line of an axis that this rank is in (collective). ranks: those of the mesh along each line of it."""
        return Line(self._runtime, axis, ranks)

    def also_remove(self, handles: Iterable[Any]) -> None:
        """Let `zs.close` remove hooks as well; a handle is any object with a method `remove`."""
        self._runtime.handles += handles


def engine_of(model: nn.Module) -> Engine:
    """Return the engine of a sharded model, or of the one that `torch.compile(model)` wraps.

    Raise TypeError if it is no nn.Module, and ZeroshardError if it is not sharded.
    """
    return Engine(runtime_of(model))


def find_engine(model: nn.Module) -> Engine | None:
    """Return the engine of a module that was itself given to zs.shard, else None."""
    runtime = model.__dict__.get("_zeroshard")
    return None if runtime is None else Engine(runtime)


def memory_of(param: nn.Parameter) -> Tensor:
    """Return the tensor whose memory a parameter is a view of while it is gathered; the parameter itself where it is not sharded."""
    home = getattr(param, "_home", None)
    return home.group.values.full if isinstance(home, ParamHome) and home.group.values.sharded else param


def abort_peers(error: Exception, comms: Iterable[Control], models: Iterable[nn.Module]) -> None:
    """Send an error to all ranks that may wait for this one: those of `comms`, and those that share parameters of the models now."""
    found = list(comms)
    for model in models:
        found += [engine.ranks for engine in map(find_engine, model.modules()) if engine is not None]
        homes = [getattr(param, "_home", None) for param in model.parameters()]
        found += [home.group.comm.control for home in homes if isinstance(home, ParamHome)]
    for comm in {id(comm): comm for comm in found}.values():
        if comm.world_size > 1:  # a copy of the error has no traceback, which would keep buffers alive
            comm.abort(f"rank {comm.rank}: {error}", copy.copy(error))
