"""Kinds of values that options take: each a text for errors and a test of a value."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar

from ..errors import ConfigError, did_you_mean

_T = TypeVar("_T")


@dataclass(frozen=True)
class Kind:
    """Kind of an option's values, as a text and as a test. None is accepted if it is the default."""

    expected: str
    accepts: Callable[[Any], bool]


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_count(value: object) -> bool:
    """Return whether a value is a whole number of at least 0; floats too, since 5e8 is one."""
    return is_number(value) and 0 <= value < math.inf and value == int(value)


def is_scale(value: object) -> bool:
    return is_number(value) and 0 < value < math.inf


BOOL = Kind("True or False", lambda value: isinstance(value, bool))
WHOLE = Kind("a whole number", is_whole)
POSITIVE = Kind("a whole number of at least 1", lambda value: is_whole(value) and value >= 1)
LENGTH = Kind("a number of at least 0", lambda value: is_number(value) and value >= 0)
SKIPS = Kind("a whole number of at least 1, or inf", lambda value: value == math.inf or (is_whole(value) and value >= 1))
COUNT = Kind("a whole number of at least 0", is_count)
BOUND = Kind("a whole number of at least 0, or inf for no bound", lambda value: is_count(value) or value == math.inf)


def _are_units(value: object) -> bool:
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(isinstance(item, (str, type)) for item in value)
    return isinstance(value, str) or callable(value)


UNITS = Kind("'auto', 'model', 'leaf', a tuple of classes or names, or a function (name, module) -> bool", _are_units)
MAX_SECONDS = 2_000_000  # 23 days: sockets count milliseconds in 31 bits
SECONDS = Kind(
    f"a number of seconds above 0, at most {MAX_SECONDS:,}",
    lambda value: is_number(value) and 0 < value <= MAX_SECONDS,
)
FOLDER = Kind("the path of a folder", lambda value: isinstance(value, (str, os.PathLike)))


def option(default: _T, kind: Kind) -> _T:
    """Make the dataclass field of an option, with its kind in the field's metadata."""
    return field(default=default, metadata={"kind": kind})


def check_names(cls: type, given: Iterable[str], name: str) -> None:
    """Raise ConfigError for the first name that is no field of a class of options. name: the option that takes such an object."""
    known = {f.name for f in dataclasses.fields(cls)}
    for key in given:
        if key not in known:
            raise ConfigError(f"{name}: unknown field {key!r}.{did_you_mean(key, known)} Known: {', '.join(sorted(known))}.")


def check_fields(given: object, kinds: Mapping[str, Kind], prefix: str = "") -> None:
    """Raise ConfigError for the first field whose value is not of its kind."""
    defaults = {f.name: f.default for f in dataclasses.fields(given)}  # type: ignore[arg-type]
    for name, kind in kinds.items():
        value = getattr(given, name)
        if not (value is None and defaults[name] is None) and not kind.accepts(value):
            raise ConfigError(f"{prefix}{name}: expected {kind.expected}, got {value!r}.")
