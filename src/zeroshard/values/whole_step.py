"""The step of whole parameters, for optimizers that need all of a matrix (optim/whole_matrix.py).

    turn 1    rank 0 collects w0: value, gradient, states     steps it with the optimizer's own class     slices go back to all
              rank 1 collects w1                              steps it                                    "
    turn 2    w2, w3 ...

Each parameter is a run of its own (engine/runs.py). States of the parameter's shape are sharded like it; states of other
shapes, and numbers, are the same on every rank. So checkpoints, tiers and resharding need no special case. At a replicated stage
each rank steps all parameters, and nothing is sent.

Parameters are assigned to ranks by size, the largest first, each to the rank with the fewest elements so far. In a turn every
rank holds one whole parameter, with gradient and states, besides its slices. The slices travel by all-gathers of small chunks
(chunked_gather.py), which also bring each rank other ranks' parameters; it drops those chunks at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TypeGuard

import torch
from torch import Tensor

from ..engine.comm.base import Comm
from ..engine.comm.messages import exchange_values, sendable
from ..engine.inner_optimizer import Options, State, fresh, step_alone
from ..engine.rest import Tiers
from ..engine.runs import Run
from ..engine.steppers import WholeStep
from ..tensor.state_column import is_column
from ..utils.torch_compat import disable_current_modes
from .chunked_gather import ChunkedGather

_CHUNK_NBYTES = 4 << 20  # size of one rank's staging buffer


@dataclass(eq=False)
class Stepping:
    """One parameter to step on rank `owner`.

    states: name -> dtype of the states that have the parameter's shape; others: all other states. written: the options of its
    group that the step has changed.
    """

    run: Run
    options: Options
    states: dict[str, torch.dtype]
    others: State
    owner: int = 0
    written: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.group, self.index = self.run.group, self.run.indices[0]
        self.shape, self.numel = self.group.specs[self.index].shape, self.group.layout.slots[self.index].numel


def _differs(after: object, before: object) -> bool:
    """Return True for an option that a step has replaced, or written into (a tensor, of which it had a copy)."""
    if isinstance(after, Tensor) and isinstance(before, Tensor):
        return not torch.equal(after, before)
    return after is not before


class WholeStepper(WholeStep):
    """Steps the runs of whole parameters."""

    def __init__(self, inner: torch.optim.Optimizer, tiers: Tiers, replicated: bool) -> None:
        self.inner, self.tiers, self.replicated = inner, tiers, replicated
        self.gathers: dict[Comm, ChunkedGather] = {}  # by the ranks over which a parameter is sharded
        self.stacked: dict[tuple[str, int], int] = {}  # (state, parameter's dims) -> its leading dims of 1

    @torch.no_grad()
    def step(self, runs: list[tuple[Run, Options]]) -> list[tuple[Run, Options]]:
        """Step all runs, the same in the same order on all ranks (collective). Return (run, changed options) for each."""
        jobs = []
        for run, options in runs:
            entries = run.states.load()
            states = {key: value.dtype for key, value in sorted(entries.items()) if run.holds(value)}
            jobs.append(Stepping(run, options, states, {key: value for key, value in entries.items() if key not in states}))
        if self.replicated:
            for job in jobs:
                self._step_here(job)
        for comm in dict.fromkeys(job.group.comm for job in jobs) if not self.replicated else ():
            self.gathers.setdefault(comm, ChunkedGather(comm, self.tiers.ledger, _CHUNK_NBYTES))
            loads = [0] * comm.world_size
            queues: list[list[Stepping]] = [[] for _ in loads]
            for job in sorted((job for job in jobs if job.group.comm is comm), key=lambda job: -job.numel):
                job.owner = loads.index(min(loads))
                loads[job.owner] += job.numel
                queues[job.owner].append(job)
            for turn in zip_longest(*queues):
                self._step_turn([job for job in turn if job is not None])
        return [(job.run, job.written) for job in jobs]

    def close(self) -> None:
        """Release all buffers."""
        for gather in self.gathers.values():
            gather.close()

    def _step_class(self, job: Stepping, param: Tensor, grad: Tensor, states: dict[str, Tensor]) -> tuple[Tensor, State]:
        """Step a whole parameter with the optimizer's own class; return its value and states afterwards."""
        state: State = {key: value.view((1,) * self._leading(job, key) + job.shape) for key, value in states.items()}
        state |= fresh({key: job.run.unmark(value) for key, value in job.others.items()})
        value, after, options = step_alone(self.inner, job.options, param.view(job.shape), grad.view(job.shape), state)
        # the default `options` is a value that no option has
        changed = {k: v for k, v in options.items() if k != "params" and _differs(v, job.options.get(k, options))}
        job.written = {k: v for k, v in changed.items() if sendable(v)}
        return value, {key: self._as_cut(job, key, state) for key, state in after.items()}

    def _as_cut(self, job: Stepping, key: str, value: object) -> object:
        """Return a state in the form in which the run keeps it: (m, n) for states (1, m, n) of classes that stack matrices."""
        if isinstance(value, Tensor) and key not in job.others:
            leading = value.dim() - len(job.shape)
            if leading >= 0 and tuple(value.shape) == (1,) * leading + job.shape and value.dim():
                self.stacked[key, len(job.shape)] = leading
                return value.view(job.shape)
        return job.run.mark(value) if not _is_state(value, job.shape) else value

    def _leading(self, job: Stepping, key: str) -> int:
        """Return how many leading dimensions of 1 the class gives a state. If no step has shown it (after a load), step zeros."""
        at = key, len(job.shape)
        if at not in self.stacked:
            self.stacked[at] = 0  # `_as_cut` overwrites it if the step below shows leading dimensions
            first, zeros = replace(job, states={}, others={}), torch.zeros(job.numel, device=job.group.comm.device)
            self._step_class(first, zeros, zeros.clone(), {})
        return self.stacked[at]

    # -- replicated ----------------------------------------------------------------------------------------------

    def _step_here(self, job: Stepping) -> None:
        """Step a replicated parameter in place, without communication. The run's state tensors end with the layout's padding."""
        run, numel, slot = job.run, job.numel, job.group.layout.slots[job.index]
        assert run.tensor is not None
        states = self._held(job, numel)
        param = run.tensor.detach()[:numel]
        value, after = self._step_class(job, param, job.group.gradients.in_step(slot.offset, slot.stop, param.dtype), states)
        if value.data_ptr() != param.data_ptr():
            param.copy_(value.view(-1))
        states = {key: value for key, value in after.items() if _is_state(value, job.shape) and key not in job.others}
        run.states.replace(after | self._keep(job, states))

    # -- sharded -------------------------------------------------------------------------------------------------

    def _step_turn(self, turn: list[Stepping]) -> None:
        """Step one turn: at most one parameter per rank."""
        mine: tuple[Stepping, Tensor, State] | None = None
        for job in turn:
            parts = self._collect(job)
            if parts is not None:
                value, after = self._step_class(job, parts[0], parts[1], dict(zip(job.states, parts[2:], strict=True)))
                mine = job, value, after
        told = (*_told(mine[0], mine[2]), mine[0].written) if mine is not None else None
        comm = turn[0].group.comm
        everyone = exchange_values(comm, told, "optimizer step: states of whole parameters")
        for job in turn:
            if comm.imagined and job.owner != comm.rank:
                # an imagined owner's message is that after a first step, computed outside of the dry run's modes
                first = replace(job, states={}, others={})
                with disable_current_modes():
                    param, grad = (torch.empty(job.numel, dtype=job.group.masters.stepped.dtype, device="meta") for _ in range(2))
                    states, others = _told(first, self._step_class(first, param, grad, {})[1])
                written = first.written
            else:
                states, others, written = everyone[job.owner]
            job.states, job.others, job.written = dict(sorted(states.items())), others, written
        self._give_back(turn, mine)

    def _collect(self, job: Stepping) -> list[Tensor] | None:
        """Return value, gradient and states of one parameter, whole and flat, on its owner; None elsewhere (collective)."""
        comm, group, home, stepped = job.group.comm, job.group, job.group.homes[job.index], job.group.masters.stepped
        states = self._held(job, home.end - home.begin).values()
        parts = [stepped.load(home.begin, home.end), group.gradients.in_step(home.begin, home.end, stepped.dtype), *states]
        dtypes = [part.dtype for part in parts]
        pieces = [group.layout.piece(job.index, rank) for rank in range(comm.world_size)]
        whole = [torch.empty(job.numel, dtype=dtype, device=comm.device) for dtype in dtypes] if job.owner == comm.rank else None
        local = torch.cat([part.contiguous().view(torch.uint8) for part in parts])
        size = sum(dtype.itemsize for dtype in dtypes)

        def take(rank: int, start: int, received: Tensor) -> None:
            if whole is None:
                return
            begin = 0
            for target, dtype in zip(whole, dtypes, strict=True):  # a rank sends them one after the other
                nbytes, at = pieces[rank].numel * dtype.itemsize, pieces[rank].start * dtype.itemsize
                _lay(received, start, target.view(torch.uint8)[at : at + nbytes], begin)
                begin += nbytes

        label = f"whole {group.specs[job.index].name}"
        self.gathers[comm].run([piece.numel * size for piece in pieces], lambda start, stop: local[start:stop], take, label)
        return whole

    def _give_back(self, turn: list[Stepping], mine: tuple[Stepping, Tensor, State] | None) -> None:
        """Send slices of values and states from the owners to all ranks, which store them (collective)."""
        comm = turn[0].group.comm
        sizes, targets = [0] * comm.world_size, {}
        for job in turn:
            dtypes = [job.group.masters.stepped.dtype, *job.states.values()]
            sizes[job.owner] = job.numel * sum(dtype.itemsize for dtype in dtypes)
            home = job.group.homes[job.index]
            targets[job.owner] = job, [torch.empty(home.end - home.begin, dtype=dtype, device=comm.device) for dtype in dtypes]
        content = torch.empty(0, dtype=torch.uint8)
        if mine is not None:
            job, value, after = mine
            results = [value, *(after[key] for key in job.states)]
            content = torch.cat([result.reshape(-1).contiguous().view(torch.uint8) for result in results])

        def take(rank: int, start: int, received: Tensor) -> None:
            job, parts = targets[rank]
            first, begin = job.group.homes[job.index].start, 0  # `begin`: byte of the owner's stream at which each part begins
            for part in parts:
                _lay(received, start, part.view(torch.uint8), begin + first * part.itemsize)
                begin += job.numel * part.itemsize

        self.gathers[comm].run(sizes, lambda start, stop: content[start:stop], take, "whole parameters back")
        for job, parts in targets.values():
            self._store(job, parts[0], dict(zip(job.states, parts[1:], strict=True)))

    def _store(self, job: Stepping, value: Tensor, states: dict[str, Tensor]) -> None:
        group, home, run = job.group, job.group.homes[job.index], job.run
        stepped = group.masters.stepped
        stepped.store(home.begin, value)
        if group.masters.rest is not None and run.tensor is None:  # otherwise `_update` copies all masters at once
            values = group.values.rest
            values.store(home.begin, value if values.resident else value.to(values.dtype))
        run.states.replace(self._keep(job, states) | {key: _placed(value, key, run) for key, value in job.others.items()})

    @staticmethod
    def _held(job: Stepping, numel: int) -> dict[str, Tensor]:
        """Return this rank's elements of a parameter's states."""
        places = {key: job.run.place(job.run.states.load()[key], job.index) for key in job.states}
        return {key: rest.load(begin, begin + numel) for key, (rest, begin) in places.items()}

    @staticmethod
    def _keep(job: Stepping, states: dict[str, Tensor]) -> State:
        """Store a parameter's states, or this rank's slices of them; return their columns."""
        columns: State = {key: job.run.states.column(key, value.dtype) for key, value in states.items()}
        for key, value in states.items():
            rest, begin = job.run.place(columns[key], job.index)
            rest.store(begin, value.reshape(-1))
        return columns


def _placed(value: object, key: str, run: Run) -> object:
    """Return an unsharded state that the owner has sent, on this run's device; `step` stays on the host, as in torch."""
    return value.to(run.tensor.device) if isinstance(value, Tensor) and run.tensor is not None and key != "step" else value


def _told(job: Stepping, after: State) -> tuple[dict[str, torch.dtype], State]:
    """Return the owner's message about a parameter's states after its step: dtypes of sharded ones, and the others' values."""
    states = {key: value.dtype for key, value in after.items() if _is_state(value, job.shape) and key not in job.others}
    return states, {key: value for key, value in after.items() if key not in states}


def _is_state(value: object, shape: tuple[int, ...]) -> TypeGuard[Tensor]:
    return is_column(value, shape) and bool(shape)


def _lay(received: Tensor, start: int, target: Tensor, begin: int) -> None:
    """Copy bytes [start, start + n) of a stream, `received`, to `target`, which is the stream's bytes from `begin` on."""
    first, last = max(start, begin), min(start + received.numel(), begin + target.numel())
    if first < last:
        target[first - begin : last - begin].copy_(received[first - start : last - start])
