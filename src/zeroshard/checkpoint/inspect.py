"""Facts about checkpoints: `zs.inspect_checkpoint` returns them, and `zeroshard inspect` prints them."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound
from ..state import Stored
from . import directory
from . import state_map as holding
from .importers import open_foreign, recognise
from .manifest import Manifest
from .resolver import Alone, agreed, check_digests, check_sizes, owner_of

HOLD, UNCHECKED, NONE, DAMAGED, UNREADABLE = "hold", "not verified", "the format has none", "damaged", "unreadable"
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError)  # raised while reading a manifest with wrong entries


@dataclass(frozen=True)
class Inspection:
    """The content of one checkpoint, a result of `zs.inspect_checkpoint`.

    Attributes:
        kind: "zeroshard", or the name of another library's format, for which some attributes are unknown.
        numel: elements of all parameters and buffers.
        kinds: bytes by kind: parameters with buffers, optimizer states, other.
        files: bytes by name of file.
        checksums: "hold", "not verified", "the format has none", "damaged", or "unreadable" (an I/O error, a newer version).
        damage: description of the damage, or "".
        facts: world size, stage, precision, optimizer, time and versions.
        ties: another name of a tensor -> the name under which it is stored.
    """

    path: str
    kind: str
    step: int
    numel: int
    tensors: int
    optimizer_tensors: int
    kinds: dict[str, int]
    files: dict[str, int]
    checksums: str
    damage: str
    facts: dict[str, Any]
    ties: dict[str, str]
    extras: tuple[str, ...] = ()
    trained_only: bool = False
    left_out: int = 0

    @property
    def nbytes(self) -> int:
        """Size of all files in bytes."""
        return sum(self.files.values())

    def to_dict(self) -> dict[str, Any]:
        """Return all facts in types that JSON has."""
        return {**asdict(self), "nbytes": self.nbytes}


def inspect_checkpoint(path: str | os.PathLike, *, name: str | None = None, verify: bool = True) -> list[Inspection]:
    """Describe the checkpoint `path`, or every complete checkpoint in the folder `path`, the oldest first, or only `name` in it.

    It runs in one process, without process group and device. Checkpoints that a running job removes meanwhile are left out.

    Args:
        verify: read all files and compare checksums. Damaged and unreadable files are reported in the result, not raised.

    Raises:
        CheckpointNotFound: there is no complete checkpoint.
        CheckpointError: the folder, or a file of another library, cannot be read.
    """
    where = Path(path)

    def look() -> list[Inspection]:
        if name is None and not (where / directory.MANIFEST).is_file():
            present = directory.complete(where)
            found = [one for one in (_inspect(folder, verify) for folder in present.values()) if one is not None]
            if found:
                return found
            if not present and recognise(where) is not None:
                return [_inspect_foreign(where)]
        folder = directory.find(where, name)
        one = _inspect(folder, verify)
        if one is None:
            raise CheckpointNotFound(f"{folder} was removed while it was read, as by a run with keep_last: inspect a later one.")
        return [one]

    return agreed(Alone(), "zs.inspect_checkpoint: reading", look, path)


def _inspect(folder: Path, verify: bool) -> Inspection | None:
    """Inspect a checkpoint of zs.save. Return None if it has been removed meanwhile."""
    checksums, damage, sizes = HOLD if verify else UNCHECKED, "", dict[str, int]()
    with suppress(OSError):  # the folder cannot be listed
        sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.is_file()}
    found = Inspection(str(folder), "zeroshard", -1, 0, 0, 0, {}, sizes, "", "", {}, {})  # if the manifest is not readable
    try:
        manifest = Manifest.read(folder)
        shapes = {name: (math.prod(entry.shape), entry.dtype.itemsize) for name, entry in manifest.tensors.items()}
        model = [shape for name, shape in shapes.items() if name.startswith(holding.MODEL)]
        states = [shape for name, shape in shapes.items() if name.startswith(holding.STATE)]
        extras = {owner_of(name, manifest.facts)[0] for name in manifest.objects if name.startswith(holding.EXTRA)}
        found = replace(
            found,
            step=int(manifest.facts["step"]),
            numel=sum(numel for numel, _ in model),
            tensors=len(model),
            optimizer_tensors=len(states),
            kinds=_kinds(model, states, sum(file.nbytes for file in manifest.files)),
            files={file.name: file.nbytes for file in manifest.files},
            facts={key: value for key, value in manifest.facts.items() if key not in ("step", "trained_only", "per_rank")},
            ties=manifest.ties,
            extras=tuple(sorted(extras)),
            trained_only=manifest.facts["trained_only"],
            left_out=len(manifest.frozen),
        )
        check_sizes(folder, manifest)
        if verify:
            check_digests(folder, manifest)
    except (CheckpointError, OSError) as error:
        if not (folder / directory.MANIFEST).exists():
            return None
        checksums, damage = DAMAGED if isinstance(error, CheckpointCorrupt) else UNREADABLE, str(error)
    except _MALFORMED as error:
        what = f"{type(error).__name__}: {error}"
        checksums, damage = UNREADABLE, f"{folder / directory.MANIFEST} can not be read by this version of zeroshard: {what}"
    return replace(found, checksums=checksums, damage=damage)


def _kinds(model: list[tuple[int, int]], states: list[tuple[int, int]], total: int) -> dict[str, int]:
    """Return bytes by kind. model, states: (elements, bytes of one element) of each tensor. total: bytes of all files."""
    of_model, of_states = (sum(numel * size for numel, size in tensors) for tensors in (model, states))
    return {"parameters": of_model, "optimizer states": of_states, "other": max(total - of_model - of_states, 0)}


def _inspect_foreign(path: Path) -> Inspection:
    opened = open_foreign(path)
    found = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    files = {file.name if path.is_file() else str(file.relative_to(path)): file.stat().st_size for file in found}
    ties = opened.tied()
    model = [(math.prod(t.shape), t.dtype.itemsize) for name, t in opened.model.items() if name not in ties]
    every = [t for state in opened.states.values() for t in state.values() if isinstance(t, Stored)]
    states = [(math.prod(t.shape), t.dtype.itemsize) for t in every]
    facts = {key: value for key, value in opened.facts.items() if key != "step"}
    numel, kinds = sum(count for count, _ in model), _kinds(model, states, sum(files.values()))
    return Inspection(str(path), opened.kind, opened.step, numel, len(model), len(states), kinds, files, NONE, "", facts, ties)
