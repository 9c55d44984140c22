"""What there is to load, whoever wrote it: tensors by name, optimizer states by parameter, groups, and facts.

`opening.py` makes one of our own checkpoints, `foreign/` one of everybody else's; `loading.py` asks nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..io.tensor_reader import Stored, StoredTensor
from .bulk_reader import Bulk

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")  # anywhere in a name
_TILE = re.compile(r"\[\d+:\d+:\d+\]$")  # behind the name of a parameter, one of whose tiles was left out
PREFIXES = ("module.", "model.")  # at its beginning


class Untrusted(CheckpointError):
    """An object is of a class that torch does not load by itself."""


@dataclass
class Opened:
    """An opened checkpoint. Of all but ours, what its format does not hold is left at its default.

    model: parameters and buffers, under each of their names. states: parameter (a name, or its number in the groups) ->
    key -> stored tensor or plain value. groups: options, and under "params" the names or numbers of their members.
    extras: of this rank. per_rank: names of extras that ranks have differently, and that these ranks can not take.
    """

    path: Path
    kind: str
    model: dict[str, Stored]
    states: dict[Any, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    step: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    module_objects: dict[str, Any] = field(default_factory=dict)  # what modules keep in state dicts that is no tensor
    module_readers: dict[str, Callable[[], Any]] = field(default_factory=dict)  # the same, still unread
    extras: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, CheckpointError] = field(default_factory=dict)  # extras (ours: without trusted=True), and why
    scaler: dict[str, Any] | None = None  # the loss scale of others, as ours is kept in `progress`
    # ours alone:
    optimizer: str | None = None  # its class
    ties: dict[str, str] = field(default_factory=dict)  # another name of a parameter -> its name
    trained_only: bool = False
    frozen: dict[str, list] = field(default_factory=dict)  # name -> fields of the Identity of what was left out
    scalars: list[str] | None = None  # keys of states that are one number a parameter; None: not known
    progress: dict[str, Any] | None = None  # steps taken, loss scale
    slices: dict[str, dict[str, Stored]] = field(default_factory=dict)  # name of an extra -> parameter -> what it keeps of it
    shared_extras: dict[str, Callable[[], Any]] = field(default_factory=dict)  # those that all ranks had alike, still unread
    same_ranks: bool = False  # it was saved by as many, of which each was the same to the model
    per_rank: frozenset[str] = frozenset()
    saved_names: dict[str, str] = field(default_factory=dict)  # where `fit` has found another name
    bulk: Bulk | None = None  # through which tensors are to be read; None: one by one
    generators: dict[str, Any] | None = None  # of this rank; of rank 0 where there were other ranks

    @property
    def ours(self) -> bool:
        """Whether `zs.save` wrote it."""
        return self.kind == "zeroshard"

    def tied(self) -> dict[str, str]:
        """Another name of a tensor -> the name that stands first, for all that are stored once under several names."""
        first: dict[Any, str] = {}
        found = {}
        for name in sorted(self.model, key=lambda name: name in self.ties):  # those that the checkpoint takes for aliases last
            stored = self.model[name]
            key = stored if isinstance(stored, StoredTensor) and stored.nbytes else id(stored)
            if first.setdefault(key, name) != name:
                found[name] = first[key]
        return found

    def fit(self, wanted: Iterable[str]) -> None:
        """Strip what wrappers put before names, or put it there, where more of them are then wanted."""
        left_out = {key: name_left_out(key) for key in self.frozen}
        rename = _renaming([*self.model, *self.module_readers, *left_out.values()], frozenset(wanted))
        if not rename:
            return
        self.saved_names = {new: name for name, new in rename.items()}
        self.ties = {rename.get(alias, alias): rename.get(name, name) for alias, name in self.ties.items()}
        self.frozen = {
            rename.get(name, name) + key.removeprefix(name): self.frozen[key] for key, name in left_out.items()
        }  # fmt: skip
        self.module_objects = {rename.get(name, name): value for name, value in self.module_objects.items()}
        self.model = {rename.get(name, name): stored for name, stored in self.model.items()}
        self.module_readers = {rename.get(name, name): reader for name, reader in self.module_readers.items()}
        self.states = {rename.get(key, key): state for key, state in self.states.items()}
        self.slices = {name: {rename.get(key, key): at for key, at in kept.items()} for name, kept in self.slices.items()}
        for group in self.groups or ():
            group["params"] = [rename.get(member, member) for member in group["params"]]


def _renaming(names: Iterable[str], wanted: frozenset[str]) -> Mapping[str, str]:
    """name -> the name that fits best, where it is another one."""
    names = list(dict.fromkeys(names))
    best, current = {name: name for name in names}, {name: _unwrapped(name) for name in names}
    most, wrapped = len(wanted.intersection(best.values())), {_unwrapped(name): name for name in wanted}
    if most == len(wanted):
        return {}
    for prefix in (None, *PREFIXES, *PREFIXES):  # module.model.x, model.module.x
        if prefix is not None:
            current = {name: short.removeprefix(prefix) for name, short in current.items()}
        fitting = {name: wrapped.get(short, short) for name, short in current.items()}
        count = len(wanted.intersection(fitting.values()))
        if count > most and len(set(fitting.values())) == len(names):
            best, most = fitting, count
    return {name: short for name, short in best.items() if name != short}


def name_left_out(key: str) -> str:
    """The parameter that a key of `Opened.frozen` is of: of the whole of it or of one tile."""
    return _TILE.sub("", key)


def _unwrapped(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
