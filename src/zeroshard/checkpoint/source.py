"""An opened checkpoint of any format: tensors by name, optimizer states by parameter, groups, and facts.

resolver.py makes it from a checkpoint of zs.save, and importers/ from other libraries' checkpoints; loading.py reads through it.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..state import Stored, StoredTensor
from ..utils.module_names import without_wrappers
from .manifest import Manifest

_TILE = re.compile(r"\[\d+:\d+:\d+\]$")  # suffix of a name in `Opened.frozen` if only a tile was left out
PREFIXES = ("module.", "model.")  # stripped at the beginning of a name


class Untrusted(CheckpointError):
    """Raised for an object of a class that torch.load(weights_only=True) refuses."""


def load_object(path: Path, offset: int, nbytes: int, name: str, trusted: bool) -> Any:
    """Return the value that torch.save wrote to a stretch of a file. Raises Untrusted, and what torch.load raises."""
    with open(path, "rb") as file:
        file.seek(offset)
        content = io.BytesIO(file.read(nbytes))
    try:
        return torch.load(content, map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        if trusted:
            raise
        named = re.search(r"GLOBAL ([\w.]+)", str(error))  # torch's message is a page long; the class is enough
        reason = named[1] if named else (str(error).splitlines() or [""])[0]
        raise Untrusted(
            f"{path}: {name}: an object of a class that is loaded with trusted=True only, as it may run code: pass that if you "
            f"trust whoever wrote this checkpoint ({reason})"
        ) from None


def read_value(stored: object) -> Any:
    """Read a (small) stored tensor; return any other value as it is."""
    if not isinstance(stored, Stored):
        return stored
    value = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
    stored.read(0, value.view(-1))
    return value


@dataclass
class Opened:
    """An opened checkpoint. Fields that a format does not have keep their defaults.

    model: parameters and buffers, under each of their names. states: parameter (name, or number in the groups) -> key ->
    stored tensor or plain value. groups: options, and under "params" the names or numbers of their members. extras: the values
    saved for this rank. per_rank: names of extras that differed between ranks; they can not be loaded, since the number of ranks
    or the mesh has changed.
    """

    path: Path
    kind: str
    model: dict[str, Stored]
    states: dict[Any, dict[str, object]] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    step: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    module_objects: dict[str, object] = field(default_factory=dict)  # modules' extra states that are no tensors
    module_readers: dict[str, Callable[[], object]] = field(default_factory=dict)  # functions that read these
    extras: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, CheckpointError] = field(default_factory=dict)  # extras that were not unpickled, with the reason
    scaler: dict[str, Any] | None = None  # loss scale of another library, in the form that `progress` has for zs.save's
    # checkpoints of zs.save only:
    optimizer: str | None = None  # the optimizer's class name
    ties: dict[str, str] = field(default_factory=dict)  # other name of a tied parameter -> its name
    trained_only: bool = False
    frozen: dict[str, list] = field(default_factory=dict)  # name of a parameter left out -> fields of its Identity
    scalars: list[str] | None = None  # keys of states that are one number for each parameter; None: unknown
    progress: dict[str, Any] | None = None  # steps taken, loss scale
    slices: dict[str, dict[str, Stored]] = field(default_factory=dict)  # name of an extra -> parameter -> values for it
    shared_extras: dict[str, Callable[[], Any]] = field(default_factory=dict)  # readers of extras that all ranks shared
    same_ranks: bool = False  # saved with the same number of ranks in the same mesh
    per_rank: frozenset[str] = frozenset()
    saved_names: dict[str, str] = field(default_factory=dict)  # name here -> name in the checkpoint, where they differ
    manifest: Manifest | None = None
    generators: dict[str, Any] | None = None  # random generators of this rank; of rank 0 unless `same_ranks`

    @property
    def ours(self) -> bool:
        """True if `zs.save` wrote the checkpoint."""
        return self.kind == "zeroshard"

    def tied(self) -> dict[str, str]:
        """Return alias -> first name, for tensors that are stored once under several names."""
        first: dict[object, str] = {}
        found = {}
        for name in sorted(self.model, key=lambda name: name in self.ties):  # names that the checkpoint calls aliases last
            stored = self.model[name]
            key = stored if isinstance(stored, StoredTensor) and stored.nbytes else id(stored)
            if first.setdefault(key, name) != name:
                found[name] = first[key]
        return found

    def read_objects(self, wanted: Container[str]) -> tuple[dict[str, object], list[str]]:
        """Read modules' extra states of these names. Return them, and the names that are left: unwanted, or Untrusted."""
        objects, left = {}, []
        for name, reader in self.module_readers.items():
            try:
                if name in wanted:
                    objects[name] = reader()
                    continue
            except Untrusted:
                pass
            left.append(name)
        return objects, left

    def name_layers(self, layers: Sequence[str]) -> None:
        """Give the tensors of numbered layers their names in a model: layers[3] + ".weight" for "3.weight", unless it has that."""
        for tensors in (self.model, self.module_readers):
            for name in list(tensors):
                number, _, rest = name.partition(".")
                if number.isdigit() and int(number) < len(layers):
                    tensors.setdefault(f"{layers[int(number)]}.{rest}", tensors.pop(name))  # type: ignore[arg-type]

    def unwrapped(self) -> Opened:
        """Take the steps into wrappers out of all names, if names stay different. Return self."""
        names = {name: without_wrappers(name) for name in self._names()}
        if len(set(names.values())) == len(names):
            self._rename(names)
        return self

    def _names(self) -> list[str]:
        return list(dict.fromkeys([*self.model, *self.module_readers, *map(name_left_out, self.frozen)]))

    def fit(self, wanted: Iterable[str]) -> None:
        """Strip wrappers' prefixes from names, or add them, if more names are then among the wanted ones."""
        names, aims = self._names(), frozenset(wanted)
        best, most = {name: name for name in names}, len(aims.intersection(names))
        if most == len(aims):
            return
        current, wrapped = {name: without_wrappers(name) for name in names}, {without_wrappers(name): name for name in aims}
        for prefix in ("", *PREFIXES, *PREFIXES):  # module.model.x, model.module.x
            current = {name: short.removeprefix(prefix) for name, short in current.items()}
            fitting = {name: wrapped.get(short, short) for name, short in current.items()}
            count = len(aims.intersection(fitting.values()))
            if count > most and len(set(fitting.values())) == len(names):
                best, most = fitting, count
        self._rename(best)

    def _rename(self, names: dict[str, str]) -> None:
        """Rename tensors, objects, states and members of groups. names: name -> new name, all of them different."""
        rename = {name: new for name, new in names.items() if name != new}
        if not rename:
            return
        left_out = {key: name_left_out(key) for key in self.frozen}
        self.saved_names |= {new: self.saved_names.get(name, name) for name, new in rename.items()}
        self.ties = {rename.get(alias, alias): rename.get(name, name) for alias, name in self.ties.items()}
        self.frozen = {rename.get(name, name) + key.removeprefix(name): self.frozen[key] for key, name in left_out.items()}
        self.module_objects = {rename.get(name, name): value for name, value in self.module_objects.items()}
        self.model = {rename.get(name, name): stored for name, stored in self.model.items()}
        self.module_readers = {rename.get(name, name): reader for name, reader in self.module_readers.items()}
        self.states = {rename.get(key, key): state for key, state in self.states.items()}
        self.slices = {name: {rename.get(key, key): at for key, at in kept.items()} for name, kept in self.slices.items()}
        for group in self.groups or ():
            group["params"] = [rename.get(member, member) for member in group["params"]]


def first_of(names: Collection[str]) -> str:
    """Return the first five names, and how many more there are."""
    return ", ".join(list(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def name_left_out(key: str) -> str:
    """Return the parameter's name in a key of `Opened.frozen`, which may have the suffix of a tile."""
    return _TILE.sub("", key)
