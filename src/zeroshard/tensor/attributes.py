"""What others have set on a parameter (`param._is_hf_initialized = True`) stays with it: cut, sharded, gathered and closed.

    at rest    the user's object is the sharded parameter        in use    the modules hold the compute parameter

Both show the same attributes, whichever they were set on.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..utils import torch_compat

_OWN = frozenset("_held _home _compute _of_parameter _of_gradient _is_param".split())  # the library's
_OWN |= set(torch_compat.FAKE_DEVICE)  # and those by which a fake tensor says where it is

whole_now: dict[int, Any] = {}  # id of each parameter that `zs.gathered` has made whole -> who did (zero/gathered_parameters.py)


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """What others have set on a tensor."""
    return {name: value for name, value in tensor.__dict__.items() if name not in _OWN}


class CarriesAttributes:
    """Mixed into the sharded parameter: its attributes are its compute parameter's too."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        compute = self.__dict__.get("_compute")
        if compute is not None and name not in _OWN and name in self.__dict__:  # else torch's: data, grad, requires_grad
            compute.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        compute = self.__dict__.get("_compute")
        if name in _OWN or compute is None:
            return super().__delattr__(name)
        if name not in self.__dict__ and name not in compute.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.__dict__.pop(name, None)
        compute.__dict__.pop(name, None)

    def __getattr__(self, name: str) -> Any:
        """One that was set inside a forward."""
        compute = self.__dict__.get("_compute")
        if compute is None or name in _OWN or name not in compute.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return compute.__dict__[name]
