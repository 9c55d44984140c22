"""A sampler whose position survives a restart with another number of ranks.

    order of an epoch     i0 i1 i2 i3 i4 i5 i6 i7 ...         a permutation drawn from (seed, epoch)
    2 ranks, from 4 on                0  1  0  1              ranks take samples in turn
    3 ranks, from 4 on                0  1  2  0

The samples consumed so far are a prefix of that order, whichever ranks read them, so one number is the position of all ranks.
A loader's workers draw samples ahead, up to the end of the epoch; `follow` counts those that the loop has consumed. Without
`follow` the position is unknown, and `state_dict` raises.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Sampler

from ..comm import backend_select
from ..comm.mesh import NamedRanks, place_along
from ..errors import ConfigError
from ..utils.axes import reads_other_sequences

Batch = TypeVar("Batch")
_POSITION = ("numel", "seed", "shuffle", "epoch", "samples")


class ShardedSampler(Sampler[int]):
    """Indices of a data set, dealt out to the data-parallel ranks.

        sampler = zs.ShardedSampler(len(dataset), seed=0)
        loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2)
        for epoch in range(sampler.epoch, 3):
            for batch in sampler.follow(loader):        # counts the batches of the loop, not those that workers draw ahead
                ...
                zs.save(path, model, optimizer, extra={"sampler": sampler})

    Args:
        numel: samples of the data set.
        seed: seed of the order.
        shuffle: False: the order is 0, 1, 2, ...
        drop_last: leave out the last samples if they do not go evenly into the ranks. Otherwise the first samples of the epoch
            come again, so that all ranks get equally many.
        rank, world_size: None: those of the process group, or of the mesh.
        mesh: the mesh of zs.shard. Ranks with tokens of the same sequences (along "sp"), or parts of the same model, get the same
            samples: rank and world_size are those along the axes of data parallelism.

    Attributes:
        epoch: the current epoch.
        samples: number of the epoch's samples that all ranks together have consumed (without `follow`: have drawn).
    """

    def __init__(
        self, numel: int, *, seed: int = 0, shuffle: bool = True, drop_last: bool = False, rank: int | None = None,
        world_size: int | None = None, mesh: DeviceMesh | Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        for name, value in (("numel", numel), ("seed", seed), ("rank", rank), ("world_size", world_size)):
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            if not whole and not (value is None and name in ("rank", "world_size")):
                raise ConfigError(f"zs.ShardedSampler: {name}: expected a whole number, got {value!r}.")
        if numel < 1:
            raise ConfigError(f"zs.ShardedSampler: numel: expected at least one sample, got {numel}.")
        if (rank is None) != (world_size is None):
            raise ConfigError("zs.ShardedSampler: give both rank and world_size, or neither.")
        if mesh is not None and rank is not None:
            raise ConfigError(
                "zs.ShardedSampler: rank and world_size, or the mesh, say which samples are this rank's: give one of them."
            )
        if mesh is not None:
            rank, world_size = place_along(NamedRanks.of(mesh) if isinstance(mesh, Mapping) else mesh, reads_other_sequences)
        elif rank is None or world_size is None:
            rank, world_size = backend_select.rank_and_size()
        if not 0 <= rank < world_size:
            raise ConfigError(f"zs.ShardedSampler: expected 0 <= rank < world_size, got {rank} of {world_size}.")
        self.numel, self.seed, self.shuffle, self.drop_last = numel, seed, shuffle, drop_last
        self.rank, self.world_size = rank, world_size
        self.epoch = self.samples = 0
        self._loop: object | None = None  # token of the loop over `follow` in progress
        self._drawn = False  # True if a loop without `follow` has drawn samples: the position is then unknown

    def __len__(self) -> int:
        """Return the number of samples left in the epoch for this rank."""
        left = max(self.numel - self.samples, 0)
        return left // self.world_size if self.drop_last else -(-left // self.world_size)

    def __iter__(self) -> Iterator[int]:
        order: Sequence[int] = range(self.numel)
        if self.shuffle:  # no two seeds share an order within a million epochs
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.epoch) % 2**63)
            order = torch.randperm(self.numel, generator=generator, device="cpu").tolist()
        begin, count, followed = self.samples, len(self), self._loop is not None
        self._drawn = self._drawn or not followed
        for number in range(count):
            yield order[(begin + number * self.world_size + self.rank) % self.numel]
            followed = followed or self._loop is not None  # `follow` may begin after the loader's iterator has been made
            if not followed:
                self.samples = min(begin + (number + 1) * self.world_size, self.numel)
        if not followed:
            self.epoch, self.samples = self.epoch + 1, 0

    def follow(self, loader: Iterable[Batch], batch_size: int | None = None) -> Iterator[Batch]:
        """Yield the batches of a loader that draws from this sampler, and count their samples as consumed.

        batch_size: number of samples of a batch on this rank. None: the loader's.

        Raise ConfigError if this loop continues after another one was begun, or a position was loaded.
        """
        batch_size = batch_size if batch_size is not None else getattr(loader, "batch_size", None)
        if not batch_size:
            raise ConfigError("zs.ShardedSampler.follow: the loader has no batch_size: pass follow(loader, batch_size=...).")
        if self._drawn and isinstance(loader, Iterator):
            raise ConfigError(
                "zs.ShardedSampler.follow: expected a loader, got an iterator, which may have drawn samples from this sampler already "
                "that can not be counted. Pass the loader itself."
            )
        loop = self._loop = object()
        self._drawn = self._drawn and self.samples > 0
        try:
            for batch in loader:
                self._check_loop(loop)
                self.samples = min(self.samples + batch_size * self.world_size, self.numel)
                yield batch
            self._check_loop(loop)
            self.epoch, self.samples, self._drawn = self.epoch + 1, 0, False
        finally:
            if self._loop is loop:
                self._loop = None

    def _check_loop(self, loop: object) -> None:
        if self._loop is not loop:
            raise ConfigError(
                "zs.ShardedSampler: another loop over sampler.follow(loader) was begun, or a position was loaded, while this loop was "
                "running: its further batches would not be counted. Begin a new loop."
            )

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, as with torch's DistributedSampler. Do nothing if it is the current one: its position is kept."""
        epoch = operator.index(epoch)  # takes NumPy's integers too
        if epoch != self.epoch:
            self.epoch, self.samples, self._drawn = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the same on every rank. Raises ConfigError after a loop without `follow`."""
        if self._drawn:
            raise ConfigError(
                "zs.ShardedSampler: the position after a plain loop over the loader is not known, since a loader's workers draw samples "
                "ahead: a resumed run would lose or repeat some. Loop over sampler.follow(loader), or save without the sampler."
            )
        return {name: getattr(self, name) for name in _POSITION}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise ConfigError if a position is of another data set or order. `zs.load` calls this before it changes the model."""
        if not isinstance(state, dict) or not set(_POSITION) <= state.keys():
            raise ConfigError(f"zs.ShardedSampler: expected a state_dict() of one, with {', '.join(_POSITION)}, got {state!r}.")
        for name in ("numel", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise ConfigError(
                    f"zs.ShardedSampler: {name}: the saved position is of {state[name]!r}, this sampler has {getattr(self, name)!r}: "
                    "samples would be lost or repeated. Build it as the saved one was, or load without the sampler."
                )
        for name, most in (("epoch", sys.maxsize), ("samples", self.numel)):
            if not isinstance(state[name], Integral) or not 0 <= state[name] <= most:
                raise ConfigError(f"zs.ShardedSampler: {name}: expected 0 to {most}, got {state[name]!r}.")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position. Raises ConfigError if it is of another data set or order."""
        self.check_state_dict(state)
        self.epoch, self.samples = int(state["epoch"]), int(state["samples"])
        self._drawn, self._loop = False, None
