"""Work that forwards and backwards do by themselves, done by hand: units are gathered, gradients are summed and reduced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import Tensor, nn

from ..engine.runtime import Runtime
from ..engine.unit import Phase


class ModuleUnits:
    """The units that forwards of these modules gather. The rank's own thread uses it."""

    def __init__(self, runtime: Runtime, modules: Collection[nn.Module]) -> None:
        self.runtime = runtime
        self.units = [unit for unit in runtime.units if any(module in modules for module in unit.modules)]

    def unshard(self) -> Callable[[], None]:
        """Start to gather (collective). The function returned waits, and shows whole parameters in the modules, until a use of these
        ends, a step, a state dict, a public function (engine/verbs.py) or `reshard`; or none, if a forward has released them."""
        units = [unit for unit in self.units if unit.sharded and not unit.in_use]
        for unit in units:
            self.runtime.attendance.gather(unit)

        def wait() -> None:
            for unit in units:
                if unit.phase in (Phase.GATHERING, Phase.READY) and not unit.in_use:
                    unit.wait_for_unshard()
                    unit.entries.swap_in()
                    unit.lent = True  # autograd may save its parameters without the hooks of a forward

        return wait

    def reshard(self) -> None:
        """Release what is gathered, unless a forward or a backward uses it."""
        for unit in self.units:
            if unit.sharded and not unit.in_use:
                unit.give_back()
                unit.reshard()

    def stay(self, after_backward: bool, stays: bool) -> None:
        """Let the units stay gathered after a forward, or after a backward, until `reshard`, a step or another write; or no longer."""
        for unit in self.units:
            (unit.stays.add if stays else unit.stays.discard)(after_backward)

    def pause(self) -> None:
        """Hold back the gradients of these units, and of no others, when a backward reduces; every rank must name the same."""
        self.runtime.reductions.paused = {unit.number for unit in self.units}

    @property
    def writes(self) -> int:
        """Number of times that values of the units' parameters have been written."""
        return sum(unit.writes for unit in self.units)

    def divide_gradients(self, factor: float) -> None:
        """Let gradients be the sum over ranks divided by `factor`, not by their number."""
        for group in (group for unit in self.units for group in unit.trainable):
            ranks = group.gradients.comm.world_size * group.gradients.comm.replicas
            group.gradients.summed = group.topology.summed * ranks / factor


class HeldGradients:
    """Gradients that are summed on this rank, without communication, before they are reduced once.

    All ranks call the same. The reductions that `begin_reductions` or `summing(reduce=True)` start end in `Engine.flush`, a step or
    another use of gradients.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    @contextlib.contextmanager
    def summing(self, reduce: bool) -> Iterator[None]:
        """Context whose backwards add their gradients to the sums: zs.accumulate.

        reduce: instead, start the reduction of each complete unit and do not wait for it: a pipeline's last backward of a step.
        """
        runtime = self.runtime
        previous = runtime.sync, runtime.reductions.waits
        runtime.sync, runtime.reductions.waits = reduce, runtime.reductions.waits and not reduce
        runtime.account.holds()
        try:
            yield
        finally:
            runtime.sync, runtime.reductions.waits = previous

    @torch.no_grad()
    def add(self, gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add local gradients, made without autograd's hooks, to the sums. gradients: (gathered parameter, gradient) pairs."""
        runtime = self.runtime
        runtime.before_gradients()
        runtime.account.holds()
        given = {id(param): grad for param, grad in gradients}
        for group in runtime.groups:
            for index, param in enumerate(group.compute):
                if id(param) in given:
                    runtime.reductions.take(group, index, given[id(param)], False)
                    runtime.account.came()
        runtime.account.ending()
        runtime.account.backwards += 1

    def reduce(self) -> None:
        """Reduce the sums, also those of units that were held back alone, but not of units that still are (collective)."""
        self.runtime.recover()
        self.runtime.before_gradients()
        self.runtime.reduce_all()

    def begin_reductions(self) -> None:
        """Start to reduce the sums at the end of a pipeline's step."""
        for unit in reversed(self.runtime.units):  # about the order in which backward would have completed them
            if any(group.gradients.holds for group in unit.trainable):
                self.runtime.reductions.complete(unit)
