"""Tensors in files, of which any flat range can be read, however the elements are spread over files.

    parts(start, out)   yields ranges of contiguous stored tensors, each with the part of `out` that it fills
    read(start, out)    reads these ranges from the files, one after another

checkpoint/bulk_reader.py, which reads many tensors together, uses `parts`.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..tensor.chunks import Box
from ..tensor.part import Part
from ..tensor.state_column import StateColumn
from ..utils.aligned import bytes_of

CHUNK_NBYTES = 16 << 20  # number of bytes read, and converted, at a time
_COMPARED_NUMEL = 1 << 20  # number of elements compared at a time
# elements of a stored tensor to be read: (object with `fill`, number of the first of its elements, the part of `out` that they fill)
StoredRange = tuple[Any, int, Tensor]


class Bulk(Protocol):
    """Collects reads, to carry them out together (checkpoint/bulk_reader.py)."""

    def add(self, stored: Any, start: int, out: Tensor) -> None:
        """Register a read of elements [start, start + n) of a stored tensor into `out` (n,)."""


class Stored:
    """A tensor that is stored in files, in one piece or several."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def parts(self, start: int, out: Tensor) -> Iterator[StoredRange]:
        """Yield the ranges in which elements [start, start + n) of the flattened tensor are stored, for `out` (n,).

        Raises OSError where the tensor has no such elements: the bytes behind it in a file are another tensor's.
        """
        stop = start + out.numel()
        if not 0 <= start <= stop <= self.numel:
            where = f"{path}: " if (path := getattr(self, "path", None)) else ""
            raise OSError(f"{where}expected elements {start} to {stop} of a tensor, it has {self.numel}")
        yield from self._parts(start, out)

    def _parts(self, start: int, out: Tensor) -> Iterator[StoredRange]:
        """Yield the ranges for `parts`, which has checked start and stop."""
        yield self, start, out

    def fill(self, start: int, out: Tensor) -> None:
        """Fill `out` (n,) with elements from `start` on, converted to its dtype. For ranges that `parts` has yielded only."""
        raise NotImplementedError

    def read(self, start: int, out: Tensor) -> None:
        """Fill `out` (n,) with elements [start, start + n) of the flattened tensor, converted to its dtype. Raises OSError."""
        for at, first, place in self.parts(start, out):
            at.fill(first, place)

    def cut(self, part: Part | None) -> Stored:
        """Return a part of the tensor (rows, or columns of a matrix) as a stored tensor; None: all of it."""
        return self if part is None else StoredPart(self, part)


@dataclass(frozen=True)
class StoredTensor(Stored):
    """A contiguous tensor in a file: bytes [offset, offset + nbytes)."""

    path: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements in the file, whatever the shape."""
        return self.nbytes // self.dtype.itemsize

    def fill(self, start: int, out: Tensor) -> None:
        """Fill `out` (n,) with the elements from number `start` on, converted to its dtype. Raises OSError."""
        step = max(CHUNK_NBYTES // self.dtype.itemsize, 1)
        with open(self.path, "rb", buffering=0) as file:
            for begin in range(0, out.numel(), step):
                part = out[begin : begin + step]
                direct = part.dtype == self.dtype and part.device.type == "cpu" and part.is_contiguous()
                values = part if direct else torch.empty(part.numel(), dtype=self.dtype, device="cpu")
                raw, at = bytes_of(values), self.offset + (start + begin) * self.dtype.itemsize
                while raw:
                    got = os.preadv(file.fileno(), [raw], at)
                    if got == 0:
                        raise OSError(f"{self.path}: expected {len(raw)} more bytes at {at}, got none: truncated file")
                    raw, at = raw[got:], at + got
                if not direct:
                    part.copy_(values)


@dataclass(frozen=True)
class StoredStretches(Stored):
    """A tensor whose flattened elements are stored as stretches of other stored tensors.

    stretches: (first element in the flattened tensor, first one in the stored tensor, count, the stored tensor), in order.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stretches: list[tuple[int, int, int, Stored]]

    def _parts(self, start: int, out: Tensor) -> Iterator[StoredRange]:
        """Yield the ranges of each tensor that has some of the elements. Raises OSError where an element is in none."""
        done, number = 0, max(bisect_right(self.stretches, start, key=itemgetter(0)) - 1, 0)
        while done < out.numel():
            if number == len(self.stretches):
                raise OSError(f"elements from {start + done} on are missing")
            at, within, count, stored = self.stretches[number]
            skip = start + done - at
            part = min(count - skip, out.numel() - done)
            if skip < 0 or part <= 0:
                raise OSError(f"elements from {start + done} on are missing")
            yield from stored.parts(within + skip, out[done : done + part])
            done, number = done + part, number + 1


