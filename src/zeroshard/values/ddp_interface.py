"""The class of a sharded model, with the attributes and methods that programs use on a DistributedDataParallel model, and FSDP2's switch.

    model.require_backward_grad_sync = False     the backwards that follow do not communicate, until it is True again
    model.set_requires_gradient_sync(False)      the same, as FSDP2 has it
    with model.no_sync(): ...                    the same for the backwards inside: zs.accumulate
    model.module                                 AttributeError, with the advice to use the model itself

zs.shard changes the model's class to a subclass of its own class with the same name, and zs.close restores it. A model that has
`require_backward_grad_sync` or `no_sync` already keeps its own. In `__call__` an out-of-memory error gets a longer message.

`module` is not served: Transformers' `unwrap_model` and Accelerate's `extract_model_from_parallel` look for wrappers by
`hasattr(model, "module")` and call themselves with `model.module`. A model that returned itself would never end that recursion.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..engine.runtime import Runtime, runtime_of
from ..engine.watch import FAILURES
from .by_hand import HeldGradients


class ShardedModel:
    """First base of a sharded model's class; the second base is the class that the user has written."""

    def __init_subclass__(cls) -> None:
        """Do nothing, in place of the user class's `__init_subclass__`: a registry of models must not see classes made here."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Make an object of the user's class, since nn.Sequential makes its slices by `type(self)(...)`."""
        self.__class__ = type(self).__bases__[1]
        self.__init__(*args, **kwargs)  # type: ignore[misc]

    def __call__(self, *args: object, **kwargs: object) -> Any:
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except FAILURES as error:
            if "_zeroshard" in self.__dict__:  # else zs.close could not restore the class, since the program has changed it
                runtime = self.__dict__["_zeroshard"]
                runtime.watches.tell(error, runtime, "the forward")
            raise

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError as error:
            if name != "module":
                raise
            raise AttributeError(
                f"{type(self).__name__}.module: zs.shard wraps no model, so there is nothing to unwrap. Write `model` in place of "
                "`model.module`, and `zs.full_state_dict(model)` (on all ranks) in place of `model.module.state_dict()`."
            ) from error


@contextlib.contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Gradient accumulation without communication: gradients of the backwards inside add up on each rank, at every stage, in
    `gradient_dtype`.

    The sums are reduced by the next backward outside, or by the first use of gradients: a step, `clip_grad_norm_`,
    `full_gradients`. All ranks must enter and leave the context for the same backwards. DDP's `model.no_sync()` and
    `model.require_backward_grad_sync = False` do the same.
    """
    with HeldGradients(runtime_of(model)).summing(reduce=False):
        yield


def give_interface(runtime: Runtime) -> None:
    """Change the class of the runtime's model until the model is closed; `take_interface` is the inverse."""

    def switched(_: nn.Module, sync: bool) -> None:
        """Set whether the backwards that follow reduce gradients, as by the attribute of DDP; every rank must set the same."""
        runtime.sync = bool(sync)
        if not sync:
            runtime.account.holds()

    def set_requires_gradient_sync(model: nn.Module, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set, as FSDP2's method does, whether the backwards that follow reduce gradients; every rank must set the same."""
        switched(model, requires_gradient_sync)

    own = type(runtime.model)
    served = {
        "require_backward_grad_sync": property(lambda _: runtime.sync, switched), "no_sync": accumulate,
        "set_requires_gradient_sync": set_requires_gradient_sync,
    }  # fmt: skip
    names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    added = {name: value for name, value in served.items() if not hasattr(runtime.model, name)}
    sharded = types.new_class(own.__name__, (ShardedModel, own), {}, lambda found: found.update(names | added))
    runtime.model.__class__ = sharded
    runtime.handles.insert(0, types.SimpleNamespace(remove=functools.partial(take_interface, runtime)))


def take_interface(runtime: Runtime) -> None:
    """Restore the class of the model, unless the program has changed the class since."""
    bases = type(runtime.model).__bases__
    if bases[0] is ShardedModel:
        runtime.model.__class__ = bases[1]
