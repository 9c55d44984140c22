"""Checks and refusals: what a program may not do to a sharded model, and ranks whose data has ended."""

from .out_of_memory import Shortage, size, telling
from .rank_consistency import distinct

__all__ = ["Shortage", "distinct", "size", "telling"]
