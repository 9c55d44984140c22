"""Checks and refusals: what a program may not do to a sharded model, and ranks whose data has ended."""

from .out_of_memory import Shortage, size, telling
from .rank_consistency import agree_on_values, check_alike, distinct
from .shared_storage import Origin

__all__ = ["Origin", "Shortage", "agree_on_values", "check_alike", "distinct", "size", "telling"]
