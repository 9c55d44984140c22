"""The optimizer states of one run, kept by the inner optimizer (DeviceStates) or in columns (ColumnStates).

States that rest on another tier, or encoded, are columns. A *column* is one state (exp_avg, ...) of a whole shard, with a `Rest`
of its own, and a run uses a range of it. So splitting a run copies only its scalars (step counts and the like).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import SupportsIndex

import torch
from torch import Tensor

from ..errors import ConfigError
from ..memory.ledger import OPTIMIZER
from ..offload.storage import CodedRest, Rest, Tiers
from ..tensor.home import DerivedHome
from ..tensor.sharded_tensor import ShardedTensor
from ..tensor.state_column import is_column
from ..utils import torch_compat
from ..zero.parameter import ParamHome
from ..zero.unit import ParamGroup
from .inner_optimizer import State, fresh


class DeviceStates:
    """States that the inner optimizer keeps itself, under the run's tensor."""

    def __init__(self, state: dict[Tensor, State], tiers: Tiers, tensor: Tensor) -> None:
        self.state, self.tiers, self.tensor = state, tiers, tensor

    def _is_column(self, value: object) -> bool:
        return is_column(value, (self.tensor.numel(),))

    def load(self) -> State:
        """Return the states by name: tensors of the run's size, and scalars. {} before the first step."""
        return self.state.get(self.tensor) or {}

    def save(self, entries: State) -> None:
        """Replace all states."""
        self.state[self.tensor] = entries

    def clear(self) -> None:
        """Drop all states: as before the first step."""
        self.state.pop(self.tensor, None)

    def add(self, name: str, dtype: torch.dtype) -> None:
        """Add a column, all zeros."""
        self.put(name, torch.zeros(self.tensor.numel(), dtype=dtype, device=self.tensor.device))

    def put(self, name: str, value: object) -> None:
        """Set one scalar state."""
        self.state.setdefault(self.tensor, {})[name] = value

    def remove(self, name: str) -> None:
        """Drop one state; without the last one it is as before the first step."""
        entries = self.load()
        del entries[name]
        if not entries:
            self.clear()

    def kind(self) -> Hashable:
        """Return a key that is equal for states that one run can hold together."""
        return _kind(self.load(), self._is_column)

    def join(self, parts: list[DeviceStates]) -> None:
        """Move the states of neighbouring runs of equal kind here; `parts` are empty afterwards."""
        entries = dict(parts[0].load())
        for name, value in entries.items():
            if parts[0]._is_column(value):
                entries[name] = torch.cat([part.load()[name] for part in parts])
        for part in parts:
            part.clear()
        if entries:
            self.save(entries)

    def cut(self, start: int, stop: int, part: Tensor | None) -> DeviceStates:
        """Return the states of elements [start, stop) of the run, for the tensor `part`. The caller clears `self` afterwards."""
        assert part is not None
        entries = self.load()
        if entries:
            columns = {name: value[start:stop] for name, value in entries.items() if self._is_column(value)}
            others = fresh({name: value for name, value in entries.items() if name not in columns})
            self.state[part] = {name: columns[name] if name in columns else others[name] for name in entries}
        return DeviceStates(self.state, self.tiers, part)


class ColumnStates:
    """States of elements [start, stop) of the columns of a group's shard, and the run's own scalars."""

    def __init__(self, group: ParamGroup, tiers: Tiers, start: int, stop: int) -> None:
        self.group, self.tiers, self.start, self.stop = group, tiers, start, stop
        self.names: list[str] | None = None  # names of this run's columns; None before the first step
        self.scalars: State = {}

    def column(self, name: str, dtype: torch.dtype) -> Rest:
        """Return the Rest of a column; the first call makes it. dtype: the dtype in which the optimizer sees the state."""
        columns = self.group.columns
        if name not in columns:
            layout, column = self.group.layout, self.group.plan.column(name)
            numel = layout.numel if self.group.masters.whole else layout.shard_numel
            rest = self.tiers.rest(OPTIMIZER, self.group.offload, column.count(numel), column.dtype or dtype)
            columns[name] = rest if column.plain(dtype) else CodedRest(rest, column, numel, dtype)
        return columns[name]

    def load(self) -> State:
        """Return the states by name: the Rests of whole columns, and scalars. {} before the first step."""
        return {**{name: self.group.columns[name] for name in self.names or ()}, **self.scalars}

    def save(self, entries: State) -> None:
        """Replace all states."""
        self.names, self.scalars = [], {}
        for name, value in entries.items():
            if is_column(value, (self.stop - self.start,)):
                self.column(name, value.dtype).store(self.start, value)
                self.names.append(name)
            else:
                self.scalars[name] = value

    def clear(self) -> None:
        """Drop all states: as before the first step."""
        self.names, self.scalars = None, {}

    def add(self, name: str, dtype: torch.dtype) -> None:
        """Add a column, whose values the caller writes."""
        self.column(name, dtype)
        self.names = [*(self.names or ()), name]

    def put(self, name: str, value: object) -> None:
        """Set one scalar state."""
        self.names, self.scalars = self.names or [], {**self.scalars, name: value}

    def remove(self, name: str) -> None:
        """Drop one state; without the last one it is as before the first step."""
        self.names = [other for other in self.names or () if other != name]
        self.scalars.pop(name, None)
        if not self.names and not self.scalars:
            self.clear()

    def kind(self) -> Hashable:
        """Return a key that is equal for states that one run can hold together."""
        return self.names is None, _kind(self.load(), lambda value: isinstance(value, Rest))

    def join(self, parts: list[ColumnStates]) -> None:
        """Become the states of neighbouring runs of equal kind; columns do not move, since all are ranges of the same ones."""
        self.names, self.scalars = parts[0].names, parts[0].scalars

    def cut(self, start: int, stop: int, part: Tensor | None) -> ColumnStates:
        """Return the states of elements [start, stop) of the run."""
        cut = ColumnStates(self.group, self.tiers, self.start + start, self.start + stop)
        cut.names = None if self.names is None else list(self.names)
        cut.scalars = fresh(self.scalars)
        return cut


