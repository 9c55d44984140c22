"""SharedComm: the communicator of ranks on one host, which read each other's memory.

Only short messages are sent: a gather is a copy from the peers' shards (or nothing at all, where one memory
serves all ranks), a reduction reads each peer's slice in place. Measured on 2 ranks and 2 cores (docs/log.md):
a 67 MB gather takes 69 ms with gloo, 25 ms one-hop over sockets, 8 ms as a copy.

    rank 0   send grads ready -> . . . . sum my shard -> done
    rank 1   . . . send grads ready -> sum my shard -> done          a source is free when all ranks are done

`hub.py` passes the messages, and runs all waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..memory.ledger import making
from .base import Collective, Combine, DirectComm, Outcome, Region
from .control import HopQueue, Missing, mismatch
from .failure import Failure
from .flight_recorder import Progress
from .hub import Fence, Hub
from .status_server import Desk
from .streams import streams_for
from .transport import Transport


class SharedComm(DirectComm):
    """Comm over a `Transport`: all ranks (threads or processes) of one host, or a subgroup of them."""

    shares_memory = copies = True

    def __init__(
        self, transport: Transport, device: torch.device, stall_timeout_s: float = 60.0, *, ranks: list[int] | None = None,
        members: tuple[int, ...] | None = None, hub: Hub | None = None, fence: Fence | None = None,
    ) -> None:  # fmt: skip
        """ranks: world rank of each rank of the transport. members: ranks of this group, as indices in the transport.

        fence: the fence of a larger group, if the shards of both are written at the same times.
        """
        self.transport = transport
        self.members = members if members is not None else tuple(range(transport.world_size))
        self.rank, self.world_size = self.members.index(transport.rank), len(self.members)
        numbers = ranks if ranks is not None else list(range(transport.world_size))
        self.ranks, self.nodes = [numbers[member] for member in self.members], [0] * self.world_size
        self.hub = hub or Hub(transport, Progress(numbers[transport.rank]), numbers, stall_timeout_s)
        self.progress = self.hub.progress
        self.fence = fence or self.hub.fences.setdefault(self.members, Fence(self.members))
        # part of the keys of meetings, which keeps subgroups apart that use the same tag
        self._name = self.members if self.world_size < transport.world_size else ()
        self.device, self.streams = device, streams_for(device)

    def subgroup(self, parts: Sequence[Sequence[int]], apart: bool = False) -> SharedComm:
        mine = next(part for part in parts if self.rank in part)
        members, fence = tuple(self.members[rank] for rank in mine), None if apart else self.fence
        return SharedComm(
            self.transport, self.device, self.stall_timeout_s, ranks=self.hub.ranks, members=members, hub=self.hub, fence=fence
        )

    @property
    def stall_timeout_s(self) -> float:
        """Seconds that a wait may last; one value for all groups of the hub."""
        return self.hub.stall_timeout_s

    @stall_timeout_s.setter
    def stall_timeout_s(self, seconds: float) -> None:
        self.hub.stall_timeout_s = seconds

    @property
    def pending(self) -> HopQueue:
        return self.hub.pending

    @property
    def desk(self) -> Desk:
        return self.hub.desk

    # -- memory ----------------------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype, *, whole: bool) -> Region:
        self.fence.writing = True  # new memory is about to be written: peers may read it after the next fence
        with making():
            mine, handle = self.transport.export(numel * dtype.itemsize)
        handles = self._meet_all(handle, self.members, "allocate")
        memory = [mine if peer == self.rank else self.transport.open(other) for peer, other in enumerate(handles)]
        self._meet_all(None, self.members, "memory opened")  # no rank needs the handle any more
        self.transport.forget(handle)
        wholes = [part.view(dtype) for part in memory]
        shards = [part.view(self.world_size, -1)[peer] if whole else part for peer, part in enumerate(wholes)]
        return Region(wholes[self.rank], list(shards), list(wholes) if whole else [])

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

            def copy(numbers: dict[int, int]) -> None:
                for rank, member in enumerate(self.members):
                    shard = self._numbered(source, numbers[member]).shards[rank]
                    assert shard is not None
                    rows[rank].copy_(shard)

            work: Collective = self.hub.meet(("gather", tag, *self._name), source.number, self.members, label, copy)
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

        work = self.hub.meet(("reduce", tag, *self._name), source.number, self.members, label, compute)
        work.sent = self.sent(numel * source.tensor.itemsize)
        return work

    @staticmethod
    def _numbered(source: Region, number: int) -> Region:
        """Return the region that a peer used: `source`, or the one of its siblings with the number that the peer sent."""
        return source.siblings(number) if source.siblings is not None else source

    def exchange(self, payload: bytes, label: str) -> list[bytes]:
        return self._meet_all(payload, self.members, label)

    def _meet_all(self, payload: object, members: Sequence[int], label: str) -> list:
        told = self.hub.exchange(payload, members, label)
        error = mismatch(
            {rank: told[member][0] for rank, member in enumerate(members)}, [self.hub.ranks[member] for member in members]
        )
        if error is not None:
            self.hub.check_peers([], label)  # if a rank failed and then made another call, raise its error instead
            raise error
        unsent = self.transport.unsent
        if unsent():  # a peer can not end its exchange before it has read this rank's payload
            self.hub.wait_for(lambda: not unsent(), lambda: list(unsent()), label)
        return [told[member][1] for member in members]

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

    # -- progress and liveness -------------------------------------------------------------------------------

    @property
    def failure(self) -> Exception | None:
        return self.hub.failure

    def announce(self, waiting_for: str | None) -> None:
        self.hub.tell(("awake",) if waiting_for is None else ("waiting", waiting_for, self.hub.others))

    def peers_wait(self) -> bool:
        return self.hub.peers_wait()

    def serve(self) -> None:
        """Process the messages that have come; raise where a peer has failed."""
        self.hub.poll()
        self.hub.check_gone("ranks of other hosts")

    def wait_until(self, done: Callable[[], bool], label: str, missing: Missing | None = None) -> None:
        def awaited() -> list[int]:
            known = missing() if missing is not None else None
            return self.hub.others if known is None else known

        self.hub.wait_for(done, awaited, label)

    def poll(self) -> None:
        self.hub.poll()

    def fail(self, failure: Failure) -> None:
        self.hub.fail(failure)

    def answer_for(self, owner: object) -> Callable[[], object]:
        return self.desk.answer_for(owner)

    def leave(self) -> None:
        self.close()

    def close(self) -> None:
        self.hub.close()
