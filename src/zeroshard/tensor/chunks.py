"""Conversion of flat ranges to boxes, which torch.distributed.checkpoint calls chunks.

A rank holds elements [start, stop) of a flattened tensor. Cut where rows begin, this range is at most 2 * dims - 1 boxes,
each contiguous in the flattened tensor, in the same order:

    (4, 5), [3, 17)     . . . x x      first row, its tail       offsets (0, 3), sizes (1, 2)
                        x x x x x      whole rows                offsets (1, 0), sizes (2, 5)
                        x x x x x
                        x x . . .      last row, its head        offsets (3, 0), sizes (1, 2)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """Elements [o, o + s) in each dimension of a tensor, o in offsets, s in sizes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def within(self, outer: Box) -> Box:
        """Return this box, of the tensor that fills `outer`, as a box of the tensor that `outer` is in."""
        return Box(tuple(o + p for o, p in zip(self.offsets, outer.offsets, strict=True)), self.sizes)

    def rows(self, shape: Sequence[int], start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int, int]]:
        """Yield (offset in the flattened tensor of `shape`, offset in the flattened box, count) of each contiguous stretch.

        Offsets (1, 1) and sizes (2, 2) in shape (3, 4) give (5, 0, 2) and (9, 2, 2). start, stop: yield only stretches that hold
        some of elements [start, stop) of the flattened box, and these whole.
        """
        inner, dims = 1, len(shape)  # inner: elements of the trailing dimensions that the box fills, which are contiguous
        while dims and (inner == 0 or self.sizes[dims - 1] == shape[dims - 1]):
            dims -= 1
            inner *= shape[dims]
        if dims:
            dims -= 1
            inner *= self.sizes[dims]
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        base = sum(o * s for o, s in zip(self.offsets, strides, strict=True))  # the box's first element in the flattened tensor
        stop = self.numel if stop is None else stop
        for number in range(start // max(inner, 1), -(-stop // max(inner, 1))):
            at, rest = base, number
            for dim in reversed(range(dims)):
                rest, position = divmod(rest, self.sizes[dim])
                at += position * strides[dim]
            yield at, number * inner, inner


def overlap(boxes: Iterable[Box]) -> Box | None:
    """Return the intersection of two boxes that overlap, or None if no two do."""
    before: list[Box] = []  # earlier boxes that reach the rows of the present one
    for box in sorted((box for box in boxes if box.numel), key=lambda box: box.offsets):
        before = [other for other in before if not box.sizes or other.offsets[0] + other.sizes[0] > box.offsets[0]]
        for other in before:
            bounds = [
                (max(a, b), min(a + n, b + m))
                for a, n, b, m in zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True)
            ]
            if all(start < stop for start, stop in bounds):
                return Box(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))
        before.append(box)
    return None


def boxes_of(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return elements [start, stop) of a flattened tensor as contiguous boxes, in order; none for an empty range."""
    if start >= stop:
        return []
    if not shape:  # 0-D: one element
        return [Box((), ())]
    inner = math.prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if head and first == last:  # the range lies inside of one row
        return _within(shape, first, head, tail)
    boxes = []
    if head:
        boxes += _within(shape, first, head, inner)
        first += 1
    if first < last:
        rest = tuple(shape[1:])  # whole rows, as one box
        boxes.append(Box((first, *(0 for _ in rest)), (last - first, *rest)))
    if tail:
        boxes += _within(shape, last, 0, tail)
    return boxes


def _within(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    """Return elements [start, stop) of one flattened row as boxes of the whole tensor."""
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes_of(shape[1:], start, stop)]
