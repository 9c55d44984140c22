"""The manifest of a checkpoint: its tensors, values and files with checksums, as JSON that any tool can read.

Each rank sends rank 0 the places of tensors in its data file (only if they differ from the last save), and a *part*: the
checksums of the file and the places of plain values. Rank 0 makes `manifest.json` and DCP's `.metadata` of all ranks' parts.
docs/checkpoint-format.md is the specification.
"""

from __future__ import annotations

import json
import re
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from ..errors import CheckpointCorrupt, CheckpointError
from ..seam import Box
from . import dcp
from .directory import MANIFEST, sync, write_whole
from .file_writer import DIGEST_NBYTES, digest_count, digests_of
from .fingerprint import totals
from .rank_file import FileLayout
from .state_map import CODED

FORMAT, VERSION, DIGEST = "zeroshard-checkpoint", 2, "xxh3-64"  # version 1 has no encoded states
_FACTS = ("step", "world_size", "stage", "precision", "optimizer", "trained_only", "per_rank", "time", "zeroshard", "torch")


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of a tensor, in the blob [offset, offset + nbytes) of file number `file`; its elements begin at byte `data`."""

    file: int
    data: int
    offset: int
    nbytes: int
    box: Box


@dataclass
class TensorEntry:
    """A tensor. keys: path of its name in nested state dicts, as ("optim", "state", parameter, "step")."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    keys: tuple[str, ...]
    boxes: list[StoredBox]

    @classmethod
    def of(cls, told: dict[str, Any]) -> TensorEntry:
        """Return the entry of its JSON, which `_tensors_json` has made."""
        boxes = [StoredBox(f, d, o, n, Box(tuple(at), tuple(size))) for f, d, o, n, at, size in told["boxes"]]
        return cls(getattr(torch, told["dtype"]), tuple(told["shape"]), tuple(told["keys"]), boxes)


