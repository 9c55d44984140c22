"""`engine.optimizer.parameter_offload` at stage 3: hooks that programs remove while they generate, and add again afterwards.

    with GatheredParameters(model.parameters()): remove_hooks(engine); model.generate(...); add_hooks(engine)       in trl

zeroshard's own hooks stay registered, since they do nothing for gathered parameters. The handles of this module belong to no
hook: programs remove and count them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from . import partition


class Handle:
    """Handle of a hook that does not exist."""

    def remove(self) -> None:
        """Do nothing, since nothing is registered."""


class ParameterOffload:
    """Handles in place of DeepSpeed's hooks: forward_hooks and backward_hooks have one for each module with parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Handle] = []
        self.backward_hooks: list[Handle] = []
        partition.show_external_parameters(module)
        self._register_deepspeed_module(module)

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        """Add handles for a module and those in it."""
        for each in module.modules():
            if any(True for _ in each.parameters(recurse=False)):
                self.forward_hooks.append(Handle())
                self.backward_hooks.append(Handle())

    def _remove_module_hooks(self) -> None:
        self.forward_hooks, self.backward_hooks = [], []


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Context with all parameters gathered, for many forwards without a gather (collective). Writes are dropped."""
    offload = getattr(model.optimizer, "parameter_offload", None)
    with partition.GatheredParameters(model.parameters()):
        if offload is not None:
            offload._remove_module_hooks()
        try:
            yield model
        finally:
            if offload is not None:
                offload._register_deepspeed_module(offload.module)
