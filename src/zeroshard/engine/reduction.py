"""The reduction of gradients: the whole way from autograd's hook of a parameter to the mean at rest, for all ZeRO stages.

    gradient_hook            autograd has accumulated a parameter's gradient on this rank; `Reductions.take` takes it
      GradientBuffer.add     copies it into the send buffer of its group (zs.accumulate: adds it to sums that are held back)
      Reduction.arrive       counts it: was it the last one of its unit in this backward?
      Reductions.complete    starts a complete unit at once; on ordered communicators when its turn comes, the same on every rank
      GradientBuffer.reduce  fills slots that have no gradient with zeros, starts the collective: send buffer -> mean's shard
    Reductions.finish        at the end of backward: agree on what was used, start what is missing, wait
      GradientBuffer.finish  lands the shard where it rests: on the device, the host or a disk

Two ranks and a unit of one parameter of three numbers; the layout pads it to four, so that each rank has a shard of two:

    rank 0   gradient 1 2 3    send buffer 1 2 3 0      mean's shard (1 + 5) / 2, (2 + 6) / 2 = 3 4
    rank 1   gradient 5 6 7    send buffer 5 6 7 0      mean's shard (3 + 7) / 2, (0 + 0) / 2 = 5 0

Where rank 1 did not use the unit, the reduction waits for it: by bit masks that ranks exchange at the end of backward it learns
that the unit was used, and joins with zeros. The shards are 0.5 1 and 1.5 0.

A gradient that comes after its unit's reduction has started is *late*: several reentrant checkpoints use one parameter, and each
runs a backward of its own. Late gradients wait for the end of the outer backward, where their units are reduced once more.
"""

from __future__ import annotations

import functools
import math
import operator
import struct
import time
import weakref
from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor

from ..config import Config, Placement, Tier
from ..errors import ModelChanged, ZeroshardError
from ..tensor.sharded_tensor import clear_local_grad, local_grad
from ..utils import torch_compat
from ..utils.work import pause
from .attendance import Attendance
from .comm.base import Collective, Comm, DirectComm, Region
from .comm.pool import StagingPool
from .flat_buffer import slot_views
from .flat_layout import FlatLayout
from .freezing import Freezing
from .inner_optimizer import scaled
from .ledger import GRADIENTS, PARTIAL, claimed
from .rest import Rest, Tiers
from .unit import ParamGroup, Unit

# numbers of units with gradients, of parameters with gradients, of units with late gradients, of units with reduced ones in place
Agreed = tuple[set[int], set[int], set[int], set[int]]

_PATIENCE_S = 0.05  # without overlap, `GradientBuffer.settle` waits this long for a reduction


def gradient_hook(group: ParamGroup, index: int) -> Callable[[Tensor], None]:
    """Return the hook that autograd calls with compute parameter `index` of a group once its gradient is accumulated.

    It moves the gradient to the send buffer, and starts to reduce the unit if it was the last one.
    """
    # a weak reference: the collector does not see references of autograd's hooks, so a strong one would keep the model for ever
    where = weakref.ref(group)

    def hook(param: Tensor) -> None:
        group = where()
        if group is None:
            return
        runtime, unit = group.runtime, group.unit
        runtime.begin_backward()
        grad = local_grad(param)
        if grad is None:  # a hook of the program has dropped it
            return
        clear_local_grad(param)  # p.grad is dropped before the next gradient comes, so that at most one exists twice
        grad = grad if grad.layout is torch.strided else grad.to_dense()  # nn.Embedding(sparse=True) gives sparse ones
        reductions = runtime.reductions
        if torch.is_grad_enabled():  # create_graph=True: the gradient's own graph must not grow into the buffer
            with torch.no_grad():
                reductions.take(group, index, grad.detach(), runtime.sync)
        else:
            reductions.take(group, index, grad, runtime.sync)
        runtime.account.came()
        completes, leaves = reductions.of[unit.number].arrive(group.specs[index].number)
        if completes:
            runtime.prefetcher.staged(runtime.in_training())
            if runtime.sync:
                reductions.complete(unit)
        if leaves and unit.expected == unit.num_params:  # else marks on its inputs tell the end (`mark_inputs`)
            runtime.leave_backward(unit)

    return hook


