"""All-gather of bytes in chunks. Ranks may have different lengths; the caller keeps what it needs of each chunk.

rank 0   | a a a a a a | a a . |        each column is one collective of at most `nbytes` a rank, through staging buffers
rank 1   | b b b b . . |       |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..engine.comm.base import Comm
from ..engine.comm.pool import StagingPool
from ..engine.ledger import Ledger


class ChunkedGather:
    """Chunked all-gather through two staging buffers of `nbytes` and one buffer for a chunk of every rank, made at first use."""

    def __init__(self, comm: Comm, ledger: Ledger, nbytes: int) -> None:
        self.comm, self.ledger, self.nbytes = comm, ledger, max(nbytes // 64 * 64, 1024)  # 64: a chunk has whole elements
        self._tag = 0
        self._pool: StagingPool | None = None
        self._received = torch.empty(0)  # (world_size, nbytes)

    def run(
        self, sizes: Sequence[int], mine: Callable[[int, int], Tensor], take: Callable[[int, int, Tensor], None], label: str
    ) -> None:
        """Gather sizes[r] bytes of each rank r (collective; `sizes` must be equal on all ranks).

        mine(start, stop): returns this rank's bytes, uint8. take(rank, start, part): called with a rank's bytes from `start`
        on, a view that is valid during the call.
        """
        comm, most = self.comm, max(sizes)
        for start in range(0, most, self.nbytes):
            n = min(self.nbytes, most - start)
            if self._pool is None:
                self._tag = comm.control.new_serial() << 20  # a number that no buffer of a model has (see `Builder.tag`)
                comm.reserve(0, self.nbytes, torch.uint8)
                self._pool = StagingPool(comm, self.ledger, self.nbytes, 2, 2)
                self._received = torch.empty(self.nbytes * comm.world_size, dtype=torch.uint8, device=comm.device)
            number, region = self._pool.take(n, torch.uint8, whole=False)
            stop = min(start + n, sizes[comm.rank])
            if start < stop:
                region.tensor[: stop - start].copy_(mine(start, stop))
            received = self._received[: n * comm.world_size]
            work = comm.gather(received, region, label, tag=self._tag)
            self.ledger.sent("gather", work.sent, label)
            work.wait()
            self._pool.give(number, work)
            for rank, row in enumerate(received.view(comm.world_size, n)):
                if sizes[rank] > start:
                    take(rank, start, row[: sizes[rank] - start])

    def close(self) -> None:
        """Release all buffers."""
        if self._pool is not None:
            self._pool.close()
        self._pool, self._received = None, torch.empty(0)
