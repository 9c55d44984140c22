"""A whole collection of garbage, which gc.collect() does not promise where a program has several threads."""

from __future__ import annotations

import gc
import threading
import time

_OLDEST = 2  # generation of a collection of everything
_PATIENCE_S = 5.0  # a finalizer that comes here is itself inside of a collection, which ends only after it


def collect_garbage() -> None:
    """Free all garbage in reference cycles that there is when this is called.

    While another thread collects, gc.collect() returns at once, and garbage that is younger than that collection stays.
    """
    me, began = threading.get_ident(), False

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        began = began or (threading.get_ident() == me and info["generation"] == _OLDEST)

    gc.callbacks.append(note)
    try:
        deadline = time.monotonic() + _PATIENCE_S
        while gc.collect() >= 0 and not began and time.monotonic() < deadline:
            time.sleep(1e-4)
    finally:
        gc.callbacks.remove(note)
