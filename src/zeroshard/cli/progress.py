"""The progress of a run: a live bar on a terminal where rich is installed, else lines; rank 0 alone shows it.

With `--quiet` it prints nothing, with `--verbose` a line for every step.
"""

import sys
import time
from typing import Any

from .arguments import quiet, verbose

PLAIN_EVERY_S = 10.0


def clock(seconds: float) -> str:
    """Return seconds as m:ss."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _bar() -> Any:
    """Return rich's progress bar; None if stdout is no terminal, or rich is not installed."""
    if not sys.stdout.isatty():
        return None
    try:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ModuleNotFoundError:
        return None
    return Progress(
        TextColumn("[bold]step {task.fields[step]}"), BarColumn(bar_width=None),
        TextColumn("loss {task.fields[loss]:.3f} bits/byte  {task.fields[rate]:,.0f} tokens/s"), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(), transient=True,
    )  # fmt: skip


class TrainingProgress:
    """A display of loss, tokens per second and the remaining time; `note` prints a line above it."""

    bar: Any  # rich.progress.Progress, or None

    def __init__(self, shown: bool) -> None:
        """Make a display. shown: False if this rank prints nothing."""
        self.shown = shown and not quiet()
        self.started = self.printed = time.monotonic()
        self.bar = _bar() if self.shown and not verbose() else None
        if self.bar is not None:
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
            left = clock(elapsed * (1 - fraction) / max(fraction, 1e-9))
            print(f"step {step:5d}  {fraction:4.0%}  loss {loss:.3f} bits/byte  {rate:,.0f} tokens/s  left {left}", flush=True)

    def note(self, text: str) -> None:
        """Print a line that stays on the terminal."""
        if self.bar is not None:
            self.bar.console.print(text, highlight=False)
        elif self.shown:
            print(text, flush=True)
