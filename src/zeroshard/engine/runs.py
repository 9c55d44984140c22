"""Runs: the contiguous ranges of a shard that one optimizer group steps as one tensor.

Neighbouring parameters of a flat shard in the same optimizer group form one run: one kernel per unit instead of one per
parameter. A parameter that missed a step (no rank had a gradient for it) must keep its own step count and moments, so
its run is split at that moment, and the optimizer's state with it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from ..config import Tier
from ..tensor.state_column import is_column
from .inner_optimizer import State, fresh, hashable
from .ledger import OPTIMIZER
from .rest import Rest, Tiers
from .unit import ParamGroup

K = TypeVar("K")  # key that is equal for parameters of one run

_MARK = (1,) * 7  # leading dimensions by which `Run.mark` marks a state that is no column; more than any parameter has


@dataclass(eq=False)
class Run:
    """Elements [start, stop) of the buffer that the optimizer steps for `group`: the parameters `indices`, in layout order.

    whole: the run is one parameter that is stepped as a whole (values/whole_step.py). states: the run's optimizer states.
    tensor: the leaf that the inner optimizer steps (a view of values or masters); None if it is stepped slab by slab: by the
    host, where states are offloaded, or by the device, where states or masters rest in another form.
    """

    group: ParamGroup
    start: int
    stop: int
    indices: list[int]
    states: RunStates
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

        The mark of a 1-D state of a whole parameter (statistics of its rows, say) is leading dimensions of 1: `is_column` would
        else take the state for a column if it happens to have as many elements as the parameter.
        """
        return value.view(*_MARK, -1) if self.whole and isinstance(value, Tensor) and value.dim() == 1 else value

    def unmark(self, value: object) -> object:
        """Return a state in the shape that the optimizer's class has given it: the inverse of `mark`."""
        marked = self.whole and isinstance(value, Tensor) and tuple(value.shape[:-1]) == _MARK
        return value.view(-1) if marked and isinstance(value, Tensor) else value


class RunStates:
    """The optimizer states of one run by name: columns (a value for each element: exp_avg) and scalars (step counts, say).

    A shard has one `Rest` for each such state, on any tier and in any form, and a run's column is a range of it: so splitting a
    run copies only its scalars. Where the inner optimizer steps and keeps states as they are (`own`), each column of a run is a
    tensor (numel,) that the optimizer's class has made.

    tensor: the run's. state: the inner optimizer's `state`, which has `own` states under the tensor; None: kept by this object.
    """

    def __init__(
        self, group: ParamGroup, tiers: Tiers, start: int, stop: int, tensor: Tensor | None, state: dict[Tensor, State] | None
    ) -> None:
        self.group, self.tiers, self.start, self.numel, self.tensor = group, tiers, start, stop - start, tensor
        self.own = state is not None
        self._held: dict = {} if state is None else state

    @property
    def entries(self) -> State | None:
        """Columns (`Rest` or, of `own` states, tensors) and scalars; None before the first step."""
        return self._held.get(self.tensor)

    @property
    def columns(self) -> State:
        """The columns."""
        return {name: value for name, value in self.load().items() if self.holds(value)}

    @property
    def scalars(self) -> State:
        """All other states."""
        return {name: value for name, value in self.load().items() if not self.holds(value)}

    def load(self) -> State:
        """Return the states by name: columns and scalars. {} before the first step."""
        return self.entries or {}

    def holds(self, value: object) -> bool:
        """Return True for a column, False for a scalar."""
        return isinstance(value, Rest) or (self.own and is_column(value, (self.numel,)))

    def shared(self, name: str, dtype: torch.dtype) -> Rest:
        """Return the Rest of a column of the shard; the first call makes it. dtype: in which the optimizer sees the state."""
        group, columns = self.group, self.group.columns
        if name not in columns:
            layout, column = group.layout, group.plan.column(name)
            numel = layout.numel if group.masters.whole else layout.shard_numel
            rest = self.tiers.rest(OPTIMIZER, group.offload, column.count(numel), column.dtype or dtype)
            columns[name] = rest if column.plain(dtype) else self.tiers.coded(rest, column, numel, dtype)
        return columns[name]

    def column(self, name: str, dtype: torch.dtype) -> Rest | Tensor:
        """Return a column for an entry of this name: the one that there is, else a new one. The caller enters and fills it."""
        if not self.own:
            return self.shared(name, dtype)
        assert self.tensor is not None
        found = self.load().get(name)
        return found if self.holds(found) else torch.zeros(self.numel, dtype=dtype, device=self.tensor.device)  # type: ignore[return-value]

    def replace(self, entries: State) -> None:
        """Replace all states; columns of the shard come first. {} for `own` states: as before the first step."""
        if entries or not self.own:
            self._held[self.tensor] = dict(sorted(entries.items(), key=lambda entry: not isinstance(entry[1], Rest)))
        else:
            self.clear()

    def clear(self) -> None:
        """Drop all states: as before the first step."""
        self._held.pop(self.tensor, None)

    def put(self, name: str, value: object) -> None:
        """Set one scalar, or add a column."""
        self.replace({**self.load(), name: value})

    def remove(self, name: str) -> None:
        """Drop one state; without the last one it is as before the first step."""
        self.replace({other: value for other, value in self.load().items() if other != name})
        if not self.entries:
            self.clear()

    def kind(self) -> Hashable:
        """Return a key that is equal for states that one run can hold together."""
        kinds = [(name, value.dtype if self.holds(value) else hashable(value)) for name, value in self.load().items()]
        return not self.own and self.entries is None, tuple(sorted(kinds))

    def join(self, parts: list[RunStates]) -> None:
        """Become the states of neighbouring runs of equal kind, which the caller clears afterwards."""
        if parts[0].entries is not None:
            own = parts[0].columns if self.own else {}  # columns of the shard do not move
            self.replace(parts[0].load() | {name: torch.cat([part.load()[name] for part in parts]) for name in own})

    def cut(self, whole: RunStates) -> None:
        """Become the states of a part of the run of `whole`, which the caller clears afterwards."""
        if whole.entries is not None:
            begin, columns = self.start - whole.start, whole.columns
            own = {name: value[begin : begin + self.numel] for name, value in columns.items() if self.own}
            self.replace(whole.entries | fresh(whole.scalars) | own)


