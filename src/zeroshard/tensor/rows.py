"""Home of rows of a sharded tensor (weight[i], weight[a:b]): reads and writes of the rows go to the tensor's home.

`Home` in tensor/sharded_tensor.py documents the methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..errors import ShardedWriteError


class RangeHome:
    """Home of rows of a sharded tensor, a contiguous range of its flattened elements; `parent` is the tensor's home."""

    def __init__(self, parent: Any, name: str, offset: int, numel: int) -> None:
        """offset, numel: range of the rows in the flattened parent."""
        self.parent, self.name, self.offset, self.comm = parent, name, offset, parent.comm
        begin, end = max(parent.start, offset), min(parent.stop, offset + numel)
        self.begin = begin - parent.start if begin < end else 0  # first element in the parent's slice
        self.start: int = begin - offset if begin < end else 0  # in the flattened rows
        self.stop: int = end - offset if begin < end else 0

    @property
    def meeting(self) -> Any:
        return self.parent.meeting

    @property
    def counts(self) -> bool:
        return self.parent.counts

    @property
    def distributed(self) -> bool:
        return self.parent.distributed

    @property
    def undivided(self) -> bool:
        return self.parent.undivided

    def before_write(self) -> None:
        self.parent.before_write()

    def fetch(self, gradient: bool) -> Tensor:
        return self.parent.fetch(gradient)[self.begin : self.begin + self.stop - self.start]

    def after_write(self, local: Tensor, offset: int = 0) -> None:
        self.parent.after_write(local, self.begin + offset)

    def after_gradient_write(self, local: Tensor, offset: int = 0) -> None:
        self.parent.after_gradient_write(local, self.begin + offset)

    def before_meeting(self, what: str) -> None:
        self.parent.before_meeting(what)

    def gather_local(self, local: Tensor) -> Tensor:
        return self.parent.gather_local(local)

    def gradient(self) -> Tensor | None:
        return None

    def set_gradient(self, value: Tensor | None) -> None:
        raise ShardedWriteError(f"{self.name} is a view and takes no gradient of its own: set that of the parameter.")

    def lend(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        return NotImplemented

    def assign(self, param: Tensor, value: Tensor) -> None:
        raise ShardedWriteError(f"{self.name} is a view and takes no other data: write in place (copy_).")
