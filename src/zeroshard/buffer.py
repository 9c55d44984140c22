"""Flat buffers: layout x placement. Their moves are the collectives.

    parameters   gather / release      sharded -> replicated, and back for free
    gradients    add ... reduce        partial -> sharded (or replicated)

A parameter buffer in placement SHARDED keeps one shard per rank; `full` is memory only between gather and release:
its storage is resized to nothing and back, so views that autograd saved stay valid. Where all ranks see one memory
(`Region.common`), `full` is always there and a gather moves nothing.

A gradient buffer takes local gradients one parameter at a time, in the order of backward, straight into the buffer
that is sent; its reduced shard accumulates over several backwards. With placement PARTIAL or REPLICATED the sent
buffer is the resting one, and the reduced shard is this rank's own slice of it.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from .comm.base import Comm, Region, Work
from .config import Placement
from .layout import FlatLayout
from .memory.ledger import GATHERED, GRADIENTS, PARAMETERS, PARTIAL, Ledger
from .memory.pool import StagingPool

_PATIENCE_S = 0.05  # without overlap: wait this long for a reduction before computing on


def slot_views(flat: Tensor, layout: FlatLayout) -> list[Tensor]:
    """One view per slot, in its parameter's shape. They share no version counter with `flat`."""
    data = flat.data
    return [data[slot.offset : slot.stop].view(slot.shape) for slot in layout.slots]


class ParameterBuffer:
    """The parameters of one dtype of one unit.

    full: (numel,), views of which the model computes with; shard: (shard_numel,), this rank's part.
    """

    def __init__(
        self, layout: FlatLayout, dtype: torch.dtype, placement: Placement, comm: Comm, ledger: Ledger,
        label: str, map_shared: bool,
    ) -> None:  # fmt: skip
        self.layout, self.comm, self.ledger, self.label = layout, comm, ledger, label
        self.sharded = placement is Placement.SHARDED
        self._full_nbytes = layout.numel * dtype.itemsize
        common = comm.allocate_common(layout.numel, dtype) if self.sharded and map_shared else None
        self.mapped = common is not None
        if common is not None:
            self.region, self.full = common, common.tensor
        elif self.sharded:
            self.region = comm.allocate(layout.shard_numel, dtype, whole=False)
            self.full = torch.empty(layout.numel, dtype=dtype, device=comm.device)
            self.full.untyped_storage().resize_(0)
        else:
            self.region = comm.allocate(layout.numel, dtype, whole=True)
            self.full = self.region.tensor
        shard = self.region.shards[comm.rank]
        assert shard is not None
        self.shard: Tensor = shard
        self.views = self._views()
        self.nbytes = self.shard.nbytes if self.sharded else self._full_nbytes
        ledger.enter(PARAMETERS, self.nbytes)
        self._present = False

    def _views(self) -> list[Tensor]:
        if not self.sharded or self.mapped:
            return slot_views(self.full, self.layout)
        self.full.untyped_storage().resize_(self._full_nbytes)
        views = slot_views(self.full, self.layout)
        self.full.untyped_storage().resize_(0)
        return views

    def gather(self) -> Work:
        """Start to fill `full` from the shards of all ranks (ZeRO-3's all-gather; after a step in stages 1, 2)."""
        if self.sharded and not self.mapped and not self._present:
            self.full.untyped_storage().resize_(self._full_nbytes)
            self.ledger.enter(GATHERED, self._full_nbytes)
            self._present = True
        self.ledger.sent("gather", self.shard.nbytes * (self.comm.world_size - 1), self.label)
        return self.comm.gather(self.full, self.region, self.label)

    def release(self) -> None:
        """Give up the gathered memory; the inverse of `gather`."""
        if self._present:
            self.full.untyped_storage().resize_(0)
            self.ledger.strike(GATHERED, self._full_nbytes)
            self._present = False

    def close(self) -> None:
        """Strike the buffer out of the ledger."""
        self.release()
        self.ledger.strike(PARAMETERS, self.nbytes)


