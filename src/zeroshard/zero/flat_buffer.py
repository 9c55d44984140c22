"""Flat buffers: layout x placement x tier. Their moves are the collectives and the copies between tiers.

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
import weakref

import torch
from torch import Tensor

from ..comm.base import Comm, Region, Work
from ..config import Config, Placement, Tier
from ..memory.ledger import GATHERED, GRADIENTS, PARAMETERS, PARTIAL, Ledger, claimed
from ..memory.pool import StagingPool
from ..memory.release import take_again
from ..offload.gradient_offload import Departure, narrowed
from ..offload.storage import Pending, Rest, Tiers
from ..tensor.flat_layout import FlatLayout
from ..utils import torch_compat

_PATIENCE_S = 0.05  # without overlap: wait this long for a reduction before computing on


def slot_views(flat: Tensor, layout: FlatLayout) -> list[Tensor]:
    """One view per slot, in its parameter's shape. They share no version counter with `flat`."""
    data = flat.data
    return [data[slot.offset : slot.stop].view(slot.shape) for slot in layout.slots]


def _own_storages(flat: Tensor, layout: FlatLayout) -> list[Tensor]:
    """As `slot_views`, each with a storage of its own over the same memory.

    Parameters that stay whole then look as on one process to what goes by storages: safetensors' `save_model`, torch.save.
    """
    storage, first, size = flat.untyped_storage(), flat.storage_offset(), flat.itemsize
    memories = (storage[(first + slot.offset) * size : (first + slot.stop) * size] for slot in layout.slots)
    fresh = (torch.empty(0, dtype=flat.dtype, device=flat.device) for _ in layout.slots)
    views = zip(fresh, memories, layout.slots, strict=True)
    return [view.set_(memory, 0, slot.shape) for view, memory, slot in views]  # type: ignore[call-overload]  # torch takes a slice