class Reduction:
    """The reduction of one unit in one backward: which of its gradients have come, and whether its collectives have started."""

    def __init__(self, unit: Unit) -> None:
        self.unit, self.number = unit, unit.number
        self.buffers = [group.gradients for group in unit.trainable]
        self.departs = any(buffer.departure is not None for buffer in self.buffers)  # results go to another tier
        self.started = False
        self._arrived: set[int] = set()  # numbers of parameters that have a gradient
        self.since_left: set[int] = set()  # the same, of this round (see `arrive`): not empty in the middle of one
        self._task = -1  # autograd's number of the (reentrant) backward that computed the newest gradients

    def begin(self) -> None:
        """Begin to count the gradients of another backward."""
        self._arrived.clear()
        self.since_left.clear()
        self._task = -1

    def arrive(self, number: int) -> tuple[bool, bool]:
        """Count the gradient of a parameter. Return (it completes the unit in this backward, it completes a round of the unit).

        A round is complete when every parameter has got a gradient since the round before: there is one for each reentrant
        checkpoint that uses the unit, since each runs a backward of its own. The unit is released after each round.
        """
        arrived, since_left, expected = self._arrived, self.since_left, self.unit.expected
        if (task := torch_compat.graph_task()) != self._task:
            self._task = task
            since_left.clear()
        since_left.add(number)
        first = number not in arrived
        arrived.add(number)
        leaves = len(since_left) == expected
        if leaves:
            since_left.clear()
        return first and len(arrived) == expected, leaves


