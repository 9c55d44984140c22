"""The seam: all that code outside of the engine uses of a sharded model, as documented objects that nobody reaches behind.

engine = engine_of(model)
"""

from __future__ import annotations

from torch import nn
from torch.utils.hooks import RemovableHandle

from .memory.ledger import Observer as Observer
from .zero import verbs
from .zero.runtime import Runtime, runtime_of


class Engine:
    """A sharded model as other parts of the package, and programs, see it; `engine_of(model)` returns it.

    The rank's own thread uses it, outside of forwards and backwards of the model unless a method says otherwise.
    """

    __slots__ = ("_runtime",)

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def begin(self, verb: str, *also: str, note: bool = True) -> None:
        """Raise unless the model is as a public function needs it: `verb` names a row of `zero.verbs.VERBS` (see its `begin`)."""
        verbs.begin(self._runtime, verb, *also, note=note)

    def observe(self, observer: Observer) -> RemovableHandle:
        """Tell an observer of each allocation, collective and copy of this rank from now on, until `remove()` of the handle.

        class Gathers(Observer):
            def sent(self, kind, label, inside, between):
                if kind.startswith("gather"):
                    print(label, inside + between)

        handle = engine_of(model).observe(Gathers())
        """
        return self._runtime.tiers.ledger.observe(observer)


def engine_of(model: nn.Module) -> Engine:
    """Return the engine of a sharded model, or of the one that `torch.compile(model)` wraps.

    Raise TypeError if it is no nn.Module, and ZeroshardError if it is not sharded.
    """
    return Engine(runtime_of(model))