class ParameterBuffer:
    """The parameters of one dtype of one unit.

    full: (numel,), views of which the model computes with; rest: (shard_numel,), where this rank's part rests.
    region: what peers read of it, None where it rests out of the device's reach: then the shard passes through a staging
    buffer to be gathered (`fetch`, then `gather`).
    """

    def __init__(
        self, layout: FlatLayout, dtype: torch.dtype, config: Config, comm: Comm, ledger: Ledger, tiers: Tiers,
        number: int, label: str, sharded: bool,
    ) -> None:  # fmt: skip
        """number: of this buffer, the same on every rank. sharded: its placement, else REPLICATED."""
        self.layout, self.comm, self.ledger, self.tiers, self.label = layout, comm, ledger, tiers, label
        self.number, self.dtype, self.sharded = number, dtype, sharded
        self._full_nbytes = layout.numel * dtype.itemsize
        offload = config.offload_param
        self.tier = offload.tier if self.sharded else Tier.DEVICE
        away = tiers.away(offload) if self.sharded else False
        mapped = self.sharded and config.map_shared and not away and comm.copies
        common = comm.allocate_common(layout.numel, dtype) if mapped else None
        self.mapped = common is not None
        self.region: Region | None = None
        if common is not None:
            self.region, self.full = common, common.tensor
        elif self.sharded:
            self.region = None if away else comm.allocate(layout.shard_numel, dtype, whole=False)
            self.full = claimed(torch.empty(layout.numel, dtype=dtype, device=comm.device))  # entered while it is gathered
            self.full.untyped_storage().resize_(0)
        else:
            self.region = comm.allocate(layout.numel, dtype, whole=True)
            self.full = self.region.tensor
        self.nbytes = layout.shard_numel * dtype.itemsize if self.sharded else self._full_nbytes
        if self.region is None:
            self.rest = tiers.rest(PARAMETERS, offload, layout.shard_numel, dtype)
        else:
            self.region.number = number
            shard = self.region.shards[comm.rank]
            assert shard is not None
            self.rest = tiers.over(shard)
            tiers.enter(PARAMETERS, self.nbytes, self.tier)
        self.views = self._views()
        if not self.mapped:
            comm.reserve(number, layout.shard_numel, dtype)
        self._present = False
        self._staged: tuple[int, Region, Pending] | None = None  # the shard on its way through a staging buffer
        self._upload: Pending | None = None  # the newest copy that the device makes of what rests on the host

    def _views(self) -> list[Tensor]:
        if not self.sharded and self.full.untyped_storage().device.type != "meta":  # neither imagined nor fake
            return _own_storages(self.full, self.layout)
        if not self.sharded or self.mapped:
            return slot_views(self.full, self.layout)
        self.full.untyped_storage().resize_(self._full_nbytes)
        views = slot_views(self.full, self.layout)
        self.full.untyped_storage().resize_(0)
        return views

    def renew_views(self) -> bool:
        """`full` may have other memory: make new views if it has."""
        moved = bool(self.views) and self.views[0].data_ptr() != self.full.data_ptr()
        if moved:
            self.views = self._views()
        return moved

    @property
    def staged(self) -> bool:
        """True where the shard must be fetched before it can be gathered."""
        return self.region is None

    @property
    def _pool(self) -> StagingPool:
        assert self.tiers.staging is not None, "shards that rest elsewhere pass through a pool"
        return self.tiers.staging

    def fetch(self, wait: bool = False) -> bool:
        """Start to bring the shard to the device; False (only if not `wait`) where no buffer is free for it."""
        if self._staged is not None or not self.staged:
            return True
        take = self._pool.take if wait else self._pool.try_take
        taken = take(self.layout.shard_numel, self.dtype, whole=False)
        if taken is None:
            return False
        pending = self.tiers.fetch(self.rest, taken[1].tensor, wait)
        if pending is None:
            self._pool.give(taken[0], None)
            return False
        self._staged = (*taken, pending)
        return True

    @property
    def fetched(self) -> bool:
        """True where the shard is on the device, at rest or in a staging buffer."""
        return not self.staged or (self._staged is not None and self._staged[2].done())

    def forget(self) -> None:
        """Drop a shard that was fetched and not gathered: the one at rest is about to change."""
        if self._staged is not None:
            number, _, pending = self._staged
            pending.wait()
            self._pool.give(number, None)
            self._staged = None
        self.settle()

    def outdate(self) -> None:
        """What rests is about to be written."""
        self.settle()
        self.comm.outdate(self.number)

    def settle(self) -> None:
        """Return when no copy reads what rests on the host: it may be written. A stream that joined one may be far behind."""
        if self._upload is not None:
            self._upload.wait()
            self._upload = None

    def gather(self) -> Work:
        """Start to fill `full` from the shards of all ranks (ZeRO-3's all-gather; after a step in stages 1, 2)."""
        if self.sharded and not self.mapped and not self._present:
            take_again(self.full, self._full_nbytes)
            self.ledger.enter(GATHERED, self._full_nbytes)
            self._present = True
        work = self._start_gather()
        self.ledger.sent("gather", work.sent, self.label)
        return work

    def _start_gather(self) -> Work:
        if self.region is not None:
            return self.comm.gather(self.full, self.region, self.label)
        self.fetch(wait=True)
        assert self._staged is not None
        number, region, pending = self._staged
        self._staged = None
        pending.join()
        if self.tier is Tier.HOST:
            self._upload = pending
        work = self.comm.gather(self.full, region, self.label, tag=self.number)
        self._pool.give(number, work)
        return work

    def release(self) -> None:
        """Give up the gathered memory; the inverse of `gather`."""
        if self._present:
            self.full.untyped_storage().resize_(0)
            self.ledger.strike(GATHERED, self._full_nbytes)
            self._present = False

    def part(self) -> None:
        """Leave the gathered memory to those who refer to it, and take other memory for gathers to come. The entry goes with the memory."""
        if self._present:
            weakref.finalize(self.full.untyped_storage(), self.ledger.strike, GATHERED, self._full_nbytes).atexit = False
        self._present = False
        self.full = claimed(torch.empty_like(self.full))
        self.full.untyped_storage().resize_(0)
        self.views = self._views()

    def close(self) -> None:
        """Give up what is not at rest."""
        self.forget()
        self.release()


class LocalSums:
    """What zs.accumulate holds back, sums of this rank alone by slot: in the resting buffer, or in memory of their own."""

    def __init__(self, layout: FlatLayout, ledger: Ledger) -> None:
        self._layout, self._ledger = layout, ledger
        self.held = [False] * len(layout.slots)
        self._views: list[Tensor] = []
        self._own_nbytes = 0

    @property
    def begun(self) -> bool:
        """True when they have a place."""
        return bool(self._views)

    def begin(self, flat: Tensor, own: bool) -> None:
        """Their place from now on, (numel,); own: it is nobody else's."""
        self._views = slot_views(flat, self._layout)
        self._own_nbytes = flat.nbytes if own else 0
        if own:
            self._ledger.enter(PARTIAL, flat.nbytes)

    def add(self, index: int, grad: Tensor) -> Tensor:
        """The sum of slot `index` with one more gradient."""
        view = self._views[index]
        view.add_(grad) if self.held[index] else view.copy_(grad)
        self.held[index] = True
        return view

    def __getitem__(self, index: int) -> Tensor:
        return self._views[index]

    def release(self) -> None:
        """Forget them; the inverse of `begin`."""
        if self._own_nbytes:
            self._ledger.strike(PARTIAL, self._own_nbytes)
        self._views, self._own_nbytes = [], 0
        self.held = [False] * len(self.held)


