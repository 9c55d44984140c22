"""DistComm: collectives over a torch.distributed process group, for ranks that do not share a host or run on GPUs.

Gloo: one hop, every rank sends each peer its slice directly (isend/irecv with tags), since gloo's own rings are
2-3 times slower on few ranks (docs/log.md). NCCL: all-gather, and all-to-all followed by a sum in fp32 in rank order
(as in ZeRO++'s qgZ); waiting for a c10d Work orders the current stream after NCCL's.

Control messages (`exchange`) go through a gloo group on the host, so they never wait for a GPU.

c10d reports a broken connection or a timeout, but not which rank caused it; and ranks that end because another one failed
break connections as well. So a rank whose wait has failed looks whether a peer has sent its failure, and whether all peers'
desks answer (`Desk.explain`).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import itertools
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ConfigError, ZeroshardError
from ...utils import torch_compat
from ...utils.one_thread import Turn, one_thread
from ...utils.work import pause
from .base import Collective, Combine, DirectComm, Outcome, Region, parts_of
from .control import Missing, Sent, mismatch, operation
from .desk import Desk, Failure
from .streams import Streams, streams_for
from .sums import piece_numel

_WAITERS = 64  # most collectives for which threads wait at a time
_FRAME_NBYTES = 1024  # control messages up to this size travel in one hop
MANY = 32  # with more ranks, `exchange` first adds up digests of the payloads, and gathers the payloads only if these differ
_TOLD = 8  # most ranks of a group in a round of that sum (`round_sizes`), unless the number of ranks has a larger prime factor
_WORDS, _MOST_NUMBERS = 5, 11  # fp64 numbers in that sum: words of the digest, and at most so many that `compare` adds up


def collectives_of(nbytes: int, world_size: int) -> list[tuple[int, int]]:
    """Return (bytes that a rank receives, hops one after another) of each collective of an `exchange` of equal payloads.

    nbytes: of the message, with its header and label. 4 ranks: [(4096, 3)] for 100 bytes, which fit one frame; for 5,000 bytes
    [(4096, 3), (20000, 3)], as sizes are known after the frames alone. gloo's all-gather goes around a ring of N - 1 hops.
    """
    if world_size > MANY:
        told = sum(size - 1 for size in round_sizes(world_size))
        return [(8 * (_WORDS + _MOST_NUMBERS) * told, told)]
    frames = [_FRAME_NBYTES] + [nbytes] * (nbytes > _FRAME_NBYTES)
    return [(world_size * each, world_size - 1) for each in frames]


def round_sizes(world_size: int) -> list[int]:
    """Return the size of the groups in each round of `_add_up`, the product being `world_size`: [4, 3] for 12, [37] for 37."""
    sizes, factor = [1], 2
    while world_size > 1:
        if world_size % factor:
            factor += 1
            continue
        if sizes[-1] > 1 and sizes[-1] * factor > _TOLD:
            sizes.append(1)
        sizes[-1] *= factor
        world_size //= factor
    return sizes


class _DistWork(Collective):
    """Collective over several c10d works. It keeps them, and so their tensors, until `wait`.

    gloo's works of isend and irecv can not be polled: where `done` is needed, a thread waits for them, in the future `transfer`.
    """

    def __init__(self, comm: DistComm, works: list, label: str, watch: bool = False) -> None:
        self.comm, self.works, self.label = comm, works, label
        self.transfer: Future | None = None
        if watch or comm.goes_on:
            self.watch()

    def watch(self) -> None:
        """Let a thread wait for the works, so that `done` can be answered."""
        if (works := self.works) and self.transfer is None and not self.comm.ordered:
            self.transfer = self.comm.waiter.submit(lambda: [work.wait() for work in works])

    def done(self) -> bool:
        self.watch()
        return self.transfer.done() if self.transfer is not None else not self.works

    def wait(self) -> None:
        if self.comm.goes_on:
            self.watch()
        transfer = self.transfer
        if transfer is not None and self.comm.goes_on:
            self.comm.wait_until(transfer.done, self.label)
        with _Explained(self.comm, self.label):
            while self.works and transfer is None:
                # a wait that a signal's handler has ended by an exception can be repeated: the work itself was over by then, and gloo
                # waits for ever in a second wait for it
                work = self.works.pop(0)
                try:
                    work.wait()
                except RuntimeError:  # c10d's own: so does the next wait fail
                    self.works.insert(0, work)
                    raise
            if transfer is not None:
                transfer.result()
        self.works, self.transfer = [], None

    def drained(self) -> bool:
        return self.transfer is None and not self.works


class _Collected(_DistWork):
    """c10d works that bring every rank's slice, followed by a function of the slices (`compute`).

    `compute` refers to the receive buffer, which is as large as the whole source. It is dropped once it has run, since the Collective
    itself lives until its source is used again, and is part of a reference cycle.
    """

    def __init__(self, comm: DistComm, works: list, label: str, compute: Callable[[], Outcome | None]) -> None:
        super().__init__(comm, works, label, watch=True)
        self.compute: Callable[[], Outcome | None] | None = compute
        self.ticket: Any = None
        if comm.ordered:  # NCCL works wait on streams, not on the host: `compute` can be enqueued at once
            outcome, self.ticket = comm.streams.run_beside(self._combine)
            self.take(outcome)

    def _combine(self) -> Outcome | None:
        super().wait()
        compute, self.compute = self.compute, None
        assert compute is not None
        return compute()

    def wait(self) -> None:
        if self.ticket is not None:
            self.comm.streams.join(self.ticket)
            self.ticket = None
        elif not self.comm.ordered and self.compute is not None:
            self.take(self._combine())

    def drained(self) -> bool:
        if self.comm.ordered:
            return self.ticket is None
        if self.compute is not None and self.done():
            self.wait()
        return self.compute is None


class _Explained:
    """Context that replaces errors of c10d by errors that name the cause: a failed or dead peer, or a stall (`Desk.explain`)."""

    def __init__(self, comm: DistComm, label: str) -> None:
        self.comm, self.label = comm, label

    def __enter__(self) -> None:
        if self.comm.desk.told is not None:
            raise self.comm.heard(self.comm.desk.told, self.label)
        self.comm.progress.wait(self.label)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # after a RuntimeError this rank's report, which `explain` asks for, must still say where it waits
        if not isinstance(error, RuntimeError):
            self.comm.progress.awake()
        if not isinstance(error, RuntimeError) or isinstance(error, ZeroshardError):  # not c10d's: let it pass
            return
        failure = self.comm.desk.explain(self.comm.root, self.label, error)
        if failure is not None:
            self.comm.fail(failure)
            raise self.comm.heard(failure, self.label) from None  # c10d's message is the same for any broken connection


def talking_device(device: torch.device) -> torch.device:
    """Return where ranks exchange metadata on tensors of `device`: on the current GPU, if the group has no CPU backend."""
    if device.type != "cpu" or not dist.is_initialized() or not torch.cuda.is_available():
        return device
    on_host = any(pair.startswith("cpu:") for pair in dist.get_backend_config().split(","))  # NCCL alone moves no host tensors
    return device if on_host else torch.device("cuda", torch.cuda.current_device())


def backend_for(device: torch.device, group: dist.ProcessGroup | None = None) -> str:
    """Return the backend with which a group moves tensors on `device`. Raises ConfigError where it has none."""
    pairs = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    found = pairs.get(device.type)
    if found is None or (found == "gloo" and device.type != "cpu"):  # gloo sends and receives host memory only
        other = "nccl" if device.type == "cuda" else "gloo"
        raise ConfigError(
            f"the model is on {device}, but the process group has {dist.get_backend_config(group)}, which can not send tensors of that "
            f"device: call init_process_group({other!r}), or move the model before zs.shard()."
        )
    return found


class DistComm(DirectComm):
    """Comm over a torch.distributed process group (gloo or NCCL).

    _summing: by number (`open_sums`), the groups that sum, of exactly these ranks.

    Threads: one at a time; two in `exchange` are refused (`ThreadsMet`). The threads of `waiter` only wait for gloo's requests.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, stall_timeout_s: float = 60.0,
        ordered: bool | None = None, streams: Streams | None = None, desk: Desk | None = None,
    ) -> None:  # fmt: skip
        """group: None for the default group. ordered, streams: by default chosen by backend and device; tests pass others.

        desk: explains errors until it has opened one that peers can ask; None: nobody answers, and no error is explained.
        """
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.device, self.stall_timeout_s = device, stall_timeout_s
        self.turn = Turn(f"the communicator of rank {self.rank}")
        self.backend = backend_for(device, group)
        self.ordered = self.backend != "gloo" if ordered is None else ordered
        self.waits_on_host = self.backend == "gloo"
        self.adds = 2 if self.backend == "gloo" else 1
        self.streams = streams or streams_for(device)
        self.waiter = ThreadPoolExecutor(max_workers=_WAITERS, thread_name_prefix="zeroshard-gloo")
        self.beside: list[Callable[[], None]] = []  # called during waits: peers of `local` may wait for this rank's answers
        self.ranks = dist.get_process_group_ranks(group) if group is not None else list(range(self.world_size))
        self.desk, self.nodes = desk or Desk(), [0] * self.world_size
        self._parent: DistComm | None = None  # for a subgroup: the comm of all ranks
        self._subgroups: dict[tuple[object, ...], DistComm] = {}  # by (apart, *parts)
        self._timeout = datetime.timedelta(seconds=stall_timeout_s)
        # new process groups, so that these messages never mix with those of the user's collectives
        make: Any = functools.partial(torch_compat.group_of_members, self.ranks, self._timeout, "gloo")
        self._control: Any = make()
        self._data: Any = make() if self.backend == "gloo" else group
        self._summing: dict[int, Any] = {}
        self._dropped: list[int] = []
        self._numbers = itertools.count()  # none is used twice: `drop_sums` may name one that `close_sums` has closed
        if self.world_size > 1:
            self.desk = self.desk.open(self)
            self.nodes = self.desk.nodes() or self.nodes

    def join(self, local: DirectComm) -> None:
        """Make every wait here serve this host's ranks in `local`. (Waits there continue hops of both: they share `pending`.)"""
        if self.beside:  # joined already
            return
        self.beside.append(local.serve)

    @property
    def goes_on(self) -> bool:
        """True if this rank must do other work during a wait (serve `local`, continue hops), as peers may wait for it."""
        return bool(self.beside or self.pending.items)

    @property
    def root(self) -> DistComm:
        """The comm of all ranks, of which this may be a subgroup."""
        return self._parent or self

    def subgroup(self, parts: Sequence[Sequence[int]], apart: bool = False) -> DistComm:
        key = (apart, *map(tuple, parts))
        if key in self._subgroups:  # models share a subgroup, since each costs new process groups
            return self._subgroups[key]
        group = super().subgroup(parts)  # shares the desk and the waiter threads
        group._subgroups, group._parent, group._summing, group._dropped = {}, self.root, {}, []
        if apart and self.local is not None:  # this host's ranks in this rank's part; None where there is no other
            here = [rank for rank, node in enumerate(self.nodes) if node == self.nodes[self.rank]]
            near = [[here.index(rank) for rank in part if rank in here] for part in parts]
            local = self.local.subgroup([part for part in near if part], apart=True)
            group.local, group.beside = local if local.world_size > 1 else None, []
        make: Any = functools.partial(torch_compat.group_of_members, group.ranks, self._timeout)
        group._control = make(backend="gloo")
        if self.backend != "gloo":  # gloo's isend and irecv name the peer and a tag, so that the parent's group serves
            group._data = make(backend=self.backend)
        self._subgroups[key] = group
        return group

    def gather(self, full: Tensor, source: Region, label: str, tag: int | None = None) -> Collective:
        mine = source.shards[self.rank]
        assert mine is not None
        self.progress.note_gather(label)
        with _Explained(self, label):
            if self.ordered:
                works = [torch_compat.all_gather_single(full, mine, group=self._data, async_op=True)]
            else:
                rows = full.view(self.world_size, -1)
                # even tags are gathers. One tag per region, so that ranks in different units never mix them up
                number = 2 * (source.number if tag is None else tag)
                works = [dist.irecv(rows[p], self.ranks[p], self._data, tag=number) for p in self._peers()]
                works += [dist.isend(mine, self.ranks[p], self._data, tag=number) for p in self._peers()]
                if rows[self.rank].data_ptr() != mine.data_ptr():
                    rows[self.rank].copy_(mine)
        work = _DistWork(self, works, label)
        work.sent = self.sent(mine.nbytes)
        return work

    def collect(self, source: Region, combine: Combine, *, tag: int, label: str) -> Collective:
        rows = source.tensor.view(self.world_size, -1)
        self.progress.note(label)
        with _Explained(self, label):
            if self.ordered and self.world_size == 1:
                works, parts = [], [rows[0]]
            elif self.ordered:
                # allocated on the side stream, which also reads and frees it: then the caching allocator gives the same memory to
                # the next reduction, however far the host has run ahead of the device
                with self.streams.beside():
                    received = torch.empty_like(rows)
                    works = [dist.all_to_all_single(received, rows, group=self._data, async_op=True)]
                    parts = list(received.unbind(0))
            else:
                received = torch.empty_like(rows)
                number = 2 * tag + 1  # odd tags are reductions
                works = [dist.irecv(received[p], self.ranks[p], self._data, tag=number) for p in self._peers()]
                works += [dist.isend(rows[p], self.ranks[p], self._data, tag=number) for p in self._peers()]
                parts = [rows[p] if p == self.rank else received[p] for p in range(self.world_size)]
        work = _Collected(self, works, label, lambda: combine(parts))
        work.sent = self.sent(rows[self.rank].nbytes)
        return work

    def reduce(self, source: Region, out: Tensor, *, scale: float, accumulate: bool, tag: int, label: str) -> Collective:
        """Start a reduce-scatter as `Comm.reduce` does; on a GPU in pieces, each of which receives at most RECEIVED_NBYTES."""
        rows = source.tensor.view(self.world_size, -1)
        size = piece_numel(rows)
        if not self.ordered or self.world_size == 1 or size >= rows.shape[1]:
            return super().reduce(source, out, scale=scale, accumulate=accumulate, tag=tag, label=label)
        works = []
        for begin in range(0, rows.shape[1], size):
            with self.streams.beside():  # allocated there for the reason given in `collect`
                piece = Region(rows[:, begin : begin + size].contiguous().view(-1))
            part = out[begin : begin + size]
            works.append(super().reduce(piece, part, scale=scale, accumulate=accumulate, tag=tag, label=label))
        last, squares = works[-1], [work.square_sum for work in works]  # one stream runs all: the last is over when all are
        last.sent = self.sent(source.tensor.nbytes // self.world_size)
        known = [square for square in squares if square is not None]
        last.take((sum(known) if len(known) == len(squares) else None, tuple({r: None for w in works for r in w.culprits})))
        return last

    def drop_sums(self, number: int) -> None:
        self._dropped.append(number)

    def open_sums(self) -> int:
        while self._dropped:
            self.close_sums(self._dropped.pop())
        number, group = next(self._numbers), self._data
        if self.backend == "gloo":  # a group for each model: ranks that use other units of one would mix up the next one's sums
            group = torch_compat.group_of_members(self.ranks, self._timeout, "gloo")
        self._summing[number] = group
        return number

    def close_sums(self, number: int) -> None:
        group = self._summing.pop(number, None)
        if group is not None and self.backend == "gloo" and dist.is_initialized():
            with contextlib.suppress(ValueError):  # the program has destroyed all groups, and perhaps started others
                dist.destroy_process_group(group)

    def reduce_scatter(self, out: Tensor, whole: Tensor, then: Callable[[], None], number: int, label: str) -> Collective:
        start = functools.partial(torch_compat.reduce_scatter_single, out, whole)
        return self._summed(start, then, number, label, self.adds * out.nbytes)

    def all_reduce(self, tensor: Tensor, then: Callable[[], None], number: int, label: str) -> Collective:
        return self._summed(functools.partial(dist.all_reduce, tensor), then, number, label, 2 * tensor.nbytes // self.world_size)

    def _summed(self, start: Callable[..., Any], then: Callable[[], None], number: int, label: str, nbytes: int) -> Collective:
        """Start a sum by the backend, then call `then`. nbytes: what a rank sends in a ring, divided by its number of peers."""
        self.progress.note(label)
        with _Explained(self, label):
            works = [start(group=self._summing[number], async_op=True)]
        work = _Collected(self, works, label, then)
        work.sent = self.sent(nbytes)
        return work

    def all_to_all(
        self, output: Tensor, input: Tensor, label: str = "all-to-all", output_counts: Sequence[int] | None = None,
        input_counts: Sequence[int] | None = None,
    ) -> Collective:  # fmt: skip
        given, taken = (parts_of(t, c, self.world_size) for t, c in ((input, input_counts), (output, output_counts)))
        self.progress.note(label)
        with _Explained(self, label):
            if self.ordered:
                into, out = ([part.numel() for part in parts] for parts in (taken, given))
                works = [dist.all_to_all_single(output.view(-1), input.view(-1), into, out, group=self._data, async_op=True)]
            else:  # tag 1 is free: reductions have 2 * tag + 1, and tags of models begin at 2**20 (engine/shard_model.py)
                works = [
                    move(parts[p], self.ranks[p], self._data, tag=1)
                    for parts, move in ((taken, dist.irecv), (given, dist.isend))
                    for p in self._peers()
                    if parts[p].numel()
                ]
                taken[self.rank].copy_(given[self.rank])
        work = _DistWork(self, works, label)
        far = [self.nodes[p] != self.nodes[self.rank] for p in range(self.world_size)]
        near_nbytes = sum(part.nbytes for p, part in enumerate(given) if not far[p] and p != self.rank)
        work.sent = Sent(near_nbytes, sum(part.nbytes for p, part in enumerate(given) if far[p]))
        return work

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.world_size) if peer != self.rank]

    @one_thread
    def exchange(self, payload: bytes, label: str) -> list[bytes]:
        if self.world_size > MANY and self._sums(payload, label, ()) is not None:
            return [payload] * self.world_size
        return self._everyone(payload, label)

    def compare(self, payload: bytes, label: str, numbers: Sequence[float] = ()) -> tuple[list[float], list[bytes] | None]:
        if self.world_size <= MANY:
            return super().compare(payload, label, numbers)
        return self._compare_many(payload, label, numbers)

    @one_thread
    def _compare_many(self, payload: bytes, label: str, numbers: Sequence[float]) -> tuple[list[float], list[bytes] | None]:
        if (sums := self._sums(payload, label, numbers)) is not None:
            return sums, None
        form = struct.Struct(f"<{len(numbers)}d")
        parts = self._everyone(form.pack(*numbers) + payload, label)
        sums = [sum(column) for column in zip(*map(form.unpack_from, parts), strict=True)]
        return sums, [part[form.size :] for part in parts]

    def _sums(self, payload: bytes, label: str, numbers: Sequence[float]) -> list[float] | None:
        """Return the sums of `numbers` if all ranks are in the same operation with the same payload, else None on every rank.

        A few numbers are added up, however many ranks there are. Sums of the digest's 24-bit words are exact in fp64 for up to
        2**29 ranks, and each rank compares them with its own words times the number of ranks.
        """
        digest = hashlib.sha256(operation(label).encode() + b"\0" + payload).digest()
        words = [int.from_bytes(digest[at : at + 3], "little") for at in range(0, 3 * _WORDS, 3)]
        told = torch.zeros(_WORDS + _MOST_NUMBERS, dtype=torch.float64, device="cpu")
        told[: _WORDS + len(numbers)] = torch.tensor([*words, *numbers], dtype=torch.float64, device="cpu")
        self.progress.note(label)
        with _Explained(self, label):
            sums = self._add_up(told, label).tolist()
        alike = sums[:_WORDS] == [float(word * self.world_size) for word in words]
        return sums[_WORDS : _WORDS + len(numbers)] if alike else None

    def _add_up(self, told: Tensor, label: str) -> Tensor:
        """Return the sums of numbers over all ranks, the same bits on every rank (collective).

        In each round the ranks of a small group send each other their sums so far: of 12 ranks, first 0 to 3 (4 to 7, 8 to 11),
        then 0, 4 and 8 (1, 5, 9; ...). (gloo's own reduction goes around one ring of all ranks, however few the bytes: 8,190 hops
        among 4,096 ranks, where these are 28 messages in four rounds.) No process groups are made for that.
        """
        stride = 1
        for size in round_sizes(self.world_size):
            place = self.rank // stride % size
            mates = {other: self.ranks[self.rank + (other - place) * stride] for other in range(size) if other != place}
            parts = [torch.empty_like(told) if other != place else told for other in range(size)]
            # a mate may send for its next sum before this one is received: messages of a pair stay in order, so one tag is enough
            works = [dist.irecv(parts[other], mate, self._control) for other, mate in mates.items()]
            works += [dist.isend(told, mate, self._control) for mate in mates.values()]
            _DistWork(self, works, label).wait()
            told = functools.reduce(torch.add, parts)  # in the order of the group
            stride *= size
        return told

    def _everyone(self, payload: bytes, label: str) -> list[bytes]:
        """Return every rank's payload, and raise CollectiveMismatch where ranks are in different operations."""
        name = label.encode()
        body = struct.pack("<II", len(name), len(payload)) + name + payload
        self.progress.note(label)
        with _Explained(self, label):
            frames = self._all_gather_bytes(body[:_FRAME_NBYTES], _FRAME_NBYTES, label)
            sizes = [8 + sum(struct.unpack_from("<II", frame)) for frame in frames]
            if max(sizes) > _FRAME_NBYTES:
                frames = self._all_gather_bytes(body, max(sizes), label)
        labels, results = [], []
        for frame in frames:
            name_len, length = struct.unpack_from("<II", frame)
            labels.append(frame[8 : 8 + name_len].decode())
            results.append(frame[8 + name_len : 8 + name_len + length])
        if (wrong := mismatch(dict(enumerate(labels)), self.ranks)) is not None:
            raise wrong
        return results

    def _all_gather_bytes(self, body: bytes, nbytes: int, label: str) -> list[bytes]:
        mine = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        mine[: len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        work = dist.all_gather(everyone, mine, group=self._control, async_op=True)
        if self.goes_on:
            self.wait_until(work.is_completed, label)
        work.wait()
        parts = [part.numpy().tobytes() for part in everyone]
        if self.ranks != (in_group := sorted(self.ranks)):  # torch's groups have ascending ranks
            places = {rank: place for place, rank in enumerate(in_group)}
            parts = [parts[places[rank]] for rank in self.ranks]
        return parts

    def wait_until(self, done: Callable[[], bool], label: str, missing: Missing | None = None) -> None:
        begin = time.monotonic()
        with _Explained(self, label), self.pending.waiting():
            while not done():
                self.poll()
                if self.desk.told is not None:
                    raise self.heard(self.desk.told, label)
                if time.monotonic() - begin > self.stall_timeout_s:
                    raise RuntimeError("timed out")  # `Desk.explain` takes this for a stall
                pause(begin)

    def fence_write(self, synchronised: bool = False) -> None:
        if self.beside and self.local is not None:  # ranks of this host read each other's shards
            self.local.fence_write(synchronised)

    def fence_read(self) -> None:
        if self.beside and self.local is not None:
            self.local.fence_read()

    def poll(self) -> None:
        self.pending.advance()
        for go_on in self.beside:
            go_on()

    def announce(self, waiting_for: str | None) -> None:
        if self.beside and self.local is not None:
            self.local.announce(waiting_for)

    def leave(self) -> None:
        self.group = self._control = self._data = None  # so that no reference here keeps the process groups alive
        for group in self._subgroups.values():
            group.group = group._control = group._data = None
            group._summing = {}
        self._summing = {}
        if self.local is not None:
            self.local.leave()

    # -- failures --------------------------------------------------------------------------------------------

    @property
    def failure(self) -> Exception | None:
        return self.desk.failure

    def heard(self, failure: Failure, label: str) -> Exception:
        """Send a failure of another rank to this host's ranks, which may wait for this one; return the exception to raise."""
        self.desk.failure = self.desk.failure or failure.error
        if self.beside and self.local is not None:
            self.local.fail(failure)
        return failure.raised(self.progress.place(label))

    def fail(self, failure: Failure) -> None:
        self.desk.failure = self.desk.failure or failure.error
        if self.desk.told is None:  # else all ranks know an earlier failure, the cause of this one
            self.desk.told = failure
            self.desk.tell(self.root._peers(), failure)
            if self.local is not None:  # a rank that waits in `local` does not look at the desk
                self.local.fail(failure)
