"""Units of some of a model's modules, for a program that gathers and releases them itself (FSDP2's `unshard` and `reshard`)."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

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
