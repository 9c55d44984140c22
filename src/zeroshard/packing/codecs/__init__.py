"""Codecs: pack the values of a flat tensor into fewer bytes, which a rank sends in place of its shard or its gradients.

    base.py                 Codec: pack, unpack, and the sum of several packed parts; error feedback
    block_quantization.py   int8, int4 and fp8 with a scale for each block: the format and its kernels in torch
    triton_kernels.py       the same kernels for a GPU
    top_k.py                the largest values of a gradient and their indices
    low_rank.py             PowerSGD: gradients of matrices as products of two thin ones

No codec communicates or knows a rank: `packing/compressed.py` and `packing/low_rank_comm.py` wrap a Comm, and pack, send and unpack.
"""

from ...utils.compression import OWN_CODECS, Compression
from .base import Codec, ErrorFeedback
from .block_quantization import CODECS, DEFAULT_BLOCK, codec_of
from .low_rank import LowRank
from .top_k import TopK

__all__ = ["CODECS", "DEFAULT_BLOCK", "Codec", "ErrorFeedback", "LowRank", "TopK", "codec_of", "packing"]


def packing(compression: Compression) -> Codec:
    """Return the codec of a compression other than "low_rank", which packs no values but matrices."""
    if compression.codec in OWN_CODECS:
        return OWN_CODECS[compression.codec]
    return TopK(compression.ratio) if compression.codec == TopK.name else codec_of(compression.codec, compression.block)
