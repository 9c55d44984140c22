"""StagingPool: buffers of one constant size through which gradients leave (ZeRO-R's CB, arXiv 1910.02054, 5.2.2).

A gradient buffer is taken when a unit's first gradient appears and given back when its reduction has started; it
can be taken again once no rank reads it any more. Normally `count` buffers circulate. More exist as address space
only: they are touched when ranks use units in different orders and would otherwise wait for one another for ever.

Every region is one that peers can read (see comm.base), so allocation is collective and happens once, at the start.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ..comm.base import Comm, Region, Work
from .ledger import STAGING, Ledger

_PATIENCE_S = 0.05  # a wait for a free buffer that lasts this long is announced to the peers
_LONGEST_S = 5.0  # after this a further buffer is touched in any case


@dataclass
class _Buffer:
    region: Region  # bytes
    work: Work | None = None  # the reduction that reads it
    taken: bool = False
    touched: bool = False


class StagingPool:
    """`limit` buffers of `nbytes` each, of which `count` are normally in use."""

    def __init__(self, comm: Comm, ledger: Ledger, nbytes: int, count: int, limit: int) -> None:
        self.comm, self.ledger, self.nbytes, self.count = comm, ledger, nbytes, count
        present = limit if comm.shares_memory else count
        self._buffers = [self._new() for _ in range(present if nbytes else 0)]
        self._views: dict[tuple[int, int, torch.dtype], Region] = {}
        self._longest_s = _LONGEST_S  # waited once in vain: not again for each buffer, until one comes free

    def _new(self) -> _Buffer:
        return _Buffer(self.comm.allocate(self.nbytes, torch.uint8, whole=True))

    def take(self, numel: int, dtype: torch.dtype) -> tuple[int, Region]:
        """A free buffer as a whole region of `numel` elements; its number is for `give`."""
        assert numel * dtype.itemsize <= self.nbytes
        number = self._find_free()
        buffer = self._buffers[number]
        if buffer.work is not None:
            buffer.work.drain()
            buffer.work = None
        if not buffer.touched:
            buffer.touched = True
            self.ledger.enter(STAGING, self.nbytes)
        buffer.taken = True
        return number, self._view(number, numel, dtype)

    def give(self, number: int, work: Work | None) -> None:
        """The buffer may be taken again when `work` has drained."""
        self._buffers[number].taken = False
        self._buffers[number].work = work

    def _find_free(self) -> int:
        """A free buffer: wait for a slow peer, but not for one that itself waits."""
        begin, announced = time.monotonic(), False
        try:
            while True:
                waiting = None
                for number, buffer in enumerate(self._buffers[: self.count]):
                    if buffer.taken:
                        continue
                    if buffer.work is None or buffer.work.drained():
                        self._longest_s = _LONGEST_S
                        return number
                    waiting = number if waiting is None else waiting
                if waiting is not None and not self.comm.waits_on_host:
                    return waiting  # `take` orders the streams; the host, which peers may need, goes on
                waited = time.monotonic() - begin
                if waited > self._longest_s:
                    self._longest_s = _PATIENCE_S
                    return self._further()
                if waiting is None or (announced and self.comm.peers_wait()):
                    return self._further()
                if waited > _PATIENCE_S and not announced:
                    announced = True
                    self.comm.announce("a staging buffer")
                self.comm.poll()
                time.sleep(2e-5)
        finally:
            if announced:
                self.comm.announce(None)

    def _further(self) -> int:
        """A buffer beyond the usual number."""
        for number, buffer in enumerate(self._buffers[self.count :], self.count):
            if not buffer.taken and (buffer.work is None or buffer.work.drained()):
                return number
        if self.comm.shares_memory:
            for number, buffer in enumerate(self._buffers):
                if not buffer.taken:
                    return number  # `take` waits; a circle of waiting ranks is detected there
        self._buffers.append(self._new())
        return len(self._buffers) - 1

    def _view(self, number: int, numel: int, dtype: torch.dtype) -> Region:
        key = (number, numel, dtype)
        if key not in self._views:
            region = self._buffers[number].region
            nbytes = numel * dtype.itemsize
            tensor = region.tensor[:nbytes].view(dtype)
            view = self.comm.private(tensor, whole=True)
            view.wholes = [whole[:nbytes].view(dtype) for whole in region.wholes]
            view.number = number
            view.siblings = lambda other: self._view(other, numel, dtype)  # ranks choose buffers by themselves
            self._views[key] = view
        return self._views[key]

    def close(self) -> None:
        """Drop all memory."""
        for buffer in self._buffers:
            if buffer.touched:
                self.ledger.strike(STAGING, self.nbytes)
        self._buffers.clear()
        self._views.clear()
