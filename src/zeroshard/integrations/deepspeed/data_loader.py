"""The data loader of `initialize(training_data=...)`, which gives each rank its own micro-batches."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from ...comm import backend_select


def check_dataset(dataset: Any) -> None:
    """Raise ValueError unless an object is a torch Dataset, or has __getitem__ and __len__."""
    if not isinstance(dataset, Dataset) and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ValueError(f"Training data must be a torch Dataset, got {type(dataset).__name__}")


class DeepSpeedDataLoader:
    """Loader of one rank's micro-batches. Without a data_sampler, the data set is shuffled and divided among ranks.

    As in DeepSpeed, every pass has the same order until the program calls `loader.data_sampler.set_epoch`. drop_last: drop the
    last batch if it is not full (the sampler has padded each rank's share with the first samples). num_workers: number of
    processes that load samples, each with its own random generators. None: two, as in DeepSpeed, but zero if ranks are threads,
    which must not fork, or daemonic processes, which may not have children, or for an IterableDataset, which each worker would
    read completely.
    """

    def __init__(
        self, dataset: Any, batch_size: int, *, rank: int, world_size: int, collate_fn: Callable | None = None, drop_last: bool = False,
        num_workers: int | None = None, pin_memory: bool = False, data_sampler: Any = None, shuffle: bool = True,
    ) -> None:  # fmt: skip
        check_dataset(dataset)
        if num_workers is None:
            alone = backend_select.in_threads() or multiprocessing.current_process().daemon  # neither can have child processes
            num_workers = 0 if isinstance(dataset, IterableDataset) or alone else 2
        sampler = data_sampler
        if sampler is None and not isinstance(dataset, IterableDataset):
            sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=shuffle)
        self.dataset, self.sampler, self.batch_size = dataset, sampler, batch_size
        self.data_sampler, self.collate_fn, self.num_local_io_workers = sampler, collate_fn, num_workers
        self.data: Iterator[Any] | None = None  # iterator of the current pass
        self.dataloader = DataLoader(
            dataset, batch_size=batch_size, sampler=sampler, collate_fn=collate_fn, drop_last=drop_last,
            num_workers=num_workers, pin_memory=pin_memory,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Any]:
        self.data = iter(self.dataloader)
        return self.data

    def __next__(self) -> Any:
        """Return the next micro-batch of the current pass, beginning one if there is none. Raises StopIteration at its end."""
        if self.data is None:
            iter(self)
        assert self.data is not None
        try:
            return next(self.data)
        except StopIteration:
            self.data = None  # the next call begins a new pass
            raise

    def __len__(self) -> int:
        return len(self.dataloader)
