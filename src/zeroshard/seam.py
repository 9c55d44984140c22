"""The seam: all that code outside of the engine uses of a sharded model, as documented objects that nobody reaches behind.

engine = engine_of(model)
"""

from __future__ import annotations

from torch import nn

from .reports.snapshot import Snapshot, snapshot_of
from .zero.runtime import Runtime, runtime_of


class Engine:
    """A sharded model as other parts of the package, and programs, see it; `engine_of(model)` returns it.

    The rank's own thread uses it, outside of forwards and backwards of the model unless a method says otherwise.
    """

    __slots__ = ("_runtime",)

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def snapshot(self) -> Snapshot:
        """Return what this rank holds, in bytes, what it has sent and moved so far, and what formulas need (not collective).

        Raise ConfigError if the model's optimizer was made since zs.shard and is refused.
        """
        return snapshot_of(self._runtime)


def engine_of(model: nn.Module) -> Engine:
    """Return the engine of a sharded model, or of the one that `torch.compile(model)` wraps.

    Raise TypeError if it is no nn.Module, and ZeroshardError if it is not sharded.
    """
    return Engine(runtime_of(model))
