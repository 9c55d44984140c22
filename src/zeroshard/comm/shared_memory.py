"""SharedComm: the communicator of ranks on one host, which read each other's memory.

Only short messages are sent: a gather is a copy from the peers' shards (or nothing at all, where one memory
serves all ranks), a reduction reads each peer's slice in place. Measured on 2 ranks and 2 cores (docs/log.md):
a 67 MB gather takes 69 ms with gloo, 25 ms one-hop over sockets, 8 ms as a copy.

    rank 0   send grads ready -> . . . . sum my shard -> done
    rank 1   . . . send grads ready -> sum my shard -> done          a source is free when all ranks are done

`hub.py` passes the messages, and runs all waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..engine import making
from ..engine.comm import Collective, Combine, Outcome, Region, Sent, parts_of, streams_for
from .hub import Hub
from .transport import Transport


@dataclass
class Fence:
    """State of the fences of ranks that read each other's shards.

    writing: shards may be written now, and may be read after the next exchange of `members`.
    """

    members: tuple[int, ...]
    writing: bool = True


class SharedComm(Hub):
    """Comm over a `Transport`: all ranks (threads or processes) of one host, or a subgroup of them."""

    shares_memory = copies = True

    def __init__(
        self, transport: Transport, device: torch.device, stall_timeout_s: float = 60.0, *, ranks: list[int] | None = None
    ) -> None:
        """ranks: world rank of each rank of the transport."""
        super().__init__(transport, ranks if ranks is not None else list(range(transport.world_size)), stall_timeout_s)
        self.rank, self.world_size = transport.rank, transport.world_size
        self.ranks, self.nodes = self.numbers, [0] * self.world_size
        self.fence = Fence(self.members)
        self._fences = {self.members: self.fence}  # those of the subgroups, too
        self.device, self.streams = device, streams_for(device)
        # memory of each rank, which peers read in `all_to_all`, and the last of these
        self._mail: tuple[list[Tensor], Collective] | None = None

    def subgroup(self, parts: Sequence[Sequence[int]], apart: bool = False) -> SharedComm:
        made = super().subgroup(parts)
        made._serial, made._mail = 0, None
        made.members = tuple(map(self.numbers.index, made.ranks))
        if apart:  # else its shards are written at the same times as those of this group
            made.fence = self._fences.setdefault(made.members, Fence(made.members))
        return made

    # -- memory ----------------------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype, *, whole: bool) -> Region:
        self.fence.writing = True  # new memory is about to be written: peers may read it after the next fence
        wholes = [part.view(dtype) for part in self._mapped(numel * dtype.itemsize)]
        shards = [part.view(self.world_size, -1)[peer] if whole else part for peer, part in enumerate(wholes)]
        return Region(wholes[self.rank], list(shards), list(wholes) if whole else [])

    def _mapped(self, nbytes: int) -> list[Tensor]:
        """Return new memory of each rank, (nbytes,) uint8, which all of them can read and write (collective)."""
        with making():
            mine, handle = self.transport.export(nbytes)
        handles = self._meet_all(handle, self.members, "allocate")
        memory = [mine if peer == self.rank else self.transport.open(other) for peer, other in enumerate(handles)]
        self._meet_all(None, self.members, "memory opened")  # no rank needs the handle any more
        self.transport.forget(handle)
        return memory

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Region | None:
        self.fence.writing = True
        handle, mine = None, None
        if self.rank == 0:
            with making():
                mine, handle = self.transport.export(numel * dtype.itemsize)
        handles = self._meet_all(handle, self.members, "allocate common memory")
        tensor = (mine if mine is not None else self.transport.open(handles[0])).view(dtype)
        self._meet_all(None, self.members, "common memory opened")  # no rank needs the handle any more
        if handle is not None:
            self.transport.forget(handle)
        return Region(tensor, list(tensor.view(self.world_size, -1).unbind(0)), [tensor] * self.world_size, common=True)

    # -- collectives -----------------------------------------------------------------------------------------

    def gather(self, full: Tensor, source: Region, label: str, tag: int | None = None) -> Collective:
        self.progress.note_gather(label)
        rows = full.view(self.world_size, -1)
        if tag is not None:

            def copy_shards(numbers: dict[int, int]) -> None:
                for rank, member in enumerate(self.members):
                    shard = self._numbered(source, numbers[member]).shards[rank]
                    assert shard is not None
                    rows[rank].copy_(shard)

            work: Collective = self.meet("gather", tag, source.number, label, copy_shards)
        else:
            self.fence_read()
            work = Collective()
            for rank, shard in enumerate(source.shards if not source.common else ()):
                assert shard is not None
                if rows[rank].data_ptr() != shard.data_ptr():
                    rows[rank].copy_(shard)
        work.sent = self.sent(rows[self.rank].nbytes)
        return work

    def collect(self, source: Region, combine: Combine, *, tag: int, label: str) -> Collective:
        self.progress.note(label)
        numel = source.tensor.numel() // self.world_size
        begin = self.rank * numel

        def compute(numbers: dict[int, int]) -> Outcome | None:
            wholes = [self._numbered(source, numbers[member]).wholes[rank] for rank, member in enumerate(self.members)]
            return combine([whole[begin : begin + numel] for whole in wholes if whole is not None])

        work = self.meet("reduce", tag, source.number, label, compute)
        work.sent = self.sent(numel * source.tensor.itemsize)
        return work

    def all_to_all(
        self, output: Tensor, input: Tensor, label: str = "all-to-all", output_counts: Sequence[int] | None = None,
        input_counts: Sequence[int] | None = None,
    ) -> Collective:  # fmt: skip
        self.progress.note(label)
        given, taken = (parts_of(t, c, self.world_size) for t, c in ((input, input_counts), (output, output_counts)))
        if self._mail is not None:
            self._mail[1].drain()  # else a peer may still read what the last one has sent
        if input_counts is None:
            nbytes, begins = input.nbytes, [self.rank * given[0].nbytes] * self.world_size
        else:  # where this rank's part begins in what each peer sends
            everyone = self._meet_all(list(input_counts), self.members, f"{label}: counts")
            nbytes = max(map(sum, everyone)) * input.itemsize
            begins = [sum(counts[: self.rank]) * input.itemsize for counts in everyone]
        if self.mail_nbytes < nbytes:  # on all ranks, so that all allocate
            self._mail = None
            nbytes += 0 if input_counts is None else nbytes // 4 + 4096  # further counts will be others
            memory = self._mapped(-(-nbytes // 16) * 16)
        else:
            assert self._mail is not None
            memory = self._mail[0]
        memory[self.rank][: input.nbytes].view(input.dtype).copy_(input.view(-1))

        def compute(_: dict[int, int]) -> None:
            for part, sent, begin in zip(taken, memory, begins, strict=True):
                part.copy_(sent[begin : begin + part.nbytes].view(part.dtype))

        work = self.meet("all-to-all", 0, 0, label, compute)
        work.sent = Sent(sum(part.nbytes for rank, part in enumerate(given) if rank != self.rank))
        self._mail = memory, work
        return work

    @property
    def mail_nbytes(self) -> int:
        return 0 if self._mail is None else self._mail[0][self.rank].nbytes

    @staticmethod
    def _numbered(source: Region, number: int) -> Region:
        """Return the region that a peer used: `source`, or the one of its siblings with the number that the peer sent."""
        return source.siblings(number) if source.siblings is not None else source

    # -- fences ----------------------------------------------------------------------------------------------

    def fence_write(self, synchronised: bool = False) -> None:
        if not self.fence.writing:
            if not synchronised:
                self._meet_all(None, self.fence.members, "begin to write shards")
            self.fence.writing = True

    def fence_read(self) -> None:
        if self.fence.writing:
            self._meet_all(None, self.fence.members, "end of writing shards")
            self.fence.writing = False
