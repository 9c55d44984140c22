"""Flat buffers of parameters and gradients: each has a layout, a placement and a tier; collectives change its placement.

    parameters   gather / release      sharded -> replicated, and back for free
    gradients    add ... reduce        partial -> sharded (or replicated)

A parameter buffer in placement SHARDED keeps one shard per rank; `full` has memory only between gather and release:
its storage is resized to nothing and back, so views that autograd saved stay valid. Where all ranks map one memory
(`Region.common`), `full` is always valid and a gather moves nothing.

A gradient buffer copies each local gradient into the send buffer as soon as backward has computed it; the reduced shard
accumulates over several backwards. With placement PARTIAL or REPLICATED the whole gradient stays at rest on every rank: this
buffer is also the send buffer, and this rank's slice of it is the reduced shard.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.base import Collective, Comm, Region
from ..comm.pool import StagingPool
from ..comm.streams import Streams
from ..config import Config, Placement, Tier
from ..memory.estimate import rests_away
from ..memory.ledger import GATHERED, GRADIENTS, PARAMETERS, PARTIAL, Ledger, claimed
from ..memory.release import take_again
from ..offload.gradient_offload import Departure, narrowed
from ..offload.storage import Rest, Tiers
from ..tensor.flat_layout import FlatLayout
from ..utils import torch_compat
from ..utils.work import Work, pause

_PATIENCE_S = 0.05  # without overlap, `GradientBuffer.settle` waits this long for a reduction


def slot_views(flat: Tensor, layout: FlatLayout) -> list[Tensor]:
    """Return one view per slot, in its parameter's shape, with a version counter of its own: not that of `flat`."""
    data = flat.data
    return [data[slot.offset : slot.stop].view(slot.shape) for slot in layout.slots]


class ParameterBuffer:
    """Flat buffer of the values of one group.

    full: (numel,); the model computes with views of it. rest: (shard_numel,), the resting place of this rank's shard.
    region: the memory that peers read; None if the shard rests off the device. Then `fetch` copies it to a staging buffer, which
    `gather` sends.
    """

    def __init__(
        self, layout: FlatLayout, dtype: torch.dtype, config: Config, comm: Comm, tiers: Tiers,
        number: int, label: str, sharded: bool, staging: StagingPool | None = None,
    ) -> None:  # fmt: skip
        """number: identifies this buffer, the same on every rank. sharded: placement SHARDED if True, else REPLICATED.

        staging: the buffers through which a shard passes that rests off the device.
        """
        self.layout, self.comm, self.ledger, self.tiers, self.label = layout, comm, tiers.ledger, tiers, label
        self.number, self.dtype, self.sharded = number, dtype, sharded
        self._full_nbytes = layout.numel * dtype.itemsize
        offload = config.offload_param
        self.tier = offload.tier if self.sharded else Tier.DEVICE
        away = rests_away(self.tier, tiers.separate)
        mapped = self.sharded and config.map_shared and not away and comm.copies
        common = comm.allocate_common(layout.numel, dtype) if mapped else None
        self.mapped = common is not None
        self.region: Region | None = None
        if common is not None:
            self.region, self.full = common, common.tensor
        elif self.sharded:
            self.region = None if away else comm.allocate(layout.shard_numel, dtype, whole=False)
            self.full = claimed(torch.empty(layout.numel, dtype=dtype, device=comm.device))  # in the ledger while gathered
            self.full.untyped_storage().resize_(0)  # released until the first gather; the tensor object stays
        else:
            self.region = comm.allocate(layout.numel, dtype, whole=True)
            self.full = self.region.tensor
        self.nbytes = layout.shard_numel * dtype.itemsize if self.sharded else self._full_nbytes
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
        if not self.sharded and storage.device.type != "meta":  # not for imagined ranks and fake tensors
            # Each view has a storage of its own over the same memory: tools that go by storages (safetensors' `save_model`,
            # torch.save) then see parameters as they are without sharding.
            first, size = full.storage_offset(), full.itemsize
            memories = (storage[(first + slot.offset) * size : (first + slot.stop) * size] for slot in slots)
            fresh = (torch.empty(0, dtype=full.dtype, device=full.device) for _ in slots)
            views = zip(fresh, memories, slots, strict=True)
            return [view.set_(memory, 0, slot.shape) for view, memory, slot in views]  # type: ignore[call-overload]  # torch takes a slice
        if not self.sharded or self.mapped:
            return slot_views(full, self.layout)  # in memory that is never released
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

    def forget(self) -> None:
        """Drop a shard that was fetched and not gathered, since the shard at rest is about to change."""
        if self._staged is not None:
            assert self._pool is not None
            number, _, pending = self._staged
            pending.wait()
            self._pool.give(number, None)
            self._staged = None
        self.settle()

    def outdate(self) -> None:
        """Invalidate copies that the communicator keeps of the shard, once none reads it: the shard is about to be written."""
        self.settle()
        self.comm.outdate(self.number)

    def settle(self) -> None:
        """Wait, on the host, until no copy to the device reads the shard in host memory: so far only a stream may have waited."""
        if self._upload is not None:
            self._upload.wait()
            self._upload = None

    def gather(self) -> Collective:
        """Start to fill `full` from the shards of all ranks (collective): ZeRO-3's all-gather; in stages 1, 2 after a step."""
        if self.sharded and not self.mapped and not self._present:
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
        return work

    def release(self) -> None:
        """Give up the gathered memory; the inverse of `gather`."""
        if self._present:
            self.full.untyped_storage().resize_(0)
            self.ledger.strike(GATHERED, self._full_nbytes)
            self._present = False

    def part(self) -> None:
        """Let tensors that refer to the gathered memory keep it, with its ledger entry; later gathers allocate other memory."""
        if self._present:
            weakref.finalize(self.full.untyped_storage(), self.ledger.strike, GATHERED, self._full_nbytes).atexit = False
        self._present = False
        self.full = claimed(torch.empty_like(self.full))
        self.full.untyped_storage().resize_(0)
        self.views = self.new_views()


