"""The manifest of a checkpoint: what is in it and the checksums of its files, as JSON that any tool can read.

Each rank writes a *part* about its data file (rank-00000.json); rank 0 joins the parts to `manifest.json` and to DCP's
`.metadata`, and removes them. docs/checkpoint-format.md is the specification.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from ..boxes import Box
from ..errors import CheckpointCorrupt, CheckpointError
from . import dcp
from .datafile import DIGEST_NBYTES, FileLayout, digest_count
from .folder import MANIFEST, sync, write_whole
from .identity import Identity

VERSION = 1


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor: its bytes begin at `data` of file number `file`; its blob is [offset, offset + nbytes)."""

    file: int
    data: int
    offset: int
    nbytes: int
    box: Box


@dataclass
class TensorEntry:
    """A tensor by name. keys: of its name, in nested state dicts."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    keys: tuple[str, ...]
    boxes: list[StoredBox]


@dataclass(frozen=True)
class ObjectEntry:
    """A plain value: what torch.save wrote at [offset, offset + nbytes) of file number `file`."""

    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class FileEntry:
    """A file of the checkpoint and the XXH3-64 of each of its blocks of DIGEST_NBYTES."""

    name: str
    nbytes: int
    digests: tuple[str, ...]


@dataclass
class Manifest:
    """What is in a checkpoint. facts: step, world size, stage, precision, time, versions; frozen: identity of what was left out."""

    facts: dict[str, Any]
    files: list[FileEntry]
    tensors: dict[str, TensorEntry]
    objects: dict[str, ObjectEntry]
    ties: dict[str, str] = field(default_factory=dict)
    frozen: dict[str, list] = field(default_factory=dict)  # name -> fields of its Identity

    def to_json(self) -> bytes:
        """The file's content: its last entry is the XXH3-64 of all before it."""
        body = {
            "format": "zeroshard-checkpoint",
            "version": VERSION,
            **self.facts,
            "digest": "xxh3-64",
            "digest_nbytes": DIGEST_NBYTES,
            "files": [asdict(file) for file in self.files],
            "tensors": {
                name: {
                    "dtype": str(t.dtype).removeprefix("torch."),
                    "shape": t.shape,
                    "keys": t.keys,
                    "boxes": [(b.file, b.data, b.offset, b.nbytes, b.box.offsets, b.box.sizes) for b in t.boxes],
                }
                for name, t in sorted(self.tensors.items())
            },
            "objects": {name: (o.file, o.offset, o.nbytes) for name, o in sorted(self.objects.items())},
            "ties": self.ties,
            "frozen": self.frozen,
        }
        text = json.dumps(body, separators=(",", ":"))
        return f'{text[:-1]},"checksum":"{xxhash.xxh3_64_hexdigest(text[:-1].encode())}"}}\n'.encode()

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises CheckpointCorrupt, CheckpointError (a version of tomorrow), FileNotFoundError."""
        path = folder / MANIFEST
        content = path.read_bytes()
        text, _, tail = content.decode("utf-8", errors="replace").rpartition(',"checksum":"')
        actual = xxhash.xxh3_64_hexdigest(text.encode())
        if tail != f'{actual}"}}\n':
            ending = re.fullmatch('([0-9a-f]{16})"}\n', tail)
            raise CheckpointCorrupt(str(path), 0, f"checksum {ending[1] if ending else 'at its end'}", f"checksum {actual}")
        body = json.loads(content)
        if body.pop("version") > VERSION:
            raise CheckpointError(f"{path}: written by a newer version of zeroshard; update it to read this checkpoint.")
        body.pop("checksum"), body.pop("digest"), body.pop("digest_nbytes"), body.pop("format")
        files = [FileEntry(f["name"], f["nbytes"], tuple(f["digests"])) for f in body.pop("files")]
        for file in files:  # a file with too few would pass for checked
            if len(file.digests) != digest_count(file.nbytes):
                wanted = f"{digest_count(file.nbytes)} checksums of the {file.nbytes:,} bytes of {file.name}"
                raise CheckpointCorrupt(str(path), 0, wanted, str(len(file.digests)))
        tensors = {}
        for name, t in body.pop("tensors").items():
            boxes = [StoredBox(f, d, o, n, Box(tuple(at), tuple(size))) for f, d, o, n, at, size in t["boxes"]]
            tensors[name] = TensorEntry(getattr(torch, t["dtype"]), tuple(t["shape"]), tuple(t["keys"]), boxes)
        objects = {name: ObjectEntry(*entry) for name, entry in body.pop("objects").items()}
        return cls(body, files, tensors, objects, body.pop("ties"), body.pop("frozen"))

    @property
    def nbytes(self) -> int:
        """Of all data files."""
        return sum(file.nbytes for file in self.files)


def part_of(layout: FileLayout, name: str, digests: list[str], extra: dict[str, Any]) -> bytes:
    """What a rank tells about its file. extra: ties, identities."""
    tensors: dict[str, Any] = {}
    for blob in layout.blobs:
        place = layout.places[blob.place]
        entry = tensors.setdefault(
            place.name, {"dtype": str(place.dtype), "shape": place.shape, "keys": place.keys, "boxes": []}
        )
        entry["boxes"].append((blob.data, blob.offset, blob.nbytes, blob.box.offsets, blob.box.sizes))
    objects = {key: (offset, len(value)) for key, offset, value in layout.objects}
    part = {"file": [name, layout.nbytes, digests], "tensors": tensors, "objects": objects, **extra}
    return json.dumps(part, separators=(",", ":")).encode()


def join(parts: list[dict[str, Any]], facts: dict[str, Any]) -> Manifest:
    """The manifest of all ranks' parts. Raises AssertionError where they do not cover every tensor exactly once."""
    files = [FileEntry(p["file"][0], p["file"][1], tuple(p["file"][2])) for p in parts]
    manifest = Manifest(facts, files, {}, {}, parts[0]["ties"])
    frozen: dict[str, Identity] = {}
    for number, part in enumerate(parts):
        for name, t in part["tensors"].items():
            dtype = getattr(torch, t["dtype"].removeprefix("torch."))
            entry = manifest.tensors.setdefault(name, TensorEntry(dtype, tuple(t["shape"]), tuple(t["keys"]), []))
            for data, offset, nbytes, at, sizes in t["boxes"]:
                entry.boxes.append(StoredBox(number, data, offset, nbytes, Box(tuple(at), tuple(sizes))))
        for name, (offset, nbytes) in part["objects"].items():
            manifest.objects[name] = ObjectEntry(number, offset, nbytes)
        for name, entry in part["frozen"].items():
            identity = Identity(*entry)
            frozen[name] = frozen[name] + identity if name in frozen else identity
    manifest.frozen = {name: list(astuple(identity)) for name, identity in frozen.items()}
    for name, entry in manifest.tensors.items():
        entry.boxes.sort(key=lambda stored: stored.box.offsets)
        covered = sum(stored.box.numel for stored in entry.boxes)
        assert covered == torch.Size(entry.shape).numel(), f"{name}: {covered} elements of {entry.shape}"
    return manifest