class GradientBuffer:
    """The gradients of one parameter buffer, from local pieces to the reduced shard.

    shard: (shard_numel,), the mean over ranks, valid while `reduced`. full: (numel,) where the placement keeps it.
    """

    def __init__(
        self, layout: FlatLayout, dtype: torch.dtype, send_dtype: torch.dtype, placement: Placement, comm: Comm,
        ledger: Ledger, pool: StagingPool, tag: int, label: str,
    ) -> None:  # fmt: skip
        self.layout, self.comm, self.ledger, self.pool = layout, comm, ledger, pool
        self.tag, self.label, self.send_dtype = tag, label, send_dtype
        self.replicated = placement is Placement.REPLICATED
        self.region: Region | None = None
        if placement is Placement.SHARDED:
            self.shard = torch.zeros(layout.shard_numel, dtype=dtype, device=comm.device)
            self.nbytes = self.shard.nbytes
        else:
            self.region = comm.allocate(layout.numel, dtype, whole=True)
            shard = self.region.shards[comm.rank]
            assert shard is not None
            self.shard, self.nbytes = shard, self.region.tensor.nbytes
        ledger.enter(GRADIENTS, self.nbytes)
        self.direct = self.region is not None and dtype == send_dtype
        self.reduced = False
        self.culprits: set[int] = set()  # ranks that sent non-finite gradients for this shard
        self.square_sum: float | None = None  # of `shard`, if known since it was last written
        self._count = len(layout.slots)
        self._held = [False] * self._count  # local sums kept by zs.accumulate
        self._filled = [False] * self._count  # present in the buffer to be sent
        self._hold: list[Tensor] | None = None
        self._hold_own: Tensor | None = None  # memory of `_hold` where it is not the resting buffer
        self._carry: Tensor | None = None  # the earlier reduced shard, while its place is used for local sums
        self._send: Region | None = None
        self._slot = -1
        self._views: dict[int, list[Tensor]] = {}
        self._work: Work | None = None

    @property
    def full(self) -> Tensor:
        """The whole gradient (placements that keep it)."""
        assert self.region is not None
        return self.region.tensor

    # -- local gradients -------------------------------------------------------------------------------------

    def add(self, index: int, grad: Tensor, sync: bool) -> None:
        """Add a local gradient of slot `index`: to what this backward sends, or (not sync) to what is held."""
        if not sync:
            hold = self._begin_hold()
            hold[index].add_(grad) if self._held[index] else hold[index].copy_(grad)
            self._held[index] = True
            return
        views = self._begin_send()
        if self._filled[index] or (self.direct and self._held[index]):
            views[index].add_(grad)
        elif self._held[index]:
            assert self._hold is not None
            views[index].copy_(self._hold[index].add_(grad))
        else:
            views[index].copy_(grad)
        self._filled[index] = True

    @property
    def pending(self) -> bool:
        """True when something waits to be sent."""
        return self._send is not None

    @property
    def holds(self) -> bool:
        """True when local sums are held back by zs.accumulate."""
        return any(self._held)

    @property
    def carries(self) -> bool:
        """True when the reduced shard lies aside, until `finish` moves it into the resting buffer."""
        return self._carry is not None

    def _begin_resting(self) -> None:
        """The resting buffer is about to take local sums: save the reduced shard that lies in it."""
        if self._work is not None:
            self._work.drain()
            self._work = None
        if self.reduced and self._carry is None:
            self._carry = self.shard.clone()
            self.ledger.enter(PARTIAL, self._carry.nbytes)

    def _begin_hold(self) -> list[Tensor]:
        if self._hold is None:
            if self.region is not None:
                self._begin_resting()
                flat = self.region.tensor
            else:
                flat = torch.zeros(self.layout.numel, dtype=self.shard.dtype, device=self.comm.device)
                self._hold_own = flat
                self.ledger.enter(PARTIAL, flat.nbytes)
            self._hold = slot_views(flat, self.layout)
        return self._hold

    def _begin_send(self) -> list[Tensor]:
        if self._send is None:
            if self.direct:
                self._begin_resting()
                self._send = self.region
            else:
                self._slot, self._send = self.pool.take(self.layout.numel, self.send_dtype)
        assert self._send is not None
        if self._slot not in self._views:
            self._views[self._slot] = slot_views(self._send.tensor, self.layout)
        return self._views[self._slot]

    # -- reduction -------------------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Start the reduction of what was added (zeros for slots without a gradient)."""
        views = self._begin_send()
        for index in range(self._count):
            if self._filled[index] or (self.direct and self._held[index]):
                continue
            if self._held[index]:
                assert self._hold is not None
                views[index].copy_(self._hold[index])
            else:
                views[index].zero_()
        assert self._send is not None
        if not self.direct:
            for start, stop in self.layout.paddings():
                self._send.tensor[start:stop].zero_()
        self._release_hold()
        out, accumulate = (self._carry, True) if self._carry is not None else (self.shard, self.reduced)
        nbytes = self._send.tensor.nbytes // self.comm.world_size * (self.comm.world_size - 1)
        self.ledger.sent("reduce", nbytes, self.label)
        self._work = self.comm.reduce(
            self._send, out, scale=1.0 / self.comm.world_size, accumulate=accumulate, tag=self.tag, label=self.label
        )
        if not self.direct:
            self.pool.give(self._slot, self._work)
        self._slot, self._send = -1, None
        self._filled = [False] * self._count

    def settle(self) -> None:
        """Wait until the reduction is over, but not for ever: a rank that uses other units joins it later."""
        deadline = time.monotonic() + _PATIENCE_S
        while self._work is not None and not self._work.drained() and time.monotonic() < deadline:
            self.comm.poll()
            time.sleep(2e-5)

    def finish(self) -> None:
        """Wait for the reduction; afterwards `shard` (REPLICATED: `full`, after `gather`) holds the gradient."""
        if self._work is None:
            return
        self._work.wait()
        self.culprits.update(self._work.culprits)
        self.square_sum = None if self.replicated else self._work.square_sum  # replicated: users write `full`
        if self._carry is not None:
            self.shard.copy_(self._carry)
            self._release_carry()
        self.reduced = True
        if self.replicated:
            self._work.drain()

    def gather(self) -> Work:
        """REPLICATED: fill `full` with the reduced shards of all ranks, after `finish` on all of them."""
        assert self.region is not None
        self.ledger.sent("gather", self.shard.nbytes * (self.comm.world_size - 1), self.label)
        return self.comm.gather(self.region.tensor, self.region, self.label)

    def drop(self) -> None:
        """Forget all gradients (zero_grad)."""
        self.reduced = False
        self.drop_held()

    def drop_held(self) -> None:
        """Forget local sums that were held back."""
        self._release_hold()
        self._release_carry()

    def discard(self) -> None:
        """A backward was given up halfway: forget also what was about to be sent."""
        if self._send is not None and not self.direct:
            self.pool.give(self._slot, None)
        self._slot, self._send = -1, None
        self._filled = [False] * self._count
        self.drop()

    def _release_hold(self) -> None:
        if self._hold_own is not None:
            self.ledger.strike(PARTIAL, self._hold_own.nbytes)
        self._hold = self._hold_own = None
        self._held = [False] * self._count

    def _release_carry(self) -> None:
        if self._carry is not None:
            self.ledger.strike(PARTIAL, self._carry.nbytes)
            self._carry = None

    def close(self) -> None:
        """Strike the buffer out of the ledger."""
        if self._work is not None:
            self._work.drain()
        self.drop()
        self.ledger.strike(GRADIENTS, self.nbytes)
