"""Flat buffers of parameters: an all-gather makes a buffer whole on each rank, a release frees the whole and keeps the shard.

    each rank keeps          parameters at rest show     gather                                    release
    a shard                  slices                      all-gather                                frees the whole
    one memory of all ranks  slices                      nothing (`mapped`)                        nothing
    the whole                the whole                   all-gather, after a step                  nothing
    the whole                slices (`masters_shown`)    all-gather, after a step or other write   nothing

Where a release frees the whole, the storage of `full` is resized to nothing and back, so that its views stay the same tensors:
those that modules use, and those that autograd saved. Gradients have a flat buffer of the same layout (engine/reduction.py).
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ..config import Config, Tier
from ..utils.release import take_again
from ..utils.work import Work
from .comm.base import Collective, Comm, Region
from .comm.pool import StagingPool
from .flat_layout import FlatLayout
from .ledger import GATHERED, PARAMETERS, claimed
from .rest import Tiers
from .sizes import rests_away


def slot_views(flat: Tensor, layout: FlatLayout) -> list[Tensor]:
    """Return one view per slot, in its parameter's shape."""
    data = flat.data  # the views have no part in the version counter of `flat`: a gather into it is no write to them for autograd
    return [data[slot.offset : slot.stop].view(slot.shape) for slot in layout.slots]