def write(folder: Path, manifest: Manifest) -> None:
    """Write `.metadata` and then `manifest.json`, for good."""
    files = [file.name for file in manifest.files]
    tensors = (
        (name, t.keys, t.dtype, t.shape, [(b.box, files[b.file], b.offset, b.nbytes) for b in t.boxes])
        for name, t in manifest.tensors.items()
    )
    objects = ((n, _keys(n), files[o.file], o.offset, o.nbytes) for n, o in manifest.objects.items())
    dcp.write_metadata(folder / ".metadata", tensors, objects)
    metadata = (folder / ".metadata").read_bytes()
    sync(folder / ".metadata")
    digests = [xxhash.xxh3_64_hexdigest(metadata[at : at + DIGEST_NBYTES]) for at in range(0, len(metadata), DIGEST_NBYTES)]
    manifest.files.append(FileEntry(".metadata", len(metadata), tuple(digests)))
    write_whole(folder / MANIFEST, manifest.to_json())


def _keys(name: str) -> tuple[str, ...]:
    """Of an object, in nested state dicts: 'optim.param_groups' -> optim, param_groups; a parameter's name stays whole."""
    head, _, rest = name.partition(".")
    if name.startswith("optim.state."):
        parameter, _, key = rest.removeprefix("state.").rpartition(".")
        return ("optim", "state", parameter, key)
    return (head, rest)
