"""Optimizer states from elsewhere (a state dict, a checkpoint) into runs.

Parameters whose counters are equal become one run again: what was split because a parameter missed a step, or came from
another partition, is stepped by as few kernels as its state allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..comm.base import Comm
from ..compat import alone
from ..memory.aligned import empty
from ..memory.tiers import Rest
from ..runtime import Runtime
from ..unit import ParamGroup
from .runs import Run, RunMaker
from .states import ColumnStates, DeviceStates, hashable

_CHUNK_NUMEL = 4 << 20  # elements of an offloaded state that are read at a time


class Reader(Protocol):
    """A flattened tensor of the shape of a parameter, readable in parts."""

    dtype: torch.dtype

    def read(self, start: int, out: Tensor) -> None:
        """Fill `out` (n,) with elements [start, start + n), converted to its dtype."""


class Core(Protocol):
    """What is asked of an optimizer's core (optim/sharded.py)."""

    runtime: Runtime
    comm: Comm
    outer: torch.optim.Optimizer
    replicated: bool
    runs: list[list[Run]]
    maker: RunMaker
    group_of: dict[int, int]
    parted: bool

    def wait(self) -> None:
        """Return when states are at rest and nobody's but ours."""

    def begin_write(self) -> None:
        """States are about to be written."""

    def states_changed(self) -> None:
        """They have been, and runs are new."""


@dataclass
class SavedState:
    """The optimizer state of one parameter. tensors: one value an element; scalars: all else."""

    tensors: dict[str, Reader] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)

    def kind(self) -> Hashable:
        """Equal for states that one run can hold together."""
        scalars = tuple((key, hashable(value)) for key, value in sorted(self.scalars.items()))
        return tuple(sorted((key, reader.dtype) for key, reader in self.tensors.items())), scalars


class TensorReader:
    """A whole tensor, or the slice of one from element `first` on."""

    def __init__(self, values: Tensor, first: int = 0) -> None:
        self.values, self.first, self.dtype = values.detach().reshape(-1), first, values.dtype

    def read(self, start: int, out: Tensor) -> None:
        out.copy_(self.values[start - self.first : start - self.first + out.numel()])


@torch.no_grad()
def restore(core: Core, states: dict[int, SavedState], write_over: bool = False) -> None:
    """Replace all states. states: by id of the parameter; one that is not there is as before its first step.

    write_over: the states that a run of the same elements had, since fresh memory can cost more than what is written to it.
        What is read must not be those.
    """
    runs = list(_runs(core, states))
    spare = _spare(core, runs) if write_over else {}
    _forget(core)
    for number, run, given in runs:
        core.runs[number].append(run)
        if isinstance(run.states, ColumnStates):
            _fill_columns(run, run.states, given)
        elif entries := _entries(core, number, run, given, None, core.comm.device, spare.get(id(run))):
            run.states.save(entries)
    core.states_changed()


@torch.no_grad()
def stage(core: Core, states: dict[int, SavedState], bulk: Any, device: torch.device) -> Callable[[], None]:
    """The same in two steps, for states on the device: notes what is to be read; what is returned replaces the states then.

    device: of the tensors to read into: the states'; "meta" only notes.
    """
    made = [(number, run, _entries(core, number, run, given, bulk, device)) for number, run, given in _runs(core, states)]

    def put() -> None:
        _forget(core)
        for number, run, entries in made:
            core.runs[number].append(run)
            if entries:
                run.states.save(entries)
        core.states_changed()

    return put


def _forget(core: Core) -> None:
    core.begin_write()
    for run in (run for runs in core.runs for run in runs):
        run.states.clear()
    core.runs = [[] for _ in core.runs]


def _spare(core: Core, runs: list[tuple[int, Run, list[SavedState]]]) -> dict[int, dict[str, Tensor]]:
    """Old states that the new runs can have the memory of, by id of the run: those of the same elements that are nobody else's."""
    before = [run for runs in core.runs for run in runs if isinstance(run.states, DeviceStates)]
    old = {(id(run.group), run.start, run.numel): run.states.load() for run in before}
    uses = Counter(id(value) for entries in old.values() for value in entries.values())
    found = {}
    for _, run, given in runs:
        entries = old.get((id(run.group), run.start, run.numel), {})
        found[id(run)] = {
            key: entries[key]
            for key, reader in given[0].tensors.items()
            if run.holds(value := entries.get(key))
            and (value.dtype, value.device) == (state_dtype(run.group, reader.dtype), core.comm.device)
            and value.is_contiguous() and not value.is_inference() and uses[id(value)] == 1 and alone(value)
        }  # fmt: skip
    return found


