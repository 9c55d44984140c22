"""The reductions of one backward: started as units complete, joined at its end by whoever had no part in them.

    in backward    a unit has all its gradients: reduce (ordered comms: in one agreed order)
    its end        ranks tell each other which units and parameters had gradients; what only others reduced is joined with
                   zeros; units that got more gradients when they had been reduced are reduced once more

What comes late are gradients of parameters that several reentrant checkpoints use: each of those runs a backward of its own.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from ..comm.base import Comm
from ..config import Config
from ..errors import ModelChanged
from .attendance import HEADER_NBYTES, Attendance
from .freezing import Freezing
from .unit import ParamGroup, Unit

Agreed = tuple[set[int], ...]  # numbers of units, of parameters, of units


class Reductions:
    """From local gradients of all units to reduced ones.

    touched: numbers of the parameters that got a gradient since the last `finish`.
    """

    def __init__(
        self, units: list[Unit], config: Config, comm: Comm, poll: Callable[[], None], attendance: Attendance, frozen: Freezing
    ) -> None:
        """poll: called after a reduction has started, so that other work may go on."""
        self.units, self.config, self.comm, self.poll = units, config, comm, poll
        self.attendance, self.frozen = attendance, frozen
        self.groups = [group for unit in units for group in unit.groups]
        self.num_params = sum(len(group.specs) for group in self.groups)
        self.touched: set[int] = set()
        self.waits = True  # False: a backward ends without its reductions, which `Runtime.flush` waits for
        self._started: set[int] = set()  # units
        self._completed: list[int] = []  # units, in this rank's order
        self._departing: list[int] = []  # units whose reduced gradients have not left for where they rest
        self._late: dict[tuple[ParamGroup, int], Tensor] = {}  # gradients that came when their unit had been reduced
        self._order = [unit.number for unit in reversed(units) if unit.expected]  # agreed, for ordered comms
        self._agreed = False  # the order is that of a backward; until then it is that of the definition, reversed
        self._idle: set[int] = set()  # units that were frozen altogether in the last backward: the order does not wait for them
        self._frozen: dict[int, set[int]] = {}  # of each rank that has data, as it told at the end of this backward

    def clear(self) -> None:
        """Forget this backward."""
        self.touched, self._started, self._completed, self._departing, self._late = set(), set(), [], [], {}

    def take(self, unit: Unit, group: ParamGroup, index: int, grad: Tensor, sync: bool) -> None:
        """A local gradient of the whole parameter `index`; not sync: it is held back."""
        self.touched.add(group.specs[index].number)
        if unit.number not in self._started:
            group.gradients.add(index, grad, sync)
        elif (group, index) in self._late:
            self._late[group, index].add_(grad)
        else:
            self._late[group, index] = grad.clone()

    def start(self, unit: Unit) -> None:
        """The unit is complete: reduce it now, or (ordered comms) in its turn."""
        self._completed.append(unit.number)
        if self.comm.ordered:
            if not self.attendance.ended:  # else at the end, when the ranks that are without data join in the same order
                self._reduce_in_order()
        else:
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        self._started.add(unit.number)
        for group in unit.trainable:
            with torch.no_grad():
                group.gradients.reduce()
                if not self.config.overlap:
                    group.gradients.settle()
        self.comm.poll()
        self._depart(unit)

    def _depart(self, latest: Unit) -> None:
        """Gradients that rest elsewhere leave while backward goes on; the device's only stream does not wait for the latest."""
        for number in self._departing:
            if number != latest.number:
                for group in self.units[number].trainable:
                    group.gradients.depart()
        self._departing = [
            number
            for number in [*self._departing, latest.number]
            if any(group.gradients.departing for group in self.units[number].trainable)
        ]
        self.poll()

    def _reduce_in_order(self) -> None:
        """Start what may start: a reduction waits for those before it in the agreed order."""
        done = set(self._completed)
        for number in self._order:
            if number in self._started or number in self._idle:
                continue
            if number not in done:
                return
            self._reduce(self.units[number])

    def finish(self, agreed: Agreed | None = None) -> None:
        """All reductions, then once more those of units that got gradients after theirs, on any rank. agreed: by `agree`, just now.

        Raises ModelChanged, on all ranks, where they have frozen other parameters: when nothing is under way any more.
        """
        again = self._join(*(agreed or self.agree()))
        self._wait()
        if again:
            self._reduce_again(again)
        self._check_frozen()
        self._idle = {unit.number for unit in self.units if not unit.expected}

    def _check_frozen(self) -> None:
        try:
            self.frozen.check_same(self._frozen)
        except ModelChanged:
            for group in (group for unit in self.units for group in unit.trainable):
                group.gradients.discard()
                group.active = [False] * len(group.specs)
            raise

    def _reduce_again(self, again: set[int]) -> None:
        for (group, index), grad in self._late.items():
            group.gradients.add(index, grad, True)
        self._late = {}
        for number in sorted(again, reverse=True):
            self._reduce(self.units[number])
        self._wait()

    def agree(self) -> Agreed:
        """Units with gradients on any rank, such parameters, and units that got more after their reduction."""
        begun = {u.number for u in self.units if any(g.gradients.pending or g.gradients.holds for g in u.trainable)}
        late = {group.unit.number for group, _ in self._late}
        self.frozen.follow()
        return self._exchange_masks(self._started | begun, self.touched, late)

    def _join(self, units: set[int], params: set[int], again: set[int]) -> set[int]:
        """Reduce (with zeros) what only others completed. Units to reduce again."""
        missing = sorted(units - self._started, reverse=True)
        if self.comm.ordered:
            missing = [number for number in self._order if number in missing]
        for number in missing:
            self._reduce(self.units[number])
        for group in self.groups:
            for index, spec in enumerate(group.specs):
                if spec.number in params:
                    group.active[index] = True
        return again

    def _exchange_masks(self, *mine: set[int]) -> Agreed:
        """The unions over ranks of numbers of units, parameters, and units. In the usual case all ranks send the same few bytes."""
        order = list(self._completed) if not self._agreed and self.comm.ordered else []
        if self.comm.world_size == 1:
            if order:
                self._agree_on_order(order)
            self._frozen = {}
            return mine
        sizes = [length // 8 + 1 for length in (len(self.units), self.num_params, len(self.units), self.num_params)]
        told = zip((*mine, self.frozen.numbers), sizes, strict=True)
        payload = b"".join(_mask(numbers).to_bytes(size, "little") for numbers, size in told)
        payload = self.attendance.header() + payload + struct.pack(f"<{len(order)}I", *order)
        label = f"end of backward (model of {self.num_params} parameters)" + self.attendance.remark()
        everyone = self.comm.exchange(payload, label)
        self.attendance.meet([part[:HEADER_NBYTES] for part in everyone])
        if self.comm.ordered and not self._agreed:
            packed = everyone[0][HEADER_NBYTES + sum(sizes) :]
            self._agree_on_order(list(struct.unpack(f"<{len(packed) // 4}I", packed)))
        if all(part == payload for part in everyone):
            self._frozen = {}
            return mine
        columns, begin = [], HEADER_NBYTES
        for size in sizes:
            columns.append([int.from_bytes(part[begin : begin + size], "little") for part in everyone])
            begin += size
        *joined, frozen = columns
        ended = self.attendance.ended  # ranks without data are where their last batch left them
        self._frozen = {rank: _bits(mask) for rank, mask in enumerate(frozen) if rank not in ended}
        return tuple(_bits(functools.reduce(operator.or_, masks)) for masks in joined)

    def _agree_on_order(self, first: list[int]) -> None:
        """Reductions are matched by order: take that in which rank 0 completed its units."""
        self._order = first + [number for number in self._order if number not in first]
        self._agreed = True

    def _wait(self) -> None:
        reduced = [group.gradients for number in sorted(self._started) for group in self.units[number].trainable]
        replicated = [grads for grads in reduced if grads.replicated]
        carried = any(grads.carries or not grads.comm.drains_all for grads in replicated)
        for grads in reduced:
            grads.finish()
        if replicated:
            if carried:
                self.comm.exchange(b"", "gradients in place")  # `finish` has put them where peers will read
            for work in [grads.gather() for grads in replicated]:
                work.wait()
            self.comm.exchange(b"", "gradients gathered")  # before any rank overwrites what peers copy
        self._started, self.touched, self._completed, self._departing = set(), set(), [], []


def _mask(numbers: set[int]) -> int:
    return sum(1 << number for number in numbers)


def _bits(mask: int) -> set[int]:
    return {number for number in range(mask.bit_length()) if mask >> number & 1}
