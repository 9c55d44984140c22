"""Access to one parameter's value, gradient and optimizer states, whole or as this rank's slice, on whatever tier they rest.

    zs.value_of(p)                     the fp32 master (where there is none, the parameter); setting it also sets the parameter
    zs.gradient_of(p)                  the mean gradient over ranks, as p.grad shows it, without the loss scale
    zs.state_of(p, "exp_avg")          one optimizer state; None before the first step

    .full()   .set_full(value)         the whole tensor (shape), equal on every rank
    .local()  .set_local(value)        this rank's slice, flat (stop - start,): elements [start, stop) of the flattened tensor
                                       (under FSDP2's door beside tensor parallelism: of this rank's part, flattened)

`full` and `local` return copies. `full` and both setters are collective: all ranks call them, for the same parameters in the
same order. A value of the wrong shape on one rank raises ConfigError on all ranks, and nothing is changed.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.comm.base import Comm
from ..engine.comm.messages import exchange_values, sendable
from ..engine.inner_optimizer import State
from ..engine.optimizer import OptimizerCore
from ..engine.parameter import ParamHome
from ..engine.shard_model import write_value
from ..engine.unit import ParamGroup
from ..errors import ConfigError, ZeroshardError
from ..tensor.attributes import whole_now
from ..tensor.sharded_tensor import ShardedTensor
from ..utils.aligned import bytes_of
from .state_view import entries_of, write_entry


def value_of(param: Tensor) -> ParameterPart:
    """Return access to a parameter's fp32 master, or value. Raise ZeroshardError if it is a parameter of no sharded model."""
    return _Value(param)


def gradient_of(param: Tensor) -> ParameterPart:
    """Return access to a parameter's mean gradient, which is None if it has none. The next step uses a gradient set by it."""
    return _Gradient(param)


def state_of(param: Tensor, key: str) -> OptimizerStatePart:
    """Return access to one optimizer state of a parameter; it is None before the first step. A step count is one number."""
    return OptimizerStatePart(param, key)


class ParameterPart(ABC):
    """The result of `value_of`, `gradient_of` and `state_of`; the docstring of this module describes it."""

    what: str
    replicated: bool  # whether every rank holds all of it

    def __init__(self, param: Tensor) -> None:
        home = getattr(param, "_home", None) if isinstance(param, nn.Parameter) else None
        if id(param) in whole_now:  # by zs.gathered
            raise ZeroshardError(
                f"{whole_now[id(param)].home.name} is gathered by zs.gathered: read or set its {self.what} outside of that `with` block."
            )
        if not isinstance(home, ParamHome):
            raise ZeroshardError(
                f"{self.what}: expected a parameter of a model that was given to zs.shard(), got {type(param).__name__}."
            )
        self.param, self.home, self.group, self.index = param, home, home.group, home.index
        self.shape = self.home.shape

    @property
    def name(self) -> str:
        """The parameter's name in its model."""
        return self.home.name

    @property
    def ranks(self) -> Comm:
        """The ranks that hold slices of the parameter."""
        return self.group.comm

    @abstractmethod
    def local(self) -> Any:
        """Return a copy of this rank's slice, flat; None if the parameter has no such gradient or state."""

    @abstractmethod
    def full(self) -> Any:
        """Return a copy of the whole tensor, on every rank (collective); None if the parameter has no such gradient or state."""

    def set_full(self, value: Tensor) -> None:
        """Set the whole tensor; every rank gives the same tensor of the parameter's shape (collective)."""
        self._agree(value, self.shape, compare=self.replicated)
        with torch.no_grad():
            value = value.detach()
            if self.home.hidden_cut is not None:
                value = self.home.wrap(self.home.slice_of(value.reshape(self.shape)), value.dtype)
            self._set(value)

    def set_local(self, value: Tensor) -> None:
        """Set this rank's slice (stop - start,); every rank sets its own (collective)."""
        self._agree(value, (self.home.stop - self.home.start,))
        with torch.no_grad():
            value = value.detach().reshape(-1)
            if self.replicated and self.home.hidden_cut is None:
                self._set(self.home.gather_local(value).view(self.shape))
            else:
                self._set(self.home.wrap(value.to(self.group.comm.device), value.dtype))

    @abstractmethod
    def _set(self, value: Tensor) -> None:
        """Write a whole tensor, or one sharded like the parameter."""

    def _prepare(self) -> str | None:
        """Get ready for a write (collective); return why this part of the parameter can not be set, or None."""
        return None

    def _agree(self, value: object, shape: tuple[int, ...], compare: bool = False) -> None:
        """Raise ConfigError on every rank if one rank's value can not be set or, with `compare`, ranks gave different values."""
        problem, fits, checksum, given = self._prepare(), False, 0, type(value).__name__
        if isinstance(value, Tensor):
            given = f"a tensor of shape {tuple(value.shape)}"
            fits = tuple(value.shape) == shape or (len(shape) == 1 and value.numel() == shape[0])
        if problem is None and (not fits or isinstance(value, ShardedTensor)):
            problem = f"expected a tensor of shape {shape}, got {given}"
        if compare and problem is None and isinstance(value, Tensor):  # a replicated value must be equal on all ranks
            checksum = zlib.crc32(bytes_of(value.detach().cpu().contiguous()))
        everyone = exchange_values(self.group.comm, (problem, checksum), f"set the {self.what} of {self.home.name}")
        for rank, (theirs, _) in enumerate(everyone):
            if theirs is not None:
                raise ConfigError(f"{self.home.name}, {self.what}: {theirs} (on rank {rank}). Nothing was changed.")
        differing = [rank for rank, (_, other) in enumerate(everyone) if other != everyone[0][1]]
        if differing:
            raise ConfigError(
                f"{self.home.name}, {self.what}: ranks {differing} gave other values than rank 0. Nothing was changed."
            )


