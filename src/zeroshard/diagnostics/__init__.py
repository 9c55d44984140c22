"""Diagnostics: the desk that tells peers where a rank stands, and the description of a stall."""

from .endings import failure_of, last_words, note_exits
from .flight_recorder import describe, places_of
from .status_server import JudgingDesk, ProcessDesk, ThreadDesk
from .verdict import judge

__all__ = ["JudgingDesk", "ProcessDesk", "ThreadDesk", "describe", "failure_of", "judge", "last_words", "note_exits", "places_of"]
