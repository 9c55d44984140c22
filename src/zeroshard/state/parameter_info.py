"""Description of one parameter of a sharded model: how it rests, whether it is gathered, which slice this rank has."""

from __future__ import annotations

from torch import Tensor, nn

from ..config import Tier
from ..engine.comm.base import Comm
from ..engine.parameter import ParamHome
from ..engine.unit import Phase
from ..tensor.sharded_tensor import ShardedTensor


class ParameterInfo:
    """A parameter of a sharded model; `info_of(param)` returns it. Nothing here is collective."""

    __slots__ = ("_group", "_home")

    def __init__(self, home: ParamHome) -> None:
        self._home, self._group = home, home.group

    @property
    def name(self) -> str:
        """The parameter's name in its model."""
        return self._home.name

    @property
    def number(self) -> int:
        """A number that identifies the parameter in its model, the same on every rank."""
        return (self._group.values.number << 16) + self._home.index  # of the flat buffer, then of the parameter in it

    @property
    def unit(self) -> int:
        """Number of the unit that gathers it, in the order of the model."""
        return self._group.unit.number

    @property
    def trainable(self) -> bool:
        """True if it had requires_grad at zs.shard."""
        return self._group.trainable

    @property
    def sharded(self) -> bool:
        """True if each rank holds a slice at rest (stage 3)."""
        return self._group.values.sharded

    @property
    def persistent(self) -> bool:
        """True if it stays whole at rest at stage 3, where others are sharded, since it is small."""
        return self._group.whole

    @property
    def tier(self) -> Tier:
        """The tier on which it rests."""
        return self._group.values.tier

    @property
    def in_use(self) -> bool:
        """True while a forward of its unit runs."""
        return bool(self._group.unit.depth)

    @property
    def gathered(self) -> bool | None:
        """True if a forward or backward of its unit has it whole, False if one waits for that; None outside of them."""
        unit = self._group.unit
        return unit.phase is Phase.READY if unit.depth or unit.in_backward else None

    @property
    def in_forward(self) -> bool:
        """True while a forward of its model runs: operations on the parameter use its gathered value then."""
        return self._group.runtime.in_forward

    @property
    def sums_locally(self) -> bool:
        """True while the model's backwards add up gradients without reducing them (zs.accumulate)."""
        return self._group.grads is not None and not self._group.runtime.sync

    @property
    def local_sum(self) -> Tensor | None:
        """The sum of this rank's gradients that is not reduced yet, without the loss scale; None if there is none."""
        found = self._group.gradients.local_sum(self._home.index)
        return None if found is None else found / self._group.runtime.progress.loss_scale

    @property
    def ranks(self) -> Comm:
        """The ranks that hold slices of it."""
        return self._home.comm

    def bounds(self, rank: int | None = None) -> tuple[int, int]:
        """Return [start, stop) of a rank's elements (None: this rank's) of the flattened parameter; (0, 0) if it has none."""
        return (self._home.start, self._home.stop) if rank is None else self._home.cut(rank)

    def local(self) -> Tensor:
        """Return this rank's slice of the value, 1-D: a view, or a copy if it is offloaded."""
        return self._home.fetch(gradient=False)

    def wrap(self, local: Tensor) -> ShardedTensor:
        """Return a sharded tensor of the parameter's shape over a slice of this rank's bounds."""
        return self._home.wrap(local.to(self._home.comm.device), local.dtype)


def info_of(param: Tensor) -> ParameterInfo | None:
    """Return what can be asked about a parameter of a sharded model; None for other tensors."""
    home = getattr(param, "_home", None)
    return ParameterInfo(home) if isinstance(param, nn.Parameter) and isinstance(home, ParamHome) else None


def memory_of(param: nn.Parameter) -> Tensor:
    """Return the tensor whose memory a parameter is a view of while it is gathered; the parameter itself where it is not sharded."""
    home = getattr(param, "_home", None)
    return home.group.values.full if isinstance(home, ParamHome) and home.group.values.sharded else param
