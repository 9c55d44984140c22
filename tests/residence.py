"""What a block of code adds to the resident memory of a process, at its peak (Linux)."""

from __future__ import annotations

from zeroshard.bench.memory import peak_rss_nbytes, reset_peak_rss, rss_nbytes


class Peak:
    """`with Peak() as peak: ...`, then peak.added_nbytes.

    Not getrusage's ru_maxrss: a program inherits that of the process that started it, so a large parent hides everything.
    """

    added_nbytes = 0

    def __enter__(self) -> Peak:
        reset_peak_rss()
        self._before = rss_nbytes()
        return self

    def __exit__(self, *_: object) -> None:
        self.added_nbytes = peak_rss_nbytes() - self._before