@dataclass(frozen=True)
class StoredBoxes(Stored):
    """A tensor stored in boxes, whose stretches are computed on first use: columns of a matrix have one for each of its rows."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: Sequence[tuple[Box, Stored]]

    @cached_property
    def rows(self) -> StoredStretches:
        rows = [(at, within, count, stored) for box, stored in self.boxes for at, within, count in box.rows(self.shape) if count]
        return StoredStretches(self.dtype, self.shape, sorted(rows, key=itemgetter(0)))

    def _parts(self, start: int, out: Tensor) -> Iterator[StoredRange]:
        return self.rows._parts(start, out)


@dataclass(frozen=True)
class StoredCoded(Stored):
    """An optimizer state that is stored encoded, as one stored tensor of bytes, and read decoded."""

    coded: Stored
    column: StateColumn
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def fill(self, start: int, out: Tensor) -> None:
        """Fill `out` (n,) with the values of elements from `start` on. Raises OSError."""
        at, coded = self.around(start, out)
        self.coded.read(at, coded)
        self.decode(coded, start, out)

    def around(self, start: int, out: Tensor) -> tuple[int, Tensor]:
        """Return the position of the blocks around elements [start, start + n), and memory for them; on meta if `out` is."""
        begin, end = map(self.column.count, self.column.blocks(start, start + out.numel()))
        return begin, torch.empty(end - begin, dtype=torch.uint8, device="meta" if out.is_meta else "cpu")

    def decode(self, coded: Tensor, start: int, out: Tensor) -> None:
        """Fill `out` (n,) with elements from `start` on, of which `coded` has the blocks."""
        out.copy_(self.column.decoded(coded, start, out.numel()))


@dataclass(frozen=True)
class StoredPart(Stored):
    """Rows, or columns of a matrix, or a box, of a stored tensor."""

    whole: Stored
    part: Part

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.whole.dtype

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.part.extents

    def _parts(self, start: int, out: Tensor) -> Iterator[StoredRange]:
        """Yield the ranges of the whole tensor that hold the elements of this part."""
        flat, stop = self.part.unpacked, start + out.numel()
        for at, within, count in flat.box.rows(flat.whole_shape, start, stop):
            first, last = max(within, start), min(within + count, stop)
            if first < last:
                yield from self.whole.parts(at + first - within, out[first - start : last - start])


def differ(one: Stored, other: Stored, rank: int = 0, ranks: int = 1) -> bool:
    """Return whether two stored tensors differ in value, within the share of one rank. False for tensors of different shapes."""
    if one is other or one == other or one.shape != other.shape:
        return False
    numel = math.prod(one.shape)
    for start in range(numel * rank // ranks, numel * (rank + 1) // ranks, _COMPARED_NUMEL):
        count = min(_COMPARED_NUMEL, numel * (rank + 1) // ranks - start)
        values = [torch.empty(count, dtype=one.dtype, device="cpu") for _ in range(2)]
        one.read(start, values[0])
        other.read(start, values[1])
        if not torch.equal(*values) and bytes_of(values[0]) != bytes_of(values[1]):  # compare bytes, too: NaN != NaN
            return True
    return False
