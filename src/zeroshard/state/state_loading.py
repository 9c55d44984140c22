"""Saves and loads of a model's states: its optimizers as one, waits and checks, and loads of optimizer states into runs.

Loading makes new runs, and neighbouring parameters with equal counters share one. So states that were saved from split runs
(a parameter had missed a step), or by another number of ranks, are stepped by as few kernels as their counters allow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..engine.inner_optimizer import Options, State, hashable
from ..engine.rest import Rest
from ..engine.runs import Run
from ..engine.runtime import Runtime
from ..engine.unit import ParamGroup
from ..errors import ConfigError, ZeroshardError
from ..tensor.state_column import is_column
from ..utils.aligned import empty
from ..utils.torch_compat import alone
from .tensor_reader import Bulk

if TYPE_CHECKING:
    from ..engine.optimizer import OptimizerCore

_CHUNK_NUMEL = 4 << 20  # number of elements of an offloaded state that are read at a time


class Reader(Protocol):
    """A flattened tensor of the shape of a parameter, readable in parts."""

    dtype: torch.dtype

    def read(self, start: int, out: Tensor) -> None:
        """Fill `out` (n,) with elements [start, start + n), converted to its dtype."""


@dataclass
class SavedState:
    """The optimizer state of one parameter. tensors: its columns; scalars: all other states."""

    tensors: dict[str, Reader] = field(default_factory=dict)
    scalars: State = field(default_factory=dict)

    def kind(self) -> Hashable:
        """Return a key that is equal for states that one run can hold together."""
        scalars = tuple((key, hashable(value)) for key, value in sorted(self.scalars.items()))
        return tuple(sorted((key, reader.dtype) for key, reader in self.tensors.items())), scalars


class TensorReader:
    """Reader of a whole tensor, or of the slice of one from element `first` on."""

    def __init__(self, values: Tensor, first: int = 0) -> None:
        self.values, self.first, self.dtype = values.detach().reshape(-1), first, values.dtype

    def read(self, start: int, out: Tensor) -> None:
        begin = start - self.first
        out.copy_(self.values.narrow(0, begin, out.numel()))  # raises for a range that it has not: one element would be broadcast


class Restoring:
    """A load of states into runs: `note`, which is optional, registers bulk reads; `put` replaces the states."""

    def __init__(self, core: OptimizerCore, states: dict[int, SavedState]) -> None:
        self.core = core
        # number of the optimizer's group, a new run, its parameters' states
        self.runs: list[tuple[int, Run, list[SavedState]]] = []
        self._made: dict[int, dict[str, Tensor]] = {}  # id of a run -> states that `note` has allocated
        nothing = SavedState()
        for group in (group for group in core.runtime.groups if group.trainable):
            numbers = [core.group_of.get(id(param)) for param in group.params]
            given = [states.get(id(param), nothing) for param in group.params]
            keys = [None if number is None else (number, state.kind()) for number, state in zip(numbers, given, strict=True)]
            for (number, _), run in core.maker.runs(group, keys):
                self.runs.append((number, run, [given[index] for index in run.indices]))

    @property
    def all_noted(self) -> bool:
        """True if `note` registers the reads of all states; those in columns, encoded or not, are read by `put` alone, in chunks."""
        return all(run.states.own for _, run, _ in self.runs)

    @torch.no_grad()
    def note(self, bulk: Bulk, has: Callable[[int], bool]) -> None:
        """Allocate states that can not reuse old ones' memory, and register reads into them with `bulk`; `put` reads the rest.

        has: bytes -> whether the device has memory for so many beside the old states; if not, `put` reads all states.
        """
        device, spare = self.core.comm.device, self._spare()
        runs = [(run, given) for _, run, given in self.runs if run.states.own]
        fresh = [(run, reader) for run, given in runs for key, reader in given[0].tensors.items() if key not in spare[id(run)]]
        room = has(sum(run.numel * state_dtype(run.group, reader.dtype).itemsize for run, reader in fresh))
        for run, given in runs:
            values = {}
            for key, reader in given[0].tensors.items():
                waits = not room or key in spare[id(run)]
                values[key] = empty(run.numel, state_dtype(run.group, reader.dtype), "meta" if waits else device)
            self._fill(run, given, values, bulk)
            self._made[id(run)] = {key: value for key, value in values.items() if not value.is_meta}

    @torch.no_grad()
    def put(self, write_over: bool = False) -> None:
        """Replace all states.

        write_over: reuse the memory of the old states of a run with the same elements, since allocating can cost more time than
            reading. The readers must not read from these old states.
        """
        core = self.core
        spare = self._spare() if write_over else {}
        core.runtime.gate.before()
        for run in core.all_runs:
            run.states.clear()
        core.runs = [[] for _ in core.runs]
        for number, run, given in self.runs:
            core.runs[number].append(run)
            entries = scalars_for(run, core.outer.param_groups[number], given[0])  # equal for all of the run
            made, old = self._made.pop(id(run), {}), spare.pop(id(run), {})
            columns: State = {key: made[key] if key in made else old.get(key) for key in given[0].tensors}
            for key, reader in given[0].tensors.items():
                if columns[key] is None:
                    columns[key] = self._new(run, key, reader.dtype)
            self._fill(run, given, {key: columns[key] for key in columns if key not in made}, None)  # `note` has read the others
            if entries or columns:
                run.states.replace(entries | columns)
        core.states_changed()

    def _spare(self) -> dict[int, dict[str, Tensor]]:
        """Return by id of a new run the old states whose memory it can reuse: of the same elements, without other references."""
        before = [run for run in self.core.all_runs if run.states.own]
        old = {(id(run.group), run.start, run.numel): run.states.load() for run in before}
        uses = Counter(id(value) for entries in old.values() for value in entries.values())
        found = {}
        for _, run, given in self.runs:
            entries = old.get((id(run.group), run.start, run.numel), {})
            found[id(run)] = {
                key: entries[key]
                for key, reader in given[0].tensors.items()
                if is_column(value := entries.get(key), (run.numel,))
                and (value.dtype, value.device) == (state_dtype(run.group, reader.dtype), self.core.comm.device)
                and value.is_contiguous() and not value.is_inference() and uses[id(value)] == 1 and alone(value)
            }  # fmt: skip
        return found

    def _new(self, run: Run, key: str, dtype: torch.dtype) -> Rest | Tensor:
        """Return a column for a stored state of this dtype, which the caller fills."""
        kept = state_dtype(run.group, dtype)
        return empty(run.numel, kept, self.core.comm.device) if run.states.own else run.states.shared(key, kept)

    def _fill(self, run: Run, given: list[SavedState], columns: State, bulk: Bulk | None) -> None:
        """Read the states of all parameters of a run, by key, into its columns. bulk: register the reads with it instead.

        The reads go parameter by parameter, the order of zeroshard's checkpoints, so that files are read sequentially.
        """
        for index, state in zip(run.indices, given, strict=True):
            start, stop = self._held(run, index)
            begin, end = run.group.masters.range(index)
            for key, column in columns.items():
                if isinstance(column, Rest):
                    padding_numel = end - begin - stop + start
                    if column.encoding is not None and padding_numel:  # first: what it has of earlier steps would set the scale
                        column.store(begin + stop - start, torch.zeros(padding_numel, dtype=column.dtype, device="cpu"))
                    copy_to_rest(state.tensors[key], start, stop, column, begin)
                    continue
                place, padding = column[begin - run.start : end - run.start].split((stop - start, end - begin - stop + start))
                padding.zero_()
                if bulk is None:
                    state.tensors[key].read(start, place)
                else:
                    bulk.add(state.tensors[key], start, place)

    def _held(self, run: Run, index: int) -> tuple[int, int]:
        """Return [start, stop) of the flattened parameter whose states this rank has."""
        home = run.group.homes[index]
        return (0, run.group.layout.slots[index].numel) if self.core.replicated else (home.start, home.stop)


class SeveralOptimizers:
    """Several optimizers of one model in the form of one, for checkpoints: their groups, one after another."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[Options]:
        """The groups of all, in the order of the optimizers' first parameters."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]


Optimizers = torch.optim.Optimizer | SeveralOptimizers  # what a checkpoint saves or loads


class StatesAtRest:
    """The states of a model for who saves and loads them, between steps: parameters, masters, optimizers' states.

    Before a read, call `wait`, or `finish_updates` to take a delayed step as well; before a write, `replace_all`. If a write
    ends half-way, call `mark_unusable`.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.gate = runtime, runtime.gate

    def check(self) -> None:
        """Raise ModelChanged if the model's parameters are no longer the ones that zs.shard() installed."""
        gathered = any(unit.pinned for unit in self.runtime.units)
        self.runtime.model_watch.check(gathered, thoroughly=True)
        for unit in () if gathered else self.runtime.units:
            unit.entries.check_unchanged(in_use=True)

    def agree(self) -> None:
        """Raise ModelMismatch on every rank if data-parallel ranks have written different values to a parameter (collective)."""
        self.runtime.values.agree()

    def wait(self) -> None:
        """Wait until masters and optimizer states are at rest, and nobody reads or writes them; clear a failed backward."""
        self.gate.wait()

    def finish_updates(self) -> None:
        """Take a delayed update's step now; copy what the program has written to parameters into their masters."""
        if self.gate.delayed is not None:
            self._drain()
        self.gate.refresh(self.runtime.groups)

    def replace_all(self, stepped: bool) -> None:
        """Prepare for a write to all states: drop gradients, and copies and residuals of the old values. stepped: the optimizer's, too."""
        if stepped:
            self._drain()  # a pending delayed update would overwrite the new masters
        self.gate.before(*self.runtime.units)  # masters that the host's step has read ahead would undo the write
        self.runtime.zero_grad()
        self.runtime.topology.forget()

    def _drain(self) -> None:
        for core in self.runtime.optimizers.cores:
            core.drain()

    def restoring(self, states: dict[int, SavedState]) -> list[Restoring]:
        """Return the loads of the optimizers' states, one for each optimizer. states: id of a parameter -> its state."""
        return [Restoring(core, states) for core in self.runtime.optimizers.cores]

    def given_optimizer(self, given: object, verb: str) -> Optimizers | None:
        """Return the model's optimizer, or all of several as one, as a caller gave them to `verb`: one, a list of all, or None.

        Raise ConfigError if what was given are not the model's.
        """
        if given is None:
            return None
        listed = list(given) if isinstance(given, (list, tuple)) else [given]
        # before this refers to others: one may replace an optimizer that the program has dropped
        self.runtime.optimizers.take(listed)
        optimizers = list(self.runtime.optimizers)
        if not listed or set(map(id, listed)) != set(map(id, optimizers)):
            why = "" if optimizers else f" {self.runtime.optimizers.text_without_one()}"
            if len(optimizers) > 1:
                names = ", ".join(type(each).__name__ for each in optimizers)
                why = f" This model is stepped by several: give a list of all ({names})."
            raise ConfigError(f"{verb}: optimizer: expected the one that zs.shard() returned with this model.{why}")
        if any(any(optimizer.core.outside) for optimizer in optimizers):
            raise ConfigError(
                f"{verb}: optimizer: it also steps parameters that are not the model's, which have no names in a checkpoint of it. Give these "
                "an optimizer of their own, and save them and its state_dict() by `extra`."
            )
        return optimizers[0] if len(optimizers) == 1 else SeveralOptimizers(optimizers)

    def mark_unusable(self, why: ZeroshardError | None) -> None:
        """Let each use of the model raise an error such as that of a load that failed half-way; None lets it be used again."""
        self.gate.mark(why)


