"""A parameter's value as its optimizer steps it: the fp32 master, shown as a sharded tensor that reads and writes both."""

from __future__ import annotations

from torch import Tensor

from ..engine.parameter import ParamHome
from ..tensor.home import DerivedHome
from ..tensor.sharded_tensor import ShardedTensor


class PreciseHome(DerivedHome):
    """Home of a parameter's master; a write to it also rounds what was written into the parameter."""

    def __init__(self, home: ParamHome) -> None:
        super().__init__(home)
        self.of, self.group = home, home.group
        self.name, self.start, self.stop = home.name, home.start, home.stop

    def before_write(self) -> None:
        self.of.before_write()

    def fetch(self, gradient: bool) -> Tensor:
        self.group.runtime.gate.refresh([self.group])
        rest, begin = self.group.masters.slice(self.of.index)
        return rest.load(begin, begin + self.stop - self.start)

    def after_write(self, local: Tensor, offset: int = 0) -> None:
        rest, begin = self.group.masters.slice(self.of.index)
        self.of.after_write(local.to(self.group.values.rest.dtype), offset)
        rest.store(begin + offset, local)
        self.group.masters.dirty.discard(self.of.index)


def precise_value(param: Tensor) -> Tensor:
    """Return a sharded parameter's fp32 master as a sharded tensor; the parameter, detached, where there is none."""
    home = getattr(param, "_home", None)
    if not isinstance(param, ShardedTensor) or not isinstance(home, ParamHome) or home.group.masters.rest is None:
        return param.detach()
    own = PreciseHome(home)
    value = ShardedTensor(None, tuple(param.shape), own, dtype=home.group.masters.rest.dtype, device=param.device)
    value._of_parameter = True
    return value
