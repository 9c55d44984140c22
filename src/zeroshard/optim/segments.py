"""Runs: the contiguous ranges of a shard that one optimizer group steps as one tensor.

Neighbouring parameters of a flat shard in the same optimizer group form one run: one kernel per unit instead of one per
parameter. A parameter that missed a step (no rank had a gradient for it) must keep its own step count and moments, so
its run is split at that moment, and the optimizer's state with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

from torch import Tensor, nn

from ..config import Tier
from ..offload.storage import Rest, Tiers
from ..tensor.state_column import is_column
from ..zero.unit import ParamGroup
from .inner_optimizer import State
from .state_storage import ColumnStates, DeviceStates

K = TypeVar("K")  # key that is equal for parameters of one run

_MARK = (1,) * 7  # leading dimensions by which `Run.mark` marks a state that is no column; more than any parameter has


@dataclass(eq=False)
class Run:
    """Elements [start, stop) of the buffer that the optimizer steps for `group`: the parameters `indices`, in layout order.

    whole: the run is one parameter that is stepped as a whole (optim/whole_matrix.py). states: the run's optimizer states.
    tensor: the leaf that the inner optimizer steps (a view of values or masters); None if it is stepped slab by slab: by the
    host, where states are offloaded, or by the device, where states or masters rest in another form.
    """

    group: ParamGroup
    start: int
    stop: int
    indices: list[int]
    states: DeviceStates | ColumnStates
    tensor: nn.Parameter | None
    whole: bool = False

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def offloaded(self) -> bool:
        """True if the host steps the run."""
        return self.group.offload.tier is not Tier.DEVICE

    @property
    def active(self) -> bool:
        """True if some rank has a gradient for the run's parameters: for all of them or for none, since other runs are split."""
        return self.group.active[self.indices[0]]

    def holds(self, value: object) -> TypeGuard[Rest | Tensor]:
        """Return True for a column, False for a scalar."""
        return isinstance(value, Rest) or is_column(value, (self.numel,))

    def place(self, value: Rest | Tensor, index: int) -> tuple[Rest, int]:
        """Return the Rest of a column, and the index in it of the first element of this parameter (of this rank's slice)."""
        start, _ = self.group.masters.range(index)
        return (value, start) if isinstance(value, Rest) else (self.states.tiers.over(value), start - self.start)

    def mark(self, value: object) -> object:
        """Return a state that is no column, marked if it might be taken for one.

        The mark of a 1-D state of a whole parameter (statistics of its rows, say) is leading dimensions of 1: `is_column` would else
        take the state for a column if it happens to have as many elements as the parameter.
        """
        return value.view(*_MARK, -1) if self.whole and isinstance(value, Tensor) and value.dim() == 1 else value

    def unmark(self, value: object) -> object:
        """Return a state in the shape that the optimizer's class has given it: the inverse of `mark`."""
        marked = self.whole and isinstance(value, Tensor) and tuple(value.shape[:-1]) == _MARK
        return value.view(-1) if marked and isinstance(value, Tensor) else value


