"""Find, verify and open a checkpoint on all ranks: one of zs.save, or of another library (importers/)."""

from __future__ import annotations

import io
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from torch import nn

from ..comm.base import DirectComm
from ..comm.codec import exchange_values
from ..errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, CheckpointReadError, ModelMismatch, ZeroshardError
from ..memory.io.tensor_reader import Stored, StoredBoxes, StoredTensor, differ
from ..tensor.chunks import overlap
from ..zero.parameter import ParamSpec
from . import directory as places
from . import safetensors
from . import state_map as holding
from .bulk_reader import Bulk
from .heartbeat import together
from .importers import RECOGNISED, open_foreign, recognise
from .manifest import FileEntry, Manifest
from .rank_file import DIGEST_NBYTES
from .source import Opened, Untrusted

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
            found = places.find(Path(path), name)
        except CheckpointNotFound:  # a listing may miss a checkpoint that has just replaced a removed one: look again
            found = places.find(Path(path), name)
        return found, places.passed_over(Path(path), found) if name is None and found != Path(path) else ""

    found, passed_over = agreed(comm, "zs.load: find", find, path)
    if passed_over:
        print(f"zeroshard: {passed_over}", file=sys.stderr)
    return Path(exchange_values(comm, str(found), "zs.load: which")[0])


def removed(comm: DirectComm | Alone, path: str | os.PathLike, folder: Path) -> bool:
    """Return whether a checkpoint has vanished since it was found: a job that saves here may remove old ones (collective)."""
    gone = comm.rank == 0 and folder != Path(path) and not (folder / places.MANIFEST).exists()
    return bool(comm.exchange(b"1" if gone else b"", "zs.load: is it still there")[0])


