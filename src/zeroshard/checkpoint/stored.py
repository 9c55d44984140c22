"""Tensors of a checkpoint as `weights` knows them: readable in any flat range, wherever the boxes lie."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..boxes import Box
from ..errors import CheckpointCorrupt, OffloadIOError
from ..tiles import Part
from ..weights import Bulk, StoredTensor
from .folder import MANIFEST
from .manifest import Manifest


class Stored(Protocol):
    """A tensor that is stored somewhere, in whatever pieces."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, start: int, out: Tensor) -> None:
        """Fill `out` (n,) with elements [start, start + n) of the flattened tensor, converted to its dtype."""

    def cut(self, part: Part | None) -> Any:
        """A part of it as a tensor of its own."""


@dataclass(frozen=True)
class StoredBoxes:
    """A tensor in boxes. stretches: (first element in the flattened tensor, in the box, count, box), in order."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stretches: list[tuple[int, int, int, StoredTensor]]
    starts: list[int] = field(repr=False)

    @classmethod
    def of(cls, dtype: torch.dtype, shape: Sequence[int], boxes: Sequence[tuple[Box, StoredTensor]]) -> StoredBoxes:
        """From where each box is stored."""
        stretches = [(at, within, count, at_rest) for box, at_rest in boxes for at, within, count in box.rows(shape) if count]
        stretches.sort(key=lambda stretch: stretch[0])
        return cls(dtype, tuple(shape), stretches, [stretch[0] for stretch in stretches])

    def read(self, start: int, out: Tensor, bulk: Bulk | None = None) -> None:
        """Fill `out` (n,) with elements [start, start + n) of the flattened tensor, converted to its dtype. bulk: later."""
        done, number = 0, max(bisect_right(self.starts, start) - 1, 0)
        while done < out.numel():
            if number == len(self.stretches):
                raise OSError(f"elements from {start + done} on are missing")
            at, within, count, stored = self.stretches[number]
            skip = start + done - at
            part = min(count - skip, out.numel() - done)
            if skip < 0 or part <= 0:
                raise OSError(f"elements from {start + done} on are missing")
            place = out[done : done + part]
            stored.read(within + skip, place) if bulk is None else stored.read(within + skip, place, bulk)
            done, number = done + part, number + 1

    def cut(self, part: Part | None) -> StoredBoxes | StoredPart:
        """A part of it as a tensor of its own."""
        return self if part is None else StoredPart(self, part)


@dataclass(frozen=True)
class StoredPart:
    """Rows, or columns of a matrix, of a stored tensor."""

    whole: Stored
    part: Part

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        extent = self.part.stop - self.part.start
        return tuple(extent if dim == self.part.dim else size for dim, size in enumerate(self.whole.shape))

    def read(self, start: int, out: Tensor, bulk: Bulk | None = None) -> None:
        """As of a whole tensor of this shape."""
        numel, stop = math.prod(self.shape), start + out.numel()
        if not 0 <= start <= stop <= numel:
            raise OSError(f"expected elements {start} to {stop} of a tensor, it has {numel}")
        box = Box(tuple(self.part.start * (dim == self.part.dim) for dim in range(len(self.shape))), self.shape)
        for at, within, count in box.rows(self.whole.shape):
            first, last = max(within, start), min(within + count, stop)
            if first < last:
                place = out[first - start : last - start]
                self.whole.read(at + first - within, place) if bulk is None else self.whole.read(at + first - within, place, bulk)


class Reading:
    """Reads that go on after an error, so that ranks stay in step and all end with it; what was read then is of no use.

    kept: what has been read of a checkpoint of ours.
    """

    def __init__(self, kept: Bulk | None = None) -> None:
        self.kept = kept
        self.error: Exception | None = None

    def guard(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """The same tensors, whose errors are kept here."""
        return {name: _Guarded(tensor, self) for name, tensor in stored.items()}


@dataclass(frozen=True)
class _Guarded:
    stored: Any
    reading: Reading

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def read(self, start: int, out: Tensor, bulk: Bulk | None = None) -> None:
        if bulk is not None:
            self.stored.read(start, out, bulk)
        elif self.reading.error is None:
            kept = self.reading.kept
            try:
                self.stored.read(start, out) if kept is None else self.stored.read(start, out, kept)
            except (OSError, OffloadIOError, CheckpointCorrupt) as error:
                self.reading.error = error


def stored_tensors(folder: Path, manifest: Manifest) -> dict[str, StoredBoxes]:
    """Every tensor of a checkpoint of ours, by its name there. Raises CheckpointCorrupt where boxes overlap."""
    paths = [folder / file.name for file in manifest.files]
    found = {}
    for name, entry in manifest.tensors.items():
        boxes = []
        for stored in entry.boxes:
            nbytes = stored.box.numel * entry.dtype.itemsize
            boxes.append((stored.box, StoredTensor(paths[stored.file], stored.data, nbytes, entry.dtype, stored.box.sizes)))
        found[name] = tensor = StoredBoxes.of(entry.dtype, entry.shape, boxes)
        for (at, _, count, _), (then, *_) in pairwise(tensor.stretches):  # so many elements as it has, says the manifest
            if at + count != then:
                found_there = f"element {min(at + count, then)} {'twice' if then < at + count else 'not'}"
                raise CheckpointCorrupt(str(folder / MANIFEST), 0, f"every element of {name} once", found_there)
    return found
