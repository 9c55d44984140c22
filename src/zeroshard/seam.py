"""The seam: all that code outside of the engine uses of a sharded model, as documented objects that nobody reaches behind.

engine = engine_of(model)
"""

from __future__ import annotations

from torch import nn

from .state.slices import StateSlice, slices_of
from .zero.runtime import Runtime, runtime_of


class Engine:
    """A sharded model as other parts of the package, and programs, see it; `engine_of(model)` returns it.

    The rank's own thread uses it, outside of forwards and backwards of the model unless a method says otherwise.
    """

    __slots__ = ("_runtime",)

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def slices(self, *kinds: str) -> list[StateSlice]:
        """Return this rank's slices of the model's states, by name; not collective, and it waits for nothing.

            for each in engine.slices("master", "optimizer"):
                if each.counted and not each.single:
                    print(each.kind, each.name, each.shape, f"[{each.start}, {each.stop})", each.host(0, each.stop - each.start))

        kinds, each in the order of the model's units (of optimizer states: of its groups):

            "value"             parameters as they rest
            "master"            what the optimizer steps: fp32 masters, or values where there are none
            "optimizer"         all states of the model's optimizer, of kinds "optimizer:exp_avg" and so on; none before the first step
            "optimizer:NAME"    one of them
            "average:NUMBER"    averages of the trained parameters; the number counts calls of zs.ema

        Raise ConfigError for another kind.
        """
        return slices_of(self._runtime, kinds)


def engine_of(model: nn.Module) -> Engine:
    """Return the engine of a sharded model, or of the one that `torch.compile(model)` wraps.

    Raise TypeError if it is no nn.Module, and ZeroshardError if it is not sharded.
    """
    return Engine(runtime_of(model))