@contextmanager
def hinted(folder: Path) -> Iterator[None]:
    """Add the name of the checkpoint before this one to the message of a CheckpointCorrupt that is raised inside."""
    try:
        yield
    except CheckpointCorrupt as error:
        earlier = places.previous(folder)
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
    wanted = _small_blocks(manifest) if small else None
    blocks = [(f, n) for f in manifest.files for n in range(len(f.digests)) if wanted is None or (f.name, n) in wanted]
    _check(folder, blocks[len(blocks) * rank // world_size : len(blocks) * (rank + 1) // world_size])


def check_tensors(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare the checksums of all blocks of some tensors, which are about to be read one by one. Raises CheckpointCorrupt."""
    wanted = _blocks(manifest, [(b.file, b.offset, b.nbytes) for name in names for b in manifest.tensors[name].boxes])
    _check(folder, [(f, n) for f in manifest.files for n in range(len(f.digests)) if (f.name, n) in wanted])


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
            digests = file.digests[first : first + count]
            _check_blocks(folder / file.name, digests, first * DIGEST_NBYTES, file.nbytes, buffer)
        at += count


def _small_blocks(manifest: Manifest) -> set[tuple[str, int]]:
    """Return (file, number) of every block that the comparison with the model reads.

    They hold bytes of objects, of tensors of at most one element, or of optimizer states that lack their parameter's shape.
    """
    stretches = [(o.file, o.offset, o.nbytes) for o in manifest.objects.values()]
    for name, entry in manifest.tensors.items():
        small = torch.Size(entry.shape).numel() <= 1 or safetensors.is_extra_state(name)
        if not small and name.startswith(holding.STATE):  # a state without one value for each element (step, ...)
            *_, parameter, key = entry.keys
            of = manifest.tensors.get(f"{holding.MODEL}{parameter}")
            small = key in (manifest.scalars or ()) or of is None or of.shape != entry.shape
        if small:
            stretches += [(box.file, box.offset, box.nbytes) for box in entry.boxes]
    metadata = {(f.name, number) for f in manifest.files if f.name == ".metadata" for number in range(len(f.digests))}
    return _blocks(manifest, stretches) | metadata


def _blocks(manifest: Manifest, stretches: list[tuple[int, int, int]]) -> set[tuple[str, int]]:
    """Return (file name, number) of every block that overlaps one of the stretches (number of a file, offset, nbytes)."""
    return {
        (manifest.files[file].name, number)
        for file, offset, nbytes in stretches
        for number in range(offset // DIGEST_NBYTES, (offset + nbytes - 1) // DIGEST_NBYTES + 1)
    }


def _check_blocks(path: Path, digests: tuple[str, ...], offset: int, file_nbytes: int, buffer: memoryview) -> None:
    nbytes = min(len(digests) * DIGEST_NBYTES, file_nbytes - offset)
    with open(path, "rb", buffering=0) as file:
        got = 0
        while got < nbytes:
            try:
                count = os.preadv(file.fileno(), [buffer[got:nbytes]], offset + got)
            except OSError as error:
                raise CheckpointReadError(path, offset + got, error.errno, error.strerror or str(error)) from error
            if count == 0:
                raise CheckpointCorrupt(str(path), offset + got, f"{file_nbytes:,} bytes", f"{offset + got:,} bytes")
            got += count
    for number, expected in enumerate(digests):
        begin = number * DIGEST_NBYTES
        actual = xxhash.xxh3_64_hexdigest(buffer[begin : min(begin + DIGEST_NBYTES, nbytes)])
        if actual != expected:
            raise CheckpointCorrupt(str(path), offset + begin, f"checksum {expected}", f"checksum {actual}")


def read_object(folder: Path, manifest: Manifest, name: str, trusted: bool = False) -> Any:
    """Read a plain value of a checkpoint.

    Raises Untrusted if it is of a class that torch.load(weights_only=True) refuses; CheckpointCorrupt, CheckpointError.
    """
    entry = manifest.objects[name]
    file_entry = manifest.files[entry.file]
    path = folder / file_entry.name
    with open(path, "rb") as file:
        file.seek(entry.offset)
        content = io.BytesIO(file.read(entry.nbytes))
    try:
        return torch.load(content, map_location="cpu", weights_only=not trusted)
    except Exception as error:
        blocks = range(entry.offset // DIGEST_NBYTES, (entry.offset + entry.nbytes - 1) // DIGEST_NBYTES + 1)
        _check(folder, [(file_entry, number) for number in blocks])  # damage is the better reason
        reason = (str(error).splitlines() or [""])[0]
        if isinstance(error, pickle.UnpicklingError) and not trusted:
            named = re.search(r"GLOBAL ([\w.]+)", str(error))  # torch's message is a page long; the class is enough
            reason = named[1] if named else reason
            raise Untrusted(
                f"{path}: {name}: an object of a class that is loaded with trusted=True only, as it may run code: pass that if you "
                f"trust whoever wrote this checkpoint ({reason})"
            ) from None
        raise CheckpointError(f"{path}: {name} can not be loaded: {type(error).__name__}: {reason}") from error


class Alone:
    """Stand-in for a Comm of one rank, for `open_any` in a process without process group and device."""

    rank, world_size = 0, 1

    def exchange(self, message: bytes, label: str) -> list[bytes]:
        """Return the messages of all ranks."""
        return [message]


def open_any(
    comm: DirectComm | Alone, path: str | os.PathLike, name: str | None = None, *,
    verify: bool = True, trusted: bool = False, values: bool = True,
    in_bulk: Callable[[Path, Manifest], Bulk] | None = None, mesh: Mapping[str, object] | None = None,
) -> Opened:  # fmt: skip
    """Open the checkpoint that rank 0 finds, of zs.save or of another library (collective).

    If a run removes the checkpoint while it is opened, the next one is opened.

    verify, values: see `open_own`; other formats have no checksums.
    in_bulk: makes the bulk reader (`Opened.bulk`) from the manifest. `open_any` then verifies small blocks only; the reader
        verifies the others, or the caller by `check_digests`.
    mesh: the ranks' mesh (`Topology.mesh`). Per-rank states (extras, random generators) are restored only if the saved mesh
        is equal to it.

    Raises CheckpointNotFound, CheckpointCorrupt, CheckpointError.
    """

    def look() -> str | None:
        where = Path(path)
        if comm.rank == 0 and name is None and not (where / places.MANIFEST).is_file() and not places.complete(where):
            return str(where) if recognise(where) is not None else None
        return None

    told = exchange_values(comm, agreed(comm, "zs.load: look", look, path), "zs.load: what is it")[0]
    if told is not None:
        where = Path(told)
        return agreed(comm, "zs.load: open", lambda: open_foreign(where, trusted), where)
    for looks in range(LOOKS, 0, -1):
        folder = find_checkpoint(comm, path, name)
        try:
            return _open_found(comm, folder, verify, trusted, values, in_bulk, mesh)
        except CheckpointError:
            if looks == 1 or not removed(comm, path, folder):
                raise
    raise AssertionError("the last look returns or raises")


def _open_found(
    comm: DirectComm | Alone, folder: Path, verify: bool, trusted: bool, values: bool,
    in_bulk: Callable[[Path, Manifest], Bulk] | None, mesh: Mapping[str, object] | None,
) -> Opened:  # fmt: skip
    """Open a checkpoint of zs.save after checking its sizes and (verify) checksums (collective)."""

    def read() -> Manifest:
        with hinted(folder):
            return Manifest.read(folder)

    manifest = agreed(comm, "zs.load: manifest", read, folder)
    ranks, bulk = (comm.rank, comm.world_size), None
    if in_bulk is not None and hasattr(os, "posix_fadvise"):
        # ask for small blocks before any rank reads ahead, since the small reads would queue behind that
        numbers: dict[str, list[int]] = {}
        for name, number in _small_blocks(manifest):
            numbers.setdefault(name, []).append(number)
        for name, wanted in numbers.items():
            with suppress(OSError), open(folder / name, "rb", buffering=0) as file:  # the later reads raise it
                for number in wanted:
                    os.posix_fadvise(file.fileno(), number * DIGEST_NBYTES, DIGEST_NBYTES, os.POSIX_FADV_WILLNEED)
    agreed(comm, "zs.load: sizes", lambda: check_sizes(folder, manifest), folder)
    if in_bulk is not None:
        bulk = agreed(comm, "zs.load: reading ahead", lambda: in_bulk(folder, manifest), folder)
    if verify:
        agreed(comm, "zs.load: checksums", lambda: check_digests(folder, manifest, *ranks, bulk is not None), folder)
    opened = agreed(comm, "zs.load: open", lambda: open_own(folder, manifest, *ranks, trusted, values, mesh), folder)
    opened.bulk = bulk
    return opened


def open_weights(
    comm: DirectComm, peers: DirectComm, path: str | os.PathLike, model: nn.Module, specs: list[ParamSpec]
) -> tuple[dict[str, Stored], dict[str, Stored]]:
    """Open the weights of any checkpoint for a model (collective).

    Return stored parameters and buffers under the model's names, and for each parameter name this rank's part of it.

    peers: ranks of `comm` that have the same part of the model. Raises as `open_any`, and ModelMismatch.
    """
    try:
        opened = open_any(comm, path, values=False)
    except CheckpointNotFound as error:
        what = f"expected a .safetensors file or a folder of them, a checkpoint of zs.save, or {RECOGNISED}"
        raise CheckpointNotFound(f"weights={str(path)!r}: {what}. {error}") from None
    prefixes, (buffers, computed) = safetensors.prefixes_of(model), safetensors.others_of(model)
    names = {name for spec in specs for name in safetensors.names_of(prefixes, spec)}
    opened.fit(names | {name for buffer in buffers for name in buffer.names} | computed.keys())
    stored = opened.model
    tied = {tuple(n for n in dict.fromkeys(safetensors.names_of(prefixes, spec)) if n in stored) for spec in specs}

    def check_ties() -> None:
        problems = []
        for name, first in ((name, names[0]) for names in sorted(tied) for name in names[1:]):
            if stored[name].shape != stored[first].shape:
                problems.append(f"{name} is {stored[name].shape} and {first}, to which the model ties it, {stored[first].shape}")
            elif differ(stored[first], stored[name], peers.rank, peers.world_size):
                problems.append(f"{name} has other values than {first}, to which the model ties it")
        if problems:
            raise ModelMismatch(f"weights do not fit the model: {'; '.join(problems)}. Build it without the tie.")

    agreed(comm, "zs.shard: tied weights", check_ties, path)
    for buffer in buffers:
        if (at := buffer.stored_in(stored)) is not None:
            stored |= dict.fromkeys(buffer.names, at)
    return stored, agreed(comm, "zs.shard: weights", lambda: safetensors.check(model, specs, stored), path)


def open_own(
    folder: Path, manifest: Manifest, rank: int = 0, world_size: int = 1, trusted: bool = False, values: bool = True,
    mesh: Mapping[str, object] | None = None,
) -> Opened:  # fmt: skip
    """Open a checkpoint of zs.save for one of `world_size` ranks. values: also read plain values (groups, extras, ...)."""
    opened = Opened(folder, "zeroshard", {}, step=int(manifest.facts["step"]), facts=manifest.facts, ties=manifest.ties)
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
            raise CheckpointCorrupt(str(folder / places.MANIFEST), 0, once, found)
        stored = StoredBoxes(entry.dtype, entry.shape, boxes)
        if name.startswith(holding.MODEL):
            opened.model[name.removeprefix(holding.MODEL)] = stored
        elif name.startswith(holding.STATE):
            *_, parameter, key = entry.keys
            opened.states.setdefault(parameter, {})[key] = stored
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
