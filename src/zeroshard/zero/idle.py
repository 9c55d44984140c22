"""The check of functions that save, load, stream or move states: a program may call them only between steps."""

from __future__ import annotations

from ..errors import ZeroshardError
from .runtime import Runtime


def check_idle(runtime: Runtime, verb: str, also_moved: bool = False) -> None:
    """Raise ZeroshardError inside a forward, a backward, zs.gathered or zs.join: there states are not at rest.

    verb: name of the calling function, for the message. also_moved: allow states that zs.offload_states has moved away.
    """
    runtime.attendance.call(f"{verb}()")
    runtime.recover()
    busy = next((unit.name for unit in runtime.units if unit.in_use), None)
    if busy is not None:
        raise ZeroshardError(f"{verb}: called inside a forward, a backward or zs.gathered() ({busy}); call it between steps.")
    if not also_moved:
        runtime.moved.check()
    runtime.tiers.check()
