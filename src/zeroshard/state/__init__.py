"""Access to the states of a sharded model by name, whatever their placement, tier and form of rest."""

from .parameter_access import ParameterPart, gradient_of, state_of, value_of
from .state_loading import Restoring, SavedState
from .tensor_reader import (
    CHUNK_NBYTES,
    Bulk,
    Stored,
    StoredBoxes,
    StoredCoded,
    StoredRange,
    StoredStretches,
    StoredTensor,
    differ,
)

__all__ = [
    "CHUNK_NBYTES", "Bulk", "ParameterPart", "Restoring", "SavedState", "Stored", "StoredBoxes", "StoredCoded", "StoredRange",
    "StoredStretches", "StoredTensor", "differ", "gradient_of", "state_of", "value_of",
]  # fmt: skip
