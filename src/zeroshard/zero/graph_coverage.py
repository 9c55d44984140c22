"""Whether backward can reach what a unit's forward computed without passing through one of its outputs.

A unit's memory is released after its forward and gathered again when a gradient reaches one of its outputs. An
auxiliary loss that a module keeps as an attribute goes past them: backward may reach it first, and would read released
memory. Autograd numbers its nodes as they are made, so two numbers a forward tell how many there are; only where their
count is not that of the last time is the graph walked through from the outputs. Of nodes that this does not reach most
are of no use to anybody: what `x *= y`, `x[0] = y` or nn.SiLU(inplace=True) make beside their result, what was computed
and dropped. Backward can begin at what the program holds alone: where their number is new, at its tensors is looked.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..utils.autograd import collections, living_tensors, next_node, nodes_since, number_of
from ..utils.torch_compat import idle_nodes
from .unit import Unit


@dataclass
class _Record:
    """A unit's last forward. All numbers count nodes of autograd's graph."""

    first: int = 0  # the number of its first node
    elsewhere: int = 0  # when it began: nodes that no output of their unit leads to, or that no graph holds
    collections: tuple[int, ...] = ()  # when it began: those of Python's collector
    nodes: int = -1  # how many it has made
    inside: int = 0  # of those, the ones that units inside of it answer for
    beside: int = 0  # of those, the ones that its outputs do not lead to
    hides: bool = False  # the program holds what such ones have made


class GraphCoverage:
    """Of each unit: does all that its forward has put into autograd's graph lead to its outputs?"""

    def __init__(self, num_units: int, tell: Callable[[str], None]) -> None:
        """tell: takes a message for the report."""
        self._records = [_Record() for _ in range(num_units)]
        self._tell = tell
        self._beside = 0  # of all units, so far

    def enter(self, unit: Unit) -> None:
        """A forward of the unit begins."""
        record = self._records[unit.number]
        record.first, record.elsewhere, record.collections = next_node(), self._beside + idle_nodes(), collections()

    def encloses(self, unit: Unit, outputs: list[Tensor]) -> bool:
        """The forward ends: True where backward reaches none of its nodes but through the outputs."""
        record = self._records[unit.number]
        nodes = next_node() - record.first
        inside = self._beside + idle_nodes() - record.elsewhere
        if (nodes, inside) != (record.nodes, record.inside):
            record.nodes, record.inside = nodes, inside
            reached, _ = nodes_since(record.first, outputs)
            beside, record.beside = record.beside, nodes - len(reached) - inside
            if record.beside != beside:
                record.hides = record.beside > 0 and (record.hides or _is_held(unit, record, reached))
                self._beside += next_node() - record.first - nodes  # to look at a view may make nodes
            if record.hides:
                self._tell(f"{unit.name}: not all that its forward computes leaves by its outputs; it stays gathered until backward")
        self._beside += record.beside
        return not record.hides

    def hides(self, unit: Unit) -> bool:
        """True where somebody held what leads to nodes of the unit's last forward, and its outputs did not."""
        return self._records[unit.number].hides

    def is_empty(self, unit: Unit) -> bool:
        """True where the unit's last forward has put nothing into the graph."""
        return not self._records[unit.number].nodes


def _is_held(unit: Unit, record: _Record, reached: set[int]) -> bool:
    """Whether the program holds a tensor of a node that is not reached, and that needs the unit's parameters.

    The same on all ranks, which gather together: what only waits for the collector, on some of them, is collected.
    """
    end = next_node()
    computed = {param for group in unit.groups for param in group.compute}

    def found() -> bool:
        tips = [each for each in living_tensors(record.collections) if record.first <= number_of(each) < end]
        tips = [each for each in tips if number_of(each) not in reached]
        tips = [each for each in tips if not (isinstance(each, FakeTensor) and _is_autograds(each, tips))]
        if unit.has_frozen:
            return bool(tips)
        return any(not computed.isdisjoint(nodes_since(record.first, [tip])[1]) for tip in tips)  # other threads count alike

    if not found():
        return False
    gc.collect()
    return found()


def _is_autograds(fake: Tensor, tips: list[Tensor]) -> bool:
    """Whether autograd alone keeps a fake tensor: what `x /= y` saves of x is an object of Python's only where tensors are fake."""
    return all(each is tips or isinstance(each, FrameType) for each in gc.get_referrers(fake))
