"""The layout of one rank's data file, and the ranges of bytes that file_writer.py writes.

Tensors on disk come first, so that they never take more than a few buffers; then tensors that users may write at any time; last
the guarded ones (see StateSlice), which can be copied while training goes on.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..errors import ConfigError
from ..seam import Box
from .dcp import ALIGN, archived, frame
from .file_writer import Elements, Range
from .state_map import Contents, Entry


@dataclass(frozen=True)
class Blob:
    """One box of a tensor in the file: bytes [offset, offset + nbytes), of which the elements begin at `data`.

    entry: number of the tensor in `FileLayout.entries`. first: the box's first element among the rank's elements of it.
    """

    offset: int
    nbytes: int
    data: int
    entry: int
    first: int
    box: Box
    prefix: bytes
    suffix: bytes


@dataclass
class FileLayout:
    """Layout of a rank's file. blobs: boxes of tensors, in the order of the file. objects: (name, offset, bytes), after them.

    at_once: number of blobs, from the first, that must be copied before training goes on.
    """

    entries: list[Entry]
    blobs: list[Blob]
    nbytes: int = 0
    at_once: int = 0
    objects: list[tuple[str, int, bytes]] = field(default_factory=list)

    @classmethod
    def of(cls, contents: Contents) -> FileLayout:
        """Return the layout of tensors, without objects. Equal entries give an equal layout, which `Saver` relies on."""
        sources = contents.sources
        order = sorted(range(len(sources)), key=lambda i: (not sources[i].on_disk, sources[i].guarded))
        blobs, end, at_once = [], 0, 0
        for number in order:
            entry = contents.entries[number]
            for box, first in entry.boxes():
                prefix, suffix = frame(entry.dtype, box.sizes)
                data = end + len(prefix)
                nbytes = len(prefix) + box.numel * entry.dtype.itemsize + len(suffix)
                blobs.append(Blob(end, nbytes, data, number, first, box, prefix, suffix))
                at_once += sources[number].on_disk or not sources[number].guarded
                end = -(-(end + nbytes) // ALIGN) * ALIGN
        return cls(contents.entries, blobs, end, at_once)

    def with_objects(self, objects: dict[str, object], pickled: dict[str, bytes]) -> FileLayout:
        """Return a layout of the same tensors with values after them, which are pickled here, and `pickled` ones.

        Raises ConfigError for what cannot be pickled.
        """
        contents = {}
        for name, value in objects.items():
            try:
                contents[name] = archived(value)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                raise ConfigError(f"zs.save: {name} can not be saved: {error}") from error
        end, placed = self.nbytes, []
        for name, content in (contents | pickled).items():
            placed.append((name, end, content))
            end = -(-(end + len(content)) // ALIGN) * ALIGN
        return dataclasses.replace(self, nbytes=end, objects=placed)

    def ranges(self, contents: Contents) -> Iterator[Range]:
        """Yield the ranges of the file, in order and without gaps."""
        end, between = 0, b""  # what stands between the data of two blobs is one range: there may be many small ones
        for blob in self.blobs:
            yield end, between.ljust(blob.offset - end, b"\0") + blob.prefix
            entry, source = self.entries[blob.entry], contents.sources[blob.entry]
            read = lambda first, out, source=source, begin=blob.first: source.read(begin + first, out)  # noqa: E731
            yield blob.data, Elements(entry.dtype, blob.box.numel, read)
            end, between = blob.offset + blob.nbytes - len(blob.suffix), blob.suffix
        for _, offset, value in self.objects:
            yield end, between.ljust(offset - end, b"\0") + value
            end, between = offset + len(value), b""
        yield end, between.ljust(self.nbytes - end, b"\0")
