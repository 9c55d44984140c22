"""Wrapper: a Comm over another Comm, to which it passes on every method that a subclass does not override."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..base import Combine, Comm, Missing, Pending, Region, Reserved, Sent, Work
from ..failure import Failure
from ..flight_recorder import Progress


class Wrapper(Comm):
    """A Comm of the same ranks as `comm`, which it wraps."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.rank, self.world_size, self.device = comm.rank, comm.world_size, comm.device
        self.ordered, self.shares_memory, self.waits_on_host = comm.ordered, comm.shares_memory, comm.waits_on_host
        self.copies, self.imagined, self.streams = comm.copies, comm.imagined, comm.streams
        self.drains_all = comm.drains_all
        self.replicas, self.replica = comm.replicas, comm.replica

    @property
    def progress(self) -> Progress:
        return self.comm.progress

    @property
    def pending(self) -> Pending:
        return self.comm.pending

    @property
    def failure(self) -> Exception | None:
        return self.comm.failure

    @property
    def ranks(self) -> list[int]:
        return self.comm.ranks

    @property
    def nodes(self) -> list[int]:
        return self.comm.nodes

    def new_serial(self) -> int:
        return self.comm.new_serial()

    def allocate(self, numel: int, dtype: torch.dtype, *, whole: bool) -> Region:
        return self.comm.allocate(numel, dtype, whole=whole)

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Region | None:
        return self.comm.allocate_common(numel, dtype)

    def gather(self, full: Tensor, source: Region, label: str, tag: int | None = None) -> Work:
        return self.comm.gather(full, source, label, tag)

    def collect(self, source: Region, combine: Combine, *, tag: int, label: str) -> Work:
        return self.comm.collect(source, combine, tag=tag, label=label)

    def volume(self, kind: str, numel: int, dtype: torch.dtype) -> Sent:
        return self.comm.volume(kind, numel, dtype)

    def reserve(self, number: int, numel: int, dtype: torch.dtype) -> None:
        self.comm.reserve(number, numel, dtype)

    def expect(self, tag: int, slots: Sequence[tuple[int, Sequence[int]]], numel: int) -> None:
        self.comm.expect(tag, slots, numel)

    def reserve_slices(self, numel: int, dtype: torch.dtype) -> None:
        self.comm.reserve_slices(numel, dtype)

    def needed(self, values: Sequence[Reserved], slices: Sequence[Reserved]) -> int:
        return self.comm.needed(values, slices)

    def open(self) -> None:
        self.comm.open()

    def release(self) -> None:
        self.comm.release()

    def forget(self) -> None:
        self.comm.forget()

    def outdate(self, number: int) -> None:
        self.comm.outdate(number)

    def holds(self, number: int) -> bool:
        return self.comm.holds(number)

    def exchange(self, payload: bytes, label: str) -> list[bytes]:
        return self.comm.exchange(payload, label)

    def square_sums(self, tensors: Sequence[Tensor]) -> float:
        return self.comm.square_sums(tensors)

    def fence_write(self, synchronised: bool = False) -> None:
        self.comm.fence_write(synchronised)

    def fence_read(self) -> None:
        self.comm.fence_read()

    def announce(self, waiting_for: str | None) -> None:
        self.comm.announce(waiting_for)

    def peers_wait(self) -> bool:
        return self.comm.peers_wait()

    def wait_until(self, done: Callable[[], bool], label: str, missing: Missing | None = None) -> None:
        self.comm.wait_until(done, label, missing)

    def poll(self) -> None:
        self.comm.poll()

    def fail(self, failure: Failure) -> None:
        self.comm.fail(failure)

    def leave(self) -> None:
        self.comm.leave()

    def close(self) -> None:
        self.comm.close()