class RunMaker:
    """Makes the runs of one optimizer. state: the inner one's. alone: ids of parameters stepped as a whole, a run for each."""

    def __init__(self, state: dict[Tensor, State], tiers: Tiers, alone: set[int]) -> None:
        self.state, self.tiers, self.alone = state, tiers, alone

    def make(self, group: ParamGroup, start: int, stop: int, indices: list[int]) -> Run:
        """Return a run without states."""
        whole = id(group.params[indices[0]]) in self.alone
        slabs = group.masters.split or (group.plan.coded and not whole)
        in_place = group.offload.tier is Tier.DEVICE and not slabs
        tensor = nn.Parameter(group.masters.of_runs.load(start, stop)) if in_place else None
        state = None if tensor is None or group.plan.coded else self.state
        return Run(group, start, stop, indices, RunStates(group, self.tiers, start, stop, tensor, state), tensor, whole)

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
            part.states.cut(run.states)
            parts.append(part)
        run.states.clear()
        return parts

    def joined(self, runs: list[list[Run]], groups: Sequence[ParamGroup]) -> list[list[Run]]:
        """Join neighbouring runs with states of equal kind, the reverse of `split`; runs, result: by the optimizer's groups."""
        kinds = {run: (number, run.states.kind()) for number, each in enumerate(runs) for run in each}
        result: list[list[Run]] = [[] for _ in runs]
        of_group: dict[ParamGroup, dict[int, Run]] = defaultdict(dict)
        for run in kinds:
            of_group[run.group].update(dict.fromkeys(run.indices, run))
        for group in groups:
            had = of_group[group]
            keys = [kinds[had[index]] if index in had else None for index in range(len(group.params))]
            for (number, _), joined in self.runs(group, keys):
                parts = list(dict.fromkeys(had[index] for index in joined.indices))
                if len(parts) > 1:
                    joined.states.join([run.states for run in parts if run.numel] or [parts[0].states])
                    for run in parts:
                        run.states.clear()
                result[number].append(joined if len(parts) > 1 else parts[0])
        return result


def state_tensors(state: dict[Tensor, State]) -> list[Tensor]:
    """Return all columns of an inner optimizer's state."""
    return [value for tensor, entries in state.items() for value in entries.values() if is_column(value, tuple(tensor.shape))]