def _runs(core: Core, states: dict[int, SavedState]) -> Iterator[tuple[int, Run, list[SavedState]]]:
    """(number of the optimizer's group, a new run, the states of its parameters)."""
    empty = SavedState()
    for group in core.runtime.groups:
        if not group.trainable:
            continue
        numbers = [core.group_of.get(id(param)) for param in group.params]
        given = [states.get(id(param), empty) for param in group.params]
        keys: list[object] = [
            None if number is None else (number, state.kind()) for number, state in zip(numbers, given, strict=True)
        ]
        for (number, _), run in core.maker.runs(group, keys):  # type: ignore[misc]
            yield number, run, [given[index] for index in run.indices]


def scalars_for(run: Run, options: Mapping[str, Any], saved: SavedState) -> dict[str, Any]:
    """Counters and the like, on the device where the run's step wants them, whichever they come from.

    The host steps with what is on the host. On the device it is as when torch loads a state dict: `step` stays on the host,
    but for fused and capturable optimizers, whose kernels would take a pointer of the host for one of their own.
    """
    on_device = run.tensor is not None and bool(options.get("fused") or options.get("capturable"))
    found = dict(saved.scalars)
    for key, value in found.items():
        if isinstance(value, Tensor):
            to_device = run.tensor is not None and (on_device or key != "step")
            found[key] = value.to(run.tensor.device if to_device else "cpu", copy=True)  # type: ignore[union-attr]
    return found


def _entries(
    core: Core, number: int, run: Run, given: list[SavedState], bulk: Any, device: torch.device,
    spare: dict[str, Tensor] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The states of a run on a device. number: of the optimizer's group. spare: tensors to take for some of them."""
    entries = scalars_for(run, core.outer.param_groups[number], given[0])  # they are equal
    for key, reader in given[0].tensors.items():
        entries[key] = (spare or {}).get(key)
        if entries[key] is None:
            entries[key] = empty(run.numel, state_dtype(run.group, reader.dtype), device)
    for index, state in zip(run.indices, given, strict=True):
        home = run.group.homes[index]
        start, stop = (0, run.group.layout.slots[index].numel) if core.replicated else (home.start, home.stop)
        at, end = (bound - run.start for bound in core.maker.slot_range(run.group, index))
        for key, reader in state.tensors.items():
            place, padding = entries[key][at:end].split((stop - start, end - at - stop + start))
            padding.zero_()
            reader.read(start, place) if bulk is None else reader.read(start, place, bulk)  # type: ignore[call-arg]
    return entries


def _fill_columns(run: Run, states: ColumnStates, given: list[SavedState]) -> None:
    """The states of a run that rest elsewhere."""
    if not given[0].tensors and not given[0].scalars:
        return
    columns = {key: states.column(key, state_dtype(run.group, reader.dtype)) for key, reader in given[0].tensors.items()}
    states.names, states.scalars = list(columns), scalars_for(run, {}, given[0])
    for index, state in zip(run.indices, given, strict=True):
        home = run.group.homes[index]
        for key, reader in state.tensors.items():
            _copy_to_rest(reader, home.start, home.stop, columns[key], home.begin)


def _copy_to_rest(reader: Reader, start: int, stop: int, rest: Rest, begin: int) -> None:
    for first in range(start, stop, _CHUNK_NUMEL):
        values = torch.empty(min(_CHUNK_NUMEL, stop - first), dtype=rest.dtype, device="cpu")
        reader.read(first, values)
        rest.store(begin + first - start, values)


def state_dtype(group: ParamGroup, given: torch.dtype) -> torch.dtype:
    """Floating-point states have the dtype of what is stepped."""
    stepped = group.master if group.master is not None else group.values
    return stepped.dtype if given.is_floating_point else given
