"""Puts the exchanges of sequence parallelism (ulysses.py) around the attention of a sharded model.

In models of Transformers the functions of its attention registry exchange heads (transformers_attention.py). In any other module
torch.nn.functional.scaled_dot_product_attention does: a TorchFunctionMode is active while the module runs, also when a checkpoint
runs it again in backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ..comm.mesh import Axes
from ..errors import ConfigError
from ..seam import Engine
from ..utils.autograd import Running
from ..utils.axes import SP, TP
from ..utils.transformers_compat import is_pretrained
from . import transformers_attention
from .ulysses import SequenceParallel, active_in, of_module

# the forwards of modules that may call scaled_dot_product_attention, each with the mode that it entered, or None
_running = Running()


class _Attention(TorchFunctionMode):
    """Mode in which scaled_dot_product_attention is over whole sequences."""

    def __init__(self, sequence: SequenceParallel) -> None:
        super().__init__()
        self.sequence = sequence

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is F.scaled_dot_product_attention and self in _running.values() and not self.sequence.is_inside:
            return self.sequence.attention(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward and self in _running.values():  # else an interrupted forward has left the mode
            raise ConfigError(
                "sp: nn.MultiheadAttention computes its attention without leaving a place for the exchange of heads. Call "
                "F.scaled_dot_product_attention(query, key, value, is_causal=...) in a module of your own."
            )
        return func(*args, **(kwargs or {}))


# -- a model -------------------------------------------------------------------------------------------------------


def check(model: nn.Module) -> None:
    """Raise ConfigError if a model can not be sharded over ranks along sp."""
    for name, module in model.named_modules():
        if is_pretrained(module):
            transformers_attention.check(name, module)


def attach(engine: Engine, axes: Axes) -> None:
    """Let the attention of a sharded model be over whole sequences (collective)."""
    line, model = engine.line(SP, axes.lines[SP]), engine.model
    sequence = SequenceParallel(line, engine.note, axes.size(TP))
    handles: list[Any] = [SimpleNamespace(remove=lambda: [of_module.pop(module, None) for module in model.modules()])]
    covered: set[nn.Module] = set()
    for module in model.modules():
        of_module[module] = sequence
        if is_pretrained(module):
            handles += transformers_attention.attach(module, sequence)
            covered.update(module.modules())
    for module in model.modules():
        if module not in covered and not type(module).__module__.startswith("torch.nn.modules"):
            handles += _with_mode(module, sequence)
    handles.append(model.register_forward_hook(_expect_calls(sequence, bool(covered))))
    engine.also_remove(handles)
    engine.note(f"sequence parallelism: attention over the tokens of {sequence.size} ranks along sp (Ulysses)")


def _with_mode(module: nn.Module, sequence: SequenceParallel) -> list[Any]:
    """Return the handles of hooks between which the mode is active; nested modules do not enter it again."""

    @torch.compiler.disable
    def before(module: nn.Module, *_: object) -> None:
        mode = _Attention(sequence) if not _running.values() and active_in(module) is not None else None
        _running.enter(module, mode)
        if mode is not None:
            sequence.agreed = False
            mode.__enter__()

    @torch.compiler.disable
    def after(module: nn.Module, *_: object) -> None:
        for mode in _running.leave(module):
            if mode is not None:
                mode.__exit__(None, None, None)

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]


def _expect_calls(sequence: SequenceParallel, pretrained: bool) -> Callable[..., None]:
    """Return a forward hook that looks once, after a model's first forward, whether attention was exchanged in it."""
    forwards = 0

    def after(module: nn.Module, *_: object) -> None:
        nonlocal forwards
        if active_in(module) is None:
            return
        forwards += 1
        if forwards > 1 or sequence.calls:
            return
        text = (
            "the mesh has an axis sp, and the forward called no F.scaled_dot_product_attention and no attention of Transformers' "
            "registry: each token is computed without those of other ranks"
        )
        if pretrained:
            raise ConfigError(f"sp: {text}. Shard this model over dp and tp.")
        if sequence.comm.ranks[sequence.rank] == 0:
            print(f"zeroshard: {text}", file=sys.stderr)

    return after
