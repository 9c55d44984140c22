"""The `extra` of zs.save and zs.load: plain values, and the states of objects that have `state_dict`."""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import ConfigError, ZeroshardError
from ..seam import Comm, StateSlice, engine_of, exchange_values
from . import directory
from .dcp import archived


def slices_of(extra: Mapping[str, Any] | None, model: nn.Module) -> dict[str, list[StateSlice]]:
    """Return the slices of the extras that keep some, by the extra's name.

    Such an object (zs.ema) has a value for each element of a model's parameters, sharded as the parameters are, and a method
    `kind_of_slices(model)`, which returns its kind among `Engine.slices`, or raises ConfigError if it belongs to another model.
    zs.save writes these values by parameter name, as it does parameters, so zs.load reads them into any other sharding. The
    object's `settings()` has the rest of its state, and `take_settings` is called when slices have been loaded.
    """
    kinds = {name: value.kind_of_slices(model) for name, value in (extra or {}).items() if keeps_slices(value)}
    return {name: engine_of(model).slices(kind) for name, kind in kinds.items()}


def keeps_slices(value: object) -> bool:
    """Return whether an extra keeps slices of values, sharded as the model's parameters are."""
    return callable(getattr(value, "kind_of_slices", None))


_PLAIN = {int, float, complex, bool, str, bytes, type(None)}  # types whose values are equal if their repr is


@dataclass(frozen=True)
class Extra:
    """The state of one extra, and the bytes that torch.save makes of it."""

    state: object
    content: bytes


def serialised(extra: object) -> dict[str, Extra]:
    """Return the pickled states of zs.save's `extra`, by name. Raises ConfigError if one cannot be saved."""
    found: dict[str, Extra] = {}
    for name, value in ({} if extra is None else check_named(extra, "zs.save")).items():
        if isinstance(value, nn.Module):
            raise ConfigError(f"zs.save: extra[{name!r}]: a module; save its state_dict(), or shard it and save it on its own.")
        state = value.settings() if keeps_slices(value) else value.state_dict() if has_state(value) else value
        try:
            found[name] = Extra(state, archived(state))
        except (pickle.PicklingError, TypeError, AttributeError, ZeroshardError) as error:
            inside = _inside(state)
            hint = f" Give the {inside} in it a name of its own in extra=, so that its state_dict() is saved." if inside else ""
            raise ConfigError(f"zs.save: extra[{name!r}] can not be saved: {error}.{hint}") from error
    return found


def check_named(extra: object, verb: str) -> Mapping[str, Any]:
    """Return `extra`. Raise ConfigError if it is no dictionary, or has keys that cannot be names in a checkpoint."""
    if not isinstance(extra, Mapping):
        raise ConfigError(f'{verb}: extra: expected a dictionary, as {{"scheduler": scheduler}}, got {extra!r:.80}.')
    for name in extra:
        if not isinstance(name, str) or not directory.plain_name(name):
            raise ConfigError(f"{verb}: extra: expected names of letters, digits, '.', '_' and '-', got {name!r}.")
    return extra


def has_state(value: object) -> bool:
    """Return whether a value has a `state_dict` method."""
    return callable(getattr(value, "state_dict", None))


def check_target(name: str, value: object) -> None:
    """Raise ConfigError if an object given to zs.load has a state that zs.load has no way to set."""
    if has_state(value) and not callable(getattr(value, "load_state_dict", None)):
        raise ConfigError(
            f"zs.load: extra[{name!r}]: a {type(value).__name__} has a state_dict and no load_state_dict to take it back; give None, "
            f"and take Loaded.extra[{name!r}]."
        )
    if inside := _inside(value):
        raise ConfigError(
            f"zs.load: extra[{name!r}] would not load the {inside} inside it: give that a name of its own in extra=, here and to zs.save."
        )


def _inside(value: object) -> str | None:
    """Return the class of the first object with a state in a dictionary, list, tuple or set, or None."""
    members = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple, set)) else ()
    return next((type(each).__name__ for each in members if has_state(each)), None)


def alike(comm: Comm, extras: dict[str, Extra], digests: list[dict[str, str]]) -> set[str]:
    """Return the names of extras that are equal on all ranks (collective). digests: for each rank, name -> hash of the bytes.

    Extras of the same values may have different bytes: ranks order sets and dictionaries differently, and pickle writes an
    object that occurs twice once. Raises ConfigError if ranks gave different names, or ambiguous ones.
    """
    names = digests[0].keys()
    for rank, theirs in enumerate(digests):
        if theirs.keys() != names:
            raise ConfigError(f"zs.save: extra: rank 0 gave {sorted(names)}, rank {rank} {sorted(theirs)}: give the same names.")
    same = {name for name in names if len({theirs[name] for theirs in digests}) == 1}
    if len(same) < len(names):
        mine = {name: digests[comm.rank][name] for name in extras if name not in same}
        for name in mine:
            # a recursive value, a meta tensor, ...: do not raise on one rank alone, in the midst of a collective
            with suppress(Exception):
                mine[name] = _digest(extras[name].state).hex()
        everyone = exchange_values(comm, mine, "zs.save: extras that differ")
        same |= {name for name in mine if len({theirs[name] for theirs in everyone}) == 1}
    for name in sorted(names):
        whose, _, number = name.rpartition(".")
        if whose in names - same and re.fullmatch("[0-9]+", number):  # any number: other loads have other ranks
            raise ConfigError(
                f"zs.save: extra[{name!r}]: the checkpoint uses this name for rank {number}'s {whose!r}, which differs between ranks; "
                "choose another name."
            )
    return same


def _digest(value: Any) -> bytes:
    """Return a hash that is the same for equal values of torch's and Python's own types."""
    kind = type(value)
    if kind in (set, frozenset):
        parts = sorted(map(_digest, value))
    elif kind is dict:
        parts = sorted(_digest(key) + _digest(each) for key, each in value.items())
    elif kind in _PLAIN or (kind in (list, tuple) and all(type(each) in _PLAIN for each in value)):
        parts = [repr(value).encode()]  # one repr for a flat list, since a sampler may save a million indices
    elif kind in (list, tuple):
        parts = [_digest(each) for each in value]
    elif kind is Tensor or kind is nn.Parameter:
        # moved to the host, where it is loaded: the device is no part of its value
        parts = [str((value.dtype, value.shape, value.requires_grad)).encode(), archived(value.detach().cpu().clone())]
    else:
        parts = [archived(value)]
    whole = hashlib.sha256(f"{kind.__module__}.{kind.__qualname__} {len(parts)}".encode())
    for part in parts:
        whole.update(hashlib.sha256(part).digest())
    return whole.digest()
