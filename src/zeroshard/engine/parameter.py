"""One parameter: its description as the model had it (`ParamSpec`), and the owner of its slices (`ParamHome`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError, ModelChanged, ShardedWriteError
from ..tensor.home import Home, Shown
from ..tensor.part import Distribution, Part, Piece, part_of
from ..tensor.sharded_tensor import ShardedTensor
from ..utils.aligned import bytes_of
from ..utils.referred_optimizers import other_optimizers
from ..utils.torch_compat import is_distributed
from .comm.base import Comm
from .user_hooks import ONE_OPTIMIZER, UserHook

if TYPE_CHECKING:
    from .unit import ParamGroup


@dataclass(frozen=True, eq=False)
class ParamSpec:
    """Description of one parameter as the model had it, with every (module, attribute) that holds it (ties)."""

    name: str
    original: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    dtype: torch.dtype  # dtype in which it rests and computes
    shape: tuple[int, ...]
    requires_grad: bool
    given_dtype: torch.dtype  # dtype in which the user gave it
    number: int = -1  # position in the model, and bit in the masks that ranks exchange at the end of backward
    distribution: Distribution | None = None  # over ranks along model axes; `shape` is that of the local shard
    counts: bool = True  # False where it is a copy (along model axes) of another rank's: it does not enter sums over ranks

    @property
    def part(self) -> Part | None:
        """Position of this parameter in a larger one, of which it is a part (a tile, a tensor-parallel shard); None: whole."""
        return self.distribution.part if self.distribution is not None else part_of(*self.owners[0])

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the mesh axes along which the parameter is cut."""
        return () if self.distribution is None else self.distribution.axes

    @property
    def absent(self) -> bool:
        """True if this rank has no part of the parameter."""
        return self.distribution is not None and self.distribution.absent

    def complete(self, value: Tensor) -> Tensor:
        """Return the whole of a tensor of the parameter's shape (collective over model axes if the parameter is distributed)."""
        return value if self.distribution is None else self.distribution.whole(value)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter that this one is, or is a part of."""
        return self.shape if self.part is None else self.part.whole_shape

    @property
    def whole_name(self) -> str:
        """Name of the whole parameter that this one is, or is a part of."""
        owner, _ = self.owners[0]
        return owner.whole_name(self.name) if isinstance(owner, Piece) else self.name


class ParamHome(Home):
    """Owner of this rank's slices of parameter `index` of a group, of its gradient and of its optimizer states.

    start, stop: the slice in the flattened parameter. begin, end: in this rank's shard. Two ranks with shards 1 2 and 3 0 of
    w = 1 2 3: rank 1 has [start, stop) = [2, 3) and [begin, end) = [0, 1).
    """

    def __init__(self, group: ParamGroup, index: int) -> None:
        self.group, self.index, self.comm = group, index, group.comm
        piece = self.piece = group.layout.piece(index, group.comm.rank)
        self.name, self.start, self.stop = group.specs[index].name, piece.start, piece.stop
        self.begin, self.end = piece.shard_offset, piece.shard_offset + piece.numel
        spec = group.specs[index]
        self.saved_here = spec.counts  # unlike the group's: of a tied parameter each stage saves its copy, which has another name
        if spec.part is not None and group.runtime.shows_masters:
            self.hidden_cut = spec.distribution
        self.shape = spec.shape if self.hidden_cut is None else spec.whole_shape  # the shape that the program sees

    def __reduce__(self) -> tuple[type, tuple]:
        """Pickle as None: an unpickled frozen parameter belongs to no sharded model."""
        return type(None), ()

    def cut(self, rank: int) -> tuple[int, int]:
        """Return [start, stop) of a rank's elements of the flattened parameter; (0, 0) if it has none."""
        piece = self.group.layout.piece(self.index, rank)
        return piece.start, piece.stop

    def wrap(self, local: Tensor | None, dtype: torch.dtype) -> ShardedTensor:
        """Return a sharded tensor of the parameter's shape over a local slice (None: over the slice at rest, see `fetch`)."""
        return ShardedTensor(local, self.shape, self, dtype=dtype, device=self.group.comm.device)

    @property
    def meeting(self) -> Comm:
        runtime = self.group.runtime
        others = runtime.topology.peers is not runtime.comm or self.group.topology is not runtime.topology
        return runtime.topology.peers if others else self.comm

    @property
    def counts(self) -> bool:
        return self.meeting is self.comm or self.group.counts

    @property
    def distribution(self) -> Distribution | None:
        return self.group.specs[self.index].distribution

    @property
    def undivided(self) -> bool:
        return self.group.runtime.account.weight != 0

    @property
    def unit(self) -> str:
        return self.group.unit.name

    @property
    def shown(self) -> Shown | None:
        return self.group.runtime.shown

    @property
    def shows_master(self) -> bool:
        """True if the parameter at rest is the fp32 master for the program, as with FSDP2, and not the value that is gathered."""
        group = self.group
        return group.runtime.shows_masters and group.masters.rest is not None and group.values.sharded

    def held(self) -> Tensor | None:
        """Return a view of what the parameter shows at rest; None if it is to be fetched at each use."""
        return None if self.group.values.staged or self.shows_master else self.fetch(gradient=False)

    def drawing(self) -> AbstractContextManager[None]:
        return self.group.runtime.drawing()

    def fetch(self, gradient: bool) -> Tensor:
        """Return this rank's slice of the value, or of the gradient, 1-D: a view, or a copy if it is offloaded."""
        if gradient:
            return self.group.gradients.load(self.begin, self.end)
        if self.shows_master:
            self.group.runtime.gate.wait()
            rest, begin = self.group.masters.slice(self.index)
            return rest.load(begin, begin + self.end - self.begin)
        return self.group.values.rest.load(self.begin, self.end)

    @property
    def traced(self) -> bool:
        return self.group.runtime.values.watches(self.group)

    @property
    def trace(self) -> int:
        return self.group.masters.traces.get((self.index, "value"), 0)

    def note(self, trace: int, anew: bool) -> None:
        self.group.masters.note(self.index, trace, anew)

    def before_load(self) -> None:
        self.group.values.behind = self.group.values.kept
        self.group.comm.control.fence_write()
        self.renewed()

    def renewed(self) -> None:
        self.group.runtime.gate.renewed(self)

    def before_write(self) -> None:
        self.group.begin_write()
        self.group.count_write()
        self.group.comm.control.fence_write()  # until no peer reads the slice in place

    def after_write(self, local: Tensor, offset: int = 0) -> None:
        values, masters = self.group.values.rest, self.group.masters
        if self.shows_master:
            rest, begin = masters.slice(self.index)
            rest.store(begin + offset, local)
            values.store(self.begin + offset, local.to(values.dtype))
            return
        values.store(self.begin + offset, local)
        masters.dirty.add(self.index)

    def after_gradient_write(self, local: Tensor, offset: int = 0) -> None:
        self.group.refuse_gradient_write()
        self.group.gradients.store(self.begin + offset, local)

    def unscale(self, homes: Sequence[Home], factor: float) -> bool:
        runtime = self.group.runtime
        of_group: dict[ParamGroup, list[ParamHome]] = {}
        runtime.attendance.call("torch.amp.GradScaler.unscale_()")
        for home in homes:
            if not isinstance(home, ParamHome):
                return home.unscale(homes, factor)  # raises
            of_group.setdefault(home.group, []).append(home)
        squares, found = runtime.reductions.square_sum(of_group), False
        if not math.isfinite(squares):  # squares may overflow where no gradient does, and not once these are unscaled
            found = not all(torch.isfinite(home.fetch(True)).all() for home in homes)
            for group in of_group:
                group.gradients.square_sum = None
        for group, own in of_group.items():
            if len(own) == sum(group.active):
                group.gradients.scale(factor)  # of an offloaded gradient: when it is read next
                continue
            for home in own:
                group.gradients.store(home.begin, home.fetch(True).mul_(factor))
        runtime.account.clipped.clear()
        told = runtime.topology.world.exchange(bytes([found]), "torch.amp.GradScaler: are all gradients finite")
        return any(part[0] for part in told)

    def before_meeting(self, what: str) -> None:
        self.group.runtime.attendance.call(what)

    def gather_local(self, local: Tensor) -> Tensor:
        self.before_meeting("full_tensor() (or another whole tensor)")
        return gather_flat(self.group.comm, local, f"full tensor of {self.name}")

    def gradient(self) -> Tensor | None:
        gradient, distribution = self.group.gradient(self.index), self.group.specs[self.index].distribution
        if distribution is None or gradient is None or isinstance(gradient, ShardedTensor):
            return gradient
        return distribution.wrap(gradient)  # stage 0: torch's own norms then cover all shards

    def set_gradient(self, value: Tensor | None) -> None:
        self.group.set_gradient(self.index, value.to_local() if self.hidden_cut is None and is_distributed(value) else value)

    def assign(self, param: Tensor, value: Tensor) -> None:
        """Carry out `param.data = value` as a write in place, since the parameter's memory is a part of the flat buffer."""
        aliases = isinstance(value, ShardedTensor) and value._home is self and (value is param or value._of_parameter)
        if aliases and (value.shape, value.dtype) == (param.shape, param.dtype):
            return  # `value` is this parameter; a result computed from it has the same home, but is no alias of it
        if not isinstance(param, ShardedTensor) and not isinstance(value, ShardedTensor):
            one, other = ((x.shape, x.dtype, x.device, x.layout) for x in (param, value))
            if one == other and param.stride() == value.stride() and param.data_ptr() == value.data_ptr():
                return  # model.to() without a change assigns this: no write, so that masters keep their precision
        if value.shape != param.shape:
            raise ModelChanged(
                f"parameter {self.name} was resized from {tuple(param.shape)} to {tuple(value.shape)} after zs.shard(). Resize before "
                "it; or zs.close(model) first, resize, build a new optimizer, and zs.shard() again."
            )
        if (value.dtype, value.device) != (param.dtype, param.device):
            raise ModelChanged(
                f"parameter {self.name} was converted from {param.dtype} on {param.device} to "
                f"{value.dtype} on {value.device} after zs.shard(), by half(), to() or `.data = ...`. Give "
                "precision='bf16' or 'fp16' to zs.shard(), convert the model before it, or zs.close(model) first."
            )
        with torch.no_grad():
            param.copy_(value)

    def arrival(self, sliced: bool) -> Callable[[Tensor], Tensor]:
        runtime, unit, shape = self.group.runtime, self.group.unit, self.group.specs[self.index].shape
        seen = unit.writes
        # inside a forward, gradients come through the model's outputs, which apply the loss scale
        enters = not runtime.in_forward

        def arrive(grad: Tensor) -> Tensor:
            grad = runtime.scale_entering(grad) if enters else grad
            if not sliced:  # of full_tensor(): the gradient is whole, as that of a forward
                return grad
            if unit.writes != seen:
                raise ShardedWriteError(
                    f"{self.name}: written (by a step, a load, in place) between to_local() and the backward of what was computed with it. "
                    "Call backward first, or to_local() again."
                )
            around = (self.start, math.prod(shape) - self.stop)
            # undoes the reduction's mean: one rank has this slice
            parts = self.comm.world_size / (self.group.gradients.summed if self.group.trainable else 1)
            return F.pad(grad * parts, around).view(shape)

        return arrive

    def adopt(self, hook: Callable) -> Callable:
        param = self.group.params[self.index]
        found = other_optimizers([hook], self.group.runtime.optimizers.settled)
        if id(param) in found:
            raise ConfigError(
                f"{self.name}: this hook steps an optimizer of its own ({type(found[id(param)]).__name__}) in backward, before the "
                f"gradient is averaged over the ranks. {ONE_OPTIMIZER}"
            )
        return UserHook(hook, self.group, self.index, whole=False)

    def lend(self, func: Callable, args: tuple, kwargs: dict) -> object:
        return self.group.runtime.lend(self.group.unit, func, args, kwargs)


def gather_flat(comm: Comm, local: Tensor, label: str) -> Tensor:
    """Return the ranks' 1-D tensors, of any lengths, concatenated in the order of ranks (collective, through the host)."""
    mine = local.detach().to("cpu").contiguous()
    everyone = comm.exchange(bytes(bytes_of(mine)), label)
    whole = torch.empty(sum(map(len, everyone)) // mine.itemsize, dtype=mine.dtype, device="cpu")
    content, begin = bytes_of(whole), 0
    for part in filter(None, everyone):
        content[begin : begin + len(part)] = part
        begin += len(part)
    return whole.to(local.device)
