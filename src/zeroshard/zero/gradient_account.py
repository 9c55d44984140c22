"""The account of gradients: what has happened to them since the last zero_grad, on this rank.

    began   a backward adds to them           ending, ended   it is over here; on all ranks
    failed  what it and earlier ones added is gone            clipped, undone   by zs.clip_grad_norm_ or a step
    zeroed  nothing is left of them

It only keeps the books: who scales or reduces gradients is the runtime, who clips the optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Clipped:
    """What a clip has found and done: norm before it, factor, bound that was asked for; how often gradients had been written.

    of_ally: another stage's optimizer was asked, not this one yet (OptimizerCore.allied). refused: that one has skipped its step.
    """

    norm: float
    coefficient: float
    max_norm: float | None
    writes: list[int]
    of_ally: bool = False
    refused: bool = False


class GradientAccount:
    """Fields may be read anywhere; events write them.

    backwards: that are over; plain: of this rank's, those without a weight (zs.backward), the one that ends included.
    weight: the sum of this rank's weights; unweighted: it had a plain one as well.
    held: sums may be held back (zs.accumulate), the same on every rank. lost: gradients went with a backward that failed.
    unscaled: reduced gradients are free of the loss scale. share: what they have been divided by, so that the mean over ranks
    is one over those that had a batch (zs.join). clipped: the norm that was found, until another backward begins.
    """

    def __init__(self) -> None:
        self.held = self._weighing = False
        self._reset()

    def _reset(self) -> None:
        self.backwards, self.plain, self.lost, self.unscaled = 0, 0, False, False
        self.weight, self.unweighted, self.share = 0.0, False, 1.0
        self.clipped: Clipped | None = None

    @contextlib.contextmanager
    def weighted(self, weight: float) -> Iterator[None]:
        """The backward inside counts `weight` in the mean."""
        self._weighing = True
        try:
            yield
        finally:
            self._weighing = False
        self.weight += weight

    def began(self) -> None:
        """A backward begins: what a clip found is of other gradients."""
        self.clipped = None

    def came(self) -> None:
        """A gradient of this rank."""
        self.unweighted |= not self._weighing

    def ending(self) -> None:
        """A backward is over on this rank; ranks are about to tell each other."""
        self.plain += not self._weighing

    def ended(self) -> None:
        """It is over on all ranks."""
        self.backwards += 1

    def failed(self) -> None:
        """A backward has failed: what earlier ones have added is gone, too."""
        self.lost = self.lost or self.backwards > 0
        self.weight, self.unweighted, self.plain, self.share = 0.0, False, 0, 1.0

    def undone(self, unscaled: bool) -> None:
        """Gradients have been divided by the weights and, with fp16 (unscaled), by the loss scale."""
        self.unscaled, self.weight, self.unweighted = unscaled, 0.0, False

    def zeroed(self, holding: bool) -> None:
        """zero_grad. holding: inside zs.accumulate."""
        self._reset()
        self.held = holding
