"""Saved-tensor hooks inside of other saved-tensor hooks.

Torch calls only the innermost hooks (`torch.autograd.graph.saved_tensors_hooks`). Hooks for some tensors therefore pass all
others to the hooks around them, or, if there are none, save them as autograd does without hooks:

    outer = Outer()                         # where the hooks are entered
    packed = outer.pack(tensor)             # an object with a method `restore`
    tensor = packed.restore()
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch.utils.checkpoint
from torch import Tensor

from ..errors import ShardedAccessError
from . import torch_compat
from .torch_compat import top_saved_tensors_hooks


class Outer:
    """The saved-tensor hooks that are active when this is made. Inner hooks are methods of an object that has it as `outer`.

    checkpoint: the hooks of `torch.utils.checkpoint` among them, which number saved tensors to find them again; or None.
    """

    __slots__ = ("checkpoint", "hooks")

    def __init__(self) -> None:
        self.hooks: tuple[Callable, Callable] | None = top_saved_tensors_hooks()
        self.checkpoint: tuple[Callable, Callable] | None = None
        if self.hooks is not None:
            around = getattr(getattr(self.hooks[0], "__self__", None), "outer", None)
            counts = self.hooks[0].__module__ == torch.utils.checkpoint.__name__
            self.checkpoint = self.hooks if counts else around.checkpoint if isinstance(around, Outer) else None

    def pack(self, tensor: Tensor) -> Packed | Saved:
        """Return the object that autograd keeps in place of a tensor that the inner hooks do not handle."""
        return Saved(tensor) if self.hooks is None else Packed(self.hooks[0](tensor), self.hooks[1])

    def count(self, tensor: Tensor) -> object:
        """Let a surrounding checkpoint count a tensor that inner hooks pack. Keep the result as long as the packed tensor."""
        return None if self.checkpoint is None else self.checkpoint[0](tensor)


class Packed:
    """A tensor that outer hooks have packed."""

    __slots__ = ("unpack", "value")

    def __init__(self, value: object, unpack: Callable[[object], Tensor]) -> None:
        self.value, self.unpack = value, unpack

    def restore(self) -> Tensor:
        return self.unpack(self.value)


class Saved:
    """A tensor saved as autograd does without hooks, with its check (which torch leaves to hooks) for in-place writes since."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # detached: an output refers to its node, and a node that saves its own output would never be freed
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = torch_compat.version(tensor)

    def restore(self) -> Tensor:
        """Return the tensor. Raises RuntimeError if it was modified in place, ShardedAccessError if its memory was released."""
        if torch_compat.version(self.tensor) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.tensor.dtype} of shape {tuple(self.tensor.shape)} is at version {torch_compat.version(self.tensor)}; expected "
                f"version {self.version}."
            )
        if self.tensor.layout is torch.strided and self.tensor.numel() and not self.tensor.untyped_storage().nbytes():
            raise ShardedAccessError(
                f"autograd has saved a tensor of shape {tuple(self.tensor.shape)} whose memory is released by now: it is a parameter of "
                "another unit, or a view of one. Let the function that computes with it read the parameter from its module."
            )
        return self.tensor


#: The `unpack` of hooks whose packed objects have a method `restore`.
restore = operator.methodcaller("restore")
