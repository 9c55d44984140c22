"""The account of gradients: what has happened to this rank's gradients since the last zero_grad.

    came     a parameter has got a local gradient                ending   a backward is over on this rank
    failed   a backward raised, and all gradients were dropped   undone   zs.clip_grad_norm_ or a step has divided gradients by
    zeroed   zero_grad has dropped all gradients                          the loss scale and the mean weight
    drops    a zero_grad has dropped some

The account only records: the runtime scales and reduces gradients, the optimizer clips them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Clipped:
    """Result of a clip, for the step. norm: before it; coefficient: factor applied; max_norm: bound that the caller gave.

    writes: write counters of the gradients at the clip; the step computes the norm anew if they differ. of_ally: the clip of
    another pipeline stage's optimizer has scaled these gradients too, and the program has not clipped by this optimizer yet
    (OptimizerCore.allied). refused: that other optimizer has skipped its step, since the norm was not finite. partial: a zero_grad has
    dropped some of the gradients since: a step uses what was clipped, and a further clip has another norm.
    """

    norm: float
    coefficient: float
    max_norm: float | None
    writes: list[int]
    of_ally: bool = False
    refused: bool = False
    partial: bool = False


class GradientAccount:
    """Account of one model's gradients. Any code may read the fields; the runtime and the optimizer's core write them.

    backwards: number of backwards that are over on all ranks. plain: number of this rank's backwards without a weight (zs.backward),
    the one that is ending included. weighing: weight of the backward that runs; None: it has none. weight: sum of this rank's
    weights since gradients were last divided by them. weighed: there were some. unweighted: some gradients came without a weight.

    By ids of parameters. divided: their gradients were divided, by weights or by 1. short: dropped while weights count, so that the
    sum of weights is more than theirs. mixed: what was divided or short has met a division by further weights, and is no mean.

    held: some rank may hold sums back (zs.accumulate); the same on every rank. lost: ids of parameters of which a failed backward
    has dropped earlier gradients. dropped: ids of those whose gradients a zero_grad has dropped since gradients last came.
    unscaled: reduced gradients were divided by the loss scale. share: number by which they were divided to be a mean over the ranks
    that had a batch (zs.join). clipped: by optimizer's core, the result of the last clip, until it steps or another backward begins.
    stepped: cores that have been called to step with these gradients: one step of the model. skipped: those that were skipped, and
    so belong to it if they step again. advanced: one of them was not skipped.
    """

    def __init__(self) -> None:
        self.weighing: float | None = None
        self.zeroed(holding=False)

    def zeroed(self, holding: bool) -> None:
        """Reset the account at zero_grad. holding: the call is inside zs.accumulate."""
        self.backwards, self.plain, self.lost, self.unscaled = 0, 0, set[int](), False
        self.weight, self.weighed, self.unweighted, self.share = 0.0, False, False, 1.0
        self.divided, self.short, self.mixed = set[int](), set[int](), set[int]()
        self.change()
        self.held = holding

    def change(self) -> None:
        """Record that gradients are about to change: results of earlier clips no longer hold."""
        self.clipped: dict[object, Clipped] = {}
        self.stepped, self.skipped, self.advanced = set[object](), set[object](), False
        self.dropped: set[int] = set()

    def begins_step(self, core: object) -> bool:
        """Record that an optimizer steps; return False if another has stepped with these gradients: both are one step of the model."""
        first = not self.stepped or (core in self.stepped and core not in self.skipped)
        self.stepped, self.advanced = ({core}, False) if first else (self.stepped | {core}, self.advanced)
        self.skipped.discard(core)
        return first

    def advances(self) -> bool:
        """Record that a step was taken; return False if it is one with that of another optimizer."""
        first, self.advanced = not self.advanced, True
        return first

    @contextlib.contextmanager
    def weighted(self, weight: float) -> Iterator[None]:
        """Weight the backward inside by `weight` in the mean over ranks and micro-batches."""
        self.weighing, self.weighed = weight, True
        try:
            yield
        finally:
            self.weighing = None
        self.weight += weight

    def came(self) -> None:
        """Record that a local gradient has come."""
        self.unweighted |= self.weighing is None

    def ending(self) -> None:
        """Record that a backward is over on this rank; ranks exchange the account afterwards."""
        self.plain += self.weighing is None

    def holds(self) -> None:
        """Record that some rank may hold sums back from now on (called on every rank)."""
        self.held, self.dropped = True, set()

    def drops(self, keys: set[int]) -> None:
        """Record a zero_grad of some parameters, or `p.grad = None`."""
        self.dropped |= keys
        self.lost -= keys
        self.divided -= keys
        self.mixed -= keys
        if self.weighed:
            self.short |= keys
        else:
            self.short -= keys

    def failed(self, keys: set[int]) -> None:
        """Record that a backward has failed, and that gradients of earlier ones are gone with it. keys: ids of what is trained."""
        self.lost = keys if self.backwards > 0 else self.lost
        self.weight, self.weighed, self.unweighted, self.plain, self.share = 0.0, False, False, 0, 1.0
        self.divided, self.short, self.mixed = set(), set(), set()

    def no_mean(self, weighted: bool) -> set[int]:
        """Return the ids of parameters whose gradients are no mean of weighted ones. weighted: some rank's weights count now."""
        return self.mixed | self.divided | self.short if weighted else self.mixed

    def undone(self, unscaled: bool, keys: set[int]) -> None:
        """Record that gradients, those of `keys`, were divided by the mean weight of the ranks and, if `unscaled` (fp16), by the loss
        scale."""
        self.mixed = self.no_mean(self.weighed) & keys
        self.divided, self.short = keys, set()
        self.unscaled, self.weight, self.weighed, self.unweighted = unscaled, 0.0, False, False
