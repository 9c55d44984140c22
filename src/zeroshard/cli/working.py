"""The progress of a plan, a search or a simulation: after one second, a line on stderr every few seconds.

    ... 2 s: dry run of rank 0: forward, blocks.12
    ... 5 s: 24,000 layouts looked at

A thread prints the text that the planner passed last to `recorder.telling`. With --quiet nothing is printed.
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
    """Print the progress of the work in the context on stderr, unless --quiet was given. what: the first text to print."""
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
