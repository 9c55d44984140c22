"""What parameters are, for whoever kept them, while their memory is given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ShardedAccessError, StatesAway, ZeroshardError
from ..utils import torch_compat
from ..utils.autograd import in_backward
from .differentiable import ReadableWhole

_VIEWS = tuple(getattr(torch.Tensor, name) for name in ("data", "T", "mT", "H", "mH", "real", "imag"))  # attributes that read
_HARMLESS = ("__get__", "register_hook", "register_post_accumulate_grad_hook", "size", "dim", "numel", "untyped_storage")


class ReleasedParameter(ReadableWhole, nn.Parameter):
    """What a compute parameter is while its memory is released, for whoever kept it beyond the forward.

    Inside of a backward it is gathered when it is used (a function may keep it in its `ctx`); elsewhere it is not to be read.
    """

    _gather: Callable[[], None] | None = None  # for the backward that runs; of each unit's subclass

    _refusal: type[ZeroshardError] = ShardedAccessError
    _why = (
        "a parameter was kept from inside a forward and used after its unit was released. Read it inside the forward, "
        "or take that of the module whole: `module.weight.full_tensor()`, on all ranks."
    )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(func, "__name__", "") in _HARMLESS and getattr(func, "__self__", None) not in _VIEWS:
            with torch_compat.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if cls._gather is None or not in_backward():
            raise cls._refusal(cls._why)
        cls._gather()  # its parameters are ordinary ones now
        return func(*args, **(kwargs or {}))

    @classmethod
    def of_unit(cls, gather: Callable[[], None]) -> type[ReleasedParameter]:
        """The class of one unit's parameters. gather: makes the unit ready for the backward that runs."""
        return type(cls.__name__, (cls,), {"_gather": staticmethod(gather), "__module__": cls.__module__})

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return "ReleasedParameter(its unit is not gathered)"


class AwayParameter(ReleasedParameter):
    """What a parameter of a replicated unit is while its memory is given up: see zs.offload_states."""

    _refusal = StatesAway
    _why = "the parameters of this model are away (zs.offload_states): call zs.reload_states(model), on all ranks, before they are used."

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        raise StatesAway(self._why)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return "AwayParameter(see zs.reload_states)"
