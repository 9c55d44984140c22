"""`engine.optimizer.parameter_offload` at stage 3: the hooks that programs take off while they generate, and put on again.

    with GatheredParameters(model.parameters()): remove_hooks(engine); model.generate(...); add_hooks(engine)       trl's

zeroshard's hooks stay: they have nothing to do for parameters that are whole. What is shown are handles to be counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from . import partition


class Handle:
    """Of a hook that does nothing."""

    def remove(self) -> None:
        """Nothing is registered."""


class ParameterOffload:
    """module: the sharded model. forward_hooks, backward_hooks: a handle for each module in it that has parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Handle] = []
        self.backward_hooks: list[Handle] = []
        partition.show_external_parameters(module)
        self._register_deepspeed_module(module)

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        """Put hooks on a module and those in it."""
        for each in module.modules():
            if any(True for _ in each.parameters(recurse=False)):
                self.forward_hooks.append(Handle())
                self.backward_hooks.append(Handle())

    def _remove_module_hooks(self) -> None:
        self.forward_hooks, self.backward_hooks = [], []


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """The engine with all parameters whole (collective), for many forwards without a gather. What is written is dropped."""
    offload = getattr(model.optimizer, "parameter_offload", None)
    with partition.GatheredParameters(model.parameters()):
        if offload is not None:
            offload._remove_module_hooks()
        try:
            yield model
        finally:
            if offload is not None:
                offload._register_deepspeed_module(offload.module)