class GradientBuffer:
    """The gradients of one parameter buffer, from local pieces to the reduced shard.

    rest: (shard_numel,), the mean over ranks, valid while `reduced`. full: (numel,) where the placement keeps it.
    """

    def __init__(
        self, layout: FlatLayout, dtype: torch.dtype, send_dtype: torch.dtype, config: Config, comm: Comm,
        ledger: Ledger, pool: StagingPool, tiers: Tiers, tag: int, label: str,
    ) -> None:  # fmt: skip
        self.layout, self.comm, self.ledger, self.pool = layout, comm, ledger, pool
        self.tag, self.label, self.dtype, self.send_dtype = tag, label, dtype, send_dtype
        self.tiers, self.offload = tiers, config.offload_gradient
        self.twin: Rest | None = None  # takes turns with `rest` (delayed update)
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
        self.factor = 1.0  # by which what rests elsewhere, or in less than fp32, is still to be multiplied (clipping, loss scale)
        self.direct = self.region is not None and dtype == send_dtype
        self.reduced = False
        self.culprits: set[int] = set()  # ranks that sent non-finite gradients for this shard
        # of the reduced shard, if known since it was last written; a tensor on the device until someone needs the number
        self.square_sum: float | Tensor | None = None
        self._stores = 0
        self._count = len(layout.slots)
        self._filled = [False] * self._count  # present in the buffer to be sent
        self._sums = LocalSums(layout, ledger)
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
            self._begin_sums()
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
        """True when something waits to be sent."""
        return self._send is not None

    @property
    def holds(self) -> bool:
        """True when local sums are held back by zs.accumulate."""
        return any(self._sums.held)

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
            self._carry = claimed(self.load().clone())
            self.ledger.enter(PARTIAL, self._carry.nbytes)

    def _begin_sums(self) -> None:
        if self._sums.begun:
            return
        if self.region is not None:
            self._begin_resting()
            self._sums.begin(self.region.tensor, own=False)
        else:
            self._sums.begin(claimed(torch.zeros(self.layout.numel, dtype=self.dtype, device=self.comm.device)), own=True)

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
            if self._filled[index] or (self.direct and self._sums.held[index]):
                continue
            if self._sums.held[index]:
                views[index].copy_(self._sums[index])
            else:
                views[index].zero_()
        assert self._send is not None
        if not self.direct:
            for start, stop in self.layout.paddings():
                self._send.tensor[start:stop].zero_()
        self._sums.release()
        if self.departure is not None:
            out, accumulate = self.departure.landing(), False
        elif self._carry is not None:
            out, accumulate = self._carry, True
        else:
            out, accumulate = self.load(), self.reduced
        scale = 1.0 / (self.comm.world_size * self.comm.replicas)
        self._work = self.comm.reduce(self._send, out, scale=scale, accumulate=accumulate, tag=self.tag, label=self.label)
        self.ledger.sent("reduce", self._work.sent, self.label)
        if not self.direct:
            self.pool.give(self._slot, self._work)
        self._slot, self._send = -1, None
        self._filled = [False] * self._count

    def settle(self) -> None:
        """Wait until the reduction is over, but not for ever: a rank that uses other units joins it later."""
        if self._work is not None and not self.comm.waits_on_host:
            self._work.wait()  # the streams wait, not the host
            return
        deadline = time.monotonic() + _PATIENCE_S
        while self._work is not None and not self._work.drained() and time.monotonic() < deadline:
            self.comm.poll()
            time.sleep(2e-5)

    @property
    def departing(self) -> bool:
        """True while a reduction is under way whose result rests elsewhere, or it is on its way there."""
        return self.departure is not None and (self._work is not None or self.departure.arriving)

    def depart(self) -> None:
        """Send such a result on its way if the reduction is over (or only the device's stream has to wait for it)."""
        if self.departure is None:
            return
        self.departure.progress()
        if self._work is not None and (not self.comm.waits_on_host or self._work.drained()):
            self.finish()

    def finish(self) -> None:
        """Wait for the reduction; afterwards `rest` (REPLICATED: `full`, after `gather`) holds the gradient."""
        if self._work is None:
            return
        self._work.wait()
        self.culprits.update(self._work.culprits)
        self.square_sum = None if self.replicated else self._work.square_sum  # replicated: users write `full`
        if self.departure is not None:
            self.apply_factor()
            total = self.departure.leave(add=self.reduced)
            if self.reduced or self.dtype.itemsize < 4:  # what rests is not, in bits, what was reduced
                self.square_sum = None
            self.square_sum = total if self.square_sum is None else self.square_sum
            self._work = None
        if self._carry is not None:
            self.rest.store(0, self._carry)
            self._release_carry()
        self.reduced = True
        if self.replicated and self._work is not None:
            self._work.drain()

    # -- the reduced shard -----------------------------------------------------------------------------------

    def load(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements [start, stop) of the reduced shard, on the device: a view, or a copy of what rests elsewhere."""
        stop = self.rest.numel if stop is None else stop
        if self.departure is None:
            self.apply_factor()
            return self._at_rest(start, stop)
        self.departure.settle()
        part = self._at_rest(start, stop)
        return part.mul_(self.factor) if self.factor != 1.0 else part

    def _at_rest(self, start: int, stop: int) -> Tensor:
        return self.rest.load(start, stop) if self._carry is None else self._carry[start:stop]

    def in_step(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Elements of the reduced shard (REPLICATED: of the whole gradient) in the dtype that the optimizer steps.

        They are multiplied after the cast: a clipped bf16 gradient is rounded once, and what the loss scale has kept in fp16 does
        not vanish when it is divided out.
        """
        self.land()
        part = (self.full[start:stop] if self.replicated else self._at_rest(start, stop)).to(dtype)
        return part if self.factor == 1.0 else part.mul(self.factor)

    def store(self, start: int, source: Tensor) -> None:
        """Set elements of the reduced shard (after `load`, of the same elements)."""
        self.square_sum = None
        self._stores += 1
        if self.departure is not None:
            self.departure.settle()
            self.apply_factor()
        if self._carry is not None:
            self._carry[start : start + source.numel()].copy_(source)
        else:
            self.rest.store(start, source)

    @property
    def writes(self) -> int:
        """Another number whenever the user has written to the gradient."""
        return torch_compat.version(self.full) if self.replicated else self._stores

    def land(self) -> None:
        """Return when the reduced shard is at rest."""
        if self.departure is not None:
            self.departure.settle()

    def hand_over(self) -> Rest:
        """Give the reduced shard away, until the next call: it rests there, and coming gradients elsewhere."""
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
            given = self.twin  # the shard is a part of the resting buffer, and stays
            given.store(0, self.rest.load(0, self.rest.numel))
        self.drop()
        return given

    def zero(self) -> None:
        """The reduced shard (REPLICATED: the whole gradient) becomes zeros."""
        self.square_sum, self.factor = None, 1.0
        if self.replicated:
            self.full.zero_()
        elif self.departure is None:
            self.load().zero_()
        else:
            self.departure.settle()
            self.rest.store(0, torch.zeros(self.rest.numel, dtype=self.dtype, device="cpu"))

    def scale(self, factor: float, stepping: bool = False) -> None:
        """Multiply the gradient. What rests elsewhere is multiplied when it is next touched: no pass of its own.

        stepping: the step comes next, and multiplies itself what rests in less than fp32 (`in_step`).
        """
        self.square_sum = None
        self.factor *= factor
        if self.departure is None and not (stepping and self.dtype.itemsize < 4):
            self.apply_factor()

    def apply_factor(self) -> None:
        """Multiply what rests by what it is still to be multiplied by."""
        factor, self.factor = self.factor, 1.0
        if factor == 1.0:
            return
        if self.departure is not None:
            self.departure.settle()
            self.rest.store(0, self._at_rest(0, self.rest.numel).mul_(factor))
        else:
            (self.full if self.replicated else self._at_rest(0, self.rest.numel)).mul_(factor)

    def square_sums(self) -> float:
        """The sum of squares of the reduced shard, found now (`square_sum` is None)."""
        if self.departure is None:
            return self.comm.square_sums([self.load()])
        self.departure.settle()
        self.apply_factor()
        return self.comm.square_sums([self.rest.host(0, self.rest.numel)])

    def gather(self) -> Work:
        """REPLICATED: fill `full` with the reduced shards of all ranks, after `finish` on all of them."""
        assert self.region is not None
        work = self.comm.gather(self.region.tensor, self.region, self.label)
        self.ledger.sent("gather", work.sent, self.label)
        return work

    def drop(self) -> None:
        """Forget all gradients (zero_grad)."""
        self.reduced, self.factor = False, 1.0
        self.drop_held()

    def drop_held(self) -> None:
        """Forget local sums that were held back."""
        self._sums.release()
        self._release_carry()

    def discard(self) -> None:
        """A backward was given up halfway: forget also what was about to be sent."""
        if self._send is not None and not self.direct:
            self.pool.give(self._slot, None)
        self._slot, self._send = -1, None
        self._filled = [False] * self._count
        if self.departure is not None:
            self.departure.abandon()
        self.drop()

    def _release_carry(self) -> None:
        if self._carry is not None:
            self.ledger.strike(PARTIAL, self._carry.nbytes)
            self._carry = None

    def close(self) -> None:
        """Give up what is not at rest."""
        if self._work is not None:
            self._work.drain()
        if self.departure is not None:
            self.departure.settle()
        self.drop()
