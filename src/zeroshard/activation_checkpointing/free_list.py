"""Space: a free list over a range of bytes. First fit, neighbours joined; plain arithmetic, no memory.

    [ taken | free      | taken |  free        ]        free: (offset, nbytes), in order, never two side by side

Offsets and lengths are multiples of `align`, so that slots are aligned as the range itself is.
Checkpoints come and go like a stack, so the list of free ranges is short and first fit leaves no holes.
"""

from __future__ import annotations

import bisect


class Space:
    """A free list over the bytes [0, nbytes)."""

    def __init__(self, nbytes: int, align: int) -> None:
        self.align = align
        self.nbytes = self.rounded(nbytes)
        self.used_nbytes = 0
        self._free: list[tuple[int, int]] = [(0, self.nbytes)] if self.nbytes else []

    def rounded(self, nbytes: int) -> int:
        """Return the bytes that a request of `nbytes` takes."""
        return -(-nbytes // self.align) * self.align

    def take(self, nbytes: int) -> int | None:
        """Take `nbytes` free bytes and return their offset, or None if there is no such gap."""
        nbytes = self.rounded(max(nbytes, 1))
        for index, (offset, length) in enumerate(self._free):
            if length >= nbytes:
                if length == nbytes:
                    del self._free[index]
                else:
                    self._free[index] = (offset + nbytes, length - nbytes)
                self.used_nbytes += nbytes
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Free the `nbytes` bytes at an offset that `take(nbytes)` returned."""
        nbytes = self.rounded(max(nbytes, 1))
        self.used_nbytes -= nbytes
        index = bisect.bisect(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + nbytes:
            nbytes += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            offset, before = self._free.pop(index - 1)
            nbytes, index = nbytes + before, index - 1
        self._free.insert(index, (offset, nbytes))