class _Value(ParameterPart):
    what = "value"

    @property
    def replicated(self) -> bool:  # type: ignore[override]
        return self.group.values.replicated

    def local(self) -> Tensor:
        home, group, runtime = self.home, self.group, self.group.runtime
        runtime.attendance.refuse(f"the value of {home.name}")
        runtime.tiers.check()
        runtime.gate.refresh([group])
        rest, begin = group.masters.slice(self.index)
        return rest.load(begin, begin + home.stop - home.start).clone()

    def full(self) -> Tensor:
        return self.home.complete(self.home.gather_local(self.local()).view(self.group.specs[self.index].shape)).clone()

    def _set(self, value: Tensor) -> None:
        group = self.group
        group.comm.control.fence_write(synchronised=True)  # `_agree` was the barrier
        write_value(group, self.index, value)
        if self.replicated:
            group.put_whole(self.index)
        group.comm.control.fence_read()


class _Gradient(ParameterPart):
    what = "gradient"

    @property
    def replicated(self) -> bool:  # type: ignore[override]
        return self.group.grads is not None and self.group.grads.replicated

    def local(self) -> Tensor | None:
        grad = self.group.gradient(self.index)
        if grad is None:
            return None
        local = grad._local if isinstance(grad, ShardedTensor) else grad.reshape(-1)[self.home.start : self.home.stop]
        return local.clone()

    def full(self) -> Tensor | None:
        self.group.runtime.flush()
        grad = self.group.gradient(self.index)
        if grad is None:
            return None
        return grad.full_tensor() if isinstance(grad, ShardedTensor) else self.home.complete(grad).clone()

    def _prepare(self) -> str | None:
        self.group.runtime.flush()
        return None if self.group.trainable else "the parameter is frozen (requires_grad=False) and takes no gradient"

    def _set(self, value: Tensor) -> None:
        self.group.set_gradient(self.index, value)


class OptimizerStatePart(ParameterPart):
    """Access to one optimizer state of one parameter."""

    def __init__(self, param: Tensor, key: str) -> None:
        self.key, self.what = key, f"optimizer state {key!r}"
        super().__init__(param)

    @property
    def replicated(self) -> bool:  # type: ignore[override]
        return self._core is None or self._core.replicated

    @property
    def _core(self) -> OptimizerCore | None:
        cores = [optimizer.core for optimizer in self.group.runtime.optimizers]
        return next((core for core in cores if id(self.param) in core.group_of), cores[0] if cores else None)

    def _entries(self) -> State:
        """Return all optimizer states of this parameter."""
        core = self._core
        return entries_of(core, self.param) if core is not None and id(self.param) in core.group_of else {}

    def names(self) -> list[str]:
        """Return the names of all optimizer states of this parameter; [] before the first step."""
        return sorted(self._entries())

    def local(self) -> Any:
        value = self._entries().get(self.key)
        if isinstance(value, ShardedTensor):
            return value._local.clone()
        if isinstance(value, Tensor) and tuple(value.shape) == self.group.specs[self.index].shape and self.replicated:
            return value.reshape(-1)[self.home.start : self.home.stop].clone()
        return value

    def full(self) -> Any:
        self.group.runtime.attendance.refuse(f"an optimizer state of {self.home.name}")
        entries = {key: value for key, value in self._entries().items() if key == self.key}
        value = whole_states(self.group, self.index, entries).get(self.key)
        if isinstance(value, Tensor):
            column = tuple(value.shape) == self.group.specs[self.index].shape
            return (self.home.complete(value) if column else value).clone()
        return value

    def _prepare(self) -> str | None:
        if self.key in self._entries():
            return None
        frozen = "" if self.group.trainable else " (it is frozen)"
        return f"the parameter has no state of this name{frozen}: states exist after the first step, or a load"

    def _set(self, value: Tensor) -> None:
        assert self._core is not None  # else `_prepare` has found a problem
        write_entry(self._core, self.param, self.key, value)


def whole_states(group: ParamGroup, index: int, entries: State) -> State:
    """Return one parameter's states with whole tensors (collective).

    A rank that has no elements of the parameter may have no states of it: it gets their names and scalars from other ranks.
    """
    # on the host, since a peer's device may be another
    plain = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in entries.items() if not isinstance(v, ShardedTensor)}
    sharded = {k: v._local for k, v in entries.items() if isinstance(v, ShardedTensor)}
    kept = {k for k, v in plain.items() if not sendable(v)}  # objects that can not be sent
    mine = ({k: v for k, v in plain.items() if k not in kept}, {k: v.dtype for k, v in sharded.items()}, sorted(kept))
    everyone = exchange_values(group.comm, mine, "optimizer state: keys")
    for key in sorted({key for _, _, theirs in everyone for key in theirs}):
        if not all(key in other or key in theirs for other, _, theirs in everyone):  # equal on every rank, so all raise
            raise ConfigError(
                f"optimizer state {key!r} of {group.specs[index].name}: some ranks hold none of this parameter and need the state from "
                "others, which can not send this object. Let the optimizer keep it as numbers, strings, tensors, lists or dictionaries."
            )
    result: State = {key: plain[key] for key in plain if key in kept}
    for other, dtypes, _ in everyone:
        result |= {k: v for k, v in other.items() if k not in result}
        for key, dtype in dtypes.items():
            sharded.setdefault(key, torch.empty(0, dtype=dtype, device=group.comm.device))
    for key in sorted(sharded):
        result[key] = group.homes[index].gather_local(sharded[key]).view(group.specs[index].shape)
    return result
