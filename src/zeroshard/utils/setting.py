"""A context variable that has another value for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Inside this context `variable` has `value`, for this thread alone; afterwards what it had before."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