class StateHome(DerivedHome):
    """Home of one parameter's slice of a state: `column` from element `begin` on, on any tier."""

    def __init__(self, home: ParamHome, column: Rest, begin: int) -> None:
        super().__init__(home)
        self.home, self.column, self.begin = home, column, begin
        self.name, self.start, self.stop = home.name, home.start, home.stop

    def tensor(self) -> ShardedTensor:
        """Return the state as a sharded tensor of the parameter's shape."""
        shape, device = self.home.group.specs[self.home.index].shape, self.home.group.comm.device
        tensor = ShardedState(None, shape, self, dtype=self.column.dtype, device=device)
        tensor._of_parameter = True  # so that writes call before_write and after_write
        return tensor

    @property
    def trace(self) -> int:
        return self.home.group.masters.traces.get((self.home.index, "states"), 0)

    def note(self, trace: int, anew: bool) -> None:
        self.home.group.masters.note(self.home.index, trace, False, "states")

    def before_write(self) -> None:
        self.home.group.begin_write()

    def fetch(self, gradient: bool) -> Tensor:
        self.home.group.runtime.gate.wait()
        return self.column.load(self.begin, self.begin + self.home.piece.numel)

    def after_write(self, local: Tensor, offset: int = 0) -> None:
        self.column.store(self.begin + offset, local)


class ShardedState(ShardedTensor):
    """An optimizer state as a sharded tensor. Assigning `state.data` writes the state, as it does for parameters."""

    _pickled_by = "zs.full_optimizer_state_dict(model), on all ranks, in the place of optimizer.state_dict(), or zs.save"

    def __deepcopy__(self, memo: dict) -> ShardedTensor:
        """Return this rank's slice, as `copy.deepcopy(optimizer.state_dict())` needs it; `load_state_dict` accepts it."""
        return memo.setdefault(id(self), self.detach().clone())

    @property
    def data(self) -> Tensor:
        return torch_compat.data_attribute.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        write_state(self, value, f"a state of {self._home.name}")


class WholeState(Tensor):
    """A state of a replicated optimizer: an ordinary tensor, except that assigning `state.data` writes the state."""

    __torch_function__ = torch_compat.disabled_torch_function

    @property
    def data(self) -> Tensor:
        return self.plain().data

    @data.setter
    def data(self, value: Tensor) -> None:
        write_state(self, value, "a state")

    def plain(self) -> Tensor:
        """Return the same memory as a plain tensor."""
        return self.as_subclass(Tensor)

    def __deepcopy__(self, memo: dict) -> Tensor:
        return memo.setdefault(id(self), self.plain().clone())

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple:
        return self.plain().__reduce_ex__(protocol)


@torch.no_grad()
def write_state(state: Tensor, value: Tensor, name: str) -> None:
    """Copy a value, whole or sharded like the parameter, into a state. Raise ConfigError if it has another shape."""
    if tuple(value.shape) != tuple(state.shape):
        raise ConfigError(
            f"optimizer.state: {name}: expected a tensor of the parameter's shape {tuple(state.shape)}, got "
            f"{tuple(value.shape)}. To start a parameter anew, remove all of its state: optimizer.state.pop(parameter)."
        )
    state.copy_(value)


def hashable(value: object) -> Hashable:
    """Return a hashable value that is equal for equal scalars."""
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), tuple(value.reshape(-1).tolist()))
    return value if isinstance(value, Hashable) else repr(value)


def _kind(entries: State, is_column: Callable[[object], bool]) -> Hashable:
    return tuple(sorted((name, value.dtype if is_column(value) else hashable(value)) for name, value in entries.items()))
