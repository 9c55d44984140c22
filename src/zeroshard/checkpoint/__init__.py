"""Checkpoints: saved in parallel, complete or invisible, loadable anywhere (docs/checkpoint-format.md)."""

from .loading import Loaded, load
from .saving import Save, save

__all__ = ["Loaded", "Save", "load", "save"]
