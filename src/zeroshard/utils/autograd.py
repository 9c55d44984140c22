"""What is asked of autograd and of the interpreter: where a backward, a forward or a transform of torch.func is, and what is in the graph."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from . import torch_compat

_LEAF = 1 << 62  # numbers of nodes that stand for leaves are higher
_CALL = torch_compat.code_of_call()
_NEAR = 12  # frames between a module's call and its hooks, at most


def in_backward() -> bool:
    """On this thread."""
    return torch_compat.graph_task() != -1


def transforming() -> bool:
    """Inside a derivative of torch.func, whose graph only it sees: backward can not be noticed."""
    return torch_compat.in_derivative()


def running_forward() -> FrameType | None:
    """The call of the module whose hook asks; None where it can not be found (a compiled call)."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_NEAR):
        if frame is None or frame.f_code is _CALL:
            return frame
        frame = frame.f_back
    return None


def forward_runs(module: nn.Module) -> bool:
    """Whether a call of the module runs on this thread; False of a call of its `forward` past its hooks, and of a compiled one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals["self"] is module:
            return True
        frame = frame.f_back
    return False


def ended(frame: FrameType) -> bool:
    """Whether a call is over, on whatever thread it ran. If so its variables go: a forward that was interrupted holds activations."""
    try:
        frame.clear()
    except RuntimeError:  # it is being executed
        return False
    return True


def memory_of(tensor: Tensor) -> int | None:
    """Identity of a tensor's memory; None for those (of torch.func, sparse) that have none of their own."""
    try:
        return torch_compat.storage_id(tensor.untyped_storage())
    except RuntimeError:
        return None


def next_node() -> int:
    """The number of the node that autograd makes next on this thread."""
    return torch_compat.next_node()


def leads_to_all(first: int, outputs: list[Tensor]) -> bool:
    """Whether all nodes of autograd's graph that were made on this thread since the number `first` lead to the outputs."""
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


class Marked(torch.autograd.Function):
    """Identity on a frozen unit's inputs: its backward runs when nothing inside the unit remains to be computed."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.done = done
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        ctx.done()
        return (None, *grads)
