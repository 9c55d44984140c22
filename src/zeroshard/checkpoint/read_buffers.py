"""Memory for reading a checkpoint: the buffers of the model's saves, and new ones where allocating is faster than reading twice.

    lasting   memory that is valid until the room is closed; None if there is no more
    passing   memory from a few slots in turn: valid until SLOTS further ones have been requested

Allocating memory can take longer than reading the same bytes a second time: a hypervisor may have to provide the pages first (at
0.4 GiB/s in one measurement, docs/log.md), and page-locking takes time. So `lasting` times its allocations, compares them with
the reads, and allocates no more once reading again is faster.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from ..comm.pool import BufferPool
from ..memory.io.aligned import ALIGN, round_up
from .rank_file import BUFFER_NBYTES, DIGEST_NBYTES

WINDOW_NBYTES, SLOTS = 4 * DIGEST_NBYTES, 8  # size of one read; number of slots for passing memory
_WORTH = 1.0  # allocating may take this many times as long as reading the same bytes again
_SLACK_S = 0.005  # times below this are too short to compare
_PASSING = SLOTS * WINDOW_NBYTES // BUFFER_NBYTES  # number of buffers that the slots take


class Room:
    """Buffers borrowed from a pool until `close`, and new ones."""

    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool
        self.most = 0  # bytes that may be allocated
        self._lent: list[Tensor] = []
        self._apart: list[Tensor] = []  # buffers that are split into the slots of `passing`
        self._slots: Iterator[Tensor] | None = None
        self._buffer: Tensor | None = None  # buffer of `lasting`, used up to `_at`
        self._at = 0
        self._made_nbytes, self._making_s, self._closed_to_more = 0, 0.0, False
        self._pace: float | None = None  # seconds to read a byte, measured before anything was allocated

    def close(self) -> None:
        """Return borrowed buffers to the pool and free new ones. The caller has waited for all reads into them."""
        for buffer in self._lent:
            self.pool.give(buffer)
        self._lent, self._apart, self._slots, self._buffer = [], [], None, None
        self._closed_to_more = True

    def plan(self, sizes: Iterable[int], all_last: bool, most: int) -> None:
        """Announce windows of these sizes for `lasting`, and reserve buffers for `passing` if it will be called.

        all_last: `passing` is called only if memory for `lasting` runs out. most: bytes that may be allocated besides the pool.
        """
        self.most = most
        count, at = 0, self._at if self._buffer is not None else BUFFER_NBYTES
        for nbytes in sizes:
            if at + nbytes > BUFFER_NBYTES:  # a window lies in one buffer
                count, at = count + 1, 0
            at += round_up(nbytes)
        if not all_last or count > self.pool.free:
            self._set_apart()

    def passing(self, nbytes: int) -> Tensor:
        """Return passing memory (nbytes,), at most a window. Raise MemoryError, RuntimeError or OSError without any."""
        if self._slots is None:
            self._set_apart()
            self._slots = itertools.cycle([slot for buffer in self._apart for slot in buffer.split(WINDOW_NBYTES)])
        return next(self._slots)[:nbytes]

    def lasting(self, nbytes: int, pace: Callable[[], float | None] | None) -> Tensor | None:
        """Return lasting memory (nbytes,), at most a window, or None.

        pace: returns the seconds to read a byte, or None. Without it: only from free buffers of the pool that `passing` will not
        need.
        """
        if self._buffer is None or self._at + nbytes > BUFFER_NBYTES:
            buffer = self._take() if pace is not None or self.pool.free > _PASSING else None
            if buffer is None and pace is not None:
                buffer = self._make(pace)
            if buffer is None:
                return None
            self._buffer, self._at = buffer, 0
        begin = self._at
        self._at += round_up(nbytes)
        return self._buffer[begin : begin + nbytes]

    def _take(self) -> Tensor | None:
        buffer = self.pool.borrow()
        if buffer is not None:
            self._lent.append(buffer)
        return buffer

    def _set_apart(self) -> None:
        while len(self._apart) < _PASSING:
            buffer = self._take()
            self._apart.append(self.pool.make(BUFFER_NBYTES) if buffer is None else buffer)

    def _make(self, pace: Callable[[], float | None]) -> Tensor | None:
        """Allocate a buffer. Return None if there is no memory, or touching its pages is slower than reading again."""
        if self._closed_to_more or self._made_nbytes + BUFFER_NBYTES > self.most:
            return None
        if self._pace is None:
            self._pace = pace()
        begin, nbytes = time.monotonic(), self._made_nbytes + BUFFER_NBYTES
        try:
            buffer = self.pool.make(BUFFER_NBYTES)
        except (MemoryError, RuntimeError, OSError):  # torch raises RuntimeError where memory is short
            self._closed_to_more = True
            return None
        made = time.monotonic()
        for end in range(WINDOW_NBYTES, BUFFER_NBYTES + 1, WINDOW_NBYTES):
            buffer[end - WINDOW_NBYTES : end : ALIGN].zero_()  # pages are provided when they are first touched
            touching_s = time.monotonic() - made
            expected_s = self._making_s + made - begin + touching_s * BUFFER_NBYTES / end
            if self._pace is not None and expected_s > _SLACK_S + _WORTH * self._pace * nbytes:
                self._closed_to_more = True
                return None
        self._making_s, self._made_nbytes = expected_s, nbytes
        return buffer