class ParameterBuffer:
    """Flat buffer of the values of one group.

    full: (numel,); the model computes with views of it. rest: (shard_numel,), the resting place of this rank's shard.
    region: the memory that peers read; None if the shard rests off the device. Then `fetch` copies it to a staging buffer, which
    `gather` sends.
    sharded: parameters at rest are slices for the program. replicated: each rank keeps the whole in memory of its own. kept: both;
    then `behind` is True from a write to shards until the next gather, on all ranks alike (`Runtime.catch_up`).
    """

    def __init__(
        self, layout: FlatLayout, dtype: torch.dtype, config: Config, comm: Comm, tiers: Tiers,
        number: int, label: str, sharded: bool, replicated: bool, staging: StagingPool | None = None,
    ) -> None:  # fmt: skip
        """number: identifies this buffer, the same on every rank. staging: the buffers through which a shard passes that rests off
        the device."""
        self.layout, self.comm, self.ledger, self.tiers, self.label = layout, comm, tiers.ledger, tiers, label
        self.number, self.dtype, self.sharded, self.replicated = number, dtype, sharded, replicated
        self.kept, self.behind = sharded and replicated, False
        self._full_nbytes = layout.numel * dtype.itemsize
        offload = config.offload_param
        self.tier = Tier.DEVICE if replicated else offload.tier
        away = rests_away(self.tier, tiers.separate)
        mapped = not replicated and config.map_shared and not away and comm.copies
        common = comm.allocate_common(layout.numel, dtype) if mapped else None
        self.mapped = common is not None
        self.released = not (replicated or self.mapped)  # a release frees the whole, and the next gather fills memory anew
        self.region: Region | None = None
        if common is not None:
            self.region, self.full = common, common.tensor
        elif not replicated:
            self.region = None if away else comm.allocate(layout.shard_numel, dtype, whole=False)
            self.full = claimed(torch.empty(layout.numel, dtype=dtype, device=comm.device))  # a ledger counts it if gathered
            self.full.untyped_storage().resize_(0)  # released until the first gather; the tensor object stays
        else:
            self.region = comm.allocate(layout.numel, dtype, whole=True)
            self.full = self.region.tensor
        self.nbytes = self._full_nbytes if replicated else layout.shard_numel * dtype.itemsize
        if self.region is None:
            self.rest = tiers.rest(PARAMETERS, offload, layout.shard_numel, dtype)
        else:
            self.region.number = number  # all ranks give the same region the same number
            shard = self.region.shards[comm.rank]
            assert shard is not None
            self.rest = tiers.over(shard)
            tiers.enter(PARAMETERS, self.nbytes, self.tier)
        self.staged = self.region is None  # the shard must be fetched to a staging buffer before it can be gathered
        self.views = self.new_views()
        if not self.mapped:
            comm.reserve(number, layout.shard_numel, dtype)
        self._present, self._pool = False, staging
        self._staged: tuple[int, Region, Work] | None = None  # staging buffer (number, region) and the copy of the shard to it
        self._upload: Work | None = None  # the newest copy from the shard at rest on the host to the device

    def new_views(self) -> list[Tensor]:
        """Return one view of `full` for each slot, in its parameter's shape."""
        full, storage, slots = self.full, self.full.untyped_storage(), self.layout.slots
        if not self.sharded and storage.device.type != "meta":  # not for fake tensors
            # Each view has a storage of its own over the same memory: tools that go by storages (safetensors' `save_model`,
            # torch.save) then see parameters as they are without sharding.
            first, size = full.storage_offset(), full.itemsize
            memories = (storage[(first + slot.offset) * size : (first + slot.stop) * size] for slot in slots)
            fresh = (torch.empty(0, dtype=full.dtype, device=full.device) for _ in slots)
            views = zip(fresh, memories, slots, strict=True)
            return [view.set_(memory, 0, slot.shape) for view, memory, slot in views]  # type: ignore[call-overload]  # torch takes a slice
        if not self.released:
            return slot_views(full, self.layout)
        storage.resize_(self._full_nbytes)  # torch makes no views beyond a storage's end
        released = slot_views(full, self.layout)
        storage.resize_(0)
        return released

    def fetch(self, wait: bool = False) -> bool:
        """Start to copy the shard to a staging buffer. Return False (only if not `wait`) where no buffer is free."""
        if self._staged is not None or not self.staged:
            return True
        assert self._pool is not None, "shards that rest elsewhere pass through a pool"
        take = self._pool.take if wait else self._pool.try_take
        taken = take(self.layout.shard_numel, self.dtype, whole=False)
        if taken is None:  # no staging buffer is free
            return False
        pending = self.tiers.fetch(self.rest, taken[1].tensor, wait)
        if pending is None:
            self._pool.give(taken[0], None)  # no host buffer is free for the way from disk
            return False
        self._staged = (*taken, pending)
        return True

    @property
    def fetched(self) -> bool:
        """True if the shard is on the device, at rest or in a staging buffer."""
        return not self.staged or (self._staged is not None and self._staged[2].done())

    def cancel_fetch(self) -> None:
        """Drop a shard that was fetched and not gathered, since the shard at rest is about to change."""
        if self._staged is not None:
            assert self._pool is not None
            number, _, pending = self._staged
            pending.wait()
            self._pool.give(number, None)
            self._staged = None
        self.settle()

    def invalidate(self) -> None:
        """Wait until no copy reads the shard, and drop the communicator's copies of it: the shard is about to be written."""
        self.settle()
        self.comm.invalidate(self.number)

    def settle(self) -> None:
        """Wait, on the host, until no copy to the device reads the shard in host memory: so far only a stream may have waited."""
        if self._upload is not None:
            self._upload.wait()
            self._upload = None

    def gather(self) -> Collective:
        """Start to fill `full` from the shards of all ranks (collective): ZeRO-3's all-gather; in stages 1, 2 after a step.

        Of a whole that is `kept`: only if it is `behind`.
        """
        if self.kept and not self.behind:
            return Collective()
        if self.released and not self._present:
            take_again(self.full, self._full_nbytes)
            self.ledger.enter(GATHERED, self._full_nbytes)
            self._present = True
        if self.region is not None:
            work = self.comm.gather(self.full, self.region, self.label)
        else:
            self.fetch(wait=True)
            assert self._staged is not None
            assert self._pool is not None
            number, region, pending = self._staged
            self._staged = None
            pending.join()  # the stream of the gather waits, the host does not
            if self.tier is Tier.HOST:
                self._upload = pending  # it still reads the shard at rest: `settle` waits for it before a write
            work = self.comm.gather(self.full, region, self.label, tag=self.number)
            self._pool.give(number, work)  # free again when all ranks have read it
        self.ledger.sent("gather", work.sent, self.label)
        self.behind = False
        return work

    def release(self) -> None:
        """Give up the gathered memory; the inverse of `gather`."""
        if self._present:
            self.full.untyped_storage().resize_(0)
            self.ledger.strike(GATHERED, self._full_nbytes)
            self._present = False

    def detach(self) -> None:
        """Let tensors that refer to the gathered memory keep it; later gathers allocate other memory."""
        if self._present:  # the ledger counts that memory until the last of these tensors is gone
            weakref.finalize(self.full.untyped_storage(), self.ledger.strike, GATHERED, self._full_nbytes).atexit = False
        self._present = False
        self.full = claimed(torch.empty_like(self.full))
        self.full.untyped_storage().resize_(0)
        self.views = self.new_views()
