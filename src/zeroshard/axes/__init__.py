"""Axes of a mesh: which ranks shard, replicate or cut the model, and parameters that are parts of larger ones."""

from .along_axis import AlongAxis, Line
from .distributed import Owned
from .tiled_parameter import Tile, Tiled, whole_name

__all__ = ["AlongAxis", "Line", "Owned", "Tile", "Tiled", "whole_name"]
