"""Progress of a run: a live bar on a terminal, plain lines now and then elsewhere, nothing on ranks other than 0."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_EVERY_S = 10.0


def clock(seconds: float) -> str:
    """Seconds as m:ss."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class TrainingProgress:
    """Shows loss, tokens per second and the remaining time; `note` prints a line above the bar."""

    console: Console  # where everything of this run is printed
    bar: Progress | None  # None without a terminal

    def __init__(self, console: Console) -> None:
        self.console = console
        self.started = self.printed = time.monotonic()
        self.bar = None
        if console.is_terminal:
            self.bar = Progress(
                TextColumn("[bold]step {task.fields[step]}"),
                BarColumn(bar_width=None),
                TextColumn("loss {task.fields[loss]:.3f} bits/byte  {task.fields[rate]:,.0f} tokens/s"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            self.task = self.bar.add_task("train", total=1.0, step=0, loss=float("nan"), rate=0.0)

    def __enter__(self) -> "TrainingProgress":
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, fraction: float, step: int, loss: float, rate: float) -> None:
        """Tell that `fraction` of the run is done; `loss` in bits per byte, `rate` in tokens per second."""
        if self.bar is not None:
            self.bar.update(self.task, completed=fraction, step=step, loss=loss, rate=rate)
            return
        now = time.monotonic()
        if now - self.printed >= PLAIN_EVERY_S:
            self.printed = now
            elapsed = now - self.started
            left = clock(elapsed * (1 - fraction) / max(fraction, 1e-9))
            self.console.print(
                f"step {step:5d}  {fraction:4.0%}  loss {loss:.3f} bits/byte  {rate:,.0f} tokens/s  left {left}",
                highlight=False,
            )

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(text, highlight=False)
