"""The progress of a training run, and of a plan, a search or a simulation. With `--quiet` nothing is printed.

Training: a live bar on a terminal where rich is installed, else lines; with `--verbose` a line for every step. Rank 0 alone
shows it. A plan: after one second, a line on stderr every few seconds, which a thread prints:

    ... 2 s: dry run of rank 0: forward, blocks.12
    ... 5 s: 24,000 layouts looked at
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from ..utils.setting import setting
from .arguments import quiet, verbose

PLAIN_EVERY_S = 10.0
_FIRST_S, _EVERY_S = 1.0, 3.0


class TrainingProgress:
    """A display of loss, tokens per second and the remaining time; `note` prints a line above it."""

    bar: Any  # rich.progress.Progress, or None

    def __init__(self, shown: bool) -> None:
        """Make a display. shown: False if this rank prints nothing."""
        self.shown = shown and not quiet()
        self.started = self.printed = time.monotonic()
        self.bar = None
        if not self.shown or verbose() or not sys.stdout.isatty():
            return
        with contextlib.suppress(ModuleNotFoundError):
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            self.bar = Progress(
                TextColumn("[bold]step {task.fields[step]}"), BarColumn(bar_width=None),
                TextColumn("loss {task.fields[loss]:.3f} bits/byte  {task.fields[rate]:,.0f} tokens/s"), TimeElapsedColumn(),
                TextColumn("left"), TimeRemainingColumn(), transient=True,
            )  # fmt: skip
            self.task = self.bar.add_task("train", total=1.0, step=0, loss=float("nan"), rate=0.0)

    def __enter__(self) -> "TrainingProgress":
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, fraction: float, step: int, loss: float, rate: float) -> None:
        """Show that `fraction` of the run is done; `loss` in bits per byte, `rate` in tokens per second."""
        if self.bar is not None:
            self.bar.update(self.task, completed=fraction, step=step, loss=loss, rate=rate)
            return
        now = time.monotonic()
        if self.shown and (verbose() or now - self.printed >= PLAIN_EVERY_S):
            self.printed = now
            elapsed = now - self.started
            seconds = int(elapsed * (1 - fraction) / max(fraction, 1e-9))
            left = f"{seconds // 60}:{seconds % 60:02d}"
            print(f"step {step:5d}  {fraction:4.0%}  loss {loss:.3f} bits/byte  {rate:,.0f} tokens/s  left {left}", flush=True)

    def note(self, text: str) -> None:
        """Print a line that stays on the terminal."""
        if self.bar is not None:
            self.bar.console.print(text, highlight=False)
        elif self.shown:
            print(text, flush=True)


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Print the progress of the work in the context on stderr, unless --quiet was given. what: the first text to print."""
    if quiet():
        yield
        return
    from ..planner.recorder import telling

    told = [what]
    over = threading.Event()
    began = time.monotonic()

    def show() -> None:
        wait = _FIRST_S
        while not over.wait(wait):
            print(f"... {time.monotonic() - began:.0f} s: {told[0]}", file=sys.stderr, flush=True)
            wait = _EVERY_S

    thread = threading.Thread(target=show, name="progress", daemon=True)
    thread.start()
    try:
        with setting(telling, lambda text: told.__setitem__(0, text)):
            yield
    finally:
        over.set()
        thread.join()
