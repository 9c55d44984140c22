"""Gradient offload: how a reduced gradient shard moves from the device to the tier where it rests (ZeRO-Offload, 2101.06840, 4.1).

    device   reduce -> landing ---.                      landing and arrival buffers are few, and of constant size
    host                           '-> rest              the first gradient of a step
                                   '-> arrival -> rest   a gradient that is added, or moves on to a disk

All moves are asynchronous as long as nothing has to be added. `progress` starts the next move if it can; `settle` waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..config import Tier
from ..engine.comm.sums import device_square_sum
from ..engine.rest import Departure, MemoryRest, Rest, Tiers
from ..utils.work import OVER, Work
from .pool import BufferPool

if TYPE_CHECKING:
    from .storage import FurtherTiers

_WIDEN_NUMEL = 1 << 18  # number of elements converted at a time


class NarrowRest(MemoryRest):
    """Host memory for gradients that arrive in a narrower dtype than they rest in.

    As long as nothing is added, the gradient stays as it arrived, in the first part of the memory: no pass converts it.
    """

    def __init__(self, tensor: Tensor, tiers: Tiers, narrow_dtype: torch.dtype) -> None:
        super().__init__(tensor, Tier.HOST, tiers)
        nbytes = tensor.numel() * narrow_dtype.itemsize
        self.narrow = tensor.view(torch.uint8)[:nbytes].view(narrow_dtype)
        self.is_narrow = False

    def view(self, start: int, stop: int) -> Tensor | None:
        return (self.narrow if self.is_narrow else self.tensor)[start:stop]

    def read(self, start: int, out: Tensor) -> Work:
        if not self.is_narrow:
            return super().read(start, out)
        out.copy_(self.narrow[start : start + out.numel()])
        return OVER

    def write(self, start: int, source: Tensor) -> Work:
        self.widen()  # elements that are not written keep their values
        return super().write(start, source)

    def load(self, start: int, stop: int) -> Tensor:
        part = (self.narrow if self.is_narrow else self.tensor)[start:stop]
        self.tiers.ledger.move(Tier.HOST, Tier.DEVICE, part.nbytes)
        return part.to(self.tiers.comm.device, copy=True).to(self.dtype)

    def store(self, start: int, source: Tensor) -> None:
        self.widen()
        super().store(start, source)

    def widen(self) -> None:
        """Convert the gradient in place to the resting dtype, from the end: an element is read before it is overwritten."""
        if self.is_narrow:
            for start in reversed(range(0, self.numel, _WIDEN_NUMEL)):
                part = slice(start, start + _WIDEN_NUMEL)
                self.tensor[part] = self.narrow[part].to(self.dtype, copy=True)
            self.is_narrow = False


def narrowed(rest: Rest, tiers: Tiers, dtype: torch.dtype) -> Rest:
    """Return a NarrowRest over the memory of `rest`, if it is on the host and gradients arrive in fewer bytes; else `rest`."""
    if isinstance(rest, MemoryRest) and not rest.resident and dtype.itemsize < rest.dtype.itemsize:
        return NarrowRest(rest.tensor, tiers, dtype)
    return rest


class GradientOffload(Departure):
    """Moves one gradient shard from the reduction's result to its `rest`.

    From a device with memory of its own the gradient moves in the dtype of the reduction (2 bytes an element in bf16); where
    the device is the host it stays in fp32 until it is added, as it would without offload.
    """

    def __init__(self, rest: Rest, tiers: FurtherTiers, send_dtype: torch.dtype) -> None:
        self.rest, self.tiers = rest, tiers
        self.dtype = send_dtype if tiers.separate else torch.promote_types(rest.dtype, torch.float32)
        self._buffer: Tensor | None = None  # the landing buffer
        self._landed: Tensor | None = None  # the reduction's result, in that buffer
        # a gradient that is copied to the host, to be added or written there: arrival buffer, gradient in it, add it?, the copy
        self.arriving: tuple[Tensor, Tensor, bool, Work] | None = None
        self._under_way: Work | None = None  # the last move, into `rest`

    def landing(self) -> Tensor:
        """Return device memory (shard_numel,) for the result of the coming reduction."""
        # in_line: the host must not wait until a landing buffer has been copied to the host. That copy runs after a reduction,
        # which, where ranks use different units, may need the message that this rank sends at the end of its backward: a deadlock
        self._buffer = _taken(self.tiers.landings, in_line=True)
        self._landed = self._buffer[: self.rest.numel * self.dtype.itemsize].view(self.dtype)
        return self._landed

    def leave(self, add: bool) -> Tensor | None:
        """Start the move to `rest` after the reduction; return the square sum if the device is separate and nothing is added."""
        assert self._landed is not None and self._buffer is not None
        landed, buffer, landings = self._landed, self._buffer, self.tiers.landings
        assert landings is not None
        self._landed = self._buffer = None
        self.settle()  # an earlier gradient may still be on its way to `rest`
        if not self.tiers.separate:
            self._under_way = self._lay_down(landed, add)
            landings.give(buffer, self._under_way)
            return None
        if isinstance(self.rest, MemoryRest) and not add:
            target = self.rest.tensor
            if isinstance(self.rest, NarrowRest):
                self.rest.is_narrow, target = True, self.rest.narrow  # its bytes are in the first part of the memory now
            self._under_way = self.tiers.copy(target, landed, Tier.DEVICE, Tier.HOST)
            landings.give(buffer, self._under_way)
        else:
            arrival = _taken(self.tiers.arrivals)
            arrived = arrival[: landed.nbytes].view(landed.dtype)
            pending = self.tiers.copy(arrived, landed, Tier.DEVICE, Tier.HOST)
            landings.give(buffer, pending)
            self.arriving = (arrival, arrived, add, pending)
        # read after `give`: the next reduction into it is ordered behind the current stream's work so far (`Streams.beside`)
        return None if add else device_square_sum(landed)  # while it is still on the device

    def progress(self) -> None:
        """Add or write the gradient that is copied to the host, if the copy is done."""
        if self.arriving is not None and self.arriving[3].done():
            self._arrive()

    def _arrive(self) -> None:
        assert self.arriving is not None
        arrival, arrived, add, pending = self.arriving
        self.arriving = None
        pending.wait()
        self._under_way = self._lay_down(arrived, add)
        assert self.tiers.arrivals is not None
        self.tiers.arrivals.give(arrival, self._under_way)

    def settle(self) -> None:
        """Return when the gradient is at rest."""
        if self.arriving is not None:
            self._arrive()
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None

    def abandon(self) -> None:
        """Drop the gradient, because its backward was given up."""
        if self._buffer is not None and self.tiers.landings is not None:
            self.tiers.landings.lose(self._buffer)  # the reduction may still write to the buffer, so it is not reused
        self._buffer = self._landed = None
        self.settle()

    def _lay_down(self, gradient: Tensor, add: bool) -> Work:
        """Start to write a gradient that the host can read to `rest`, or add it to the one that is there."""
        rest = self.rest
        if not add:
            return rest.write(0, gradient if isinstance(rest, MemoryRest) else gradient.to(rest.dtype))  # a disk does not convert
        if isinstance(rest, NarrowRest):
            rest.widen()
        view = rest.view(0, rest.numel)
        if view is not None:
            view.add_(gradient)
            return OVER
        total = torch.empty(rest.numel, dtype=rest.dtype, device="cpu")
        rest.read(0, total).wait()
        return rest.write(0, total.add_(gradient))


def _taken(pool: BufferPool | None, in_line: bool = False) -> Tensor:
    """Take a buffer. Where running work holds all of them, which may end only if this rank goes on, allocate one more."""
    assert pool is not None
    buffer = pool.take(wait=True, in_line=in_line)
    if buffer is None:
        pool.count += 1
        buffer = pool.take()
    assert buffer is not None
    return buffer
