"""Optimizer states that rest encoded (in 8 bits, say): a read decodes them, a write encodes them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..tensor.state_column import StateColumn
from ..utils.work import OVER, Work
from .storage import Rest


class CodedRest(Rest):
    """Resting place of a column: callers see `numel` elements in the optimizer's dtype; `inner` holds them encoded, in blocks.

    Any range of elements may be read and written. A write to a part of a block decodes the block and encodes it again.
    """

    resident = False

    def __init__(self, inner: Rest, column: StateColumn, numel: int, dtype: torch.dtype) -> None:
        self.inner, self.column, self.numel, self.dtype, self.tier = inner, column, numel, dtype, inner.tier

    def nbytes_of(self, numel: int) -> int:
        return self.column.nbytes(numel, self.dtype)

    def read(self, start: int, out: Tensor) -> Work:
        if not out.numel():
            return OVER
        at, end = map(self.column.count, self.column.blocks(start, start + out.numel()))
        coded = self.inner.view(at, end)  # host memory: no read is needed
        if coded is not None:
            self.decode(coded, start, out)
            return OVER
        coded = torch.empty(end - at, dtype=self.inner.dtype, device="cpu")
        return _Decoding(self, self.inner.read(at, coded), coded, start, out)

    def decode(self, coded: Tensor, start: int, out: Tensor) -> None:
        """Fill `out` (n,) with elements [start, start + n), cut out of the blocks around them."""
        skipped = start % self.column.elements  # elements of the first block before `start`
        out.copy_(self.column.decode(coded)[skipped : skipped + out.numel()])

    def write(self, start: int, source: Tensor) -> Work:
        return self.inner.write(*self._encoded(start, source)) if source.numel() else OVER

    def load(self, start: int, stop: int) -> Tensor:
        at, end = map(self.column.count, self.column.blocks(start, stop))
        coded = self.inner.load(at, end)
        out = torch.empty(stop - start, dtype=self.dtype, device=coded.device)
        if out.numel():
            self.decode(coded, start, out)
        return out

    def store(self, start: int, source: Tensor) -> None:
        if source.numel():
            self.inner.store(*self._encoded(start, source.detach()))

    def _encoded(self, start: int, source: Tensor) -> tuple[int, Tensor]:
        """Return the position in `inner` of the blocks around these elements, and the encoded blocks with them replaced."""
        begin, end = self.column.blocks(start, start + source.numel())
        if end - begin != source.numel():
            blocks = self.load(begin, end)
            blocks[start - begin : start - begin + source.numel()] = source
            source = blocks
        return self.column.count(begin), self.column.encode(source.to(self.dtype)).to(self.inner.dtype)


class _Decoding(Work):
    """A running read of encoded values; `wait` decodes them."""

    def __init__(self, rest: CodedRest, read: Work, coded: Tensor, start: int, out: Tensor) -> None:
        self.rest, self.read, self.coded, self.start, self.out = rest, read, coded, start, out

    def done(self) -> bool:
        return self.read.done()

    def wait(self) -> None:
        self.read.wait()
        self.rest.decode(self.coded, self.start, self.out)
