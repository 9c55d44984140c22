"""Modules whose forward sends activations along one axis of the mesh, and the communicators that `zs.shard` gives to them.

A *line* of an axis is a set of ranks that differ in their index along this axis only: in a mesh dp=2, sp=4 the axis sp has two lines
of four ranks. Each rank is in one line of each axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ..engine.ledger import STAGING
from ..engine.runtime import Runtime
from ..engine.topology import Parts
from ..errors import ConfigError


class Line:
    """The line of an axis that this rank is in, over which modules of a model send activations; the ledger counts the bytes.

    comm: these ranks. Threads: as the Comm.
    """

    def __init__(self, runtime: Runtime, axis: str, ranks: Parts) -> None:
        """Open the Comm of the ranks along the axis (collective). ranks: those of the mesh along each line of it."""
        self.comm = runtime.topology.world.subgroup(ranks, apart=True)
        self._ledger, self._kind = runtime.tiers.ledger, f"all-to-all along {axis}"
        self._held = 0  # bytes of the Comm's memory in the ledger

    def __deepcopy__(self, memo: object) -> Line:
        """Return the same line: a copy of a closed model goes on to send along it."""
        return self

    def __reduce__(self) -> tuple:
        """Leave the line out of a pickle, which other processes may read."""
        return type(None), ()

    def all_to_all(
        self, output: Tensor, input: Tensor, label: str, output_counts: Sequence[int] | None = None,
        input_counts: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Send each rank its part of `input` and wait for what all have sent (collective): `DirectComm.all_to_all`."""
        work = self.comm.all_to_all(output, input, label, output_counts, input_counts)
        work.wait()
        self._ledger.sent(self._kind, work.sent, label)
        if (held := self.comm.mail_nbytes) != self._held:
            self._ledger.strike(STAGING, self._held)
            self._ledger.enter(STAGING, held)
            self._held = held


class AlongAxis(nn.Module):
    """Base class of modules whose forward sends activations along an axis.

    axis: its name. module_name: the module's name in the model, known from zs.shard on.
    """

    axis: str
    module_name = ""
    _line: Line | None = None

    @property
    def line(self) -> Line:
        """The line of the axis that this rank is in. Raises ConfigError before zs.shard."""
        if self._line is None:
            raise ConfigError(
                f"{type(self).__name__} was divided over the axis {self.axis!r} of a mesh, and is called before "
                "zs.shard(model, optimizer, mesh=mesh), which connects the ranks."
            )
        return self._line


def check_axes(model: nn.Module, lines: Mapping[str, Parts]) -> None:
    """Raise ConfigError for a module that sends along an axis that the mesh does not have, or that PEFT adapts by its parameters.

    lines: as for `connect`.
    """
    for name, module in model.named_modules():
        adapted = getattr(module, "base_layer", None)  # PEFT's
        if isinstance(adapted, AlongAxis):
            raise ConfigError(
                f"{name} adapts parameters that are divided over the axis {adapted.axis!r} (LoRA with target_parameters), and needs "
                f"whole ones. Adapt other modules (target_modules), or leave {adapted.axis!r} out of the mesh."
            )
        if isinstance(module, AlongAxis) and module.axis not in lines:
            raise ConfigError(
                f"{name} was divided over the axis {module.axis!r}, which the mesh given to zs.shard does not have: pass the whole mesh "
                f"(mesh=mesh), with an axis named {module.axis!r}."
            )


def connect(runtime: Runtime, lines: Mapping[str, Parts]) -> None:
    """Give each module of the model that sends along an axis the `Line` of this rank (collective).

    lines: by name of an axis, the ranks of each line of it.
    """
    opened: dict[str, Line] = {}
    for name, module in runtime.model.named_modules():
        if isinstance(module, AlongAxis):
            if module.axis not in opened:
                opened[module.axis] = Line(runtime, module.axis, lines[module.axis])
            module._line, module.module_name = opened[module.axis], name
