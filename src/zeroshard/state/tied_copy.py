"""A stage's copy of a parameter that other stages of a pipeline hold, too: what parallel/tied.py reads, sends and writes of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..engine.runtime import Runtime
from .parameter_access import value_of


class TiedCopy:
    """One stage's copy of a tied parameter: its value, and this rank's slice of its reduced gradient (stage 0: all of it)."""

    def __init__(self, runtime: Runtime, param: nn.Parameter, counted: bool) -> None:
        """counted: norms count this copy's gradient; of all copies only one may be counted."""
        self._group, self._index = next((g, i) for g in runtime.groups for i, p in enumerate(g.params) if p is param)
        self._group.counts = self._group.counts and counted

    def layout(self) -> tuple[str, tuple[int, int], bool]:
        """Return what copies must have in common: dtype, begin and end of the gradient's slice, trained or frozen."""
        group, home = self._group, self._group.homes[self._index]
        whole = not group.trainable or group.gradients.replicated
        span = (0, group.layout.slots[self._index].numel) if whole else (home.start, home.stop)
        return str(group.values.dtype), span, group.trainable

    def full(self) -> Tensor:
        """Return the whole value, exact: a master's where there are masters (collective)."""
        return value_of(self._group.params[self._index]).full()

    def set_full(self, value: Tensor) -> None:
        """Write the whole value (collective)."""
        value_of(self._group.params[self._index]).set_full(value)

    def empty(self) -> Tensor:
        """Return memory for a whole value as `full` returns it."""
        group = self._group
        exact = group.masters.rest.dtype if group.masters.rest is not None else group.values.dtype
        return torch.empty(group.specs[self._index].shape, dtype=exact, device=group.comm.device)

    @property
    def reduced(self) -> bool:
        """True if the parameter has a reduced gradient, of this step or of earlier ones that are accumulated."""
        return self._group.gradients.reduced and self._group.active[self._index]

    def gradient(self) -> Tensor:
        """Return this rank's slice of the reduced gradient, flat and contiguous; zeros if there is none."""
        grads, home, slot = self._group.gradients, self._group.homes[self._index], self._group.layout.slots[self._index]
        if not grads.reduced:
            grads.zero()
        place = (
            grads.full[slot.offset : slot.stop]
            if grads.replicated
            else grads.load(home.begin, home.begin + home.stop - home.start)
        )
        return place.contiguous()

    def set_gradient(self, total: Tensor) -> None:
        """Write this rank's slice of the reduced gradient."""
        grads, home, slot = self._group.gradients, self._group.homes[self._index], self._group.layout.slots[self._index]
        if grads.replicated:
            grads.full[slot.offset : slot.stop].copy_(total)
        else:
            grads.store(home.begin, total)
        grads.reduced, self._group.active[self._index] = True, True
