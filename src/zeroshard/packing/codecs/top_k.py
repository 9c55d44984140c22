"""Top-k: sends the largest values of a slice with their indices, and drops the others (Lin et al., arXiv 1712.01887, section 3).

    packed = values | places | zeros          k = max(1, ceil(ratio * numel)), at most numel
             values: k x fp32
             places: k x index of the value, ascending: 2 bytes each (unsigned) for up to 2^16 values, else 4
             zeros:  padding to a multiple of 4 bytes

Of equal magnitudes those with the lowest indices are sent, so equal values give equal bytes. Infinities and NaN count as
largest, so that at least one of a slice is sent. Without `ErrorFeedback` training stalls, since small values never arrive.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .base import Codec


class TopK(Codec):
    """Codec that sends the fraction `ratio` of a slice's values that are largest in magnitude, exact in fp32."""

    name = "top_k"
    chunked = False  # a stretch's values may be anywhere among the k

    def __init__(self, ratio: float = 0.01) -> None:
        self.ratio = ratio

    def __repr__(self) -> str:
        return f"top_k of {self.ratio:g}"

    def kept(self, numel: int) -> int:
        """Return k, the number of sent values of `numel`."""
        return min(max(math.ceil(self.ratio * numel), 1), numel)

    def packed_nbytes(self, numel: int) -> int:
        return self.kept(numel) * (4 + _place_dtype(numel).itemsize) + 3 & -4

    def _pack(self, values: Tensor, out: Tensor) -> None:
        numel, k = values.numel(), self.kept(values.numel())
        values = values.float()
        magnitudes = values.view(torch.int32) & 0x7FFFFFFF  # these integers order as magnitudes do, with NaN above infinity
        least = magnitudes.topk(k, sorted=False).values.amin()
        above, equal = magnitudes > least, magnitudes == least
        chosen = above | (equal & (equal.cumsum(0) <= k - above.sum()))  # of equal ones the first
        places = torch.nonzero_static(chosen, size=k).view(-1)  # ascending
        out[: 4 * k].copy_(values[places].view(torch.uint8))
        end = 4 * k + k * _place_dtype(numel).itemsize
        out[4 * k : end].copy_(places.to(_place_dtype(numel)).view(torch.uint8))
        out[end:].zero_()

    def _unpack(self, packed: Tensor, out: Tensor) -> None:
        values, places = self._taken(packed, out.numel())
        out.zero_()
        out[places] = values.to(out.dtype)

    def _unpack_stretch(self, packed: Tensor, numel: int, begin: int, out: Tensor) -> None:
        assert begin == 0 and out.numel() == numel
        self._unpack(packed, out)

    def _add_stretch(self, packed: Tensor, numel: int, begin: int, total: Tensor, term: Tensor) -> None:
        values, places = self._taken(packed, numel)
        total.index_add_(0, places, values)  # indices are distinct: each element adds its terms in the order of parts

    def _taken(self, packed: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Return values (k,) fp32 and indices (k,) int64, as copies, since the bytes need not be aligned."""
        k, dtype = self.kept(numel), _place_dtype(numel)
        values = packed[: 4 * k].clone().view(torch.float32)
        places = packed[4 * k : 4 * k + k * dtype.itemsize].clone().view(dtype).long()
        return values, places & 0xFFFF if dtype is torch.int16 else places  # int16 holds them without a sign


def _place_dtype(numel: int) -> torch.dtype:
    return torch.int16 if numel <= 1 << 16 else torch.int32
