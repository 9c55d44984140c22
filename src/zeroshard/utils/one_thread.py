"""A check that only one thread at a time uses an object that is not thread-safe."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ..errors import ThreadsMet

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Turn:
    """Context that one thread at a time may enter, any number of times.

    Unlike with a lock, no thread waits: one that enters while another is inside gets ThreadsMet, which names both, and has
    changed nothing; the other goes on undisturbed.
    """

    def __init__(self, what: str) -> None:
        """what: name of the object, for the error."""
        self.what = what
        self._held, self._inside = threading.RLock(), 0

    def __enter__(self) -> None:
        if not self._held.acquire(False):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            inside = names.get(self._inside, "that has ended by now")
            raise ThreadsMet(
                f"{self.what}: thread '{threading.current_thread().name}' came in while thread '{inside}' was inside; expected "
                "one at a time. Use a sharded model, its optimizer and its saves from one thread of each rank."
            )
        self._inside = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._held.release()


class _HasTurn(Protocol):
    @property
    def turn(self) -> AbstractContextManager[object, bool | None]: ...


_Owner = TypeVar("_Owner", bound=_HasTurn)


def one_thread(
    method: Callable[Concatenate[_Owner, _Arguments], _Result],
) -> Callable[Concatenate[_Owner, _Arguments], _Result]:
    """Decorator: run the method inside the object's `turn`, a `Turn` or an RLock: one thread at a time is in all such methods."""

    @functools.wraps(method)
    def alone(self: _Owner, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with self.turn:
            return method(self, *args, **kwargs)

    return alone
