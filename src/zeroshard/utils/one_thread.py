"""The check that threads of a rank use an object one after another, for objects that are not made for two at a time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import ThreadsMet

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Turn:
    """Whose turn it is with an object: any thread's, until one is inside.

    No lock: nobody waits. A thread that comes in while another is inside gets ThreadsMet, which names both, and has changed
    nothing; the one inside goes on undisturbed. The same thread may come in again.
    """

    def __init__(self, what: str) -> None:
        """what: the object, in the words of an error."""
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


def one_thread(method: _Method) -> _Method:
    """A method in which one thread at a time may be, as in all such methods of its object: of that object's `turn`, a `Turn`."""

    @functools.wraps(method)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.turn:
            return method(self, *args, **kwargs)

    return alone  # type: ignore[return-value]
