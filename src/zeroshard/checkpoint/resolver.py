"""Find, verify and open a checkpoint on all ranks: one of zs.save, or of another library (importers/)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ..errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, CheckpointReadError, ModelMismatch, ZeroshardError
from ..formats import labelled_column
from ..seam import DirectComm, NamedPart, exchange_values, overlap
from ..state import Stored, StoredBoxes, StoredCoded, StoredTensor
from . import directory, module_state, safetensors
from . import state_map as holding
from .file_writer import DIGEST_NBYTES, compare_digests
from .heartbeat import together
from .importers import RECOGNISED, open_foreign, recognise
from .manifest import FileEntry, Manifest
from .source import Opened, Untrusted, load_object

LOOKS = 5  # attempts to open a checkpoint: a running job may remove it meanwhile, and then the next one is opened
_READ_NBYTES = 4 << 20
T = TypeVar("T")


def agreed(comm: DirectComm | Alone, label: str, action: Callable[[], T], path: str | os.PathLike = "") -> T:
    """Run `action`, which may take one rank minutes, on all ranks; if it raises on one rank, every rank raises (collective).

    The action must not use `comm` (see `together`). Ranks raise a ZeroshardError unchanged, an OSError as CheckpointReadError,
    and any other error as a CheckpointError with the rank and the reason. path: the checkpoint that is read, for messages.
    """
    results: list[T] = []
    rank = comm.rank if comm.world_size > 1 else None

    def work() -> None:
        try:
            results.append(action())
        except CheckpointReadError as error:
            if rank is None:
                raise
            raise CheckpointReadError(error.file, error.offset, error.errno, error.reason, rank) from error
        except ZeroshardError:
            raise
        except OSError as error:
            raise CheckpointReadError(error.filename or path, None, error.errno, error.strerror or str(error), rank) from error
        except Exception as error:
            doing, who = label.partition(": ")[2] or label, "" if rank is None else f"rank {rank}, "
            what = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            which = path or "a checkpoint"
            raise CheckpointError(f"{which} could not be read ({who}at: {doing}): {what}; nothing was changed.") from error

    together(comm, label, work)  # type: ignore[arg-type]
    return results[0]


def find_checkpoint(comm: DirectComm | Alone, path: str | os.PathLike, name: str | None) -> Path:
    """Return the folder of the checkpoint that rank 0 finds (collective)."""

    def find() -> tuple[Path | None, str]:
        if comm.rank != 0:
            return None, ""
        try:
            found = directory.find(Path(path), name)
        except CheckpointNotFound:  # a listing may miss a checkpoint that has just replaced a removed one: look again
            found = directory.find(Path(path), name)
        return found, directory.passed_over(Path(path), found) if name is None and found != Path(path) else ""

    found, passed_over = agreed(comm, "zs.load: find", find, path)
    if passed_over:
        print(f"zeroshard: {passed_over}", file=sys.stderr)
    return Path(exchange_values(comm, str(found), "zs.load: which")[0])


@contextmanager
def hinted(folder: Path) -> Iterator[None]:
    """Add the name of the checkpoint before this one to the message of a CheckpointCorrupt that is raised inside."""
    try:
        yield
    except CheckpointCorrupt as error:
        earlier = directory.previous(folder)
        hint = f"The complete checkpoint before it: {earlier}" if earlier is not None else "There is none before it"
        raise CheckpointCorrupt(error.file, error.offset, error.expected, error.actual, f"{hint}.") from None


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise CheckpointCorrupt if a file is missing or truncated."""
    for file in manifest.files:
        with hinted(folder):
            try:
                nbytes = (folder / file.name).stat().st_size
            except FileNotFoundError:
                raise CheckpointCorrupt(str(folder / file.name), 0, f"{file.nbytes:,} bytes", "no file") from None
            if nbytes != file.nbytes:
                at = min(nbytes, file.nbytes)
                raise CheckpointCorrupt(str(folder / file.name), at, f"{file.nbytes:,} bytes", f"{nbytes:,} bytes")


