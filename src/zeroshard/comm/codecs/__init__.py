"""Values of a flat tensor as fewer bytes: what a rank sends in place of its shard, its gradients, or their errors.

    base.py                 Codec: pack, unpack, and the sum of several packed parts; feedback of errors
    block_quantization.py   int8, int4 and fp8 with a scale for each block: the format and its kernels in torch
    triton_kernels.py       the same kernels for a GPU
    top_k.py                the largest values of a gradient and where they lie
    low_rank.py             PowerSGD: gradients of matrices as products of two thin ones

Nothing here communicates or knows a rank: a Comm that wraps a Comm packs, sends and unpacks.
"""

from .base import Codec, ErrorFeedback
from .block_quantization import CODECS, DEFAULT_BLOCK, codec_of
from .low_rank import LowRank
from .top_k import TopK

__all__ = ["CODECS", "DEFAULT_BLOCK", "Codec", "ErrorFeedback", "LowRank", "TopK", "codec_of"]
