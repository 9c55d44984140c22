"""One parameter's optimizer states as tensors of its shape, sharded or whole: writing into them writes the state."""

from __future__ import annotations

from typing import SupportsIndex

import torch
from torch import Tensor

from ..engine.parameter import ParamHome
from ..engine.rest import Rest
from ..errors import ConfigError
from ..tensor.home import DerivedHome
from ..tensor.sharded_tensor import ShardedTensor
from ..utils import torch_compat


class StateHome(DerivedHome):
    """Home of one parameter's slice of a state: `column` from element `begin` on, on any tier."""

    def __init__(self, home: ParamHome, column: Rest, begin: int) -> None:
        super().__init__(home)
        self.home, self.column, self.begin = home, column, begin
        self.name, self.start, self.stop = home.name, home.start, home.stop

    def tensor(self) -> ShardedTensor:
        """Return the state as a sharded tensor of the parameter's shape."""
        tensor = ShardedState(None, self.home.shape, self, dtype=self.column.dtype, device=self.home.group.comm.device)
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

    @property  # type: ignore[misc]  # nobody assigns it
    def __class__(self) -> type:
        shown = self._home.shown
        return ShardedState if shown is None else shown.states

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


def check_shape(state: Tensor, value: Tensor, name: str) -> None:
    """Raise ConfigError if a value has another shape than a state."""
    if tuple(value.shape) != tuple(state.shape):
        raise ConfigError(
            f"optimizer.state: {name}: expected a tensor of the parameter's shape {tuple(state.shape)}, got "
            f"{tuple(value.shape)}. To start a parameter anew, remove all of its state: optimizer.state.pop(parameter)."
        )


@torch.no_grad()
def write_state(state: Tensor, value: Tensor, name: str) -> None:
    """Copy a value, whole or sharded like the parameter, into a state. Raise ConfigError if it has another shape."""
    check_shape(state, value, name)
    state.copy_(value)