def check_digests(folder: Path, manifest: Manifest, rank: int = 0, world_size: int = 1, small: bool = False) -> None:
    """Compare the checksums of this rank's share of all blocks. Raises CheckpointCorrupt.

    small: only the blocks with plain values and single numbers, which are read one by one; `Bulk` verifies the others.
    """
    whole = [(number, 0, file.nbytes) for number, file in enumerate(manifest.files)]
    blocks = _small_blocks(manifest) if small else _blocks(manifest, whole)
    _check(folder, blocks[len(blocks) * rank // world_size : len(blocks) * (rank + 1) // world_size])


def check_tensors(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare the checksums of all blocks of some tensors, which are about to be read one by one. Raises CheckpointCorrupt."""
    boxes = [box for name in names for box in manifest.tensors[name].boxes]
    _check(folder, _blocks(manifest, [(box.file, box.offset, box.nbytes) for box in boxes]))


def _check(folder: Path, blocks: list[tuple[FileEntry, int]]) -> None:
    """Compare the checksums of blocks, (file, number), some MiB in one read. Raises CheckpointCorrupt."""
    buffer, at = memoryview(bytearray(min(_READ_NBYTES, len(blocks) * DIGEST_NBYTES))), 0
    per_read = _READ_NBYTES // DIGEST_NBYTES
    while at < len(blocks):
        file, first = blocks[at]
        count = 1
        while count < per_read and at + count < len(blocks) and blocks[at + count] == (file, first + count):
            count += 1
        with hinted(folder):
            _check_blocks(folder / file.name, file, first, count, buffer)
        at += count


def _small_blocks(manifest: Manifest) -> list[tuple[FileEntry, int]]:
    """Return every block that the comparison with the model reads, and all blocks of `.metadata`, which it does not.

    They hold bytes of objects, of tensors of at most one element, or of optimizer states that lack their parameter's shape.
    """
    stretches = [(o.file, o.offset, o.nbytes) for o in manifest.objects.values()]
    stretches += [(number, 0, file.nbytes) for number, file in enumerate(manifest.files) if file.name == ".metadata"]
    for name, entry in manifest.tensors.items():
        small = torch.Size(entry.shape).numel() <= 1 or safetensors.is_extra_state(name)
        if not small and name.startswith(holding.STATE):  # a state without one value for each element (step, ...)
            *_, parameter, key = entry.keys
            of = manifest.tensors.get(f"{holding.MODEL}{parameter}")
            encoded = holding.CODED in key
            small = key in (manifest.scalars or ()) or of is None or (of.shape != entry.shape and not encoded)
        if small:
            stretches += [(box.file, box.offset, box.nbytes) for box in entry.boxes]
    return _blocks(manifest, stretches)


def _blocks(manifest: Manifest, stretches: list[tuple[int, int, int]]) -> list[tuple[FileEntry, int]]:
    """Return (file, number), in order, of every block that overlaps one of the stretches (number of a file, offset, nbytes)."""
    found = {
        (file, number)
        for file, offset, nbytes in stretches
        for number in range(offset // DIGEST_NBYTES, (offset + nbytes - 1) // DIGEST_NBYTES + 1)
    }
    return [(manifest.files[file], number) for file, number in sorted(found)]


def _check_blocks(path: Path, entry: FileEntry, first: int, count: int, buffer: memoryview) -> None:
    offset = first * DIGEST_NBYTES
    nbytes = min(count * DIGEST_NBYTES, entry.nbytes - offset)
    with open(path, "rb", buffering=0) as file:
        got = 0
        while got < nbytes:
            try:
                read = os.preadv(file.fileno(), [buffer[got:nbytes]], offset + got)
            except OSError as error:
                raise CheckpointReadError(path, offset + got, error.errno, error.strerror or str(error)) from error
            if read == 0:
                raise CheckpointCorrupt(str(path), offset + got, f"{entry.nbytes:,} bytes", f"{offset + got:,} bytes")
            got += read
    compare_digests(path, entry.digests, offset, buffer[:nbytes])


def read_object(folder: Path, manifest: Manifest, name: str, trusted: bool = False) -> Any:
    """Read a plain value of a checkpoint.

    Raises Untrusted if it is of a class that torch.load(weights_only=True) refuses; CheckpointCorrupt, CheckpointError.
    """
    entry = manifest.objects[name]
    path = folder / manifest.files[entry.file].name
    try:
        return load_object(path, entry.offset, entry.nbytes, name, trusted)
    except OSError:
        raise
    except Exception as error:
        _check(folder, _blocks(manifest, [(entry.file, entry.offset, entry.nbytes)]))  # damage is the better reason
        if isinstance(error, Untrusted):
            raise
        reason = (str(error).splitlines() or [""])[0]
        raise CheckpointError(f"{path}: {name} can not be loaded: {type(error).__name__}: {reason}") from error


class Alone:
    """Stand-in for a Comm of one rank, for `open_any` in a process without process group and device."""

    rank, world_size, failure = 0, 1, None

    def exchange(self, message: bytes, label: str) -> list[bytes]:
        """Return the messages of all ranks."""
        return [message]


def open_any(
    comm: DirectComm | Alone, path: str | os.PathLike, name: str | None = None, *,
    verify: bool = True, trusted: bool = False, values: bool = True,
) -> Opened:  # fmt: skip
    """Open the checkpoint that rank 0 finds, of zs.save or of another library (collective). Arguments: see `use_any`."""
    return use_any(comm, path, name, lambda opened: opened, verify=verify, trusted=trusted, values=values)


def use_any(
    comm: DirectComm | Alone, path: str | os.PathLike, name: str | None, use: Callable[[Opened], T], *,
    verify: bool | str = True, trusted: bool = False, values: bool = True, mesh: Mapping[str, object] | None = None,
) -> T:  # fmt: skip
    """Open the checkpoint that rank 0 finds, of zs.save or of another library, and return what `use` makes of it (collective).

    If a run removes the checkpoint while it is opened or used, the next one is opened, and `use` called with that.

    verify: compare all checksums; "small": of small blocks only, since the caller verifies the others (bulk_reader.py, or
        `check_digests`). Other formats have none. values: see `open_own`.
    mesh: the ranks' mesh (`Topology.mesh`). Per-rank states (extras, random generators) are restored only if the saved mesh
        is equal to it.

    Raises CheckpointNotFound, CheckpointCorrupt, CheckpointError.
    """

    def look() -> str | None:
        where = Path(path)
        if comm.rank == 0 and name is None and not (where / directory.MANIFEST).is_file() and not directory.complete(where):
            return str(where) if recognise(where) is not None else None
        return None

    told = exchange_values(comm, agreed(comm, "zs.load: look", look, path), "zs.load: what is it")[0]
    if told is not None:
        where = Path(told)
        return use(agreed(comm, "zs.load: open", lambda: open_foreign(where, trusted).unwrapped(), where))
    for looks in range(LOOKS, 0, -1):
        folder = find_checkpoint(comm, path, name)
        try:
            return use(_open_found(comm, folder, verify, trusted, values, mesh))
        except CheckpointError:
            if looks == 1 or comm.failure is not None:
                raise
            gone = comm.rank == 0 and folder != Path(path) and not (folder / directory.MANIFEST).exists()
            if not comm.exchange(b"1" if gone else b"", "zs.load: is it still there")[0]:
                raise
    raise AssertionError("the last look returns or raises")


def _open_found(
    comm: DirectComm | Alone, folder: Path, verify: bool | str, trusted: bool, values: bool, mesh: Mapping[str, object] | None,
) -> Opened:  # fmt: skip
    """Open a checkpoint of zs.save after checking its sizes and (verify) checksums (collective)."""

    def read() -> Manifest:
        with hinted(folder):
            return Manifest.read(folder)

    manifest = agreed(comm, "zs.load: manifest", read, folder)
    agreed(comm, "zs.load: sizes", lambda: check_sizes(folder, manifest), folder)
    ranks = comm.rank, comm.world_size
    if verify:
        agreed(comm, "zs.load: checksums", lambda: check_digests(folder, manifest, *ranks, verify == "small"), folder)
    return agreed(comm, "zs.load: open", lambda: open_own(folder, manifest, *ranks, trusted, values, mesh).unwrapped(), folder)


def open_weights(
    comm: DirectComm, peers: DirectComm, path: str | os.PathLike, model: nn.Module, parts: list[NamedPart]
) -> tuple[dict[str, Stored], dict[str, Stored]]:
    """Open the weights of any checkpoint for a model (collective).

    Return stored parameters and buffers under the model's names, and for each parameter name this rank's part of it.

    parts: the model's parameters. peers: ranks of `comm` that have the same part of the model. Raises as `open_any`, and ModelMismatch.
    """
    try:
        opened = open_any(comm, path, values=False)
    except CheckpointNotFound as error:
        what = f"expected a .safetensors file or a folder of them, a checkpoint of zs.save, or {RECOGNISED}"
        raise CheckpointNotFound(f"weights={str(path)!r}: {what}. {error}") from None
    opened.fit(module_state.names_in(model, parts))
    stored = opened.model
    for buffer in safetensors.others_of(model)[0]:
        if (at := buffer.stored_in(stored)) is not None:
            stored |= dict.fromkeys(buffer.names, at)

    def check() -> dict[str, Stored]:
        fit = module_state.compare(model, parts, stored, peers, computes=False)  # hooks make that from the parameters
        if lines := fit.lines([name for name in stored if name not in fit.used]):
            raise ModelMismatch(f"weights do not fit the model ({len(lines)} problems): {'; '.join(lines[:10])}")
        return fit.found

    return stored, agreed(comm, "zs.shard: weights", check, path)


def open_own(
    folder: Path, manifest: Manifest, rank: int = 0, world_size: int = 1, trusted: bool = False, values: bool = True,
    mesh: Mapping[str, object] | None = None,
) -> Opened:  # fmt: skip
    """Open a checkpoint of zs.save for one of `world_size` ranks. values: also read plain values (groups, extras, ...)."""
    opened = Opened(folder, "zeroshard", {}, step=int(manifest.facts["step"]), facts=manifest.facts, ties=manifest.ties)
    opened.manifest = manifest
    opened.optimizer, opened.trained_only = manifest.facts["optimizer"], manifest.facts["trained_only"]
    opened.frozen, opened.scalars = manifest.frozen, manifest.scalars
    paths = [folder / file.name for file in manifest.files]
    for name, entry in manifest.tensors.items():
        boxes = [
            (b.box, StoredTensor(paths[b.file], b.data, b.box.numel * entry.dtype.itemsize, entry.dtype, b.box.sizes))
            for b in entry.boxes
        ]
        if (twice := overlap(box for box, _ in boxes)) is not None:  # the number of elements was checked with the manifest
            once, found = f"every element of {name} once", f"element {next(twice.rows(entry.shape))[0]} twice"
            raise CheckpointCorrupt(str(folder / directory.MANIFEST), 0, once, found)
        stored = StoredBoxes(entry.dtype, entry.shape, boxes)
        if name.startswith(holding.MODEL):
            opened.model[name.removeprefix(holding.MODEL)] = stored
        elif name.startswith(holding.STATE):
            *_, parameter, key = entry.keys
            opened.states.setdefault(parameter, {})[key.partition(holding.CODED)[0]] = _decoded(
                stored, folder, manifest, parameter, key
            )
        elif name.startswith(holding.SLICES):
            _, extra, parameter = entry.keys
            opened.slices.setdefault(extra, {})[parameter] = stored
    for alias, first in manifest.ties.items():
        if first in opened.model:
            opened.model.setdefault(alias, opened.model[first])
    for name in manifest.objects:
        reader = partial(read_object, folder, manifest, name, trusted)
        if name.startswith(holding.MODEL):
            opened.module_readers[name.removeprefix(holding.MODEL)] = reader
        elif name.startswith(holding.EXTRA) and owner_of(name, manifest.facts)[1] is None:
            opened.shared_extras[name.removeprefix(holding.EXTRA)] = reader
    if values:
        opened.same_ranks = world_size == manifest.facts["world_size"] and mesh == manifest.facts.get("mesh")
        _add_values(opened, manifest, rank, trusted)
    return opened


def _decoded(stored: Stored, folder: Path, manifest: Manifest, parameter: str, key: str) -> Stored:
    """Return an optimizer state with its values; one that was saved encoded has the label of its encoding in its key.

    Raises CheckpointError for an encoding that is not known, CheckpointCorrupt where the bytes are not those of the parameter's blocks.
    """
    name, coded, label = key.partition(holding.CODED)
    if not coded:
        return stored
    path, shape = folder / directory.MANIFEST, manifest.tensors[f"{holding.MODEL}{parameter}"].shape
    try:
        column = labelled_column(name, label)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: {parameter}: {error}: update zeroshard, or load another checkpoint (name=); nothing was changed."
        ) from None
    nbytes = column.nbytes(torch.Size(shape).numel(), torch.float32)
    if (stored.dtype, stored.numel) != (torch.uint8, nbytes):
        wanted = f"{nbytes:,} bytes of {name} of {parameter} in blocks of {column.elements} ({label})"
        with hinted(folder):
            raise CheckpointCorrupt(str(path), 0, wanted, f"{stored.numel:,} elements of {stored.dtype}")
    return StoredCoded(stored, column, shape)


def _add_values(opened: Opened, manifest: Manifest, rank: int, trusted: bool) -> None:
    objects, same = manifest.objects, opened.same_ranks
    read = lambda name: read_object(opened.path, manifest, name, trusted)  # noqa: E731
    opened.per_rank = frozenset() if same else frozenset(manifest.facts["per_rank"])
    opened.progress, opened.generators = read(holding.OWN), read(f"{holding.RNG}{rank if same else 0}")
    for name in objects:
        if name == holding.GROUPS:
            opened.groups = read(name)
        elif name.startswith(holding.STATE):
            parameter, _, key = name.removeprefix(holding.STATE).rpartition(".")
            opened.states.setdefault(parameter, {})[key] = read(name)
        elif name.startswith(holding.EXTRA):
            stem, owner = owner_of(name, manifest.facts)
            if owner is None or (same and owner == rank):
                try:
                    opened.extras[stem] = read(name)
                except Untrusted as error:  # raised later, if somebody asks for it
                    opened.unread[stem] = error
    opened.module_objects = {name: reader() for name, reader in opened.module_readers.items()}


def owner_of(name: str, facts: Mapping[str, Any]) -> tuple[str, int | None]:
    """Return (name of the extra, rank, or None for an extra of all ranks) for the name 'extra.<name>[.<rank>]' of an object."""
    short = name.removeprefix(holding.EXTRA)
    stem, _, suffix = short.rpartition(".")
    if stem in facts["per_rank"] and suffix in map(str, range(facts["world_size"])):
        return stem, int(suffix)
    return short, None