class RunMaker:
    """Makes the runs of one optimizer.

    replicated: every rank has all optimizer states. state: the inner optimizer's `state`. alone: ids of parameters that are
    stepped as a whole, each in a run of its own.
    """

    def __init__(self, replicated: bool, state: dict[Tensor, State], tiers: Tiers, alone: set[int]) -> None:
        self.replicated, self.state, self.tiers, self.alone = replicated, state, tiers, alone

    def make(self, group: ParamGroup, start: int, stop: int, indices: list[int]) -> Run:
        """Return a run without states."""
        whole = id(group.params[indices[0]]) in self.alone
        slabs = group.masters.split or (group.plan.coded and not whole)
        tensor = nn.Parameter(self.stepped(group)[start:stop]) if group.offload.tier is Tier.DEVICE and not slabs else None
        if tensor is None or group.plan.coded:
            return Run(group, start, stop, indices, ColumnStates(group, self.tiers, start, stop), tensor, whole)
        return Run(group, start, stop, indices, DeviceStates(self.state, self.tiers, tensor), tensor, whole)

    @contextmanager
    def ready(self, runs: list[Run]) -> Iterator[None]:
        """Context in which the tensors of runs on the device have gradients."""
        tensors = [run.tensor for run in runs if run.tensor is not None]
        for run in runs:
            if run.tensor is not None:
                run.tensor.grad = run.group.gradients.in_step(run.start, run.stop, run.tensor.dtype)
        yield
        for tensor in tensors:
            tensor.grad = None

    def stepped(self, group: ParamGroup) -> Tensor:
        """Return the tensor on the device of which runs are views: the masters where there are any, else the values."""
        if group.masters.rest is not None:
            return group.masters.rest.load(0, group.masters.rest.numel)
        return group.values.full if self.replicated else group.values.rest.load(0, group.layout.shard_numel)

    def runs(self, group: ParamGroup, keys: Sequence[K | None]) -> list[tuple[K, Run]]:
        """Return (key, run) for each longest sequence of neighbours with the same key; a parameter of key None is left out.

        A parameter without elements on this rank joins its neighbour's run, or becomes a run without elements: every rank keeps
        its step count, so that all ranks show the same states.
        """
        pending: list[tuple[K, int, int, list[int]]] = []
        alone = [id(param) in self.alone for param in group.params]
        for index, key in enumerate(keys):
            if key is None:
                continue
            start, stop = group.masters.range(index)
            if start == stop:  # no elements here: put it at the end of the run before, so that it adjoins
                start = stop = pending[-1][2] if pending else 0
            apart = alone[index] or (pending and alone[pending[-1][3][0]])  # a parameter that is stepped whole shares no run
            if pending and not apart and pending[-1][0] == key and pending[-1][2] == start:
                last = pending.pop()
                pending.append((key, last[1], stop, [*last[3], index]))
            else:
                pending.append((key, start, stop, [index]))
        return [(key, self.make(group, start, stop, indices)) for key, start, stop, indices in pending]

    def split(self, run: Run) -> list[Run]:
        """Return one run per parameter, each with its part of the states."""
        parts = []
        for index in run.indices:
            start, stop = run.group.masters.range(index)
            part = self.make(run.group, start, stop, [index])
            part.states = run.states.cut(start - run.start, stop - run.start, part.tensor)
            parts.append(part)
        run.states.clear()
        return parts

    def joined(self, runs: list[Run]) -> list[Run]:
        """Join neighbouring runs with states of equal kind: the reverse of `split`."""
        bunches: list[list[Run]] = []
        kind: object = None
        for run in runs:
            # the last run with elements
            last = next((other for other in reversed(bunches[-1]) if other.numel), run) if bunches else run
            adjoins = bunches and bunches[-1][0].group is run.group and (not run.numel or last is run or last.stop == run.start)
            if adjoins and kind == run.states.kind() and not (run.whole or bunches[-1][0].whole):
                bunches[-1].append(run)
            else:
                bunches.append([run])
                kind = run.states.kind()
        result: list[Run] = []
        for parts in bunches:
            if len(parts) == 1:
                result += parts
                continue
            filled = [run for run in parts if run.numel] or parts[:1]  # runs without elements have no place in the buffer
            indices = [index for run in parts for index in run.indices]
            joined = self.make(parts[0].group, filled[0].start, filled[-1].stop, indices)
            joined.states.join([run.states for run in filled])  # type: ignore[misc]  # runs of one group have one kind of states
            for run in parts:
                run.states.clear()
            result.append(joined)
        return result


def state_tensors(state: dict[Tensor, State]) -> list[Tensor]:
    """Return all columns of an inner optimizer's state."""
    return [value for tensor, entries in state.items() for value in entries.values() if is_column(value, tuple(tensor.shape))]
