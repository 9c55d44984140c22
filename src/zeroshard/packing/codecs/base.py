"""The Codec interface, and error feedback over any codec.

    values (numel,) --pack--> packed (packed_nbytes,) uint8 --unpack--> out (numel,)
    parts of several ranks --unpack_sum--> out (numel,) = [out +] scale * their sum, in fp32, in the order of parts

The number of bytes follows from numel alone, so peers need not exchange it. Equal values give equal bytes on every rank,
whatever its device. Codecs run under the caller's `torch.no_grad()`, on the current stream; on a GPU the host never waits
for the device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from ...engine.comm.sums import CHUNK_NUMEL, sum_by_chunks


class Codec(ABC):
    """Packs the values of a flat tensor into fewer bytes. Stateless: `ErrorFeedback` keeps the errors of packing.

    Values that are not finite must stay non-finite after `unpack`, since overflow of gradients is detected there. A subclass has
    `packed_nbytes`, `_pack`, `_unpack` and `_unpack_stretch`, which get at least one value, and tensors of the right shape, dtype
    and device. Threads: several ranks may be threads of a process and use one codec at once.

    name: as in the options; `zeroshard.seam.register` sets it.
    """

    name: str

    @abstractmethod
    def packed_nbytes(self, numel: int) -> int:
        """Return the number of bytes of `numel` packed values: a multiple of 4; 0 for no values."""

    def pack(self, values: Tensor, out: Tensor) -> None:
        """Fill `out` (packed_nbytes(numel),) uint8 from `values` (numel,) fp32, fp64, bf16 or fp16, both contiguous.

        fp64 is rounded to fp32. Raises ValueError for other shapes, dtypes or devices.
        """
        self._check(values, out, "values")
        if values.numel():
            self._pack(values, out)

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        """Fill `out` (numel,) of any floating dtype from `packed` (packed_nbytes(numel),) uint8, both contiguous."""
        self._check(out, packed, "out")
        if out.numel():
            self._unpack(packed, out)

    def unpack_sum(self, parts: Sequence[Tensor], out: Tensor, *, scale: float, accumulate: bool) -> float | None:
        """Compute out = [out +] scale * (unpacked parts[0] + parts[1] + ...), in fp32, in the order of parts.

        The bits are those of `unpack` into fp32 tensors and `comm.sums.sum_in_rank_order` of these. Returns the sum of
        out's squares where it costs nothing extra (CPU, out fp32), else None.
        """
        for part in parts:
            self._check(out, part, "out")
        numel = out.numel()
        chunk = min(CHUNK_NUMEL, numel) if out.device.type == "cpu" and self.chunked else numel
        term = torch.empty(chunk if len(parts) > 1 else 0, dtype=torch.float32, device=out.device)

        def fill(begin: int, total: Tensor) -> None:
            self._unpack_stretch(parts[0], numel, begin, total)
            for part in parts[1:]:
                self._add_stretch(part, numel, begin, total, term[: total.numel()])

        return sum_by_chunks(fill, out, chunk, torch.float32, scale=scale, accumulate=accumulate)

    def error(self, values: Tensor, packed: Tensor) -> float:
        """Return |values - unpacked| / |values|, for reports; 0 where all values are zero."""
        exact = values.double()
        found = torch.empty_like(values, dtype=torch.float32)
        self.unpack(packed, found)
        norm = exact.norm().item()
        return 0.0 if norm == 0 else (exact - found).norm().item() / norm

    # -- for subclasses to implement ---------------------------------------------------------------------------------

    chunked = True  # the cost of `_unpack_stretch` is proportional to the stretch, wherever it begins

    @abstractmethod
    def _pack(self, values: Tensor, out: Tensor) -> None:
        """Fill every byte of `out`, as `pack` does: equal values give equal bytes, padding included."""

    @abstractmethod
    def _unpack(self, packed: Tensor, out: Tensor) -> None:
        """Fill `out`, as `unpack` does. The address of `packed` may be no multiple of 4."""

    @abstractmethod
    def _unpack_stretch(self, packed: Tensor, numel: int, begin: int, out: Tensor) -> None:
        """Fill out (n,) fp32 with packed values `begin` to `begin` + n of `numel`; `begin` is a multiple of CHUNK_NUMEL."""

    def _add_stretch(self, packed: Tensor, numel: int, begin: int, total: Tensor, term: Tensor) -> None:
        """Add to total (n,) fp32 the values with which `_unpack_stretch` would fill it. term (n,) fp32: scratch."""
        self._unpack_stretch(packed, numel, begin, term)
        total.add_(term)

    def _check(self, values: Tensor, packed: Tensor, name: str) -> None:
        nbytes = self.packed_nbytes(values.numel())
        if values.dim() != 1 or not values.dtype.is_floating_point or values.dtype.itemsize < 2 or not values.is_contiguous():
            expected = "a contiguous (numel,) of fp32, fp64, bf16 or fp16"
            raise ValueError(f"{self.name}: {name}: expected {expected}, got {_what(values)}")
        if packed.shape != (nbytes,) or packed.dtype != torch.uint8 or not packed.is_contiguous():
            raise ValueError(f"{self.name}: packed: expected a contiguous ({nbytes},) of uint8, got {_what(packed)}")
        if values.device != packed.device:
            raise ValueError(f"{self.name}: {name} is on {values.device}, packed bytes on {packed.device}; move one of them")


def _what(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}" + (
        "" if tensor.is_contiguous() else ", not contiguous"
    )


class ErrorFeedback:
    """Error feedback: the error of packing is added to the next values of the same buffer (Seide et al. 2014; Karimireddy et al.,
    arXiv 1901.09847).

        values + residual --pack--> out;   residual = values + residual - unpack(out)

    residuals: buffer -> (numel,) fp32, the only state. It belongs to the rank, and to the number of values in each buffer.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.residuals: dict[Hashable, Tensor] = {}

    def pack(self, buffer: Hashable, values: Tensor, out: Tensor) -> None:
        """Pack the sum of `values` and the buffer's residual, and keep the new residual. Non-finite residuals become zero."""
        residual = self.residuals.get(buffer)
        if residual is None or residual.shape != values.shape:
            residual = self.residuals[buffer] = torch.zeros_like(values, dtype=torch.float32)
        residual.add_(values)
        self.codec.pack(residual, out)
        square_sum = self.codec.unpack_sum([out], residual, scale=-1.0, accumulate=True)
        if square_sum is None or not math.isfinite(square_sum):
            residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def clear(self) -> None:
        """Drop all residuals, as after a load of other values."""
        self.residuals.clear()