class LocalSums:
    """Sums of this rank's gradients, by slot, that zs.accumulate holds back: in the resting buffer or in memory of their own.

    views: the sums, between `begin` and `release`. held: by slot, whether a gradient was added.
    """

    def __init__(self, layout: FlatLayout, ledger: Ledger) -> None:
        self._layout, self._ledger = layout, ledger
        self.held = [False] * len(layout.slots)
        self.views: list[Tensor] = []
        self._own_nbytes = 0

    def begin(self, flat: Tensor, own: bool) -> None:
        """Keep the sums in `flat` (numel,) from now on. own: `flat` was allocated for them, and counts in the ledger."""
        self.views = slot_views(flat, self._layout)
        self._own_nbytes = flat.nbytes if own else 0
        if own:
            self._ledger.enter(PARTIAL, flat.nbytes)

    def add(self, index: int, grad: Tensor) -> Tensor:
        """Add a gradient to the sum of slot `index`, and return the sum."""
        view = self.views[index]
        view.add_(grad) if self.held[index] else view.copy_(grad)
        self.held[index] = True
        return view

    def release(self) -> None:
        """Drop the sums and their memory; the inverse of `begin`."""
        if self._own_nbytes:
            self._ledger.strike(PARTIAL, self._own_nbytes)
        self.views, self._own_nbytes = [], 0
        self.held = [False] * len(self.held)


