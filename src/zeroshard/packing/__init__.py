"""Fewer bytes on the wire (ZeRO++): Comms that quantize, send in hops, or leave sums to the backend; codecs pack values."""

from .backend_sums import BackendSums
from .compressed import CompressedGathers, CompressedReductions
from .hierarchical import HierarchicalComm
from .low_rank_comm import LowRankReductions
from .replicated import ReplicatedComm

__all__ = ["BackendSums", "CompressedGathers", "CompressedReductions", "HierarchicalComm", "LowRankReductions", "ReplicatedComm"]