class Reductions:
    """The reductions of all units of a model: when each starts, and what ranks agree on at the end of a backward.

    of: the Reduction of each unit, by its number. touched: numbers of the parameters that got a gradient since the last `finish`.
    paused: numbers of units, the same on every rank, whose gradients are held back while others are reduced (FSDP2's switch).
    """

    def __init__(
        self, units: list[Unit], config: Config, comm: DirectComm, poll: Callable[[], None], attendance: Attendance, frozen: Freezing,
    ) -> None:  # fmt: skip
        """poll: called after each start of a reduction, to let other work on the host progress."""
        self.of, self.config, self.comm, self.poll = [Reduction(unit) for unit in units], config, comm, poll
        self.attendance, self.frozen = attendance, frozen
        # NCCL and sums by a backend match collectives by the order in which ranks start them: all ranks must agree on one
        self.in_order = comm.ordered or config.sums == "backend"
        self.groups = [group for unit in units for group in unit.groups]
        self.num_params = sum(len(group.specs) for group in self.groups)
        self.touched: set[int] = set()
        self.paused: set[int] = set()
        self.waits = True  # False: the end of a backward does not wait for reductions, `Runtime.flush` does
        self._completed: list[int] = []  # numbers of units with all gradients, in the order on this rank
        self._departing: list[Reduction] = []  # those whose results have not reached their tier
        self._late: dict[tuple[ParamGroup, int], Tensor] = {}  # gradients that came after the reduction of their unit
        self._order = [unit.number for unit in reversed(units) if unit.expected]  # of reductions (ordered communicators)
        # the order in which rank 0 completed its units, for all backwards from the next one on
        self._next: list[int] | None = None
        self._agreed = False  # True once ranks have agreed on `_order` after a backward; until then: the model's, reversed
        self._idle: set[int] = set()  # units frozen as a whole in the last backward: `_order` does not wait for them
        self._frozen: dict[int, set[int]] = {}  # rank -> its frozen parameters at the end of this backward, if it has data

    def clear(self) -> None:
        """Forget what has come and started: all of it is reduced, or the backward has raised."""
        for reduction in self.of:
            reduction.started = False
        self.touched, self._completed, self._departing, self._late = set(), [], [], {}

    @property
    def started(self) -> set[int]:
        """Numbers of the units whose reductions have started since the last `finish`."""
        return {reduction.number for reduction in self.of if reduction.started}

    def take(self, group: ParamGroup, index: int, grad: Tensor, sync: bool) -> None:
        """Add a local gradient, of the shape of parameter `index` of the group. sync: to be reduced; else it is held back."""
        self.touched.add(group.specs[index].number)
        if not self.of[group.unit.number].started:
            paused = sync and group.unit.number in self.paused
            if paused and group.has_reduced and group.gradients.replicated:  # the sums would lie where the reduced ones are
                raise ZeroshardError(
                    f"{group.unit.name}: set_requires_gradient_sync(False) of a part holds back gradients beside reduced ones, which stage 0 has no "
                    "memory for. Choose another stage, or call zero_grad() between."
                )
            group.gradients.add(index, grad, sync and not paused)
        elif (group, index) in self._late:
            self._late[group, index].add_(grad)
        else:
            self._late[group, index] = grad.clone()

    def complete(self, unit: Unit) -> None:
        """Start the reduction of a unit that has all its gradients, now or (ordered communicators) when its turn comes."""
        if unit.number in self.paused:
            return
        self._completed.append(unit.number)
        if not self.in_order:
            self._start(self.of[unit.number])
        elif not self.attendance.ended:  # else `finish` starts all: ranks without data take part only there
            done = set(self._completed)
            for number in self._order:
                reduction = self.of[number]
                if reduction.started or number in self._idle or number in self.paused:
                    continue
                if number not in done:  # later units must wait: all ranks start reductions in this order
                    return
                self._start(reduction)

    def _start(self, reduction: Reduction) -> None:
        """Start a unit's collectives, with what has come so far; then let earlier ones and other work on the host go on."""
        reduction.started = True
        with torch.no_grad():
            for buffer in reduction.buffers:
                buffer.reduce()
                if not self.config.overlap:  # give it some time to end
                    buffer.settle()
        self.comm.poll()
        if self._departing or reduction.departs:
            # earlier results go to their tier; this unit's not yet, since the stream would wait for its reduction, just started
            for other in self._departing:
                if other is not reduction:
                    for buffer in other.buffers:
                        buffer.start_offload()
            self._departing = [each for each in (*self._departing, reduction) if any(b.departing for b in each.buffers)]
        self.poll()

    def finish(self, agreed: Agreed | None = None) -> None:
        """Run all reductions, then again those of units with late gradients (collective). agreed: result of `agree`, if called.

        A unit that only other ranks completed is reduced with zeros. Raise ModelChanged, on all ranks and when no reduction runs
        any more, if ranks have frozen different parameters.
        """
        units, params, again, reduced = agreed or self.agree()
        missing = sorted(units - self.started, reverse=True)  # in the order of backward, the same on every rank
        if self.in_order:
            # units that were frozen as a whole come last: ranks that have started units after them have passed over them
            missing = sorted((number for number in self._order if number in missing), key=self._idle.__contains__)
            # rank 0's order holds from the next backward on: some ranks have started reductions of this one in its old order
            self._order, self._next = self._next or self._order, None
        for number in missing:
            self._start(self.of[number])
        for group in self.groups:
            for index, spec in enumerate(group.specs):
                if spec.number in params:
                    group.active[index] = True
        late = self._late
        self._wait(carried=bool(reduced))
        if again:
            while late:  # each is freed once it is in the send buffer
                group, index = next(iter(late))
                group.gradients.add(index, late.pop((group, index)), True)
            for number in sorted(again, reverse=True):  # the same order on all ranks: some communicators match collectives by it
                self._start(self.of[number])
            self._wait(carried=True)
        try:
            self.frozen.check_same(self._frozen)
        except ModelChanged:
            for group in (group for reduction in self.of for group in reduction.unit.trainable):
                group.gradients.discard()
                group.active = [False] * len(group.specs)
            raise
        if self._frozen and self.comm.rank not in self._frozen:
            # without data: its own requires_grad may be that of earlier batches
            frozen = next(iter(self._frozen.values()))
            told = {each.number: {spec.number for group in each.unit.trainable for spec in group.specs} for each in self.of}
            self._idle = {number for number, params in told.items() if params <= frozen}
        else:
            self._idle = {each.number for each in self.of if not each.unit.expected}

    def agree(self) -> Agreed:
        """Return what any rank has: units and parameters with gradients, units with late ones, units with reduced ones in place (collective).

        Ranks exchange a bit mask of each; usually all send the same few bytes.
        """
        begun = {each.number for each in self.of if any(buffer.pending or buffer.holds for buffer in each.buffers)} - self.paused
        reduced = {each.number for each in self.of if any(buffer.replicated and buffer.reduced for buffer in each.buffers)}
        mine = self.started | begun, self.touched - self._of_paused(), {group.unit.number for group, _ in self._late}, reduced
        self.frozen.follow()
        order = list(self._completed) if not self._agreed and self.in_order else []
        if self.comm.world_size == 1:
            if order:
                self._agree_on_order(order)
            self._frozen = {}
            return mine
        # bytes of each mask: units, parameters, units with late gradients, and with reduced ones, frozen parameters
        sizes = [length // 8 + 1 for length in (len(self.of), self.num_params, len(self.of), len(self.of), self.num_params)]
        masks = [sum(1 << number for number in numbers) for numbers in (*mine, self.frozen.numbers)]
        header = self.attendance.header()
        payload = header + b"".join(mask.to_bytes(size, "little") for mask, size in zip(masks, sizes, strict=True))
        payload += struct.pack(f"<{len(order)}I", *order)
        label = f"end of backward (model of {self.num_params} parameters)" + self.attendance.remark()
        _, everyone = self.comm.compare(payload, label)
        begin = len(header)
        self.attendance.meet([part[:begin] for part in everyone] if everyone is not None else None)
        if self.in_order and not self._agreed:
            packed = (payload if everyone is None else everyone[0])[begin + sum(sizes) :]
            self._agree_on_order(list(struct.unpack(f"<{len(packed) // 4}I", packed)))
        if everyone is None:  # the usual case: ranks used the same units and parameters
            self._frozen = {}
            return mine
        columns = []
        for size in sizes:
            columns.append([int.from_bytes(part[begin : begin + size], "little") for part in everyone])
            begin += size
        *joined, frozen = columns
        ended = self.attendance.ended  # ranks without data may still have the requires_grad of their last batch
        self._frozen = {rank: _bits(mask) for rank, mask in enumerate(frozen) if rank not in ended}
        units, params, late, reduced = (_bits(functools.reduce(operator.or_, masks)) for masks in joined)
        return units, params, late, reduced

    def _agree_on_order(self, first: list[int]) -> None:
        """Let all ranks start reductions, from the next backward on, in the order `first` in which rank 0 completed units."""
        self._next = first + [number for number in self._order if number not in first]
        self._agreed = True

    def _of_paused(self) -> set[int]:
        units = [each.unit for each in self.of if each.number in self.paused]
        return {spec.number for unit in units for group in unit.trainable for spec in group.specs}

    def square_sum(self, groups: Iterable[ParamGroup], without: Collection[int] = ()) -> float:
        """Return the sum of squares of reduced shards, which still carry loss scale and weights. Each offloaded one is read once.

        without: ids of parameters that are left out.
        """
        parts = {group: group.parts(without) for group in groups} if without else {}
        pieces = [group.homes[index].fetch(gradient=True) for group, part in parts.items() if part is not None for index in part]
        buffers, streams = [group.gradients for group in groups if parts.get(group) is None], self.comm.streams
        for grads in buffers:
            if grads.square_sum is None and grads.departure is not None:
                grads.wait_at_rest()
                grads.apply_factor()
                grads.square_sum = streams.square_sums([grads.rest.host(0, grads.rest.numel)])
        known = [grads.square_sum for grads in buffers if grads.square_sum is not None]
        total = sum(value for value in known if isinstance(value, float))
        total += streams.square_sums([*pieces, *(grads.load() for grads in buffers if grads.square_sum is None)])
        on_device = [value for value in known if isinstance(value, Tensor)]
        return total + (float(torch.stack(on_device).sum()) if on_device else 0.0)

    def _wait(self, carried: bool) -> None:
        """Wait for the reductions that have started. carried: some rank had reduced gradients before."""
        reduced = [buffer for reduction in self.of if reduction.started for buffer in reduction.buffers]
        replicated = [buffer for buffer in reduced if buffer.replicated]
        # a rank that held sums back over reduced gradients has a `carry`, which others may lack
        carried = carried or not all(buffer.comm.drains_all for buffer in replicated)
        for buffer in reduced:
            buffer.finish()
        if replicated:
            if carried:
                self.comm.exchange(b"", "gradients in place")  # peers read the shards that `finish` has copied into place
            for work in [buffer.gather() for buffer in replicated]:
                work.wait()
            self.comm.exchange(b"", "gradients gathered")  # before any rank overwrites a buffer that peers still copy
        held = self.touched & self._of_paused()
        self.clear()
        self.touched = held


def _bits(mask: int) -> set[int]:
    return {number for number in range(mask.bit_length()) if mask >> number & 1}


class GradientBuffer:
    """Flat buffer of the gradients of one group: takes local gradients, reduces them, keeps the reduced shard.

    rest: (shard_numel,), the mean over ranks, valid while `reduced`. full: (numel,), if the placement keeps it. summed: factor on
    the mean over `comm`: 1, or other where gradients of ranks are parts of one sum (comm/mesh.py: Axes, Divided).
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
        self.rest, self.departure = tiers.departure(self.rest, send_dtype)
        self.factor = 1.0  # of clipping and loss scale: still to be applied to a shard that is offloaded or narrower than fp32
        self.direct = self.region is not None and dtype == send_dtype  # the buffer at rest is the send buffer
        self.reduced = False
        self.culprits: set[int] = set()  # ranks that sent non-finite gradients for this shard
        # sum of squares of the reduced shard, if known since its last write; a device tensor until someone needs the number
        self.square_sum: float | Tensor | None = None
        self._stores = 0
        self._count = len(layout.slots)
        self._filled = [False] * self._count  # by slot: its gradient is in the send buffer
        self._held = [False] * self._count  # by slot: zs.accumulate holds a sum of this rank's gradients back, in `_held_views`
        self._held_views: list[Tensor] = []  # of the resting buffer, or of memory of their own, of `_held_nbytes`
        self._held_nbytes = 0
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
            self._hold(index, grad)
            return
        views = self._begin_send()
        if self._filled[index] or (self.direct and self._held[index]):
            views[index].add_(grad)
        elif self._held[index]:  # added to the sum first, in the resting dtype: rounded once when it is sent
            views[index].copy_(self._held_views[index].add_(grad))
        else:
            views[index].copy_(grad)
        self._filled[index] = True

    def _hold(self, index: int, grad: Tensor) -> None:
        """Add a local gradient to the sum of slot `index` that is held back."""
        if not self._held_views:
            if self.region is not None:
                self._begin_resting()
                flat = self.region.tensor
            else:
                flat = claimed(torch.zeros(self.layout.numel, dtype=self.dtype, device=self.comm.device))
                self._held_nbytes = flat.nbytes
                self.ledger.enter(PARTIAL, flat.nbytes)
            self._held_views = slot_views(flat, self.layout)
        view = self._held_views[index]
        view.add_(grad) if self._held[index] else view.copy_(grad)
        self._held[index] = True

    def unhold(self, indices: Iterable[int]) -> None:
        """Drop the sums of some slots that zs.accumulate holds back."""
        for index in indices:
            self._held[index] = False

    def _release_held(self) -> None:
        if self._held_nbytes:
            self.ledger.strike(PARTIAL, self._held_nbytes)
        self._held_views, self._held_nbytes, self._held = [], 0, [False] * self._count

    @property
    def pending(self) -> bool:
        """True if the send buffer has gradients whose reduction has not started."""
        return self._send is not None

    @property
    def holds(self) -> bool:
        """True if zs.accumulate holds local sums back."""
        return any(self._held)

    def local_sum(self, index: int) -> Tensor | None:
        """Return the sum of this rank's gradients of slot `index` that zs.accumulate holds back; None if it holds none."""
        return self._held_views[index] if self._held[index] else None

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
            if self._filled[index] or (self.direct and self._held[index]):
                continue
            if self._held[index]:
                views[index].copy_(self._held_views[index])
            else:
                views[index].zero_()
        assert self._send is not None
        if not self.direct:
            for start, stop in self.layout.paddings():  # a buffer of the pool has bytes of another unit there
                self._send.tensor[start:stop].zero_()
        self._release_held()
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

    def start_offload(self) -> None:
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
        self.wait_at_rest()
        if self.replicated:
            return self.tiers.over(self.full)
        return self.rest if self.carry is None else self.tiers.over(self.carry)

    def in_step(self, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return elements [start, stop) of the reduced shard (REPLICATED: of the whole gradient) in the optimizer's dtype.

        `factor` is applied in the wider of both dtypes: a clipped gradient is rounded once, and small fp16 gradients, which the loss
        scale has kept from underflow, do not vanish when the loss scale is divided out.
        """
        self.wait_at_rest()
        return scaled(self.full[start:stop] if self.replicated else self._at_rest(start, stop), self.factor, dtype)

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

    def wait_at_rest(self) -> None:
        """Wait until the reduced shard is at rest."""
        if self.departure is not None:
            self.departure.settle()

    def hand_over(self) -> Rest:
        """Return where the reduced shard rests, for a delayed update until the next call; later gradients use another place."""
        self.wait_at_rest()
        if self.twin is None:
            twin = self.tiers.rest(GRADIENTS, self.offload, self.rest.numel, self.dtype)
            self.twin, _ = self.tiers.departure(twin, self.send_dtype)
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
        self.drop_reduced()
        self._release_held()

    def drop_held(self) -> None:
        """Drop the local sums that were held back."""
        self._release_held()
        self._drop_carry()

    def drop_reduced(self) -> None:
        """Drop the reduced gradient."""
        self.reduced, self.factor = False, 1.0
        self._drop_carry()

    def _drop_carry(self) -> None:
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
        self.wait_at_rest()
        self.drop()
