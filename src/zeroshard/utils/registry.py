"""Registries: what a program has given a name with `zeroshard.seam.register`, beside the names that the library has itself."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from ..errors import ConfigError


class Registered:
    """A name that is registered until `remove`, which must not be called while a model uses what the name stands for.

    As a context manager it calls `remove` at the end.
    """

    def __init__(self, registry: Registry, name: str, thing: object) -> None:
        self.registry, self.name, self.thing = registry, name, thing

    def __enter__(self) -> Registered:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Make the name free again. Later calls do nothing."""
        if self.registry.named.get(self.name) is self:  # else the name was given again since then
            del self.registry.named[self.name]


class Registry:
    """The things of one kind that the program has named. what: the kind, in errors. taken: the library's own names of that kind."""

    def __init__(self, what: str, taken: Collection[str]) -> None:
        self.what, self.taken = what, taken
        self.named: dict[str, Registered] = {}

    def check(self, name: str) -> None:
        """Raise ConfigError if a name is taken, or none."""
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"register: expected a name of letters, digits and underscores for a {self.what}, got {name!r}.")
        if name in self.taken:
            raise ConfigError(f"register: zeroshard itself has a {self.what} named {name!r}. Choose another name.")
        if name in self.named:
            raise ConfigError(
                f"register: {name!r} is a {self.what} of this program already, {self.named[name].thing!r}. Choose another name, or call "
                "remove() of what register() returned then."
            )

    def add(self, name: str, thing: object) -> Registered:
        """Give a thing a name. Raise ConfigError as `check` does."""
        self.check(name)
        self.named[name] = Registered(self, name, thing)
        return self.named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.named))  # a copy: ranks may be threads

    def __contains__(self, name: object) -> bool:
        return name in self.named

    def __getitem__(self, name: str) -> Any:
        if name not in self.named:
            raise ConfigError(f"no {self.what} is named {name!r} any more: its registration was removed while a model uses it.")
        return self.named[name].thing
