"""A probe of a disk: its rates of reads and writes, under the conditions of a step.

All ranks measure at the same time, since they share cores, memory and disks. The disk gets reads and writes in the step's
proportion, over blocks that have been written before, first alone and then while the host steps.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable

from ...tiers.io import Engine, Handle
from ...utils.aligned import empty_aligned
from ..simulator.disk_bandwidth import hidden_file, noise

_PROBE_S = 0.4
_BLOCK_NBYTES, _BLOCKS = 8 << 20, 4  # size of a block; blocks in each half of the file
_DEPTH = 12  # requests in flight: about as many bytes as a step's buffers hold


class DiskProbe:
    """A file that is read in one half and written in the other; `read_share` of the bytes are reads."""

    def __init__(self, folder: str | os.PathLike, read_share: float) -> None:
        self.read_share = read_share
        self.engine, self.file = Engine(), hidden_file(folder, 2 * _BLOCKS * _BLOCK_NBYTES)
        self.target = empty_aligned(_BLOCK_NBYTES)  # all reads go here; the data is not used
        self.source = noise(_BLOCK_NBYTES)
        self._count = self._reads = 0
        first = [self.engine.write(self.file, block * _BLOCK_NBYTES, self.source) for block in range(2 * _BLOCKS)]
        for handle in first:  # so that the measured writes overwrite blocks, as those of steps do
            handle.wait()

    def _request(self) -> Handle:
        """Start the next read or write, of blocks in turn."""
        self._count += 1
        if self._reads < self._count * self.read_share:
            self._reads += 1
            return self.engine.read(self.file, self._reads % _BLOCKS * _BLOCK_NBYTES, self.target)
        block = _BLOCKS + (self._count - self._reads) % _BLOCKS
        return self.engine.write(self.file, block * _BLOCK_NBYTES, self.source)

    def rates(self, beside: Callable[[], int] | None) -> tuple[float, float]:
        """Measure the bytes per second, and the sum per second of what `beside` returns when called repeatedly meanwhile."""
        flight = deque(self._request() for _ in range(_DEPTH))
        moved = counted = 0
        begin = time.perf_counter()
        while time.perf_counter() - begin < _PROBE_S or not moved:
            if beside is not None:
                counted += beside()
            else:
                flight[0].wait()
            while flight[0].done():
                flight.popleft().wait()  # raises if the request failed
                moved += _BLOCK_NBYTES
                flight.append(self._request())
        elapsed = time.perf_counter() - begin
        for handle in flight:
            handle.wait()
        return moved / elapsed, counted / elapsed

    def close(self) -> None:
        """Close the file, which has no name any more."""
        self.engine.close()
        self.file.close()
