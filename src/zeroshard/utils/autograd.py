"""Queries to autograd and the interpreter: whether a backward, a forward or a torch.func transform runs; the graph's nodes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from . import torch_compat

_LEAF = 1 << 62  # gradient accumulators (nodes of leaves) have higher numbers
_CALL = torch_compat.CODE_OF_CALL
_NEAR = 12  # most frames between a module's call and its hooks

# returns whether this thread is inside a derivative of torch.func; hooks on our tensors do not see its backward
transforming = torch_compat.in_derivative
next_node = torch_compat.next_node


def in_backward() -> bool:
    """Return whether a backward runs on this thread."""
    return torch_compat.graph_task() != -1


def running_forward() -> FrameType | None:
    """Return the frame of the module call whose hook calls this; None if it is not found (a compiled call)."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_NEAR):
        if frame is None or frame.f_code is _CALL:
            return frame
        frame = frame.f_back
    return None


def forward_runs(module: nn.Module) -> bool:
    """Return whether a call of the module runs on this thread. False for compiled calls and calls of `forward` itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals["self"] is module:
            return True
        frame = frame.f_back
    return False


def ended(frame: FrameType) -> bool:
    """Return whether a call has ended, on any thread, and if so clear its variables: an interrupted forward holds activations."""
    try:
        frame.clear()
    except RuntimeError:  # still running
        return False
    return True


class Running(threading.local):
    """The forwards that run in a thread, as hooks enter and leave them, outermost first; each with a value of these hooks.

    A forward that was interrupted is dropped: torch runs no forward hooks after KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[nn.Module, FrameType | None, Any]] = []

    def values(self) -> list[Any]:
        """Return the values of the forwards that run."""
        while self._entries and (frame := self._entries[-1][1]) is not None and ended(frame):
            self._entries.pop()
        return [value for *_, value in self._entries]

    def enter(self, module: nn.Module, value: Any) -> None:
        """Note that the forward of a module begins; called by its pre-hook."""
        self._entries.append((module, running_forward(), value))

    def leave(self, module: nn.Module) -> list[Any]:
        """Forget the innermost forward of a module, and those inside of it; return their values, the innermost one's first.

        A forward whose earlier pre-hook raised was not entered: torch calls forward hooks then, too, and there is nothing to forget.
        """
        modules = [entered for entered, *_ in self._entries]
        if module not in modules:
            return []
        first = len(modules) - 1 - modules[::-1].index(module)
        values = [value for *_, value in reversed(self._entries[first:])]
        del self._entries[first:]
        return values


def memory_of(tensor: Tensor) -> int | None:
    """Return the identity of a tensor's storage; None for tensors without one (of torch.func, sparse)."""
    try:
        return torch_compat.storage_id(tensor.untyped_storage())
    except RuntimeError:
        return None


def leads_to_all(first: int, outputs: list[Tensor]) -> bool:
    """Return whether all graph nodes made on this thread from number `first` on lead to the outputs."""
    count = next_node() - first
    stack = [node for node in (output.grad_fn for output in outputs) if node is not None]
    found: set[int] = set()
    while stack:
        node = stack.pop()
        number = torch_compat.number_of(node)
        if first <= number < _LEAF and number not in found:
            found.add(number)
            stack.extend(before for before, _ in node.next_functions if before is not None)
    return len(found) == count


class _Context(Protocol):
    done: Callable[[], None]


class Marked(torch.autograd.Function):
    """Identity on a frozen unit's inputs, whose backward calls `done` when the backward inside the unit has ended."""

    @staticmethod
    def forward(ctx: _Context, done: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.done = done
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple:
        ctx.done()
        return (None, *grads)


def marked(done: Callable[[], None], tensors: list[Tensor]) -> Sequence[Tensor]:
    """Return views of the tensors. Once the gradients of all of them have come, a backward calls `done`.

    A single tensor is viewed by torch, so that the forward may write it in place, as nn.ReLU(inplace=True) does; `done` is not
    called then. Torch refuses to write a view that a function like `Marked` has made.
    """
    if len(tensors) > 1:
        return Marked.apply(done, *tensors)
    view = tensors[0].view_as(tensors[0])
    view.register_hook(lambda _: done())
    return [view]
