"""The optimizer states of one run: in the inner optimizer, or in columns that rest on another tier.

A *column* is one state (exp_avg, ...) of a whole shard, resting like everything else in a `Rest`; a run is a range of it.
So a run can be split without moving anything but its scalars (step counts and the like).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..errors import ShardedWriteError
from ..memory.ledger import OPTIMIZER
from ..memory.tiers import Rest, Tiers
from ..sharded import ShardedTensor
from ..unit import ParamGroup, ParamHome


class DeviceStates:
    """States that the inner optimizer keeps itself, under the run's tensor."""

    def __init__(self, state: dict[Tensor, dict], tensor: Tensor) -> None:
        self.state, self.tensor = state, tensor

    def load(self) -> dict[str, Any]:
        """Name -> tensor of the run's size, or scalar. Empty before the first step."""
        return self.state.get(self.tensor) or {}

    def save(self, entries: dict[str, Any]) -> None:
        """Replace all states."""
        self.state[self.tensor] = entries

    def clear(self) -> None:
        """As before the first step."""
        self.state.pop(self.tensor, None)

    def cut(self, start: int, stop: int, part: Tensor | None) -> DeviceStates:
        """The states of elements [start, stop) of the run, for the tensor `part`; `self` is left without."""
        assert part is not None
        entries = self.load()
        if entries:
            self.state[part] = {k: _cut(v, self.tensor.numel(), start, stop) for k, v in entries.items()}
        return DeviceStates(self.state, part)


class ColumnStates:
    """States of elements [start, stop) of the columns of a group's shard, and the run's own scalars."""

    def __init__(self, group: ParamGroup, tiers: Tiers, start: int, stop: int) -> None:
        self.group, self.tiers, self.start, self.stop = group, tiers, start, stop
        self.names: list[str] | None = None  # of this run's columns; None before the first step
        self.scalars: dict[str, Any] = {}

    def column(self, name: str, dtype: Any) -> Any:
        """The Rest of a column, made when it is first asked for."""
        columns = self.group.columns
        if name not in columns:
            numel = self.group.layout.shard_numel
            columns[name] = self.tiers.rest(OPTIMIZER, self.group.offload, numel, dtype)
        return columns[name]

    def load(self) -> dict[str, Any]:
        """Name -> Rest of the whole column, or scalar. Empty before the first step."""
        return {**{name: self.group.columns[name] for name in self.names or ()}, **self.scalars}

    def save(self, entries: dict[str, Any]) -> None:
        """Replace all states."""
        self.names, self.scalars = [], {}
        for name, value in entries.items():
            if isinstance(value, Tensor) and value.dim() == 1 and value.numel() == self.stop - self.start:
                self.column(name, value.dtype).store(self.start, value)
                self.names.append(name)
            else:
                self.scalars[name] = value

    def clear(self) -> None:
        """As before the first step."""
        self.names, self.scalars = None, {}

    def cut(self, start: int, stop: int, part: Tensor | None) -> ColumnStates:
        """The states of elements [start, stop) of the run."""
        cut = ColumnStates(self.group, self.tiers, self.start + start, self.start + stop)
        cut.names = None if self.names is None else list(self.names)
        cut.scalars = {k: _cut(v, -1, 0, 0) for k, v in self.scalars.items()}
        return cut


class StateHome:
    """The Home (see sharded.py) of one parameter's part of a state: read when it is looked at, put back when written.

    begin: its first element in `column`; None: the column is one of the whole shard.
    """

    def __init__(self, home: ParamHome, column: Rest, begin: int | None = None) -> None:
        self.home, self.column, self.begin = home, column, home.begin if begin is None else begin
        self.name, self.start, self.stop = home.name, home.start, home.stop

    def tensor(self) -> ShardedTensor:
        """The state as a sharded tensor of the parameter's shape."""
        group = self.home.group
        shape = group.specs[self.home.index].shape
        tensor = ShardedTensor(None, shape, self, dtype=self.column.dtype, device=group.comm.device)
        tensor._of_parameter = True  # writes come through before_write and after_write
        return tensor

    def before_write(self) -> None:
        self.home.group.begin_write()

    def fetch(self, gradient: bool) -> Tensor:
        self.home.group.runtime.optimizer.core.wait()
        return self.column.load(self.begin, self.begin + self.home.piece.numel)

    def after_write(self, local: Tensor, offset: int = 0) -> None:
        self.column.store(self.begin + offset, local)

    def after_gradient_write(self, local: Tensor, offset: int = 0) -> None:
        raise AssertionError("a state is no gradient")

    def gather_local(self, local: Tensor) -> Tensor:
        return self.home.gather_local(local)

    def gradient(self) -> Tensor | None:
        return None

    def set_gradient(self, value: Tensor | None) -> None:
        raise ShardedWriteError(f"an optimizer state of {self.name} takes no gradient.")

    def lend(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        return NotImplemented

    def assign(self, param: Tensor, value: Tensor) -> None:
        raise AssertionError("a state is no parameter")


def _cut(value: Any, numel: int, start: int, stop: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value[start:stop] if value.dim() == 1 and value.numel() == numel else value.clone()
