"""Communicators: what ranks send each other. This package shows what one is made of, for backends of one's own (comm/)."""

from .base import Collective, Combine, Comm, DirectComm, Outcome, Region, parts_of
from .control import Group, HopQueue, Missing, Sent, mismatch, misuse
from .desk import GONE, Desk, Failure
from .messages import decode, encode
from .process_group import DistComm, backend_for, collectives_of, talking_device
from .progress import Progress
from .streams import Streams, T, streams_for
from .sums import GPU_CHUNK_NUMEL, piece_numel, sum_dtype

__all__ = [
    "GONE",
    "GPU_CHUNK_NUMEL",
    "Collective",
    "Combine",
    "Comm",
    "Desk",
    "DirectComm",
    "DistComm",
    "Failure",
    "Group",
    "HopQueue",
    "Missing",
    "Outcome",
    "Progress",
    "Region",
    "Sent",
    "Streams",
    "T",
    "backend_for",
    "collectives_of",
    "decode",
    "encode",
    "mismatch",
    "misuse",
    "parts_of",
    "piece_numel",
    "streams_for",
    "sum_dtype",
    "talking_device",
]