class GradientBuffer:
    """Flat buffer of the gradients of one group: takes local gradients, reduces them, keeps the reduced shard.

    rest: (shard_numel,), the mean over ranks, valid while `reduced`. full: (numel,), if the placement keeps it. summed: number of
    ranks over which gradients are to be summed, not averaged (of experts a fraction): the mean over `comm` is multiplied by it.
    """

    def __init__(
        self, layout: FlatLayout, dtype: torch.dtype, send_dtype: torch.dtype, config: Config, comm: Comm, pool: StagingPool,
        tiers: Tiers, tag: int, label: str, summed: float,
    ) -> None:  # fmt: skip
        self.layout, self.comm, self.ledger, self.pool, self.summed = layout, comm, tiers.ledger, pool, summed
        self.tag, self.label, self.dtype, self.send_dtype = tag, label, dtype, send_dtype
        self.tiers, self.offload = tiers, config.offload_gradient
        self.twin: Rest | None = None  # a second resting place that takes turns with `rest` (delayed update)
        placement = config.row.gradient
        self.replicated = placement is Placement.REPLICATED
        self.region: Region | None = None
        if placement is Placement.SHARDED:
            self.rest = tiers.rest(GRADIENTS, config.offload_gradient, layout.shard_numel, dtype)
        else:
            self.region = comm.allocate(layout.numel, dtype, whole=True)
            self.region.number = tag
            shard = self.region.shards[comm.rank]
            assert shard is not None
            self.rest = tiers.over(shard)
            tiers.enter(GRADIENTS, self.region.tensor.nbytes, Tier.DEVICE)
        if self.replicated:
            comm.reserve(tag, layout.shard_numel, dtype)
        comm.reserve_slices(layout.shard_numel, send_dtype)
        if self.replicated:
            comm.reserve(0, layout.shard_numel, dtype)
        self.departure: Departure | None = None
        if not self.rest.resident:
            self.rest = narrowed(self.rest, tiers, send_dtype)
            self.departure = Departure(self.rest, tiers, send_dtype)
        self.factor = 1.0  # of clipping and loss scale: still to be applied to a shard that is offloaded or narrower than fp32
        self.direct = self.region is not None and dtype == send_dtype  # the buffer at rest is the send buffer
        self.reduced = False
        self.culprits: set[int] = set()  # ranks that sent non-finite gradients for this shard
        # sum of squares of the reduced shard, if known since its last write; a device tensor until someone needs the number
        self.square_sum: float | Tensor | None = None
        self._stores = 0
        self._count = len(layout.slots)
        self._filled = [False] * self._count  # by slot: its gradient is in the send buffer
        self._sums = LocalSums(layout, tiers.ledger)
        # copy of the earlier reduced shard, while its place is used for local sums; `finish` copies it into the resting buffer
        self.carry: Tensor | None = None
        self._send: Region | None = None  # the send buffer, from the first gradient until `reduce`
        self._slot = -1  # number of the send buffer in the pool; -1: there is none, or it is the buffer at rest
        self._views: dict[int, list[Tensor]] = {}  # by `_slot`
        self._work: Collective | None = None  # the running reduction

    @property
    def full(self) -> Tensor:
        """Whole gradient (numel,); placements PARTIAL and REPLICATED alone have it."""
        assert self.region is not None
        return self.region.tensor

    # -- local gradients -------------------------------------------------------------------------------------

    def add(self, index: int, grad: Tensor, sync: bool) -> None:
        """Add a local gradient of slot `index` to the send buffer (sync) or to the sums held back (not sync)."""
        if not sync:
            if not self._sums.views and self.region is not None:
                self._begin_resting()
                self._sums.begin(self.region.tensor, own=False)
            elif not self._sums.views:
                flat = claimed(torch.zeros(self.layout.numel, dtype=self.dtype, device=self.comm.device))
                self._sums.begin(flat, own=True)
            self._sums.add(index, grad)
            return
        views = self._begin_send()
        if self._filled[index] or (self.direct and self._sums.held[index]):
            views[index].add_(grad)
        elif self._sums.held[index]:
            views[index].copy_(self._sums.add(index, grad))
        else:
            views[index].copy_(grad)
        self._filled[index] = True

    @property
    def pending(self) -> bool:
        """True if the send buffer has gradients whose reduction has not started."""
        return self._send is not None

    @property
    def holds(self) -> bool:
        """True if zs.accumulate holds local sums back."""
        return any(self._sums.held)

    def local_sum(self, index: int) -> Tensor | None:
        """Return the sum of this rank's gradients of slot `index` that zs.accumulate holds back; None if it holds none."""
        return self._sums.views[index] if self._sums.held[index] else None

    def _begin_resting(self) -> None:
        """Copy the reduced shard out of the resting buffer, which is about to take local sums."""
        if self._work is not None:
            self._work.drain()
            self._work = None
        if self.reduced and self.carry is None:
            self.carry = claimed(self.load().clone())
            self.ledger.enter(PARTIAL, self.carry.nbytes)

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
        """Start to reduce the gradients that were added, with zeros for slots that have none (collective)."""
        views = self._begin_send()
        for index in range(self._count):
            if self._filled[index] or (self.direct and self._sums.held[index]):
                continue
            if self._sums.held[index]:
                views[index].copy_(self._sums.views[index])
            else:
                views[index].zero_()
        assert self._send is not None
        if not self.direct:
            for start, stop in self.layout.paddings():  # a buffer of the pool has bytes of another unit there
                self._send.tensor[start:stop].zero_()
        self._sums.release()
        if self.departure is not None:
            out, accumulate = self.departure.landing(), False  # the host adds it to the shard at rest (`Departure.leave`)
        elif self.carry is not None:
            out, accumulate = self.carry, True
        else:
            out, accumulate = self.load(), self.reduced
        scale = self.summed / (self.comm.world_size * self.comm.replicas)  # the mean, unless ranks hold parts of one sum
        self._work = self.comm.reduce(self._send, out, scale=scale, accumulate=accumulate, tag=self.tag, label=self.label)
        self.ledger.sent("reduce", self._work.sent, self.label)
        if not self.direct:
            self.pool.give(self._slot, self._work)
        self._slot, self._send = -1, None
        self._filled = [False] * self._count

    def settle(self) -> None:
        """Wait for the reduction, at most _PATIENCE_S on the host: a rank that uses other units joins it only later."""
        if self._work is not None and not self.comm.waits_on_host:
            self._work.wait()  # the streams wait, not the host
            return
        begin = time.monotonic()
        while self._work is not None and not self._work.drained() and time.monotonic() - begin < _PATIENCE_S:
            self.comm.control.poll()
            pause(begin)

    @property
    def departing(self) -> bool:
        """True while a reduction whose result is offloaded runs, or its result is being copied to its tier."""
        return self.departure is not None and (self._work is not None or self.departure.arriving is not None)

    def depart(self) -> None:
        """Start to copy the result to its tier if the reduction is over, or if only the device's stream has to wait for it."""
        if self.departure is None:
            return
        self.departure.progress()
        if self._work is not None and (not self.comm.waits_on_host or self._work.drained()):
            self.finish()

    def finish(self) -> None:
        """Wait for the reduction. Afterwards `rest` holds the reduced gradient (REPLICATED: `full` does after `gather`)."""
        if self._work is None:
            return
        self._work.wait()
        self.culprits.update(self._work.culprits)
        self.square_sum = None if self.replicated else self._work.square_sum  # the program may write to `full` unnoticed
        if self.departure is not None:
            self.apply_factor()
            total = self.departure.leave(add=self.reduced)
            if self.reduced or self.dtype.itemsize < 4:  # the shard at rest differs in bits from the reduction's result
                self.square_sum = None
            self.square_sum = total if self.square_sum is None else self.square_sum
            self._work = None
        if self.carry is not None:
            self.rest.store(0, self.carry)
            self.ledger.strike(PARTIAL, self.carry.nbytes)
            self.carry = None
        self.reduced = True
        if self.replicated and self._work is not None:  # peers still read `full`, which `gather` overwrites
            self._work.drain()

    # -- the reduced shard -----------------------------------------------------------------------------------

    def load(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return elements [start, stop) of the reduced shard on the device: a view, or a copy if it is offloaded."""
        stop = self.rest.numel if stop is None else stop
        if self.departure is None:
            self.apply_factor()
            return self._at_rest(start, stop)
        self.departure.settle()
        part = self._at_rest(start, stop)
        return part.mul_(self.factor) if self.factor != 1.0 else part

    def _at_rest(self, start: int, stop: int) -> Tensor:
        return self.rest.load(start, stop) if self.carry is None else self.carry[start:stop]

    def resting(self) -> Rest:
        """Return where the reduced shard (REPLICATED: the whole gradient) rests, not yet multiplied by `factor`."""
        self.land()
        if self.replicated:
            return self.tiers.over(self.full)
        return self.rest if self.carry is None else self.tiers.over(self.carry)

    def in_step(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return elements [start, stop) of the reduced shard (REPLICATED: of the whole gradient) in the optimizer's dtype.

        `factor` is applied after the cast: a clipped bf16 gradient is rounded once, and small fp16 gradients, which the loss
        scale has kept from underflow, do not vanish when the loss scale is divided out.
        """
        self.land()
        part = (self.full[start:stop] if self.replicated else self._at_rest(start, stop)).to(dtype)
        return part if self.factor == 1.0 else part.mul(self.factor)

    def store(self, start: int, source: Tensor) -> None:
        """Write `source` to the reduced shard, from element `start` on (after `load` of the same elements)."""
        self.square_sum = None
        self._stores += 1  # see `writes`
        if self.departure is not None:
            self.departure.settle()
            self.apply_factor()
        if self.carry is not None:
            self.carry[start : start + source.numel()].copy_(source)
        else:
            self.rest.store(start, source)

    @property
    def writes(self) -> int:
        """A counter that changes whenever the user writes to the gradient."""
        return torch_compat.version(self.full) if self.replicated else self._stores

    def land(self) -> None:
        """Wait until the reduced shard is at rest."""
        if self.departure is not None:
            self.departure.settle()

    def hand_over(self) -> Rest:
        """Return the resting place of the reduced shard, valid until the next call; later gradients use the other place."""
        self.land()
        if self.twin is None:
            twin = self.tiers.rest(GRADIENTS, self.offload, self.rest.numel, self.dtype)
            self.twin = narrowed(twin, self.tiers, self.send_dtype)
        given = self.rest
        if self.region is None:
            self.rest, self.twin = self.twin, self.rest
            if self.departure is not None:
                self.departure.rest = self.rest
        else:
            given = self.twin  # the shard is a slice of the resting buffer, so it is copied instead of swapped
            given.store(0, self.rest.load(0, self.rest.numel))
        self.drop()
        return given

    def zero(self) -> None:
        """Set the reduced shard (REPLICATED: the whole gradient) to zeros."""
        self.square_sum, self.factor = None, 1.0
        if self.replicated:
            self.full.zero_()
        elif self.departure is None:
            self.load().zero_()
        else:
            self.departure.settle()
            self.rest.store(0, torch.zeros(self.rest.numel, dtype=self.dtype, device="cpu"))

    def scale(self, factor: float, stepping: bool = False) -> None:
        """Multiply the gradient by `factor`. An offloaded shard is multiplied when it is next read, without a pass of its own.

        stepping: the optimizer's step follows, and itself multiplies gradients held in less than fp32 (`in_step`).
        """
        exact = self.square_sum is not None and math.frexp(factor)[0] == 0.5  # a power of two scales squares without rounding
        self.square_sum = self.square_sum * factor**2 if exact else None  # type: ignore[operator]
        self.factor *= factor
        if self.departure is None and not (stepping and self.dtype.itemsize < 4):
            self.apply_factor()

    def apply_factor(self) -> None:
        """Multiply the gradient at rest by `factor`, and set `factor` to 1."""
        factor, self.factor = self.factor, 1.0
        if factor == 1.0:
            return
        if self.departure is not None:
            self.departure.settle()
            self.rest.store(0, self._at_rest(0, self.rest.numel).mul_(factor))
        else:
            (self.full if self.replicated else self._at_rest(0, self.rest.numel)).mul_(factor)

    def gather(self) -> Collective:
        """Start to fill `full` with the reduced shards of all ranks, after `finish` on all of them (REPLICATED; collective)."""
        assert self.region is not None
        work = self.comm.gather(self.region.tensor, self.region, self.label)
        self.ledger.sent("gather", work.sent, self.label)
        return work

    def drop(self) -> None:
        """Drop the reduced gradient and the sums held back (zero_grad)."""
        self.reduced, self.factor = False, 1.0
        self.drop_held()

    def drop_held(self) -> None:
        """Drop the local sums that were held back."""
        self._sums.release()
        if self.carry is not None:
            self.ledger.strike(PARTIAL, self.carry.nbytes)
            self.carry = None

    def discard(self) -> None:
        """Drop all gradients, also gradients in the send buffer, after a backward that raised."""
        if self._send is not None and not self.direct:
            self.pool.give(self._slot, None)
        self._slot, self._send = -1, None
        self._filled = [False] * self._count
        if self.departure is not None:
            self.departure.abandon()
        self.drop()

    def close(self) -> None:
        """Wait for transfers under way, and drop all gradients."""
        if self._work is not None:
            self._work.drain()
        self.land()
        self.drop()


def square_sum(buffers: Sequence[GradientBuffer], streams: Streams) -> float:
    """Return the sum of squares of reduced shards, which still carry loss scale and weights. Each offloaded one is read once."""
    for grads in buffers:
        if grads.square_sum is None and grads.departure is not None:
            grads.land()
            grads.apply_factor()
            grads.square_sum = streams.square_sums([grads.rest.host(0, grads.rest.numel)])
    known = [grads.square_sum for grads in buffers if grads.square_sum is not None]
    total = sum(value for value in known if isinstance(value, float))
    total += streams.square_sums([grads.load() for grads in buffers if grads.square_sum is None])
    on_device = [value for value in known if isinstance(value, Tensor)]
    return total + (float(torch.stack(on_device).sum()) if on_device else 0.0)
