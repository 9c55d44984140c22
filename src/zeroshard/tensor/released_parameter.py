"""Classes of parameters while their memory is released: code that kept such a parameter gets an error, or a gather."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import ShardedAccessError, StatesAway, ZeroshardError
from ..utils import torch_compat
from ..utils.autograd import in_backward
from .differentiable import ReadableWhole

# attributes that read elements
_VIEWS = tuple(getattr(torch.Tensor, name) for name in ("data", "T", "mT", "H", "mH", "real", "imag"))
# functions that read no elements (`__get__`: of other attributes than `_VIEWS`)
_HARMLESS = ("__get__", "register_hook", "register_post_accumulate_grad_hook", "size", "dim", "numel", "untyped_storage")


class ReleasedParameter(ReadableWhole):
    """Class of a compute parameter while its memory is released, for code that kept it beyond the forward.

    A use inside a backward gathers its unit (an autograd function may keep it in its `ctx`); any other use raises.
    """

    _gather: Callable[[], None] | None = None  # gathers the unit for the backward that runs; set in each unit's subclass

    _refusal: type[ZeroshardError] = ShardedAccessError
    _why = (
        "a parameter was kept from inside a forward and used after its unit was released. Read it inside the forward, "
        "or take that of the module whole: `module.weight.full_tensor()`, on all ranks."
    )

    @classmethod
    def __torch_function__(cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if getattr(func, "__name__", "") in _HARMLESS and getattr(func, "__self__", None) not in _VIEWS:
            with torch_compat.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if cls._gather is None or not in_backward():
            raise cls._refusal(cls._why)
        cls._gather()  # also sets the class of the unit's parameters back to nn.Parameter
        return func(*args, **(kwargs or {}))

    @classmethod
    def of_unit(cls, gather: Callable[[], None]) -> type[ReleasedParameter]:
        """Return a subclass for one unit's parameters. gather: gathers the unit for the backward that runs."""
        return type(cls.__name__, (cls,), {"_gather": staticmethod(gather), "__module__": cls.__module__})

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return "ReleasedParameter(its unit is not gathered)"


class AwayParameter(ReleasedParameter):
    """Class of a parameter of a replicated unit while zs.offload_states has moved its memory away: any use raises."""

    _refusal = StatesAway
    _why = "the parameters of this model are away (zs.offload_states): call zs.reload_states(model), on all ranks, before they are used."

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        raise StatesAway(self._why)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return "AwayParameter(see zs.reload_states)"
