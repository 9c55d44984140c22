"""Finding, verifying and opening a checkpoint, on all ranks: one of ours, or of another library (foreign/)."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from torch import nn

from .. import weights
from ..comm.base import Comm
from ..errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, ZeroshardError
from ..unit import ParamSpec
from . import contents as holding
from . import folder as places
from .bulk import Bulk
from .datafile import DIGEST_NBYTES
from .foreign import RECOGNISED, open_foreign, recognise
from .manifest import Manifest, ObjectEntry
from .opened import Opened
from .stored import Stored, stored_tensors

_READ_NBYTES = 4 << 20
T = TypeVar("T")


def agreed(comm: Comm | Alone, label: str, action: Callable[[], T]) -> T:
    """Carry out an action; if it raises one of our errors or OSError on one rank, every rank raises that (collective)."""
    problem, result = None, None
    try:
        result = action()
    except (ZeroshardError, OSError) as error:
        problem = error
    everyone = [pickle.loads(part) for part in comm.exchange(pickle.dumps(problem), label)]
    found = next((p for p in everyone if p is not None), None)
    if found is not None:
        raise found
    return result  # type: ignore[return-value]


def open_checkpoint(comm: Comm | Alone, path: str | os.PathLike, name: str | None) -> tuple[Path, Manifest]:
    """The checkpoint that rank 0 finds, and its manifest (collective)."""
    found: Path | None = None

    def find() -> None:
        nonlocal found
        if comm.rank == 0:
            found = places.find(Path(path), name)

    agreed(comm, "zs.load: find", find)
    folder = pickle.loads(comm.exchange(pickle.dumps(found), "zs.load: which")[0])
    return folder, agreed(comm, "zs.load: manifest", lambda: hinted(folder, lambda: Manifest.read(folder)))


def hinted(folder: Path, action: Callable[[], T]) -> T:
    """Where a file is damaged, name the checkpoint before."""
    try:
        return action()
    except CheckpointCorrupt as error:
        earlier = places.previous(folder)
        hint = f"The complete checkpoint before it: {earlier}" if earlier is not None else "There is none before it"
        raise CheckpointCorrupt(error.file, error.offset, error.expected, error.actual, f"{hint}.") from None


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise CheckpointCorrupt where a file is missing or truncated."""

    def check() -> None:
        for file in manifest.files:
            try:
                nbytes = (folder / file.name).stat().st_size
            except FileNotFoundError:
                raise CheckpointCorrupt(str(folder / file.name), 0, f"{file.nbytes:,} bytes", "no file") from None
            if nbytes != file.nbytes:
                at = min(nbytes, file.nbytes)
                raise CheckpointCorrupt(str(folder / file.name), at, f"{file.nbytes:,} bytes", f"{nbytes:,} bytes")

    hinted(folder, check)


