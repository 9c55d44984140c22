"""Rests of states and masters in another form than the optimizer steps: encoded in blocks, and as two halves."""

from __future__ import annotations

import torch
from torch import Tensor

from ..engine.rest import Rest
from ..tensor.state_column import StateColumn
from ..utils.work import OVER, Then, Work
from .stretch import SplitStretch


class CodedRest(Rest):
    """Resting place of a column: callers see `numel` elements in the optimizer's dtype; `inner` holds them encoded, in blocks.

    Any range of elements may be read and written. A write to a part of a block decodes the block and encodes it again.
    """

    resident = False

    def __init__(self, inner: Rest, column: StateColumn, numel: int, dtype: torch.dtype) -> None:
        self.inner, self.column, self.numel, self.dtype, self.tier = inner, column, numel, dtype, inner.tier

    @property
    def encoding(self) -> tuple[StateColumn, Rest]:
        return self.column, self.inner

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
        read = torch.empty(end - at, dtype=self.inner.dtype, device="cpu")

        def decode() -> Work:
            self.decode(read, start, out)
            return OVER

        return Then(self.inner.read(at, read), decode)

    def decode(self, coded: Tensor, start: int, out: Tensor) -> None:
        """Fill `out` (n,) with elements [start, start + n), cut out of the blocks around them."""
        out.copy_(self.column.decoded(coded, start, out.numel()))

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


class SplitRest(Rest):
    """Resting place of fp32 masters as their two halves: `high` has the bf16 parameters, `low` the 16 bits that these lack."""

    resident = False

    def __init__(self, high: Rest, low: Rest) -> None:
        self.high, self.low, self.numel, self.dtype, self.tier = high, low, low.numel, torch.float32, low.tier

    @property
    def halves(self) -> tuple[Rest, Rest]:
        return self.high, self.low

    def nbytes_of(self, numel: int) -> int:
        return self.low.nbytes_of(numel)

    def read(self, start: int, out: Tensor) -> Work:
        out.copy_(self.load(start, start + out.numel()))
        return OVER

    def write(self, start: int, source: Tensor) -> Work:
        self.store(start, source)
        return OVER

    def load(self, start: int, stop: int) -> Tensor:
        low = self.low.load(start, stop)
        return SplitStretch(self.high.load(start, stop), low).join(torch.empty_like(low, dtype=torch.int32))

    def store(self, start: int, source: Tensor) -> None:
        numel = source.numel()
        halves = [torch.empty(numel, dtype=dtype, device=source.device) for dtype in (torch.bfloat16, torch.int16)]
        values = source.detach().view(-1).float()
        SplitStretch(*halves).cut(values, torch.empty_like(values, dtype=torch.int32))
        self.high.store(start, halves[0])
        self.low.store(start, halves[1])