@dataclass(frozen=True)
class ObjectEntry:
    """A plain value: bytes [offset, offset + nbytes) of file number `file` are a file of torch.save."""

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
    """Content of a checkpoint.

    facts: step, world size, stage, precision, time, versions. frozen: identities of the parameters that the save left out.
    scalars: keys of optimizer states that are one number for each parameter; shapes do not show this for parameters without
    dimensions. None: an earlier version wrote the checkpoint.
    """

    facts: dict[str, Any]
    files: list[FileEntry]
    tensors: dict[str, TensorEntry]
    objects: dict[str, ObjectEntry]
    ties: dict[str, str] = field(default_factory=dict)
    frozen: dict[str, list] = field(default_factory=dict)  # name -> fields of its Identity
    scalars: list[str] | None = None

    def to_json(self, tensors: str | None = None) -> bytes:
        """Return the file's content; its last entry is the XXH3-64 of everything before. tensors: their JSON, if already made."""
        files = [vars(file) for file in self.files]
        head = {
            "format": FORMAT,
            "version": VERSION if any(CODED in t.keys[-1] for t in self.tensors.values()) else 1,
            **self.facts,
            "digest": DIGEST,
            "digest_nbytes": DIGEST_NBYTES,
            "files": files,
        }
        tail = {
            "objects": {name: (o.file, o.offset, o.nbytes) for name, o in sorted(self.objects.items())},
            "ties": self.ties,
            "frozen": self.frozen,
            **({} if self.scalars is None else {"scalars": self.scalars}),
        }
        tensors = _json(_tensors_json(dict(sorted(self.tensors.items())))) if tensors is None else tensors
        # one object, joined as text since `tensors` may be cached text
        text = f'{_json(head)[:-1]},"tensors":{tensors},{_json(tail)[1:-1]}'
        return f'{text},"checksum":"{xxhash.xxh3_64_hexdigest(text.encode())}"}}\n'.encode()

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and check a manifest. Raises CheckpointCorrupt, CheckpointError (other format or version), FileNotFoundError."""
        path = folder / MANIFEST
        content = path.read_bytes()
        text, _, tail = content.decode("utf-8", errors="replace").rpartition(',"checksum":"')
        actual = xxhash.xxh3_64_hexdigest(text.encode())
        if tail != f'{actual}"}}\n':
            ending = re.fullmatch('([0-9a-f]{16})"}\n', tail)
            raise CheckpointCorrupt(str(path), 0, f"checksum {ending[1] if ending else 'at its end'}", f"checksum {actual}")
        try:
            found = cls._of(path, json.loads(content))
            _check_places(path, found)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise CheckpointError(
                f"{path} does not follow the format of zs.save, though its checksum is right ({what}): another program wrote or changed it. "
                "Load another checkpoint."
            ) from error
        return found

    @classmethod
    def _of(cls, path: Path, body: dict[str, Any]) -> Manifest:
        body.pop("checksum")
        form, version = body.pop("format"), body.pop("version")
        if form != FORMAT:
            raise CheckpointError(f"{path}: format: expected {FORMAT!r}, got {form!r}: zs.save did not write it.")
        if version > VERSION:
            raise CheckpointError(f"{path}: written by a newer version of zeroshard; update it to read this checkpoint.")
        digest = (body.pop("digest"), body.pop("digest_nbytes"))
        if digest != (DIGEST, DIGEST_NBYTES):
            raise CheckpointError(
                f"{path}: digest, digest_nbytes: expected {DIGEST} of {DIGEST_NBYTES:,} bytes each, got {digest}."
            )
        absent = [key for key in _FACTS if key not in body]
        if absent:
            raise CheckpointError(f"{path} lacks {', '.join(absent)}, which zs.save writes: another program changed it.")
        files = [FileEntry(f["name"], f["nbytes"], tuple(f["digests"])) for f in body.pop("files")]
        for file in files:  # with too few checksums, a part of the file would pass unchecked
            if len(file.digests) != digest_count(file.nbytes):
                wanted = f"{digest_count(file.nbytes)} checksums of the {file.nbytes:,} bytes of {file.name}"
                raise CheckpointCorrupt(str(path), 0, wanted, str(len(file.digests)))
        tensors = {name: TensorEntry.of(told) for name, told in body.pop("tensors").items()}
        objects = {name: ObjectEntry(*entry) for name, entry in body.pop("objects").items()}
        return cls(body, files, tensors, objects, body.pop("ties"), body.pop("frozen"), body.pop("scalars", None))


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _tensors_json(tensors: dict[str, TensorEntry]) -> dict[str, object]:
    return {
        name: {
            "dtype": str(t.dtype).removeprefix("torch."),
            "shape": t.shape,
            "keys": t.keys,
            "boxes": [(b.file, b.data, b.offset, b.nbytes, b.box.offsets, b.box.sizes) for b in t.boxes],
        }
        for name, t in tensors.items()
    }


def _check_places(path: Path, manifest: Manifest) -> None:
    """Raise CheckpointCorrupt if a blob lies outside its file, or boxes do not add up to the elements of their tensor."""
    files = manifest.files

    def check(name: str, file: int, offset: int, nbytes: int, begin: int, end: int) -> None:
        if not 0 <= file < len(files):
            raise CheckpointCorrupt(str(path), 0, f"{name} in one of {len(files)} files", f"file {file}")
        if not (0 <= offset <= begin <= end <= offset + nbytes <= files[file].nbytes):
            where = f"{name} within the {files[file].nbytes:,} bytes of {files[file].name}"
            raise CheckpointCorrupt(str(path), 0, where, f"bytes {begin} to {end}, in a stretch of {nbytes} at {offset}")

    for file in files:
        if Path(file.name).name != file.name:
            raise CheckpointCorrupt(str(path), 0, "names of files in its folder", repr(file.name))
    for name, value in manifest.objects.items():
        check(name, value.file, value.offset, value.nbytes, value.offset, value.offset + value.nbytes)
    for name, entry in manifest.tensors.items():
        shape, covered = torch.Size(entry.shape), 0
        for at in entry.boxes:
            covered += at.box.numel
            check(name, at.file, at.offset, at.nbytes, at.data, at.data + at.box.numel * entry.dtype.itemsize)
            if not all(0 <= o <= o + s <= n for o, s, n in zip(at.box.offsets, at.box.sizes, shape, strict=True)):
                raise CheckpointCorrupt(str(path), 0, f"boxes of {name} within {entry.shape}", str(at.box))
        if covered != shape.numel() or not entry.boxes:
            raise CheckpointCorrupt(str(path), 0, f"all {shape.numel():,} elements of {name}", f"{covered:,}")


def tensors_of(layout: FileLayout, file: int) -> bytes:
    """Return the JSON of the places of tensors in a rank's file. Equal layouts give equal bytes. file: its number, the rank's."""
    tensors: dict[str, TensorEntry] = {}
    for blob in layout.blobs:
        entry = layout.entries[blob.entry]
        found = tensors.setdefault(entry.name, TensorEntry(entry.dtype, entry.shape, entry.keys, []))
        found.boxes.append(StoredBox(file, blob.data, blob.offset, blob.nbytes, blob.box))
    return _json(_tensors_json(tensors)).encode()


def part_of(layout: FileLayout, name: str, digests: list[str], extra: dict[str, object]) -> bytes:
    """Return the JSON of a rank's part: name, size and checksums of its file, places of plain values, and `extra`.

    extra: ties, identities of frozen parameters, scalars.
    """
    objects = {key: (offset, len(value)) for key, offset, value in layout.objects}
    return _json({"file": [name, layout.nbytes, digests], "objects": objects, **extra}).encode()


class Listed:
    """Cache for saves with unchanged layouts: tensors of all ranks, as entries and as JSON, and DCP's `.metadata`.

    digests: XXH3-64 of each rank's `tensors_of`.
    """

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.tensors: dict[str, TensorEntry] = {}
        self.text = "{}"
        self.last_metadata = b""
        self._made_of: tuple = ()

    def take(self, digests: list[str], told: list[bytes]) -> None:
        """Replace the cache by the `tensors_of` of all ranks. Raise CheckpointError if boxes do not add up to their tensors."""
        self.digests, tensors = [], dict[str, TensorEntry]()  # no digests: if this raises, the cache must not match the next save
        for name, of_rank in ((name, TensorEntry.of(each)) for part in told for name, each in json.loads(part).items()):
            tensors.setdefault(name, replace(of_rank, boxes=[])).boxes.extend(of_rank.boxes)
        for name, entry in tensors.items():
            entry.boxes.sort(key=lambda stored: stored.box.offsets)
            covered = sum(stored.box.numel for stored in entry.boxes)
            if covered != torch.Size(entry.shape).numel():
                raise CheckpointError(
                    f"zs.save: {name}: {covered:,} elements of {entry.shape}. Of a tiled layer this is what is left where some tiles have "
                    "never been stepped (their p.grad was None): drop the gradients of all tiles of a layer, or of none."
                )
        self.tensors, self.text, self._made_of = tensors, _json(_tensors_json(dict(sorted(tensors.items())))), ()
        self.digests = digests

    def metadata(self, manifest: Manifest) -> bytes:
        """Return the content of `.metadata`. It is cached, since making it takes longer than writing it.

        DCP gets one tensor for each name of a tied parameter, over the same blobs.
        """
        files = [file.name for file in manifest.files]
        made_of = (self.digests, files, manifest.objects, manifest.ties)
        if self._made_of == made_of:
            return self.last_metadata
        aliases = {
            f"model.{alias}": replace(manifest.tensors[f"model.{first}"], keys=("model", alias))
            for alias, first in manifest.ties.items()
            if f"model.{first}" in manifest.tensors  # absent if it is frozen and was left out
        }
        tensors = (
            (name, t.keys, t.dtype, t.shape, [(b.box, files[b.file], b.offset, b.nbytes) for b in t.boxes])
            for name, t in {**manifest.tensors, **aliases}.items()
        )
        objects = []
        for name, at in manifest.objects.items():
            head, _, rest = name.partition(".")  # the path in nested state dicts: 'optim.param_groups' -> optim, param_groups
            keys: tuple[str, ...] = (head, rest)
            if name.startswith("optim.state."):
                parameter, _, key = rest.removeprefix("state.").rpartition(".")
                keys = ("optim", "state", parameter, key)
            objects.append((name, keys, files[at.file], at.offset, at.nbytes))
        self.last_metadata, self._made_of = dcp.metadata_of(tensors, objects), made_of
        return self.last_metadata


def join(parts: list[bytes], facts: dict[str, Any], listed: Listed) -> Manifest:
    """Return the manifest made of all ranks' parts."""
    read = [json.loads(part) for part in parts]
    files = [FileEntry(part["file"][0], part["file"][1], tuple(part["file"][2])) for part in read]  # file number = rank
    manifest = Manifest(facts, files, listed.tensors, {})
    for number, part in enumerate(read):
        manifest.ties |= part["ties"]
        for name, (offset, nbytes) in part["objects"].items():
            manifest.objects[name] = ObjectEntry(number, offset, nbytes)
    manifest.scalars = sorted({key for part in read for key in part["scalars"]})
    manifest.frozen = {name: list(astuple(identity)) for name, identity in totals(part["frozen"] for part in read).items()}
    return manifest


def write_metadata(folder: Path, metadata: bytes) -> None:
    """Write `.metadata`, and wait until its content is on the disk."""
    path = folder / ".metadata"
    path.write_bytes(metadata)
    sync(path)


def write(folder: Path, manifest: Manifest, listed: Listed, ahead: bytes = b"") -> None:
    """Write `.metadata`, unless it has been written with the content `ahead`, then `manifest.json`. The caller syncs the folder."""
    metadata = listed.metadata(manifest)
    if metadata != ahead:
        write_metadata(folder, metadata)
    manifest.files.append(FileEntry(".metadata", len(metadata), tuple(digests_of(metadata))))
    write_whole(folder / MANIFEST, manifest.to_json(listed.text), named=False)
