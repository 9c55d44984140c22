"""Checkpoints: all ranks write one in parallel, it is complete or invisible, and any mesh loads it (docs/checkpoint-format.md)."""

from .export import Exported, export
from .inspect import Inspection, inspect_checkpoint
from .loading import Loaded, load
from .saving import Save, save

__all__ = ["Exported", "Inspection", "Loaded", "Save", "export", "inspect_checkpoint", "load", "save"]
