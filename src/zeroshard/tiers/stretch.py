"""Stretches: elements that rest in another form than the optimizer steps, opened and closed chunk by chunk.

at rest   | chunk | chunk | chunk |
            open |  ^ close                  one chunk at a time is in the optimizer's form, small enough for the cache
          fp32 (n,) -> step -> fp32 (n,)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from ..tensor.state_column import Scratch, StateColumn

Noise = Callable[[int, int], Tensor]  # (start, stop) -> uniform numbers from 0 to 1, one for each of these elements

_SCRATCH = Scratch()
_MOST_LOW = (1 << 15) - 1


class Stretch(ABC):
    """Elements in the form in which they rest, in memory of the device that steps them; `open` and `close` convert them."""

    @abstractmethod
    def numel(self) -> int:
        """Return the number of elements."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes at rest."""

    @abstractmethod
    def part(self, start: int, stop: int) -> Stretch:
        """Return the stretch of elements [start, stop), over the same memory."""

    @abstractmethod
    def open(self) -> Tensor:
        """Return the elements (n,) as the optimizer has them: a copy, valid until this thread opens another stretch of this state."""

    @abstractmethod
    def close(self, values: Tensor) -> None:
        """Write `values` (n,), in the optimizer's form, over the elements at rest."""

    def split(self, size: int) -> list[Stretch]:
        """Return stretches of `size` elements each, the last one of what is left, as `Tensor.split` does."""
        numel = self.numel()
        return [self.part(start, min(start + size, numel)) for start in range(0, max(numel, 1), size)]


class CodedStretch(Stretch):
    """Elements of a state in whole encoded blocks. noise: for stochastic rounding; start: number of the first element in `noise`."""

    def __init__(
        self,
        coded: Tensor,
        column: StateColumn,
        dtype: torch.dtype,
        noise: Noise | None = None,
        start: int = 0,
        views: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.coded, self.column, self.dtype, self.noise, self.start = coded, column, dtype, noise, start
        self.views = column.codec.views(coded) if views is None and column.codec is not None else views

    def numel(self) -> int:
        return self.coded.numel() // self.column.values * self.column.elements

    @property
    def nbytes(self) -> int:
        return self.coded.nbytes

    def part(self, start: int, stop: int) -> CodedStretch:
        coded = self.coded[self.column.count(start) : self.column.count(stop)]
        return CodedStretch(coded, self.column, self.dtype, self.noise, self.start + start)

    def split(self, size: int) -> list[Stretch]:
        if self.views is None:
            return super().split(size)
        # torch's split makes all views at once; making those of each chunk by itself would take a noticeable part of the step
        parts = zip(
            self.coded.split(self.column.count(size)),
            *(view.split(size // self.column.elements) for view in self.views),
            strict=True,
        )
        return [
            CodedStretch(coded, self.column, self.dtype, self.noise, self.start + number * size, (codes, scales))
            for number, (coded, codes, scales) in enumerate(parts)
        ]

    def open(self) -> Tensor:
        codec = self.column.codec
        if self.dtype is not torch.float32:
            return self.column.decode(self.coded).to(self.dtype, copy=True)
        out = _SCRATCH.flat(self.numel(), self.column.name, torch.float32, self.coded)
        if codec is not None and self.views is not None:
            codec.read(*self.views, out)
        else:
            out.copy_(self.column.decode(self.coded))
        return out

    def close(self, values: Tensor) -> None:
        noisy, codec, noise = self.column.noisy, self.column.codec, None
        if noisy is not None and self.noise is not None:
            noise = self.noise(self.start, self.start + values.numel())
        if codec is not None and self.views is not None:
            codec.write(values, *self.views, noise)
        elif noisy is not None and noise is not None:
            self.coded.copy_(noisy(values, noise))
        else:
            self.coded.copy_(self.column.encode(values))


class SplitStretch(Stretch):
    """fp32 values as bf16 numbers (high), rounded to nearest even, and the difference of the fp32 bits to these (low), -2^15 to 2^15.

    The bits 3F808001 round to the bf16 number 3F81: low = 3F808001 - 3F810000 = -32767. A difference of 2^15 does not fit int16.
    It occurs for values half-way between an even bf16 number and the next larger one, as 3F808000. These lose their last bit
    (3F807FFF comes back), so that the bf16 number stays the one to which fp32 masters are rounded.
    """

    def __init__(self, high: Tensor, low: Tensor) -> None:
        self.high, self.low = high, low

    def numel(self) -> int:
        return self.low.numel()

    @property
    def nbytes(self) -> int:
        return self.high.nbytes + self.low.nbytes

    def part(self, start: int, stop: int) -> SplitStretch:
        return SplitStretch(self.high[start:stop], self.low[start:stop])

    def open(self) -> Tensor:
        return self.join(_SCRATCH.flat(self.numel(), "(halves)", torch.int32, self.low))

    def close(self, values: Tensor) -> None:
        self.cut(values, _SCRATCH.flat(self.numel(), "(low)", torch.int32, self.low))

    def join(self, bits: Tensor) -> Tensor:
        """Return the elements (n,), in the memory of `bits` (n,), int32."""
        low = _SCRATCH.flat(self.numel(), "(opened low)", torch.int32, self.low).copy_(self.low)
        bits.copy_(self.high.view(torch.int16))
        return torch.add(low, bits, alpha=1 << 16, out=bits).view(torch.float32)

    def cut(self, values: Tensor, bits: Tensor) -> None:
        """Set the elements (n,). bits: memory (n,), int32, for intermediate values."""
        self.high.copy_(values)
        bits.copy_(self.high.view(torch.int16))
        torch.sub(values.view(torch.int32), bits, alpha=1 << 16, out=bits)
        self.low.copy_(bits.clamp_max_(_MOST_LOW))  # the least is -2^15
