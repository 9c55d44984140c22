"""Notices what was done to a model behind the library's back: parameters that came, went or got another dtype."""

from __future__ import annotations

import operator
from itertools import repeat

import torch
from torch import nn

from .errors import ModelChanged
from .unit import ParamGroup


class ModelWatch:
    """Looks at a model before each forward; microseconds where nothing has changed."""

    def __init__(self, model: nn.Module, groups: list[ParamGroup]) -> None:
        self.model = model
        self._tree = _Tree(model)
        self._params = [(param, spec.name) for group in groups for param, spec in zip(group.params, group.specs, strict=True)]
        self._dtypes = [param.dtype for param, _ in self._params]

    def check(self, gathered: bool, thoroughly: bool = False) -> None:
        """Raise ModelChanged where parameters are not those of zs.shard() (a submodule may be wrapped).

        gathered: inside `zs.gathered`, where other tensors stand in their places. thoroughly: see also one that stands in the place
            of another, which units notice when they are used; milliseconds.
        """
        with torch._C.DisableTorchFunctionSubclass():  # looking at a sharded parameter takes microseconds otherwise
            dtypes = [param.dtype for param, _ in self._params]
        if dtypes != self._dtypes:
            self._complain_dtype()
        if gathered or (not thoroughly and self._tree.stands()):
            return
        names = {id(param): name for param, name in self._params}
        present = {id(p): name for name, p in self.model.named_parameters()}
        gone = [name for key, name in names.items() if key not in present]
        new = [name for key, name in present.items() if key not in names]
        if gone or new:
            raise ModelChanged(
                f"parameter {(gone + new)[0]} was replaced, added or removed after zs.shard(). "
                "zs.close(model) first, change the model (resize, adapt), then zs.shard() it again."
            )
        self._tree = _Tree(self.model)

    def _complain_dtype(self) -> None:
        for (param, name), known in zip(self._params, self._dtypes, strict=True):
            if param.dtype != known:
                raise ModelChanged(
                    f"parameter {name} was converted from {known} to {param.dtype} after zs.shard(), by half(), "
                    "to(dtype) or the like. Give precision='bf16' or 'fp16' to zs.shard(), or convert the model before it."
                )


class _Tree:
    """The modules of a model and which parameters they have: seen in microseconds whether any came or went."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._children = [(module._modules, dict(module._modules)) for module in modules if module._modules]
        self._params = [module._parameters for module in modules]
        self._counts = [*map(len, self._params)]
        absent = [(params, name) for params in self._params for name, param in params.items() if param is None]
        self._absent = [params for params, _ in absent], [name for _, name in absent]

    def stands(self) -> bool:
        """True if every module has the children and the number of parameters that it had."""
        return (
            all(modules == known for modules, known in self._children)
            and [*map(len, self._params)] == self._counts
            and all(map(operator.is_, map(dict.get, *self._absent), repeat(None)))
        )
