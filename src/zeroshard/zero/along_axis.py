"""Modules whose forward sends values along one axis of the mesh: `zs.shard` gives each the communicator of these ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from ..comm.base import DirectComm
from ..comm.mesh.axes import Parts
from ..errors import ConfigError
from ..memory.ledger import Ledger
from .runtime import Runtime


@dataclass(frozen=True)
class Line:
    """The ranks along one line of an axis (`comm`), all data-parallel ranks (`everyone`), and the model's ledger."""

    comm: DirectComm
    everyone: DirectComm
    ledger: Ledger


class AlongAxis(nn.Module):
    """Base class of such modules. axis: name of the axis."""

    axis: str
    _line: Line | None = None

    @property
    def line(self) -> Line:
        """The ranks along the axis. Raises ConfigError before zs.shard."""
        if self._line is None:
            raise ConfigError(
                f"{type(self).__name__} was divided over the axis {self.axis!r} of a mesh, and is called before "
                "zs.shard(model, optimizer, mesh=mesh), which connects the ranks."
            )
        return self._line


def check_axes(model: nn.Module, lines: Mapping[str, Parts]) -> None:
    """Raise ConfigError for a module that sends along an axis that is none of `lines`."""
    for name, module in model.named_modules():
        if isinstance(module, AlongAxis) and module.axis not in lines:
            raise ConfigError(
                f"{name} was divided over the axis {module.axis!r}, which the mesh given to zs.shard has not: pass the whole mesh (mesh=mesh), "
                f"with an axis named {module.axis!r}."
            )


def connect(runtime: Runtime, lines: Mapping[str, Parts]) -> None:
    """Give each module of the model that sends along an axis the Comm of its ranks (collective).

    lines: by name of an axis, the ranks of the mesh along each line of it.
    """
    comms: dict[str, DirectComm] = {}
    for module in runtime.model.modules():
        if not isinstance(module, AlongAxis):
            continue
        if module.axis not in comms:
            comms[module.axis] = runtime.topology.world.subgroup(lines[module.axis])
        module._line = Line(comms[module.axis], runtime.comm, runtime.tiers.ledger)
