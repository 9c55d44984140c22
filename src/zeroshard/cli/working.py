"""Progress of a plan, a search or a simulation: from the second second on, a line on stderr every few seconds.

    ... 2 s: dry run of rank 0: forward, blocks.12
    ... 5 s: 24,000 layouts looked at

With --quiet there is none. A thread of its own prints what was told last, so that a long silence of the work is no silence of the command.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from ..planner.recorder import telling
from .arguments import quiet

_FIRST_S, _EVERY_S = 1.0, 3.0


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Tell on stderr how far the work inside has come, but with --quiet. what: what it begins with."""
    if quiet():
        yield
        return
    told = [what]
    over = threading.Event()
    began = time.monotonic()

    def show() -> None:
        wait = _FIRST_S
        while not over.wait(wait):
            print(f"... {time.monotonic() - began:.0f} s: {told[0]}", file=sys.stderr, flush=True)
            wait = _EVERY_S

    thread = threading.Thread(target=show, name="progress", daemon=True)
    token = telling.set(lambda text: told.__setitem__(0, text))
    if not quiet():
        thread.start()
    try:
        yield
    finally:
        telling.reset(token)
        over.set()
        if thread.ident is not None:
            thread.join()
