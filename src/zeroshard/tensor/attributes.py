"""Python attributes that programs set on a parameter (`param._is_hf_initialized = True`) survive sharding, gathering and close.

    at rest    the user's object is the sharded parameter        in use    the modules hold the compute parameter

An attribute that a program sets on one of these two objects is found on the other, too.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..utils import torch_compat

_OWN = frozenset("_held _home _history _compute _of_parameter _of_gradient _is_param".split())  # attributes of this library
_OWN |= set(torch_compat.FAKE_DEVICE)  # attributes in which a fake tensor keeps its device

NOT_SHARDED = "not_sharded"  # attribute of a parameter that zs.shard leaves whole, to the program

# id of a parameter that `zs.gathered` has made whole -> its _Whole (values/gathered_parameters.py)
whole_now: dict[int, Any] = {}


def attributes_of(tensor: Tensor) -> dict[str, object]:
    """Return the attributes that programs have set on a tensor."""
    return {name: value for name, value in tensor.__dict__.items() if name not in _OWN}


def stays_whole(param: Tensor) -> bool:
    """Return whether a parameter stays the program's own: zs.shard neither moves nor cuts it, nor sums its gradients."""
    return getattr(param, NOT_SHARDED, False) is True


class CarriesAttributes:
    """Mixin of the sharded parameter, which shares its attributes with the compute parameter."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        compute = self.__dict__.get("_compute")
        # properties of torch (data, grad, requires_grad) are not in __dict__, and each object has its own
        if compute is not None and name not in _OWN and name in self.__dict__:
            compute.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        compute = self.__dict__.get("_compute")
        if name in _OWN or compute is None:  # this library's own, or before zs.shard
            return super().__delattr__(name)
        if name not in self.__dict__ and name not in compute.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.__dict__.pop(name, None)
        compute.__dict__.pop(name, None)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that was set on the compute parameter, inside a forward."""
        compute = self.__dict__.get("_compute")
        if compute is None or name in _OWN or name not in compute.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return compute.__dict__[name]