def kind_of(optimizer: Optimizers) -> str:
    """Return the name of an optimizer's class, as checkpoints keep it; of several joined by "+"."""
    several = optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else [optimizer]
    return "+".join(type(each).__name__.removeprefix("Sharded") for each in several)


def scalars_for(run: Run, options: Options, saved: SavedState) -> State:
    """Return a parameter's saved scalars (counters and the like), moved to the device where the run's step needs them.

    The host's step needs them on the host. A step on the device needs them as after torch's load_state_dict: on the device, but
    `step` on the host unless the optimizer is fused or capturable (their kernels would take a host pointer for a device pointer).
    """
    on_device = run.tensor is not None and bool(options.get("fused") or options.get("capturable"))
    found = {key: run.mark(value) for key, value in saved.scalars.items()}
    for key, value in found.items():
        if isinstance(value, Tensor):
            to_device = run.tensor is not None and (on_device or key != "step")
            found[key] = value.to(run.tensor.device if to_device else "cpu", copy=True)  # type: ignore[union-attr]
    return found


def copy_to_rest(reader: Reader, start: int, stop: int, rest: Rest, begin: int) -> None:
    """Copy elements [start, stop) of a stored tensor to a Rest, from the Rest's element `begin` on, in chunks."""
    for first in range(start, stop, _CHUNK_NUMEL):
        values = torch.empty(min(_CHUNK_NUMEL, stop - first), dtype=rest.dtype, device="cpu")
        reader.read(first, values)
        rest.store(begin + first - start, values)


def state_dtype(group: ParamGroup, given: torch.dtype) -> torch.dtype:
    """Return the dtype in which a stored state is kept: floating-point states get that of the masters, or of the values."""
    return group.masters.stepped.dtype if given.is_floating_point else given