def check_digests(folder: Path, manifest: Manifest, rank: int = 0, world_size: int = 1, small: bool = False) -> int:
    """Compare the checksums of this rank's share of all blocks; bytes read. Raises CheckpointCorrupt.

    small: only of those with plain values and numbers, which are read one by one; `Bulk` sees to the others.
    """
    blocks = [(file, number) for file in manifest.files for number in range(len(file.digests))]
    if small:
        wanted = _small_blocks(manifest)
        blocks = [(file, number) for file, number in blocks if (file.name, number) in wanted]
    mine = blocks[len(blocks) * rank // world_size : len(blocks) * (rank + 1) // world_size]

    def check() -> int:
        total, buffer, at = 0, memoryview(bytearray(_READ_NBYTES)), 0
        per_read = _READ_NBYTES // DIGEST_NBYTES
        while at < len(mine):
            file, first = mine[at]
            count = 1
            while count < per_read and at + count < len(mine) and mine[at + count][0] is file:
                count += 1
            digests = file.digests[first : first + count]
            total += _check_blocks(folder / file.name, digests, first * DIGEST_NBYTES, file.nbytes, buffer)
            at += count
        return total

    return hinted(folder, check)


def _small_blocks(manifest: Manifest) -> set[tuple[str, int]]:
    """(file, number) of every block with bytes of objects, or of tensors of one element or none."""
    stretches = [(o.file, o.offset, o.nbytes) for o in manifest.objects.values()]
    for name, entry in manifest.tensors.items():
        if torch.Size(entry.shape).numel() <= 1 or name.endswith("_extra_state"):
            stretches += [(box.file, box.offset, box.nbytes) for box in entry.boxes]
    return {
        (manifest.files[file].name, number)
        for file, offset, nbytes in stretches
        for number in range(offset // DIGEST_NBYTES, (offset + nbytes - 1) // DIGEST_NBYTES + 1)
    } | {(".metadata", number) for file in manifest.files if file.name == ".metadata" for number in range(len(file.digests))}


def _check_blocks(path: Path, digests: tuple[str, ...], offset: int, file_nbytes: int, buffer: memoryview) -> int:
    nbytes = min(len(digests) * DIGEST_NBYTES, file_nbytes - offset)
    with open(path, "rb", buffering=0) as file:
        got = 0
        while got < nbytes:
            count = os.preadv(file.fileno(), [buffer[got:nbytes]], offset + got)
            if count == 0:
                raise CheckpointCorrupt(str(path), offset + got, f"{file_nbytes:,} bytes", f"{offset + got:,} bytes")
            got += count
    for number, expected in enumerate(digests):
        begin = number * DIGEST_NBYTES
        actual = xxhash.xxh3_64_hexdigest(buffer[begin : min(begin + DIGEST_NBYTES, nbytes)])
        if actual != expected:
            raise CheckpointCorrupt(str(path), offset + begin, f"checksum {expected}", f"checksum {actual}")
    return nbytes


def read_object(folder: Path, manifest: Manifest, entry: ObjectEntry, trusted: bool = False) -> Any:
    """A plain value. Raises CheckpointError where it is of a class that torch does not load by itself."""
    path = folder / manifest.files[entry.file].name
    with open(path, "rb") as file:
        file.seek(entry.offset)
        content = io.BytesIO(file.read(entry.nbytes))
    try:
        return torch.load(content, map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: an object of a class that is not loaded without your word: pass trusted=True if you trust whoever wrote "
            f"this checkpoint ({str(error).splitlines()[0]})"
        ) from None


def is_foreign(path: Path) -> bool:
    """Whether a checkpoint of another library lies there, and none of ours."""
    return not (path / places.MANIFEST).is_file() and not places.complete(path) and recognise(path) is not None


class Alone:
    """What `open_any` asks of its ranks, for a process by itself: no process group, no device."""

    rank, world_size = 0, 1

    def exchange(self, message: bytes, label: str) -> list[bytes]:
        """What all ranks sent."""
        return [message]


def open_any(
    comm: Comm | Alone, path: str | os.PathLike, name: str | None = None, *,
    verify: bool = True, trusted: bool = False, values: bool = True, bulk: Callable[[Manifest], bool] = lambda manifest: False,
) -> Opened:  # fmt: skip
    """Whatever rank 0 finds (collective). verify, values: as for ours (`open_own`); other formats have no checksums.

    bulk: whether tensors will be read by `Opened.bulk`, which verifies them: then they are not read beforehand.

    Raises CheckpointNotFound, CheckpointCorrupt, CheckpointError.
    """
    foreign: Path | None = None

    def look() -> None:
        nonlocal foreign
        if comm.rank == 0 and name is None and is_foreign(Path(path)):
            foreign = Path(path)

    agreed(comm, "zs.load: look", look)
    where = pickle.loads(comm.exchange(pickle.dumps(foreign), "zs.load: what is it")[0])
    if where is not None:
        return agreed(comm, "zs.load: open", lambda: open_foreign(where, trusted))
    folder, manifest = open_checkpoint(comm, path, name)
    agreed(comm, "zs.load: sizes", lambda: check_sizes(folder, manifest))
    in_bulk = verify and bulk(manifest)
    if verify:
        agreed(comm, "zs.load: checksums", lambda: check_digests(folder, manifest, comm.rank, comm.world_size, in_bulk))
    opened = agreed(comm, "zs.load: open", lambda: open_own(folder, manifest, comm.rank, comm.world_size, trusted, values))
    opened.bulk = Bulk(folder, manifest) if in_bulk else None
    return opened


def open_weights(comm: Comm, path: str | os.PathLike, model: nn.Module, specs: list[ParamSpec]) -> dict[str, Stored]:
    """Parameters and buffers of any checkpoint under the names that a model has (collective). Raises as `open_any`."""
    try:
        opened = open_any(comm, path, values=False)
    except CheckpointNotFound as error:
        what = f"expected a .safetensors file or a folder of them, a checkpoint of zs.save, or {RECOGNISED}"
        raise CheckpointNotFound(f"weights={str(path)!r}: {what}. {error}") from None
    prefixes = weights.prefixes_of(model)
    names = {name for spec in specs for name in weights.names_of(prefixes, spec)}
    opened.fit(names | dict(model.named_buffers()).keys())
    return opened.model


def open_own(
    folder: Path, manifest: Manifest, rank: int = 0, world_size: int = 1, trusted: bool = False, values: bool = True
) -> Opened:
    """One of ours, for one of `world_size` ranks. values: also what is no tensor (groups, extras, ...)."""
    opened = Opened(folder, "zeroshard", {}, step=int(manifest.facts["step"]), facts=manifest.facts, ties=manifest.ties)
    opened.optimizer, opened.trained_only = manifest.facts["optimizer"], manifest.facts["trained_only"]
    opened.frozen = manifest.frozen
    for name, stored in stored_tensors(folder, manifest).items():
        if name.startswith(holding.MODEL):
            opened.model[name.removeprefix(holding.MODEL)] = stored
        elif name.startswith(holding.STATE):
            *_, parameter, key = manifest.tensors[name].keys
            opened.states.setdefault(parameter, {})[key] = stored
    for alias, first in manifest.ties.items():
        if first in opened.model:
            opened.model.setdefault(alias, opened.model[first])
    for name in manifest.objects:
        short = name.removeprefix(holding.EXTRA)
        if short != name and short.rpartition(".")[0] not in manifest.facts["per_rank"]:
            opened.shared_extras[short] = partial(read_object, folder, manifest, manifest.objects[name], trusted)
    if values:
        _add_values(opened, manifest, rank, world_size, trusted)
    return opened


def _add_values(opened: Opened, manifest: Manifest, rank: int, world_size: int, trusted: bool) -> None:
    objects, same = manifest.objects, world_size == manifest.facts["world_size"]
    read = lambda name: read_object(opened.path, manifest, objects[name], trusted)  # noqa: E731
    opened.per_rank = frozenset() if same else frozenset(manifest.facts["per_rank"])
    opened.progress, opened.generators = read(holding.OWN), read(f"{holding.RNG}{rank if same else 0}")
    for name in objects:
        if name == holding.GROUPS:
            opened.groups = read(name)
        elif name.startswith(holding.MODEL):
            opened.module_objects[name.removeprefix(holding.MODEL)] = read(name)
        elif name.startswith(holding.STATE):
            parameter, _, key = name.removeprefix(holding.STATE).rpartition(".")
            opened.states.setdefault(parameter, {})[key] = read(name)
        elif name.startswith(holding.EXTRA):
            short = name.removeprefix(holding.EXTRA)
            stem, _, owner = short.rpartition(".")
            if short in opened.shared_extras:
                opened.extras[short] = opened.shared_extras[short]()
            elif same and owner == str(rank):
                opened.extras[stem] = read(name)
