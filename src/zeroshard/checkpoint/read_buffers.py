"""Memory for what is read of a checkpoint: the buffers of a model's saves, and more of them where that is worth its time.

    lasting   stays as it is until the room is closed; None where there is no more
    passing   goes round: good until as many more have been asked for as there are slots

Fresh memory can cost more than to read the same bytes a second time: a hypervisor may have to find it first (0.4 GiB/s as
measured, docs/log.md), and locking it for a device takes its time. So it is timed, beside the reads.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from ..io.aligned import ALIGN, round_up
from .rank_file import BUFFER_NBYTES, DIGEST_NBYTES, Ring

WINDOW_NBYTES, SLOTS = 4 * DIGEST_NBYTES, 8  # of one read; of memory that goes round
_WORTH = 1.0  # to make memory may take so many times as long as to read as much once more, which is what it saves
_SLACK_S = 0.005  # nothing is told by less
_PASSING = SLOTS * WINDOW_NBYTES // BUFFER_NBYTES  # buffers


class Room:
    """Buffers of a ring that nobody else uses until `close`."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.most = 0  # bytes that may be made
        self._lent: list[Tensor] = []
        self._apart: list[Tensor] = []  # for what goes round
        self._slots: Iterator[Tensor] | None = None
        self._buffer: Tensor | None = None  # of what lasts, up to `_at`
        self._at = 0
        self._made_nbytes, self._making_s, self._closed_to_more = 0, 0.0, False
        self._pace: float | None = None  # seconds to read a byte, while nothing was made

    def close(self) -> None:
        """Give the buffers back, when nothing is read into them any more; what was made beside them is freed."""
        for buffer in self._lent:
            self.ring.give(buffer)
        self._lent, self._apart, self._slots, self._buffer = [], [], None, None
        self._closed_to_more = True

    def plan(self, sizes: Iterable[int], all_last: bool, most: int) -> None:
        """Windows of these sizes are to last. all_last: no others will be asked for. most: bytes that may be made beside the ring."""
        self.most = most
        count, at = 0, self._at if self._buffer is not None else BUFFER_NBYTES
        for nbytes in sizes:
            if at + nbytes > BUFFER_NBYTES:
                count, at = count + 1, 0
            at += round_up(nbytes)
        if not all_last or count > self.ring.free:
            self._set_apart()

    def passing(self, nbytes: int) -> Tensor:
        """(nbytes,) of at most a window. Raises MemoryError and the like where there is none to begin with."""
        if self._slots is None:
            self._set_apart()
            self._slots = itertools.cycle([slot for buffer in self._apart for slot in buffer.split(WINDOW_NBYTES)])
        return next(self._slots)[:nbytes]

    def lasting(self, nbytes: int, pace: Callable[[], float | None]) -> Tensor | None:
        """(nbytes,) of at most a window, or None. pace: seconds that it takes to read a byte; None: not known yet."""
        return self._carve(nbytes, lambda: self._make(pace) if (buffer := self._take()) is None else buffer)

    def spare(self, nbytes: int) -> Tensor | None:
        """The same of what is there and will not be missed."""
        return self._carve(nbytes, lambda: self._take() if self.ring.free > _PASSING else None)

    def _carve(self, nbytes: int, more: Callable[[], Tensor | None]) -> Tensor | None:
        if self._buffer is None or self._at + nbytes > BUFFER_NBYTES:
            buffer = more()
            if buffer is None:
                return None
            self._buffer, self._at = buffer, 0
        begin = self._at
        self._at += round_up(nbytes)
        return self._buffer[begin : begin + nbytes]

    def _take(self) -> Tensor | None:
        buffer = self.ring.borrow()
        if buffer is not None:
            self._lent.append(buffer)
        return buffer

    def _set_apart(self) -> None:
        while len(self._apart) < _PASSING:
            buffer = self._take()
            self._apart.append(self.ring.make(BUFFER_NBYTES) if buffer is None else buffer)

    def _make(self, pace: Callable[[], float | None]) -> Tensor | None:
        """A buffer more, unless there is no memory for it, or making it takes too long."""
        if self._closed_to_more or self._made_nbytes + BUFFER_NBYTES > self.most:
            return None
        if self._pace is None:
            self._pace = pace()
        begin, nbytes = time.monotonic(), self._made_nbytes + BUFFER_NBYTES
        try:
            buffer = self.ring.make(BUFFER_NBYTES)
        except (MemoryError, RuntimeError, OSError):  # torch has its own for it
            self._closed_to_more = True
            return None
        made = time.monotonic()
        for end in range(WINDOW_NBYTES, BUFFER_NBYTES + 1, WINDOW_NBYTES):
            buffer[end - WINDOW_NBYTES : end : ALIGN].zero_()  # what has not been touched is not there yet
            touching_s = time.monotonic() - made
            expected_s = self._making_s + made - begin + touching_s * BUFFER_NBYTES / end
            if self._pace is not None and expected_s > _SLACK_S + _WORTH * self._pace * nbytes:
                self._closed_to_more = True
                return None
        self._making_s, self._made_nbytes = expected_s, nbytes
        return buffer
