"""Wrapper: a Comm over another Comm of the same ranks. It calls that Comm's collectives unless a subclass overrides them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..base import Collective, Combine, Comm, Region
from ..control import Group


class Wrapper(Comm):
    """A Comm over `comm`. parts: the Comms over which it works, `comm` if none are given."""

    def __init__(self, comm: Comm, *parts: Comm) -> None:
        self.comm, self.control, self.parts = comm, comm.control, parts or (comm,)
        for name in Group.__annotations__:  # rank, world_size, device, ...: copied, so that subclasses can change them
            setattr(self, name, getattr(comm, name))

    def allocate(self, numel: int, dtype: torch.dtype, *, whole: bool) -> Region:
        return self.comm.allocate(numel, dtype, whole=whole)

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Region | None:
        return self.comm.allocate_common(numel, dtype)

    def gather(self, full: Tensor, source: Region, label: str, tag: int | None = None) -> Collective:
        return self.comm.gather(full, source, label, tag)

    def collect(self, source: Region, combine: Combine, *, tag: int, label: str) -> Collective:
        return self.comm.collect(source, combine, tag=tag, label=label)
