"""SharedComm: ranks of one host that read each other's memory.

Nothing is sent but short messages: a gather is a copy from the peers' shards (or nothing at all, where one memory
serves all ranks), a reduction reads each peer's slice where it lies. Measured on 2 ranks and 2 cores (docs/log.md):
a 67 MB gather takes 69 ms with gloo, 25 ms one-hop over sockets, 8 ms as a copy.

    rank 0   send grads ready -> . . . . sum my shard -> done
    rank 1   . . . send grads ready -> sum my shard -> done          a source is free when all ranks are done

A wait never hangs: it ends when a peer fails (its traceback is raised here), leaves, or stands in another
collective; and when all ranks that are waited for wait themselves, the circle is reported by name.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable

import torch
from torch import Tensor

from ..errors import LEFT, CollectiveMismatch, StallError
from .base import Comm, Region, Work, misuse, nonfinite_ranks, operation, sum_in_rank_order
from .failure import GONE, Failure
from .flight_recorder import describe, places_of
from .status_server import Desk, ThreadDesk
from .streams import streams_for
from .transport import ThreadTransport, Transport

_NOTE_AFTER_S = 0.05  # a wait longer than this is announced to the peers
_CIRCLE_AFTER_S = 5.0  # a circle of waiting ranks that lasts this long is a deadlock


class _Meeting(Work):
    """Ranks read what the others have just written: it can when all sources are ready, and is drained when all have read."""

    def __init__(self, comm: SharedComm, key: Hashable, label: str, compute: Callable) -> None:
        self.comm, self.key, self.label, self.compute = comm, key, label, compute
        self.finished = False
        self.over = False  # drained, and forgotten by the comm

    def wait(self) -> None:
        if not self.finished:
            self.comm.wait_for(lambda: self.finished, lambda: self.comm.missing(self.comm.arrived[self.key]), self.label)

    def drained(self) -> bool:
        return self.over or (self.finished and len(self.comm.summed[self.key]) == self.comm.world_size)

    def drain(self) -> None:
        if self.over:
            return
        if not self.drained():
            self.comm.wait_for(self.drained, lambda: self.comm.missing(self.comm.summed[self.key]), self.label)
        self.over = True
        self.comm.forget(self.key)


class SharedComm(Comm):
    """Ranks as threads or processes of one host, over a `Transport`."""

    shares_memory = True

    def __init__(self, transport: Transport, device: torch.device, stall_timeout_s: float = 60.0) -> None:
        self.transport = transport
        self.rank, self.world_size, self.device = transport.rank, transport.world_size, device
        self.stall_timeout_s = stall_timeout_s
        self.streams = streams_for(device)
        self.arrived: dict[Hashable, dict[int, int]] = defaultdict(dict)  # whose source is ready: region number
        self.summed: dict[Hashable, set[int]] = defaultdict(set)  # who has read all sources
        self._open: dict[Hashable, _Meeting] = {}  # reductions that this rank started and has not summed
        self._payloads: dict[int, deque] = {peer: deque() for peer in range(self.world_size)}
        self._turn: dict[Hashable, int] = defaultdict(int)  # how often a tag was reduced
        self._failed: Failure | None = None  # the first of which this rank heard
        self._lost: dict[int, str] = {}
        self._notes: dict[int, tuple[float, str, list[int]]] = {}  # peer -> (when, waiting for what, whom)
        self._writing = True
        self._closed = False
        threads = isinstance(transport, ThreadTransport)
        self.desk: Desk = ThreadDesk(transport.world.boards, self.progress) if threads else Desk()  # processes: see `world`

    # -- memory ----------------------------------------------------------------------------------------------

    def allocate(self, numel: int, dtype: torch.dtype, *, whole: bool) -> Region:
        self._writing = True  # fresh memory is about to be filled: peers may read after the next fence
        mine, handle = self.transport.export(numel * dtype.itemsize)
        memory = self._open_all(handle, mine)
        wholes = [part.view(dtype) for part in memory]
        shards = [part.view(self.world_size, -1)[peer] if whole else part for peer, part in enumerate(wholes)]
        return Region(wholes[self.rank], list(shards), wholes if whole else [])

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Region | None:
        self._writing = True
        handle, mine = None, None
        if self.rank == 0:
            mine, handle = self.transport.export(numel * dtype.itemsize)
        handles = self._exchange(handle, "allocate common memory")
        tensor = (mine if mine is not None else self.transport.open(handles[0])).view(dtype)
        self._exchange(None, "common memory opened")
        if handle is not None:
            self.transport.forget(handle)
        return Region(tensor, list(tensor.view(self.world_size, -1).unbind(0)), [tensor] * self.world_size, common=True)

    def _open_all(self, handle: object, mine: Tensor) -> list[Tensor]:
        handles = self._exchange(handle, "allocate")
        memory = [
            mine if peer == self.rank else self.transport.open(other) for peer, other in enumerate(handles)
        ]
        self._exchange(None, "memory opened")
        self.transport.forget(handle)
        return memory

    # -- collectives -----------------------------------------------------------------------------------------

    def gather(self, full: Tensor, source: Region, label: str, tag: int | None = None) -> Work:
        self.progress.note_gather(label)
        if tag is not None:
            rows = full.view(self.world_size, -1)

            def copy(work: _Meeting) -> None:
                for peer, number in self.arrived[work.key].items():
                    rows[peer].copy_(self._numbered(source, number).shards[peer])

            return self._meet(("gather", tag), source, label, copy)
        self.fence_read()
        if not source.common:
            rows = full.view(self.world_size, -1)
            for peer, shard in enumerate(source.shards):
                assert shard is not None
                if rows[peer].data_ptr() != shard.data_ptr():
                    rows[peer].copy_(shard)
        return Work()

    def reduce(
        self, source: Region, out: Tensor, *, scale: float, accumulate: bool, tag: int, label: str
    ) -> Work:
        begin = self.rank * out.numel()
        self.progress.note(label)

        def compute(work: _Meeting) -> float | None:
            parts = [
                self._numbered(source, number).wholes[peer][begin : begin + out.numel()]
                for peer, number in sorted(self.arrived[work.key].items())
            ]
            total = sum_in_rank_order(parts, out, scale=scale, accumulate=accumulate)
            if total is not None and not math.isfinite(total):
                work.culprits = nonfinite_ranks(parts, out)
            return total

        return self._meet(("reduce", tag), source, label, compute)

    @staticmethod
    def _numbered(source: Region, number: int) -> Region:
        """The region that a peer used: `source`, or the one of its siblings that the peer named."""
        return source.siblings(number) if source.siblings is not None else source

    def _meet(self, tag: tuple, source: Region, label: str, compute: Callable) -> _Meeting:
        """Tell the peers that `source` is ready; `compute` runs when all are."""
        key = (*tag, self._turn[tag])
        self._turn[tag] += 1
        work = _Meeting(self, key, label, compute)
        self._open[key] = work
        self.arrived[key][self.rank] = source.number
        self._tell_all(("ready", key, source.number))
        self.poll()
        return work

    def exchange(self, payload: bytes, label: str) -> list[bytes]:
        return self._exchange(payload, label)

    def _exchange(self, payload: object, label: str) -> list:
        self.progress.note(label)
        self._tell_all(("exchange", label, payload))
        others = [peer for peer in range(self.world_size) if peer != self.rank]
        self.wait_for(
            lambda: all(self._payloads[peer] for peer in others),
            lambda: [peer for peer in others if not self._payloads[peer]],
            label,
        )
        results: list = [payload] * self.world_size
        labels = {self.rank: label}
        for peer in others:
            labels[peer], results[peer] = self._payloads[peer].popleft()
        if len(set(map(operation, labels.values()))) > 1:
            self._check_peers([], label)  # one that failed and went on says why
            places = "; ".join(f"rank {peer}: {at}" for peer, at in sorted(labels.items()))
            raise CollectiveMismatch(
                f"ranks entered different operations ({places}). Every rank must run the same sequence of "
                f"zeroshard calls (steps, evaluations, saves).{misuse(labels, self.world_size)}"
            )
        if self.transport.unsent():  # no peer ends this exchange before it has read its part
            self.wait_for(lambda: not self.transport.unsent(), lambda: list(self.transport.unsent()), label)
        return results

    # -- fences ----------------------------------------------------------------------------------------------

    def fence_write(self, synchronised: bool = False) -> None:
        if not self._writing:
            if not synchronised:
                self._exchange(None, "begin to write shards")
            self._writing = True

    def fence_read(self) -> None:
        if self._writing:
            self._exchange(None, "end of writing shards")
            self._writing = False

    # -- progress and liveness -------------------------------------------------------------------------------

    def announce(self, waiting_for: str | None) -> None:
        others = [peer for peer in range(self.world_size) if peer != self.rank]
        self._tell_all(("awake",) if waiting_for is None else ("waiting", waiting_for, others))

    def peers_wait(self) -> bool:
        self._check_peers([peer for peer in range(self.world_size) if peer != self.rank], "a staging buffer")
        return bool(self._notes)

    def poll(self) -> None:
        while (item := self.transport.receive(0)) is not None:
            self._take(*item)
        self._sum_ready()

    def _sum_ready(self) -> None:
        for key in [key for key in self._open if len(self.arrived[key]) == self.world_size]:
            work = self._open.pop(key)
            work.square_sum = work.compute(work)
            work.finished = True
            self.summed[key].add(self.rank)
            self._tell_all(("summed", key))

    def _take(self, peer: int, message: tuple) -> None:
        kind = message[0]
        if kind == "waiting":
            self._notes[peer] = (time.monotonic(), message[1], message[2])
            return
        if kind == "awake":  # nothing else ends a wait: a waiting rank goes on summing and telling so
            self._notes.pop(peer, None)
        elif kind == "ready":
            self.arrived[message[1]][peer] = message[2]
        elif kind == "summed":
            self.summed[message[1]].add(peer)
        elif kind == "exchange":
            self._payloads[peer].append(message[1:])
        elif kind == "failed":
            self._failed = self._failed or Failure(*message[1:])
            self.failure = self.failure or self._failed.error
        elif kind == "lost":
            self._lost.setdefault(peer, message[1])  # the first says more than that its socket is closed

    def wait_for(self, done: Callable[[], bool], missing: Callable[[], list[int]], label: str) -> None:
        """Receive until `done`; raise when a rank in `missing` can not come any more."""
        begin, noted = time.monotonic(), False
        self.progress.wait(label, missing)
        self._sum_ready()
        while not done():
            item = self.transport.receive(0.2 if noted else _NOTE_AFTER_S)
            if item is not None:
                self._take(*item)
                self._sum_ready()
                continue
            waited = time.monotonic() - begin
            self._check_peers(missing(), label)
            if waited >= _NOTE_AFTER_S and not noted:
                self._tell_all(("waiting", label, missing()))
                noted = True
            if waited > _CIRCLE_AFTER_S:
                self._check_circle(missing(), label, waited)
        self.progress.awake()
        if noted:
            self._tell_all(("awake",))

    def _check_peers(self, missing: list[int], label: str) -> None:
        if self._failed is None and any(peer in self._lost for peer in missing):
            first = next((peer for peer, reason in self._lost.items() if reason == GONE), None)  # others may have gone with it
            peer = first if first is not None else next(peer for peer in missing if peer in self._lost)
            self.fail(Failure(peer, self._lost[peer] if peer != first else self.desk.how_it_ended(peer)))
        if self._failed is not None:
            raise self._failed.raised(self.place(label))

    def _check_circle(self, missing: list[int], label: str, waited: float) -> None:
        """Raise if every rank that this one needs, directly or not, is itself waiting (or busy for too long)."""
        now, seen, queue = time.monotonic(), {self.rank}, list(missing)
        while queue:
            peer = queue.pop()
            if peer in seen:
                continue
            seen.add(peer)
            note = self._notes.get(peer)
            if note is None or now - note[0] < _CIRCLE_AFTER_S / 2:
                if waited < self.stall_timeout_s:
                    return
                break  # busy beyond the timeout: report as well
            queue += note[2]
        reports = self.desk.ask(self._others()) | {self.rank: self.progress.report()}
        self.poll()
        if self._failed is not None:  # a peer has found the same, and gone
            raise self._failed.raised(self.place(label))
        places = places_of(reports) | {peer: note[1] for peer, note in self._notes.items()} | {self.rank: label}
        hint = f"Did all ranks run the same modules and calls?{misuse(places, self.world_size)}"
        text = describe(waited, reports, hint)
        self.abort(text, StallError(text))
        raise StallError(text)

    def missing(self, present: Collection[int]) -> list[int]:
        """Ranks that are not in `present`."""
        return [peer for peer in range(self.world_size) if peer not in present]

    def forget(self, key: Hashable) -> None:
        """A finished reduction's bookkeeping may go."""
        self.arrived.pop(key, None)
        self.summed.pop(key, None)

    def _tell_all(self, message: tuple) -> None:
        self.transport.tell(message)

    def fail(self, failure: Failure) -> None:
        if not self._closed:
            self._tell_all(("failed", failure.rank, failure.reason, failure.error))
        if failure.error is not None or failure.rank != self.rank:  # all raise the same: this rank must not wait for peers that do
            self._failed = self._failed or failure
            self.failure = self.failure or failure.error

    def _others(self) -> list[int]:
        return [peer for peer in range(self.world_size) if peer != self.rank]

    def leave(self) -> None:
        self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.desk.close()
            self._tell_all(("lost", LEFT))  # only who is still waited for minds
            self.transport.close()
