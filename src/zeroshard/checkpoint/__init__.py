"""Checkpoints: all ranks write in parallel, a checkpoint is complete or invisible, any mesh loads it (checkpoint-format.md)."""

from .export import Exported, export
from .inspect import Inspection, inspect_checkpoint
from .loading import Loaded, load
from .saving import Save, save

__all__ = ["Exported", "Inspection", "Loaded", "Save", "export", "inspect_checkpoint", "load", "save"]
