"""What a program written for DistributedDataParallel sets and calls on its model, served by the class of a sharded model.

    model.require_backward_grad_sync = False     the backwards that follow do not communicate, until it is True again
    with model.no_sync(): ...                    the same for the backwards inside: zs.accumulate
    model.module                                 AttributeError, which says that the model itself is meant

zs.shard makes the model's class a subclass of its own class with the same name, and zs.close takes that back. A model that has
`require_backward_grad_sync` or `no_sync` already keeps its own.

`module` is not served: Transformers' `unwrap_model` and Accelerate's `extract_model_from_parallel` look for wrappers by
`hasattr(model, "module")` and call themselves with `model.module`. A model that returned itself would never end that recursion.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from .runtime import Runtime


class ShardedModel:
    """The first base of a sharded model's class: the second one is the class that the user has written."""

    def __init_subclass__(cls) -> None:
        """Without the `__init_subclass__` of the user's class: a registry of models is not to see a class made here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """An object that is made of this class, as nn.Sequential makes its slices, is one of the user's class."""
        self.__class__ = type(self).__bases__[1]
        self.__init__(*args, **kwargs)  # type: ignore[misc]

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
def accumulate(runtime: Runtime) -> Iterator[None]:
    """The backwards inside do not communicate: see zs.accumulate."""
    previous = runtime.sync
    set_sync(runtime, False)
    try:
        yield
    finally:
        runtime.sync = previous


def set_sync(runtime: Runtime, sync: bool) -> None:
    """Whether the backwards that follow reduce gradients. All ranks set it alike."""
    runtime.sync = sync
    if not sync:
        runtime.account.held = True


def give_interface(runtime: Runtime) -> None:
    """Change the class of the runtime's model; `take_interface` is the inverse."""

    def switched(_: nn.Module, sync: bool) -> None:
        """Whether the backwards that follow reduce gradients: the switch that DDP reads, set between micro-steps."""
        set_sync(runtime, bool(sync))

    def no_sync(_: nn.Module) -> contextlib.AbstractContextManager[None]:
        """`zs.accumulate(model)` under the name that DDP gives it."""
        return accumulate(runtime)

    model: Any = runtime.model
    own: type[nn.Module] = type(model)
    served = {"require_backward_grad_sync": property(lambda _: runtime.sync, switched), "no_sync": no_sync}
    names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    added = {name: value for name, value in served.items() if not hasattr(model, name)}
    metaclass: Any = type(own)
    model.__class__ = metaclass(own.__name__, (ShardedModel, own), names | added)


def take_interface(runtime: Runtime) -> None:
    """The model is of its own class again, unless somebody has changed its class since."""
    bases = type(runtime.model).__bases__
    if bases[0] is ShardedModel:
        runtime.model.__class__ = bases[1]
