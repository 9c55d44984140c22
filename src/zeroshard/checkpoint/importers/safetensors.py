"""Safetensors files and their indices, as Hugging Face writes them: find the file that has each tensor.

    model.safetensors                                       one file, or
    model-00001-of-00002.safetensors, ...                   several, and
    model.safetensors.index.json                            {weight_map: {name: file}}

If there is an index, other files are ignored: they may be of an earlier save, or variants. pytorch_model.bin has such an index,
too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from ...errors import CheckpointCorrupt, CheckpointError
from ...state import Stored, StoredTensor
from ..safetensors import FOREIGN_DTYPES, SAFETENSORS_DTYPES, elements_of
from ..source import Opened

T = TypeVar("T")


def open_safetensors(root: Path) -> Opened:
    """Open a safetensors file, the files of an index, or a folder; in one with an index, only files that this names.

    Raises CheckpointError if a folder has several models.
    """
    index = root if is_index(root) else None
    if root.is_dir():
        found, whole = sorted(root.glob("*.safetensors.index.json")), root / "model.safetensors"
        if len(found) > 1:
            found = [each for each in found if each.name == "model.safetensors.index.json"] or found
        if len(found) > 1:
            raise CheckpointError(f"{root} holds two models, {found[0].name} and {found[1].name}: name the one that is meant.")
        if found and whole.is_file() and whole not in read_index(found[0]).values():
            raise CheckpointError(f"{root} holds two models, {whole.name} and {found[0].name}: name the file that is meant.")
        index = found[0] if found else None
    wanted = {} if index is None else read_index(index)
    files = [root] if root.is_file() else sorted(root.glob("*.safetensors"))
    if index is not None:
        files = sorted(set(wanted.values()))
    if not files:
        raise FileNotFoundError(f"weights={str(root)!r}: expected a .safetensors file or a folder of them.")
    return Opened(root, "safetensors", merged({file: _tensors_of(file) for file in files}, wanted))


def is_index(path: Path) -> bool:
    """Return whether a path is a Hugging Face index {weight_map: {name: file}}, by its name."""
    return path.name.endswith(".index.json") and path.is_file()


def read_index(index: Path) -> dict[str, Path]:
    """Return tensor name -> file of an index. Raises CheckpointCorrupt if a file is missing."""
    wanted = {name: index.parent / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    for file in sorted(set(wanted.values())):
        if not file.is_file():
            raise CheckpointCorrupt(str(file), 0, f"a file that {index.name} names", "no file")
    return wanted


def merged(parts: Mapping[Path, Mapping[str, T]], wanted: dict[str, Path]) -> dict[str, T]:
    """Merge the entries of several files. wanted: the index: name -> file to take it from, if several files have it.

    Raises CheckpointError if several files have a name and the index does not.
    """
    found: dict[str, T] = {}
    holders: dict[str, Path] = {}
    for file, part in parts.items():
        for name, value in part.items():
            chosen = wanted.get(name)
            if chosen != file and name in parts.get(chosen, ()):  # type: ignore[arg-type]
                continue
            if name in holders:
                raise CheckpointError(
                    f"{name} is in two files, {holders[name]} and {file.name}, and no index says which one counts: name the file "
                    "that is meant, or remove the other."
                )
            holders[name], found[name] = file, value
    return found


def _tensors_of(file: Path) -> dict[str, Stored]:
    """Return the tensors of one safetensors file, by each of their names. Raises OSError (truncated), CheckpointError."""
    with open(file, "rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        header = json.loads(handle.read(length))
    ends = [8 + length + entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    if file.stat().st_size < max(ends, default=0):
        raise OSError(f"{file}: expected {max(ends)} bytes, got {file.stat().st_size}: truncated file")
    stored: dict[str, Stored] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        (begin, end), kind = entry["data_offsets"], entry["dtype"]
        if kind not in SAFETENSORS_DTYPES:
            known = "which torch has no dtype for" if kind in FOREIGN_DTYPES else "which is none of the format's dtypes"
            raise CheckpointError(
                f"{file}: {name} is {kind}, {known}; nothing was changed. Convert it to one of {', '.join(SAFETENSORS_DTYPES)}."
            )
        shape = elements_of(kind, tuple(entry["shape"]), 0.5)
        stored[name] = StoredTensor(file, 8 + length + begin, end - begin, SAFETENSORS_DTYPES[kind], shape)
    for name, first in header.get("__metadata__", {}).items():  # ties: other names of a tensor
        if first in header and name not in header:
            stored[name] = stored[first]
    return stored
