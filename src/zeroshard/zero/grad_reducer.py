"""The reductions of one backward: each starts when its unit is complete; at the end ranks take part in missed ones.

    in backward    a unit has all its gradients: reduce it (ordered communicators: in an order that ranks agree on)
    its end        ranks exchange which units and parameters have gradients; a rank joins with zeros the reductions of units
                   that only others used; units that got gradients after their reduction are reduced once more

Such late gradients come where several reentrant checkpoints use one parameter: each of them runs a backward of its own.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from ..comm.base import DirectComm
from ..config import Config
from ..errors import ModelChanged
from .attendance import HEADER_NBYTES, Attendance
from .model_changes import Freezing
from .unit import ParamGroup, Unit

# numbers of units with gradients, of parameters with gradients, of units with late gradients
Agreed = tuple[set[int], set[int], set[int]]


class Reductions:
    """Reduces the gradients of all units of a model.

    touched: numbers of the parameters that got a gradient since the last `finish`.
    """

    def __init__(
        self,
        units: list[Unit],
        config: Config,
        comm: DirectComm,
        poll: Callable[[], None],
        attendance: Attendance,
        frozen: Freezing,
    ) -> None:
        """poll: called after each start of a reduction, to let other work on the host progress."""
        self.units, self.config, self.comm, self.poll = units, config, comm, poll
        self.attendance, self.frozen = attendance, frozen
        self.in_order = comm.ordered or config.sums == "backend"  # ranks start reductions in an order that they agree on
        self.groups = [group for unit in units for group in unit.groups]
        self.num_params = sum(len(group.specs) for group in self.groups)
        self.touched: set[int] = set()
        self.waits = True  # False: the end of a backward does not wait for reductions, `Runtime.flush` does
        self._started: set[int] = set()  # numbers of units whose reduction has started
        self._completed: list[int] = []  # numbers of units with all gradients, in the order on this rank
        self._departing: list[int] = []  # numbers of units whose reduced gradients are not on their way to their tier
        self._late: dict[tuple[ParamGroup, int], Tensor] = {}  # gradients that came after the reduction of their unit
        self._order = [unit.number for unit in reversed(units) if unit.expected]  # of reductions (ordered communicators)
        self._next: list[int] | None = (
            None  # the order in which rank 0 completed its units, for all backwards from the next one on
        )
        self._agreed = False  # True once ranks have agreed on `_order` after a backward; until then: the model's, reversed
        self._idle: set[int] = set()  # units frozen as a whole in the last backward: `_order` does not wait for them
        self._frozen: dict[int, set[int]] = {}  # rank -> its frozen parameters at the end of this backward, if it has data

    def clear(self) -> None:
        """Clear the state of this backward."""
        self.touched, self._started, self._completed, self._departing, self._late = set(), set(), [], [], {}

    def take(self, unit: Unit, group: ParamGroup, index: int, grad: Tensor, sync: bool) -> None:
        """Add a local gradient, of the shape of parameter `index` of the group. sync: to be reduced; else it is held back."""
        self.touched.add(group.specs[index].number)
        if unit.number not in self._started:
            group.gradients.add(index, grad, sync)
        elif (group, index) in self._late:
            self._late[group, index].add_(grad)
        else:
            self._late[group, index] = grad.clone()

    def start(self, unit: Unit) -> None:
        """Start to reduce a complete unit, now or (ordered communicators) when its turn comes."""
        self._completed.append(unit.number)
        if not self.in_order:
            self._reduce(unit)
        elif not self.attendance.ended:  # else `finish` starts all: ranks without data take part only there
            done = set(self._completed)
            for number in self._order:
                if number in self._started or number in self._idle:
                    continue
                if number not in done:  # later units must wait: all ranks start reductions in this order
                    return
                self._reduce(self.units[number])

    def _reduce(self, unit: Unit) -> None:
        self._started.add(unit.number)
        for group in unit.trainable:
            with torch.no_grad():
                group.gradients.reduce()
                if not self.config.overlap:
                    group.gradients.settle()
        self.comm.poll()
        # reduced gradients go to their tier, except this unit's: the stream would wait for its reduction
        for number in self._departing:
            if number != unit.number:
                for group in self.units[number].trainable:
                    group.gradients.depart()
        self._departing = [
            number
            for number in [*self._departing, unit.number]
            if any(group.gradients.departing for group in self.units[number].trainable)
        ]
        self.poll()

    def finish(self, agreed: Agreed | None = None) -> None:
        """Run all reductions, then again those of units with late gradients (collective). agreed: result of `agree`, if called.

        A unit that only other ranks completed is reduced with zeros. Raise ModelChanged, on all ranks and when no reduction runs
        any more, if ranks have frozen different parameters.
        """
        units, params, again = agreed or self.agree()
        missing = sorted(units - self._started, reverse=True)  # in the order of backward, the same on every rank
        if self.in_order:
            # those last that were frozen as a whole: ranks that started later units have passed over them
            missing = sorted((number for number in self._order if number in missing), key=self._idle.__contains__)
            # not before: other ranks have started more, or fewer, of this backward's reductions in the order that it began with
            self._order, self._next = self._next or self._order, None
        for number in missing:
            self._reduce(self.units[number])
        for group in self.groups:
            for index, spec in enumerate(group.specs):
                if spec.number in params:
                    group.active[index] = True
        self._wait()
        if again:
            for (group, index), grad in self._late.items():
                group.gradients.add(index, grad, True)
            self._late = {}
            for number in sorted(again, reverse=True):  # one order on all ranks, as collectives are matched by it
                self._reduce(self.units[number])
            self._wait()
        try:
            self.frozen.check_same(self._frozen)
        except ModelChanged:
            for group in (group for unit in self.units for group in unit.trainable):
                group.gradients.discard()
                group.active = [False] * len(group.specs)
            raise
        # without data: its own requires_grad may be that of earlier batches
        if self._frozen and self.comm.rank not in self._frozen:
            frozen = next(iter(self._frozen.values()))
            told = {unit: {spec.number for group in unit.trainable for spec in group.specs} for unit in self.units}
            self._idle = {unit.number for unit, numbers in told.items() if numbers <= frozen}
        else:
            self._idle = {unit.number for unit in self.units if not unit.expected}

    def agree(self) -> Agreed:
        """Return the units and parameters with gradients on any rank, and the units with late gradients (collective).

        Ranks exchange a bit mask of each; usually all send the same few bytes.
        """
        begun = {u.number for u in self.units if any(g.gradients.pending or g.gradients.holds for g in u.trainable)}
        mine = self._started | begun, self.touched, {group.unit.number for group, _ in self._late}
        self.frozen.follow()
        order = list(self._completed) if not self._agreed and self.in_order else []
        if self.comm.world_size == 1:
            if order:
                self._agree_on_order(order)
            self._frozen = {}
            return mine
        # bytes of each mask: units, parameters, units with late gradients, frozen parameters
        sizes = [length // 8 + 1 for length in (len(self.units), self.num_params, len(self.units), self.num_params)]
        masks = [sum(1 << number for number in numbers) for numbers in (*mine, self.frozen.numbers)]
        payload = b"".join(mask.to_bytes(size, "little") for mask, size in zip(masks, sizes, strict=True))
        payload = self.attendance.header() + payload + struct.pack(f"<{len(order)}I", *order)
        label = f"end of backward (model of {self.num_params} parameters)" + self.attendance.remark()
        _, everyone = self.comm.compare(payload, label)
        self.attendance.meet([part[:HEADER_NBYTES] for part in everyone] if everyone is not None else None)
        if self.in_order and not self._agreed:
            packed = (payload if everyone is None else everyone[0])[HEADER_NBYTES + sum(sizes) :]
            self._agree_on_order(list(struct.unpack(f"<{len(packed) // 4}I", packed)))
        if everyone is None:  # the usual case: ranks used the same units and parameters
            self._frozen = {}
            return mine
        columns, begin = [], HEADER_NBYTES
        for size in sizes:
            columns.append([int.from_bytes(part[begin : begin + size], "little") for part in everyone])
            begin += size
        *joined, frozen = columns
        ended = self.attendance.ended  # ranks without data may still have the requires_grad of their last batch
        self._frozen = {rank: _bits(mask) for rank, mask in enumerate(frozen) if rank not in ended}
        units, params, late = (_bits(functools.reduce(operator.or_, masks)) for masks in joined)
        return units, params, late

    def _agree_on_order(self, first: list[int]) -> None:
        """Let all ranks start the next backward's reductions in the order in which rank 0 has completed its units."""
        self._next = first + [number for number in self._order if number not in first]
        self._agreed = True

    def _wait(self) -> None:
        reduced = [group.gradients for number in sorted(self._started) for group in self.units[number].trainable]
        replicated = [grads for grads in reduced if grads.replicated]
        # a rank that held sums back over reduced gradients has a `carry`, which others (after the end of their data) may lack
        carried = any(grads.reduced or not grads.comm.drains_all for grads in replicated)
        for grads in reduced:
            grads.finish()
        if replicated:
            if carried:
                self.comm.exchange(b"", "gradients in place")  # peers read the shards that `finish` has copied into place
            for work in [grads.gather() for grads in replicated]:
                work.wait()
            self.comm.exchange(b"", "gradients gathered")  # before any rank overwrites a buffer that peers still copy
        self._started, self.touched, self._completed, self._departing = set(), set(), [], []


def _bits(mask: int) -> set[int]:
    return {number for number in range(mask.bit_length()) if mask >> number & 1}
