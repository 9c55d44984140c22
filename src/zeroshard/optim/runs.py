"""Runs: the contiguous stretches of a shard that one optimizer group steps as one tensor.

Within a flat shard neighbours of the same optimizer group are one run: one kernel per unit instead of one per
parameter. A parameter that missed a step (no rank had a gradient for it) must keep its own step count and moments, so
its run is split at that moment, with the optimizer's state split along.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..layout import ALIGNMENT, round_up
from ..unit import ParamGroup


@dataclass(eq=False)
class Run:
    """Elements [start, stop) of the stepped buffer of `group`: the parameters `indices`, in layout order.

    tensor: the leaf that the optimizer steps (values or masters, sharing memory).
    """

    group: ParamGroup
    start: int
    stop: int
    indices: list[int]
    tensor: nn.Parameter

    def grad_of(self, grads: Tensor) -> Tensor:
        """This run's part of the gradient buffer that matches the stepped one."""
        return grads[self.start : self.stop]


def stepped_buffer(group: ParamGroup, replicated: bool) -> Tensor:
    """What the optimizer steps: masters where there are any, else the values; the shard, or (replicated) all."""
    if group.master is not None:
        return group.master
    return group.values.full if replicated else group.values.shard


def gradient_buffer(group: ParamGroup, replicated: bool) -> Tensor:
    """The gradient that matches `stepped_buffer`."""
    assert group.grads is not None
    return group.grads.full if replicated else group.grads.shard


def slot_range(group: ParamGroup, index: int, replicated: bool) -> tuple[int, int]:
    """[start, stop) of a parameter in the stepped buffer, with the padding that follows it."""
    slot = group.layout.slots[index]
    stop = round_up(slot.stop, ALIGNMENT)
    if replicated:
        return slot.offset, stop
    begin, end = group.layout.shard_range(group.comm.rank)
    start, stop = max(slot.offset, begin), min(stop, end)
    return (start - begin, stop - begin) if start < stop else (0, 0)


def make_runs(group: ParamGroup, keys: list[object], replicated: bool) -> list[tuple[object, Run]]:
    """(key, run) for each maximal stretch of parameters with equal, not-None key.

    A parameter that lies in the shards of other ranks alone joins its neighbour's run, or is a run of no elements: its
    step count lives on every rank, so that all ranks show the same states.
    """
    runs: list[tuple[object, Run]] = []
    buffer = stepped_buffer(group, replicated)
    pending: list[tuple[object, int, int, list[int]]] = []
    for index, key in enumerate(keys):
        if key is None:
            continue
        start, stop = slot_range(group, index, replicated)
        if start == stop:
            start = stop = pending[-1][2] if pending else 0
        if pending and pending[-1][0] == key and pending[-1][2] == start:
            last = pending.pop()
            pending.append((key, last[1], stop, [*last[3], index]))
        else:
            pending.append((key, start, stop, [index]))
    for key, start, stop, indices in pending:
        runs.append((key, Run(group, start, stop, indices, nn.Parameter(buffer[start:stop]))))
    return runs


def split(run: Run, replicated: bool, state: dict[Tensor, dict]) -> list[Run]:
    """One run per parameter, with the optimizer's state divided: tensors of the run's size are cut, others copied."""
    buffer = stepped_buffer(run.group, replicated)
    old = state.pop(run.tensor, None)
    parts = []
    for index in run.indices:
        start, stop = slot_range(run.group, index, replicated)
        part = Run(run.group, start, stop, [index], nn.Parameter(buffer[start:stop]))
        if old is not None:
            state[part.tensor] = {k: _cut(v, run, start, stop) for k, v in old.items()}
        parts.append(part)
    return parts


def _cut(value: object, run: Run, start: int, stop: int) -> object:
    if isinstance(value, Tensor):
        if value.shape == run.tensor.shape:
            return value[start - run.start : stop - run.start]
        return value.clone()
    return value


def state_nbytes(state: dict[Tensor, dict]) -> int:
    """Bytes of all state tensors of the size of their run (step counters and the like are left out)."""
    return sum(
        value.nbytes
        for tensor, entries in state.items()
        for value in entries.values()
        if isinstance(value, torch.Tensor) and value.shape == tensor.shape
    )
