"""Tiers of imagined ranks, for plans: moves are counted and told to the dry run's watcher, and no byte moves."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from ..config import Offload, Tier
from ..engine.inner_optimizer import Options
from ..engine.rest import Copy, Links, Rest, Tiers
from ..utils.work import OVER, Then, Work
from .cpu_kernels import CHUNK_NUMEL
from .storage import FurtherTiers, converting


def imagine(links: Links, *path: Tier, nbytes: int) -> Work:
    """Count a move along two or more tiers in which no byte moves; a dry run's watcher is told of each hop."""
    imagined: Work = OVER
    for source, target in itertools.pairwise(path):
        links.ledger.move(source, target, nbytes)
        if (ticket := links.streams.moved(source, target, nbytes)) is not None:
            imagined = Copy(links.streams, ticket)
    return imagined


class ImaginedRest(Rest):
    """A resting place on an imagined disk, for planning: counts the bytes that would move.

    Its requests are done at once, as on a fast disk; `wait` reports to the dry run's watcher. With gradients on a slow disk, real
    ranks take one staging buffer more than such a plan says.
    """

    tier, resident = Tier.DISK, False

    def __init__(self, numel: int, dtype: torch.dtype, tiers: Tiers) -> None:
        self.numel, self.dtype, self.tiers = numel, dtype, tiers

    def read(self, start: int, out: Tensor) -> Work:
        return imagine(self.tiers, Tier.DISK, Tier.HOST, nbytes=out.nbytes)

    def write(self, start: int, source: Tensor) -> Work:
        return imagine(self.tiers, Tier.HOST, Tier.DISK, nbytes=source.nbytes)

    def load(self, start: int, stop: int) -> Tensor:
        out = torch.empty(stop - start, dtype=self.dtype, device=self.tiers.device)
        self.read(start, out)
        self.tiers.count_hop(out.nbytes, up=True)
        return out

    def store(self, start: int, source: Tensor) -> None:
        nbytes = source.numel() * self.dtype.itemsize
        self.tiers.count_hop(nbytes, up=False)
        direct = source.dtype == self.dtype and not self.tiers.separate
        with contextlib.nullcontext() if direct else converting(source.numel(), self.dtype, self.tiers):
            imagine(self.tiers, Tier.HOST, Tier.DISK, nbytes=nbytes)


class ImaginedTiers(FurtherTiers):
    """Tiers without folders, on whose host nothing is computed."""

    one_thread = True  # as fake tensors belong to one

    def open_folder(self, offload: Offload) -> None:
        """Open nothing: there is no disk."""

    def place(self, offload: Offload, numel: int, dtype: torch.dtype) -> Rest:
        if offload.tier is Tier.DISK:
            return ImaginedRest(numel, dtype, self)
        # a program's own place would encode values, of which there are none
        return super().place(dataclasses.replace(offload, device="cpu") if offload.own else offload, numel, dtype)

    @contextlib.contextmanager
    def stepping(self, groups: list[Options]) -> Iterator[None]:
        """Set `foreach` as torch would choose it on a GPU, if fake tensors stand for a GPU's: torch sees them on a CPU."""
        undecided = [group for group in groups if self.separate and _foreach_on_gpu(group)]
        for group in undecided:
            group["foreach"] = True
        yield
        for group in undecided:
            group["foreach"] = None

    def begun(self, hops: Then) -> Work:
        self.streams.run_beside(hops.done)  # nobody polls: the second hop is enqueued at once
        return hops

    def at_once(self, numel: int) -> int | None:
        return -(-numel // CHUNK_NUMEL) * CHUNK_NUMEL


def _foreach_on_gpu(options: Options) -> bool:
    """Return whether torch would choose `foreach` for these options on a GPU."""
    chosen = options.get("foreach", False) is not None or options.get("fused") is not None  # False: the class has no foreach
    looped = options.get("differentiable") or (isinstance(options.get("lr"), Tensor) and not options.get("capturable"))
    return not (chosen or looped)
