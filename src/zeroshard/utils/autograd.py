"""What is asked of autograd and of the interpreter: where a backward, a forward or a transform of torch.func is, and what is in the graph."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

_LEAF = 1 << 62  # numbers of nodes that stand for leaves are higher
_CALL = nn.Module._call_impl.__code__
_NEAR = 12  # frames between a module's call and its hooks, at most


def in_backward() -> bool:
    """On this thread."""
    return torch._C._current_graph_task_id() != -1


def transforming() -> bool:
    """Inside a derivative of torch.func, whose graph only it sees: backward can not be noticed."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return False
    kinds = torch._C._functorch.TransformType
    return any(each.key() in (kinds.Grad, kinds.Jvp) for each in retrieve_all_functorch_interpreters())


def running_forward() -> FrameType | None:
    """The call of the module whose hook asks; None where it can not be found (a compiled call)."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_NEAR):
        if frame is None or frame.f_code is _CALL:
            return frame
        frame = frame.f_back
    return None


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
        return tensor.untyped_storage()._cdata
    except RuntimeError:
        return None


def next_node() -> int:
    """The number of the node that autograd makes next on this thread."""
    return torch._C._autograd._get_sequence_nr()


def nodes_since(first: int, outputs: list[Tensor]) -> tuple[set[int], set[Tensor | None]]:
    """(numbers, from `first` on, of the nodes of autograd's graph that lead to the outputs; leaves that these begin with)"""
    stack = [node for node in map(_node_of, outputs) if node is not None]
    found: set[int] = set()
    leaves: set[Tensor | None] = set()
    while stack:
        node = stack.pop()
        number = node._sequence_nr()
        if number >= _LEAF:
            leaves.add(getattr(node, "variable", None))  # of a leaf; there are others
        elif first <= number and number not in found:
            found.add(number)
            stack.extend(before for before, _ in node.next_functions if before is not None)
    return found, leaves


def number_of(tensor: Tensor) -> int:
    """Of the node that made a tensor, which may be another thread's; -1 for a leaf, and for tensors of torch.func."""
    with torch._C.DisableTorchFunctionSubclass():
        if not tensor.requires_grad:
            return -1
        node = _node_of_view(tensor) if tensor._is_view() else _node_of(tensor)
    number = -1 if node is None else node._sequence_nr()
    return number if number < _LEAF else -1


def _node_of_view(view: Tensor) -> Any:
    """A thread that changes a view in place holds the view's lock, and may wait for the interpreter's. To read `grad_fn` takes
    the first while it holds the second, which stops both threads; an operation takes it without. This one makes a node."""
    with torch.enable_grad(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        try:
            above = view.view_as(view).grad_fn
        except RuntimeError:  # of a layout that has no such operation
            above = None
    return _node_of(view) if above is None else above.next_functions[0][0]


def _node_of(tensor: Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return tensor.grad_fn
        except RuntimeError:  # of a torch.func that is over
            return None


_begun = (0, 0, 0)  # collections of each generation


def _collecting(phase: str, info: dict[str, int]) -> None:
    global _begun
    if phase == "start":
        _begun = tuple(count + (generation == info["generation"]) for generation, count in enumerate(_begun))


gc.callbacks.append(_collecting)


def collections() -> tuple[int, ...]:
    """How often Python's collector has begun, by generation: what outlives it goes to the next one."""
    return _begun


def living_tensors(since: tuple[int, ...]) -> list[Tensor]:
    """At least those tensors that a program holds and that were made when `collections` was `since`."""
    found = _tensors_of(0, 1)
    return found if collections()[1:] == since[1:] else _tensors_of(None)  # not a thousandth of all that there is, but some 10^5


def _tensors_of(*generations: int | None) -> list[Tensor]:
    """In one call of C, so that no other thread goes on while all objects are held: a tuple that it is just making must be held by
    nobody else (SystemError: bad argument to internal function)."""
    kinds, stack = set(), [Tensor]
    while stack:
        kinds.add(kind := stack.pop())
        stack += [each for each in type.__subclasses__(kind) if each not in kinds]
    chain, held = itertools.chain, []
    everything = chain.from_iterable(map(gc.get_objects, generations))
    chosen = itertools.compress(chain.from_iterable((held,)), map(kinds.__contains__, map(type, chain.from_iterable((held,)))))
    return list(chain(map(held.extend, (everything,)), chosen, map(list.clear, (held,))))[1:-1]  # None is from extend, and clear


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
