"""Read tensors of a checkpoint of zs.save by name, with errors held back until all ranks can raise them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointCorrupt, OffloadIOError
from ..memory.io.tensor_reader import Stored, StoredChunks, StoredTensor, Stretch
from ..tensor.chunks import overlap
from .bulk_reader import Kept
from .directory import MANIFEST
from .manifest import Manifest


class Reading:
    """Reads that keep the first error in `error` and then do nothing, so that ranks stay in step and all raise it at the end.

    kept: the result of `Bulk.read`, from which tensors are then read; None: they are read from files.
    """

    def __init__(self, kept: Kept | None = None) -> None:
        self.kept = kept
        self.error: Exception | None = None

    def guard(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return the same tensors with a `read` that keeps its error in `error` instead of raising it."""
        return {name: _Guarded(tensor.dtype, tensor.shape, tensor, self) for name, tensor in stored.items()}


@dataclass(frozen=True)
class _Guarded(Stored):
    dtype: torch.dtype
    shape: tuple[int, ...]
    stored: Stored
    reading: Reading

    def parts(self, start: int, out: Tensor) -> Iterator[Stretch]:
        return self.stored.parts(start, out)

    def read(self, start: int, out: Tensor) -> None:
        kept = self.reading.kept
        if self.reading.error is None:
            try:
                self.stored.read(start, out) if kept is None else kept.read(self.stored, start, out)
            except (OSError, OffloadIOError, CheckpointCorrupt) as error:
                self.reading.error = error


def stored_tensors(folder: Path, manifest: Manifest) -> dict[str, StoredChunks]:
    """Return every tensor of a checkpoint of zs.save, by its name in the manifest. Raises CheckpointCorrupt if boxes overlap."""
    paths = [folder / file.name for file in manifest.files]
    found = {}
    for name, entry in manifest.tensors.items():
        boxes = []
        for stored in entry.boxes:
            nbytes = stored.box.numel * entry.dtype.itemsize
            boxes.append((stored.box, StoredTensor(paths[stored.file], stored.data, nbytes, entry.dtype, stored.box.sizes)))
        found[name] = StoredChunks(entry.dtype, entry.shape, boxes)
        if (twice := overlap(box for box, _ in boxes)) is not None:  # the number of elements was checked with the manifest
            raise CheckpointCorrupt(
                str(folder / MANIFEST), 0, f"every element of {name} once", f"element {next(twice.rows(entry.shape))[0]} twice"
            )
    return found
