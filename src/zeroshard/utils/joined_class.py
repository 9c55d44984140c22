"""Classes with two bases, one of this library and one of the user's: modules that keep the user's methods and get further ones."""

from __future__ import annotations

import functools
from typing import Any, TypeVar


class Joined:
    """The library's base of such a class. Copying and unpickling make the class again, since no module has it by name."""

    stands_for: type[Any]  # the user's class

    def __reduce_ex__(self, protocol: object) -> tuple:
        return new_joined, (type(self).__bases__[0], self.stands_for), self.__dict__


BaseT = TypeVar("BaseT", bound=Joined)


@functools.cache
def joined_class(base: type[BaseT], cls: type[Any]) -> type[BaseT]:
    """Return the class with the bases `base` and `cls`, in this order. Equal arguments give the same class."""
    return type(f"{base.__name__}Of{cls.__name__}", (base, cls), {"stands_for": cls, "__module__": base.__module__})


def new_joined(base: type[BaseT], cls: type[Any]) -> BaseT:
    """Return an object of `joined_class(base, cls)` whose `__init__` has not run."""
    made: type[BaseT] = joined_class(base, cls)  # type: ignore[arg-type]  # a class can be hashed
    return object.__new__(made)
