"""zs.load: a checkpoint into a sharded model, whatever wrote it and however it was cut.

    find -> read the manifest -> verify checksums (ranks share the files) -> compare names and shapes -> read slices

Nothing is changed before all of the first four have passed on every rank. Each rank reads its own slices (of replicated
states: the whole), some MiB at a time.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor, nn

from .. import weights
from ..comm.base import Comm
from ..errors import (
    BaseModelMismatch,
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    ConfigError,
    ZeroshardError,
    did_you_mean,
)
from ..optim.restoring import SavedState, restore
from ..optim.sharded import OptimizerCore
from ..runtime import Runtime, runtime_of
from ..tiles import part_of
from . import contents as holding
from . import folder as places
from .datafile import DIGEST_NBYTES
from .identity import Identity, identify
from .manifest import Manifest, ObjectEntry
from .saving import check_idle, core_of
from .stored import StoredBoxes, stored_tensors

_READ_NBYTES = 4 << 20
T = TypeVar("T")


@dataclass
class Loaded:
    """What `zs.load` found. extra: what was saved under `extra`, by name. rng: 'restored', 'reseeded' or 'left'."""

    path: Path
    step: int
    facts: dict[str, Any]
    extra: dict[str, Any] = field(default_factory=dict)
    rng: str = "left"


def load(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: dict[str, Any] | None = None,
    name: str | None = None,
    verify: bool = True,
    rng: bool = True,
    trusted: bool = False,
) -> Loaded:
    """Load a checkpoint of `zs.save` into a sharded model and optimizer, in place (collective).

    World size, stage, tiers, precision, units and tiles may differ from those that saved it.

    Args:
        path: a checkpoint, or a folder of checkpoints: then `name`, or the newest complete one.
        optimizer: the model's; None: optimizer states stay as they are.
        extra: by name, objects whose `load_state_dict` is to be called, or None for values to be returned.
        verify: first read everything and compare checksums (ranks share the work).
        rng: restore random generators: exactly at the same number of ranks; else every rank is seeded anew from what rank 0
            had, and `Loaded.rng` says so.
        trusted: unpickle any object in `extra`; needed for those of your own classes, which can run code.

    Raises:
        CheckpointNotFound: no complete checkpoint there.
        CheckpointCorrupt: a file is damaged: which, where, expected and actual. Nothing was changed.
        CheckpointMismatch: of another architecture or optimizer; all differences. Nothing was changed.
        BaseModelMismatch: it holds trained parameters alone, of another base model. Nothing was changed.
    """
    runtime = runtime_of(model)
    core = core_of(runtime, optimizer, "zs.load")
    check_idle(runtime, "zs.load")
    comm = runtime.comm
    folder, manifest = open_checkpoint(comm, path, name)
    agreed(comm, "zs.load: sizes", lambda: check_sizes(folder, manifest))
    if verify:
        agreed(comm, "zs.load: checksums", lambda: check_digests(folder, manifest, comm.rank, comm.world_size))
    loading = _Loading(runtime, core, folder, manifest, trusted)
    extras = agreed(comm, "zs.load: comparing", lambda: loading.compare(extra or {}))
    loading.check_base()
    try:
        loading.take()
    except BaseException as error:
        runtime.unusable = f"{folder} could not be loaded to its end ({error}): load a checkpoint again before you go on."
        if not isinstance(error, ZeroshardError):
            comm.abort(f"rank {comm.rank}: {error}", CheckpointError(runtime.unusable))
        raise
    runtime.unusable = ""
    result = Loaded(folder, int(manifest.facts["step"]), manifest.facts, extras)
    for key, target in (extra or {}).items():
        if target is not None:
            target.load_state_dict(extras[key])
    if rng:
        result.rng = loading.take_generators()
    comm.exchange(b"", "zs.load: done")
    return result


def agreed(comm: Comm, label: str, action: Callable[[], T]) -> T:
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


def open_checkpoint(comm: Comm, path: str | os.PathLike, name: str | None) -> tuple[Path, Manifest]:
    """The checkpoint that rank 0 finds, and its manifest (collective)."""
    found: Path | None = None

    def find() -> None:
        nonlocal found
        if comm.rank == 0:
            found = places.find(Path(path), name)

    agreed(comm, "zs.load: find", find)
    folder = pickle.loads(comm.exchange(pickle.dumps(found), "zs.load: which")[0])
    return folder, agreed(comm, "zs.load: manifest", lambda: _hinted(folder, lambda: Manifest.read(folder)))


def _hinted(folder: Path, action: Callable[[], T]) -> T:
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

    _hinted(folder, check)


def check_digests(folder: Path, manifest: Manifest, rank: int = 0, world_size: int = 1) -> int:
    """Compare the checksums of this rank's share of all blocks; bytes read. Raises CheckpointCorrupt."""
    blocks = [(file, number) for file in manifest.files for number in range(len(file.digests))]
    mine = blocks[len(blocks) * rank // world_size : len(blocks) * (rank + 1) // world_size]

    def check() -> int:
        total, buffer, at = 0, memoryview(bytearray(_READ_NBYTES)), 0
        per_read = _READ_NBYTES // DIGEST_NBYTES
        while at < len(mine):
            file, first = mine[at]
            count = 1
            while count < per_read and at + count < len(mine) and mine[at + count][0] is file:
                count += 1
            total += _check_blocks(folder / file.name, file.digests[first : first + count], first * DIGEST_NBYTES, file.nbytes, buffer)
            at += count
        return total

    return _hinted(folder, check)


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


class _Loading:
    """One load on one rank."""

    def __init__(self, runtime: Runtime, core: OptimizerCore | None, folder: Path, manifest: Manifest, trusted: bool) -> None:
        self.runtime, self.core, self.folder, self.manifest, self.trusted = runtime, core, folder, manifest, trusted
        self.comm = runtime.comm
        self.stored = stored_tensors(folder, manifest)
        self.model = {n.removeprefix(holding.MODEL): t for n, t in self.stored.items() if n.startswith(holding.MODEL)}
        for alias, first in manifest.ties.items():
            self.model.setdefault(alias, self.model[first]) if first in self.model else None
        self.found: dict[str, Any] = {}  # parameter -> where it is stored
        self.left_out: list[tuple[Any, int]] = []  # (group, index) of parameters that it leaves out
        self.states: dict[int, SavedState] = {}
        self.groups: list[dict[str, Any]] = []

    # -- compare ---------------------------------------------------------------------------------------------

    def compare(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Raise where the checkpoint does not fit; the saved extras."""
        missing, mismatched, used = [], [], set()
        for group in self.runtime.groups:
            for index, (name, part) in enumerate(holding.names_of_group(group)):
                spec = group.specs[index]
                at = next((n for n in (name, *weights.names_of(self.runtime.model, spec)) if n in self.model), None)
                shape = spec.shape if part is None else part.shape
                if at is not None:
                    used.add(at)
                    if self.model[at].shape == tuple(shape):
                        self.found[spec.name] = self.model[at].cut(part)
                    else:
                        mismatched.append(f"{name}: saved {self.model[at].shape}, wanted {tuple(shape)}")
                elif not group.trainable and self.manifest.facts["trained_only"]:
                    self.left_out.append((group, index))
                else:
                    missing.append(f"{name} {tuple(shape)}")
        problems = self._compare_buffers(missing, mismatched, used)
        problems += self._compare_optimizer()
        if problems:
            raise CheckpointMismatch(f"{self.folder} does not fit the model; nothing was changed.\n" + "\n".join(problems))
        return self._extras(extra)

    def _compare_buffers(self, missing: list[str], mismatched: list[str], used: set[str]) -> list[str]:
        params = {id(param) for group in self.runtime.groups for param in group.params}
        for name, value in self.runtime.model.state_dict(keep_vars=True).items():
            if id(value) in params or not isinstance(value, Tensor):
                continue
            used.add(name)
            if name not in self.model:
                missing.append(f"{name} {tuple(value.shape)} (buffer)")
            elif self.model[name].shape != tuple(value.shape):
                mismatched.append(f"{name}: saved {self.model[name].shape}, wanted {tuple(value.shape)} (buffer)")
        same = {first for alias, first in self.manifest.ties.items() if alias in used} | self.manifest.ties.keys()
        unexpected = [f"{n} {t.shape}" for n, t in self.model.items() if n not in used | same]
        missing = [f"{m}{did_you_mean(m.split(' ')[0], [u.split(' ')[0] for u in unexpected])}" for m in dict.fromkeys(missing)]
        lists = {"missing (the model has it, the checkpoint not)": missing, "unexpected": unexpected, "of another shape": mismatched}
        return [f"  {what}: {entry}" for what, entries in lists.items() for entry in dict.fromkeys(entries)]

    def _compare_optimizer(self) -> list[str]:
        """What does not fit the optimizer; where all does, its states are found."""
        if self.core is None:
            return []
        if holding.GROUPS not in self.manifest.objects:
            return ["  the checkpoint has no optimizer states: load it with optimizer=None"]
        own, saved = type(self.core.outer).__name__.removeprefix("Sharded"), self.manifest.facts["optimizer"]
        if own != saved:
            return [f"  optimizer: saved {saved}, wanted {own}: load it with optimizer=None to take the model alone"]
        self.groups = self._object(holding.GROUPS)
        present = holding.param_groups(self.runtime, self.core)
        if len(self.groups) != len(present):
            return [f"  optimizer: saved {len(self.groups)} parameter groups, wanted {len(present)}"]
        problems = []
        for number, (given, mine) in enumerate(zip(self.groups, present, strict=True)):
            differing = sorted(set(given["params"]) ^ set(mine["params"]))
            if differing:
                problems.append(f"  optimizer group {number}: {len(differing)} members differ, first {', '.join(differing[:5])}")
        self._find_states()
        return problems

    def _find_states(self) -> None:
        entries: dict[str, dict[str, Any]] = {}
        for name, stored in self.stored.items():
            if name.startswith(holding.STATE):
                *_, parameter, key = self.manifest.tensors[name].keys
                entries.setdefault(parameter, {})[key] = stored
        for name in self.manifest.objects:
            if name.startswith(holding.STATE):
                parameter, _, key = name.removeprefix(holding.STATE).rpartition(".")
                entries.setdefault(parameter, {})[key] = self._object(name)
        counters = {"step"} | {
            key for name, states in entries.items() for key, stored in states.items()
            if not isinstance(stored, StoredBoxes) or (stored.shape == () and self._shape(name) != ())
        }  # fmt: skip
        for group in self.runtime.groups:
            for index, (name, part) in enumerate(holding.names_of_group(group)):
                state = SavedState()
                for key, stored in entries.get(name, {}).items():
                    if not isinstance(stored, StoredBoxes):
                        state.scalars[key] = stored
                    elif key in counters or stored.shape != self._shape(name):
                        value = torch.empty(stored.shape, dtype=stored.dtype)
                        stored.read(0, value.view(-1))
                        state.scalars[key] = value
                    else:
                        state.tensors[key] = stored.cut(part)
                if state.tensors or state.scalars:
                    self.states[id(group.params[index])] = state

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.model[name].shape if name in self.model else ()

    def check_base(self) -> None:
        """The parameters that the checkpoint leaves out are those that it was saved with (collective)."""
        mine: dict[str, Identity] = {}
        for group, index in self.left_out:
            home, spec = group.homes[index], group.specs[index]
            part = part_of(*spec.owners[0])
            name = holding.names_of_group(group)[index][0]
            key = name if part is None else f"{name}[{part.dim}:{part.start}:{part.stop}]"
            mine[key] = identify(group.values.rest, home.begin, home.start, home.stop, spec.shape)
        everyone = [pickle.loads(part) for part in self.comm.exchange(pickle.dumps(mine), "zs.load: base model")]
        differing = []
        for key in mine:
            total = everyone[0][key]
            for other in everyone[1:]:
                total = total + other[key]
            saved = self.manifest.frozen.get(key)
            if saved is None or not total.same(Identity(*saved)):
                differing.append(f"{key}: saved {saved[2] if saved else 'nothing'}, this model {total.exact}")
        if differing:
            raise BaseModelMismatch(
                f"{self.folder} holds trained parameters of another base model; nothing was changed. {len(differing)} of "
                f"{len(mine)} parameters that it leaves out differ (fingerprints): {'; '.join(differing[:5])}"
            )

    def _extras(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Saved extras by name: all of them. Raises where one that is wanted is missing, or is of other ranks."""
        found: dict[str, Any] = {}
        per_rank = set(self.manifest.facts["per_rank"])
        names = {n.removeprefix(holding.EXTRA) for n in self.manifest.objects if n.startswith(holding.EXTRA)}
        for name in {n.rpartition(".")[0] if n.rpartition(".")[0] in per_rank else n for n in names}:
            if name not in per_rank:
                found[name] = self._object(f"{holding.EXTRA}{name}")
            elif self.comm.world_size == self.manifest.facts["world_size"]:
                found[name] = self._object(f"{holding.EXTRA}{name}.{self.comm.rank}")
            elif name in wanted:
                raise CheckpointMismatch(
                    f"extra[{name!r}] was saved by {self.manifest.facts['world_size']} ranks, each with a state of its own, and "
                    f"there are {self.comm.world_size} now: none can be dropped or made up. Load without it, or save one that "
                    "does not depend on the rank (zs.ShardedSampler)."
                )
        absent = sorted(wanted.keys() - found.keys())
        if absent:
            raise ConfigError(f"zs.load: extra: {', '.join(absent)} not in {self.folder}; it has: {', '.join(sorted(found)) or 'none'}.")
        for name, target in wanted.items():
            if target is not None and not callable(getattr(target, "load_state_dict", None)):
                raise ConfigError(f"zs.load: extra[{name!r}]: expected an object with load_state_dict, or None, got {target!r}.")
        return found

    def _object(self, name: str) -> Any:
        return read_object(self.folder, self.manifest, self.manifest.objects[name], self.trusted)

    # -- take ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def take(self) -> None:
        """Read everything into place (collective)."""
        runtime = self.runtime
        if self.core is not None:
            self.core.drain()
        runtime.settle()
        runtime.drop_gradients()
        weights.stream(runtime, self.found, self.model)
        self._take_objects()
        for group in runtime.groups:
            group.dirty.clear()
            group.versions = [param._version for param in group.params] if not group.values.sharded else group.versions
        if self.core is not None:
            restore(self.core, self.states)
            for mine, given in zip(self.core.outer.param_groups, self.groups, strict=True):
                mine.update({key: value for key, value in given.items() if key != "params"})
        self._take_own()

    def _take_objects(self) -> None:
        """What modules keep in state dicts that is no tensor."""
        given = {n.removeprefix(holding.MODEL): self._object(n) for n in self.manifest.objects if n.startswith(holding.MODEL)}
        for prefix, module in self.runtime.model.named_modules():
            key = f"{prefix}._extra_state" if prefix else "_extra_state"
            if key in given:
                module.set_extra_state(given[key])

    def _take_own(self) -> None:
        own, runtime = self._object(holding.OWN), self.runtime
        if self.core is None:
            return
        runtime.steps = own["steps"]
        if runtime.scaler is not None and own["scaler"] is not None and runtime.scaler.dynamic:
            runtime.scaler.scale, runtime.scaler.good_steps = own["scaler"]["scale"], own["scaler"]["good_steps"]

    def take_generators(self) -> str:
        """Restore random generators; how."""
        same = self.comm.world_size == self.manifest.facts["world_size"]
        rank = self.comm.rank if same else 0
        states = self._object(f"{holding.RNG}{rank}")
        if same:
            holding.set_generators(states, self.comm.device)
            return "restored"
        seed = int(xxhash.xxh3_64_hexdigest(bytes(states["torch"].numpy())), 16) % 2**63
        torch.manual_seed((seed + self.comm.rank) % 2**63)
        if self.comm.rank == 0:
            print(
                f"zeroshard: {self.folder} was saved by {self.manifest.facts['world_size']} ranks, now there are "
                f"{self.comm.world_size}: random generators are seeded anew from rank 0's",
                file=sys.stderr,
            )
        return "reseeded"
