"""Ring 0, the engine: stages 0 to 3 over one process group, with states on the device."""

from .ledger import Ledger, making
from .topology import Errors, Parts, Topology

__all__ = ["Errors", "Ledger", "Parts", "Topology", "making"]
