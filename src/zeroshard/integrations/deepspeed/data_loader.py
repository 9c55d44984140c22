"""The loader that `initialize(training_data=...)` makes: each rank its own micro-batches."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from ...comm import backend_select


def check_dataset(dataset: Any) -> None:
    """Raise ValueError for what a loader can not be made of."""
    if not isinstance(dataset, Dataset) and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ValueError(f"Training data must be a torch Dataset, got {type(dataset).__name__}")


class DeepSpeedDataLoader:
    """Micro-batches of one rank. Without a sampler of one's own the data set is shuffled and shared out over the ranks.

    As with DeepSpeed every pass draws the same order until the program calls `loader.data_sampler.set_epoch`. drop_last: a last batch
    that is not full is left out; each rank's share is first filled up with samples of the beginning. num_workers: processes that fetch
    samples, whose random numbers are not the trainer's; None: two, as with DeepSpeed, but none where ranks are threads, which must not
    fork, or daemonic processes, which may not, or where each would go through all of an IterableDataset.
    """

    def __init__(
        self, dataset: Any, batch_size: int, *, rank: int, world_size: int, collate_fn: Callable | None = None, drop_last: bool = False,
        num_workers: int | None = None, pin_memory: bool = False, data_sampler: Any = None, shuffle: bool = True,
    ) -> None:  # fmt: skip
        check_dataset(dataset)
        if num_workers is None:
            alone = backend_select.in_threads() or multiprocessing.current_process().daemon  # may have no children
            num_workers = 0 if isinstance(dataset, IterableDataset) or alone else 2
        sampler = data_sampler
        if sampler is None and not isinstance(dataset, IterableDataset):
            sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle)
        self.dataset, self.sampler, self.batch_size = dataset, sampler, batch_size
        self.data_sampler, self.collate_fn, self.num_local_io_workers = sampler, collate_fn, num_workers
        self.data: Iterator[Any] | None = None  # of the pass that is under way
        self.dataloader = DataLoader(
            dataset, batch_size=batch_size, sampler=sampler, collate_fn=collate_fn, drop_last=drop_last,
            num_workers=num_workers, pin_memory=pin_memory,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Any]:
        self.data = iter(self.dataloader)
        return self.data

    def __next__(self) -> Any:
        """The next micro-batch of the pass that is under way; without one it begins. StopIteration at its end."""
        if self.data is None:
            iter(self)
        assert self.data is not None
        try:
            return next(self.data)
        except StopIteration:
            self.data = None
            raise

    def __len__(self) -> int:
        return len(self.dataloader)
