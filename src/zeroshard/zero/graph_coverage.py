"""Whether backward can reach what a unit's forward computed without passing through one of its outputs.

A unit's memory is released after its forward and gathered again when a gradient reaches one of its outputs. An
auxiliary loss that a module keeps as an attribute goes past them: backward may reach it first, and would read released
memory. Autograd numbers its nodes as they are made, so two numbers a forward tell how many there are; only where their
count is not that of the last time is the graph walked through from the outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..utils.autograd import next_node, nodes_since
from ..utils.torch_compat import idle_nodes
from .unit import Unit


@dataclass
class _Record:
    """A unit's last forward. All numbers count nodes of autograd's graph."""

    first: int = 0  # the number of its first node
    elsewhere: int = 0  # when it began: nodes that no output of their unit leads to, or that no graph holds
    nodes: int = -1  # how many it has made
    inside: int = 0  # of those, the ones that units inside of it answer for
    hidden: int = 0  # of those, the ones that its outputs do not lead to


class GraphCoverage:
    """Of each unit: does all that its forward has put into autograd's graph lead to its outputs?"""

    def __init__(self, num_units: int, tell: Callable[[str], None]) -> None:
        """tell: takes a message for the report."""
        self._records = [_Record() for _ in range(num_units)]
        self._tell = tell
        self._hidden = 0  # of all units, so far

    def enter(self, unit: Unit) -> None:
        """A forward of the unit begins."""
        record = self._records[unit.number]
        record.first, record.elsewhere = next_node(), self._hidden + idle_nodes()

    def encloses(self, unit: Unit, outputs: list[Tensor]) -> bool:
        """The forward ends: True where all its nodes are reached through the outputs."""
        record = self._records[unit.number]
        nodes = next_node() - record.first
        inside = self._hidden + idle_nodes() - record.elsewhere
        if (nodes, inside) != (record.nodes, record.inside):
            record.nodes, record.inside = nodes, inside
            record.hidden = nodes - len(nodes_since(record.first, outputs)) - inside
            if record.hidden:
                self._tell(f"{unit.name}: not all that its forward computes leaves by its outputs; it stays gathered until backward")
        self._hidden += record.hidden
        return not record.hidden

    def hides(self, unit: Unit) -> bool:
        """True where the unit's last forward had nodes that its outputs do not lead to."""
        return self._records[unit.number].hidden > 0

    def is_empty(self, unit: Unit) -> bool:
        """True where the unit's last forward has put nothing into the graph."""
        return not self._records[unit.number].nodes
