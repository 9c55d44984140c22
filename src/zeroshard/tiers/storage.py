"""Tiers (device, host, disk): the resting places of shards of model states, and the moves between them.

    device  <--- streams, pinned copies --->  host  <--- file engine, O_DIRECT --->  disk

A `Rest` is the resting place of one flat shard. A step on the host works on it piece by piece: `view` returns elements that the
host can use in place, `read` and `write` move elements to and from host buffers and return a `Work`. `load` and `store` are
slow and synchronous, for all other uses (initial values, inspection).

On a CPU the device's memory is the host's: tiers DEVICE and HOST differ in the ledger alone and nothing is copied.
`Streams.separate_host` is False there; the library distinguishes kinds of devices by nothing else.

Source: ZeRO-Infinity, arXiv 2104.07857, sections 5.1 and 6.3.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..comm.fake import Watcher
from ..config import Offload, Tier
from ..engine.comm.base import DirectComm
from ..engine.comm.pool import BufferPool, StagingPool
from ..engine.comm.streams import Copy, Streams
from ..engine.ledger import STAGING, Ledger, making
from ..engine.tensor.state_column import StateColumn
from ..engine.tensor.stretch import SplitStretch
from ..errors import OffloadIOError
from ..utils import torch_compat
from ..utils.aligned import zeros
from ..utils.one_thread import Turn, one_thread
from ..utils.work import OVER, Then, Work
from .estimate import PAGE_NBYTES
from .io.async_file import Engine, File, empty_aligned
from .io.swap_folder import SwapFolder

_PIECES, _PIECE_NBYTES = 4, 2 << 20  # buffers for values that are converted for a disk: one for each thread of the engine
_SEGMENT_NBYTES = 1 << 30  # least length of a file in a swap folder; files are sparse, so unused parts cost nothing


class Links:
    """The links between the tiers of one rank: copies, which its ledger counts, and memory for them.

    separate: the device has a memory of its own.
    """

    def __init__(self, device: torch.device, streams: Streams, ledger: Ledger) -> None:
        self.device, self.streams, self.ledger, self.separate = device, streams, ledger, streams.separate_host

    def host_buffer(self, nbytes: int, pin: bool = True) -> Tensor:
        """Return page-aligned host memory (nbytes,) uint8, pinned if `pin`, where there is a GPU."""
        with making():
            return empty_aligned(nbytes, pin=pin and self.device.type == "cuda")

    def device_buffer(self, nbytes: int) -> Tensor:
        """Return device memory (nbytes,) uint8; page-aligned where the device is the host."""
        if self.separate:
            with making():
                return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self.host_buffer(nbytes)

    def copy(self, target: Tensor, source: Tensor, begins: Tier, ends: Tier) -> Work:
        """Start a copy between host and device; on a separate device it overlaps with computation."""
        if not self.separate or begins is ends:
            target.copy_(source)  # at once, in the host's memory
            return OVER
        self.ledger.move(begins, ends, target.nbytes)
        return Copy(self.streams, self.streams.copy(target, source, up=ends is Tier.DEVICE))

    def count_hop(self, nbytes: int, up: bool) -> None:
        """Count the copy between host and device that is part of a move between disk and device."""
        if self.separate:
            self.ledger.move(*((Tier.HOST, Tier.DEVICE) if up else (Tier.DEVICE, Tier.HOST)), nbytes)

    def imagine(self, *path: Tier, nbytes: int) -> Work:
        """Count a move along two or more tiers in which no byte moves; a dry run's watcher is told of each hop."""
        imagined: Work = OVER
        for source, target in itertools.pairwise(path):
            self.ledger.move(source, target, nbytes)
            if isinstance(self.streams, Watcher):
                imagined = Copy(self.streams, self.streams.moved(source, target, nbytes))
        return imagined


class _Watched(Work):
    """A request to the file engine, whose failure is raised on all ranks (see `Tiers.fail`)."""

    def __init__(self, handle: Any, tiers: Tiers) -> None:
        self.handle, self.tiers = handle, tiers

    def done(self) -> bool:
        return self.handle.done()

    def wait(self) -> None:
        try:
            self.handle.wait()
        except OffloadIOError as error:
            self.tiers.fail(error)


class Rest(ABC):
    """The resting place of (numel,) elements of one dtype. All offsets are in elements."""

    tier: Tier
    dtype: torch.dtype
    numel: int
    resident: bool  # whether the device can compute with it in place

    @property
    def nbytes(self) -> int:
        return self.nbytes_of(self.numel)

    def nbytes_of(self, numel: int) -> int:
        """Return the bytes that `numel` elements take at rest."""
        return numel * self.dtype.itemsize

    def view(self, start: int, stop: int) -> Tensor | None:
        """Return elements [start, stop) if the host can use them in place, else None."""
        return None

    @abstractmethod
    def read(self, start: int, out: Tensor) -> Work:
        """Start to copy elements [start, start + n) to `out` (n,), host memory."""

    @abstractmethod
    def write(self, start: int, source: Tensor) -> Work:
        """Start to copy `source` (n,), host memory, to elements [start, start + n)."""

    @abstractmethod
    def load(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) on the device: a view where the rest is resident, else a copy."""

    def host(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) on the host: a view where there is one, else a copy."""
        view = self.view(start, stop)
        if view is None:
            view = torch.empty(stop - start, dtype=self.dtype, device="cpu")
            self.read(start, view).wait()
        return view

    @abstractmethod
    def store(self, start: int, source: Tensor) -> None:
        """Set elements [start, start + n) from a tensor on any device; synchronous."""


class MemoryRest(Rest):
    """A resting place on the device or on the host: a tensor."""

    def __init__(self, tensor: Tensor, tier: Tier, tiers: Tiers) -> None:
        self.tensor, self.tier, self.tiers = tensor, tier, tiers
        self.dtype, self.numel = tensor.dtype, tensor.numel()
        self.resident = tier is Tier.DEVICE or not tiers.separate
        self.on_host = tier is Tier.HOST or not tiers.separate

    def view(self, start: int, stop: int) -> Tensor | None:
        return self.tensor[start:stop] if self.on_host else None

    def read(self, start: int, out: Tensor) -> Work:
        return self.tiers.copy(out, self.tensor[start : start + out.numel()], self.tier, Tier.HOST)

    def write(self, start: int, source: Tensor) -> Work:
        return self.tiers.copy(self.tensor[start : start + source.numel()], source, Tier.HOST, self.tier)

    def load(self, start: int, stop: int) -> Tensor:
        part = self.tensor[start:stop]
        if self.resident:
            return part
        self.tiers.ledger.move(self.tier, Tier.DEVICE, part.nbytes)
        return part.to(self.tiers.device, copy=True)

    def store(self, start: int, source: Tensor) -> None:
        place = self.tensor[start : start + source.numel()]
        if torch_compat.storage_id(place.untyped_storage()) == torch_compat.storage_id(source.untyped_storage()):
            return  # `source` is the view that `load` returned
        if not self.resident:
            self.tiers.ledger.move(Tier.DEVICE, self.tier, place.nbytes)
        place.copy_(source)


class FileRest(Rest):
    """A resting place on disk: bytes [offset, offset + nbytes) of a file."""

    tier, resident = Tier.DISK, False

    def __init__(self, file: File, offset: int, numel: int, dtype: torch.dtype, engine: Engine, tiers: Tiers) -> None:
        self.file, self.offset, self.numel, self.dtype = file, offset, numel, dtype
        self.engine, self.tiers = engine, tiers
        self._under_way: list[tuple[int, int, bool, Work]] = []  # (start, stop, does it write, the request)
        self.turn = Turn(f"what rests in {file.path}")

    def read(self, start: int, out: Tensor) -> Work:
        return self._request(start, out, writes=False)

    def write(self, start: int, source: Tensor) -> Work:
        return self._request(start, source, writes=True)

    @one_thread
    def _request(self, start: int, tensor: Tensor, *, writes: bool) -> Work:
        """Start a request, after running ones on the same elements that it must not overtake. Raises if any has failed."""
        self.tiers.check()
        stop, still_under_way = start + tensor.numel(), []
        for request in self._under_way:
            begin, end, wrote, pending = request
            if pending.done() or (begin < stop and start < end and (wrote or writes)):
                pending.wait()
            else:
                still_under_way.append(request)
        self._under_way = still_under_way
        self.tiers.ledger.move(*((Tier.HOST, Tier.DISK) if writes else (Tier.DISK, Tier.HOST)), tensor.nbytes)
        begin_request = self.engine.write if writes else self.engine.read
        watched = _Watched(begin_request(self.file, self.offset + start * self.dtype.itemsize, tensor), self.tiers)
        self._under_way.append((start, stop, writes, watched))
        return watched

    def load(self, start: int, stop: int) -> Tensor:
        out = torch.empty(stop - start, dtype=self.dtype, device="cpu")
        if out.numel():
            self.read(start, out).wait()
        self.tiers.count_hop(out.nbytes, up=True)
        return out.to(self.tiers.device)

    def store(self, start: int, source: Tensor) -> None:
        if not source.numel():
            return
        source = source.detach()
        self.tiers.count_hop(source.numel() * self.dtype.itemsize, up=False)
        if source.device.type == "cpu" and source.dtype == self.dtype and source.is_contiguous():
            self.write(start, source).wait()
            return
        # through a few pieces of aligned memory: whole copies leave holes in the heap, unaligned ones are copied again
        with _converting(source.numel(), self.dtype, self.tiers) as nbytes:
            # address and offset congruent, so that the engine needs no bounce buffer
            memory = empty_aligned(nbytes + PAGE_NBYTES)[(self.offset + start * self.dtype.itemsize) % PAGE_NBYTES :]
            pieces = [part.view(self.dtype) for part in memory[:nbytes].split(_PIECE_NBYTES)]
            under_way: list[Work] = [OVER] * len(pieces)
            for number, part in enumerate(source.reshape(-1).split(_PIECE_NBYTES // self.dtype.itemsize)):
                which = number % len(pieces)
                under_way[which].wait()
                piece = pieces[which][: part.numel()].copy_(part)
                under_way[which] = self.write(start, piece)
                start += part.numel()
            for pending in under_way:
                pending.wait()


@contextlib.contextmanager
def _converting(numel: int, dtype: torch.dtype, tiers: Tiers) -> Iterator[int]:
    """Context that yields the bytes of host memory in which values are converted for a disk, and enters them in the ledger."""
    nbytes = min(numel * dtype.itemsize, _PIECES * _PIECE_NBYTES)
    tiers.ledger.enter(STAGING, nbytes, Tier.HOST)
    try:
        yield nbytes
    finally:
        tiers.ledger.strike(STAGING, nbytes, Tier.HOST)


class ImaginedRest(Rest):
    """A resting place on an imagined disk, for planning: counts the bytes that would move.

    Its requests are done at once, as on a fast disk; `wait` reports to the dry run's watcher. With gradients on a slow disk, real
    ranks take one staging buffer more than such a plan says.
    """

    tier, resident = Tier.DISK, False

    def __init__(self, numel: int, dtype: torch.dtype, tiers: Tiers) -> None:
        self.numel, self.dtype, self.tiers = numel, dtype, tiers

    def read(self, start: int, out: Tensor) -> Work:
        return self.tiers.imagine(Tier.DISK, Tier.HOST, nbytes=out.nbytes)

    def write(self, start: int, source: Tensor) -> Work:
        return self.tiers.imagine(Tier.HOST, Tier.DISK, nbytes=source.nbytes)

    def load(self, start: int, stop: int) -> Tensor:
        out = torch.empty(stop - start, dtype=self.dtype, device=self.tiers.device)
        self.read(start, out)
        self.tiers.count_hop(out.nbytes, up=True)
        return out

    def store(self, start: int, source: Tensor) -> None:
        nbytes = source.numel() * self.dtype.itemsize
        self.tiers.count_hop(nbytes, up=False)
        direct = source.dtype == self.dtype and not self.tiers.separate
        with contextlib.nullcontext() if direct else _converting(source.numel(), self.dtype, self.tiers):
            self.tiers.imagine(Tier.HOST, Tier.DISK, nbytes=nbytes)


class CodedRest(Rest):
    """Resting place of a column: callers see `numel` elements in the optimizer's dtype; `inner` holds them encoded, in blocks.

    Any range of elements may be read and written. A write to a part of a block decodes the block and encodes it again.
    """

    resident = False

    def __init__(self, inner: Rest, column: StateColumn, numel: int, dtype: torch.dtype) -> None:
        self.inner, self.column, self.numel, self.dtype, self.tier = inner, column, numel, dtype, inner.tier

    def nbytes_of(self, numel: int) -> int:
        return self.column.nbytes(numel, self.dtype)

    def read(self, start: int, out: Tensor) -> Work:
        if not out.numel():
            return OVER
        at, end = map(self.column.count, self.column.blocks(start, start + out.numel()))
        coded = self.inner.view(at, end)  # host memory: no read is needed
        if coded is not None:
            self.decode(coded, start, out)
            return OVER
        read = torch.empty(end - at, dtype=self.inner.dtype, device="cpu")

        def decode() -> Work:
            self.decode(read, start, out)
            return OVER

        return Then(self.inner.read(at, read), decode)

    def decode(self, coded: Tensor, start: int, out: Tensor) -> None:
        """Fill `out` (n,) with elements [start, start + n), cut out of the blocks around them."""
        out.copy_(self.column.decoded(coded, start, out.numel()))

    def write(self, start: int, source: Tensor) -> Work:
        return self.inner.write(*self._encoded(start, source)) if source.numel() else OVER

    def load(self, start: int, stop: int) -> Tensor:
        at, end = map(self.column.count, self.column.blocks(start, stop))
        coded = self.inner.load(at, end)
        out = torch.empty(stop - start, dtype=self.dtype, device=coded.device)
        if out.numel():
            self.decode(coded, start, out)
        return out

    def store(self, start: int, source: Tensor) -> None:
        if source.numel():
            self.inner.store(*self._encoded(start, source.detach()))

    def _encoded(self, start: int, source: Tensor) -> tuple[int, Tensor]:
        """Return the position in `inner` of the blocks around these elements, and the encoded blocks with them replaced."""
        begin, end = self.column.blocks(start, start + source.numel())
        if end - begin != source.numel():
            blocks = self.load(begin, end)
            blocks[start - begin : start - begin + source.numel()] = source
            source = blocks
        return self.column.count(begin), self.column.encode(source.to(self.dtype)).to(self.inner.dtype)


class SplitRest(Rest):
    """Resting place of fp32 masters as their two halves: `high` has the bf16 parameters, `low` the 16 bits that these lack."""

    resident = False

    def __init__(self, high: Rest, low: Rest) -> None:
        self.high, self.low, self.numel, self.dtype, self.tier = high, low, low.numel, torch.float32, low.tier

    def nbytes_of(self, numel: int) -> int:
        return self.low.nbytes_of(numel)

    def read(self, start: int, out: Tensor) -> Work:
        out.copy_(self.load(start, start + out.numel()))
        return OVER

    def write(self, start: int, source: Tensor) -> Work:
        self.store(start, source)
        return OVER

    def load(self, start: int, stop: int) -> Tensor:
        low = self.low.load(start, stop)
        return SplitStretch(self.high.load(start, stop), low).join(torch.empty_like(low, dtype=torch.int32))

    def store(self, start: int, source: Tensor) -> None:
        numel = source.numel()
        halves = [torch.empty(numel, dtype=dtype, device=source.device) for dtype in (torch.bfloat16, torch.int16)]
        values = source.detach().view(-1).float()
        SplitStretch(*halves).cut(values, torch.empty_like(values, dtype=torch.int32))
        self.high.store(start, halves[0])
        self.low.store(start, halves[1])


class _Folder:
    """A swap folder with its engine, from which regions are allocated one after another."""

    def __init__(self, offload: Offload, comm: DirectComm) -> None:
        assert offload.path is not None
        self.swap = SwapFolder(offload.path, rank=comm.rank, needed_nbytes=0, any_filesystem=offload.any_filesystem)
        self.engine = Engine(checksum=offload.checksum)
        self._file: File | None = None
        self._end = self._count = 0

    def region(self, nbytes: int) -> tuple[File, int]:
        """Return (file, offset) of `nbytes` new bytes, which read as zeros."""
        if self._file is None or self._end + nbytes > self._file.nbytes:
            self._file = self.swap.file(f"states-{self._count}", max(_SEGMENT_NBYTES, nbytes))
            self._count, self._end = self._count + 1, 0
        offset = self._end
        # regions begin at pages, so that no block of direct I/O has bytes of two
        self._end = -(-(offset + nbytes) // PAGE_NBYTES) * PAGE_NBYTES
        return self._file, offset


class Tiers(Links):
    """Makes the resting places of one model's states, and owns the buffers and engines that move them.

    Threads: the rank's own, and that of a delayed step, which reads and writes masters, states and the gradients handed to it.
    The rank's own thread does not touch these meanwhile; a FileRest checks that (`ThreadsMet`). Only the thread that uses the
    Comm sends word of failures to peers.

    failure: error of the first request that failed; from then on every use of the
    states raises it, as some of them may be of one step and some of the next.
    """

    def __init__(self, comm: DirectComm, ledger: Ledger) -> None:
        super().__init__(comm.device, comm.streams, ledger)
        self.comm = comm
        self.pools: list[StagingPool] = []  # device: gradients to be reduced; offloaded shards that are about to be gathered
        self.slots: BufferPool | None = None  # host: shards read from disk that are copied to a separate device
        self.landings: BufferPool | None = None  # device: reduced gradient shards that rest on another tier
        self.arrivals: BufferPool | None = None  # host: gradient shards that are then added, or written to disk
        self._folders: dict[str, _Folder] = {}
        self._entered: list[tuple[str, int, Tier]] = []
        self.failure: OffloadIOError | None = None
        self._told = False  # True once this rank has sent the failure to its peers
        self._beside = threading.local()  # .comm: True on a thread that must not use the Comm, since another one does

    @contextlib.contextmanager
    def beside_comm(self) -> Iterator[None]:
        """Context for a second thread: failures are raised in it, and the thread that uses the Comm sends them to the peers."""
        before, self._beside.comm = getattr(self._beside, "comm", False), True
        try:
            yield
        finally:
            self._beside.comm = before

    def fail(self, error: OffloadIOError) -> None:
        """Record a failed request, send its error to the peers, and raise it."""
        self.failure = self.failure or copy.copy(error)  # without the traceback, which holds buffers
        self.check()

    def check(self) -> None:
        """Raise if a request has failed, here or on a peer. Send the error to peers, which raise it in their next wait."""
        failure = self.failure or self.comm.failure
        if failure is None:
            return
        if not self._told and not getattr(self._beside, "comm", False):
            self._told = True
            self.comm.abort(f"rank {self.comm.rank}: {failure}", failure)
        raise copy.copy(failure)

    def open_folder(self, offload: Offload) -> None:
        """Check an offload option's folder (see SwapFolder) and make this run's own in it; once per path, before any change."""
        if offload.tier is Tier.DISK and not self.comm.imagined and offload.path not in self._folders:
            assert offload.path is not None
            self._folders[offload.path] = _Folder(offload, self.comm)

    def check_space(self, mine: dict[str, int], on_host: list[dict[str, int]]) -> None:
        """Raise SwapError where folders are too small. mine: bytes by folder; on_host: the same of each rank of this host."""
        devices = {path: folder.swap.device for path, folder in self._folders.items()}
        for path, folder in self._folders.items():
            same = [other for other, device in devices.items() if device == devices[path]]  # one disk may hold several
            folder.swap.check_space(
                sum(mine.get(other, 0) for other in same), sum(needed.get(other, 0) for needed in on_host for other in same)
            )

    def rest(self, category: str, offload: Offload, numel: int, dtype: torch.dtype) -> Rest:
        """Return a new resting place, zero-filled and entered in the ledger."""
        self.enter(category, numel * dtype.itemsize, offload.tier)
        return self.place(offload, numel, dtype)

    def place(self, offload: Offload, numel: int, dtype: torch.dtype) -> Rest:
        """Return a new resting place, zero-filled, whose bytes the caller enters in the ledger."""
        tier = offload.tier
        if tier is Tier.DISK and self.comm.imagined:
            return ImaginedRest(numel, dtype, self)
        if tier is Tier.DISK:
            assert offload.path is not None
            folder = self._folders[offload.path]
            return FileRest(*folder.region(numel * dtype.itemsize), numel, dtype, folder.engine, self)
        if tier is Tier.HOST:
            # torch's pinned allocator would round up to a power of two; and a step on the host is faster in huge pages
            memory = self.host_buffer(numel * dtype.itemsize, offload.pin_memory).zero_()
            return MemoryRest(memory.view(dtype), tier, self)
        with making():
            return MemoryRest(zeros(numel, dtype=dtype, device=self.device), tier, self)

    def over(self, tensor: Tensor) -> Rest:
        """Return a resting place over a tensor on the device, whose bytes its owner enters in the ledger."""
        return MemoryRest(tensor, Tier.DEVICE, self)

    def fetch(self, rest: Rest, out: Tensor, wait: bool) -> Work | None:
        """Start to copy a whole rest to the device, to `out` (numel,). Without `wait`: None where no buffer is free."""
        if isinstance(rest, MemoryRest):
            return self.copy(out, rest.tensor, rest.tier, Tier.DEVICE)
        if not self.separate:  # the host's memory is the device's: read into it directly
            return rest.read(0, out)
        assert self.slots is not None
        buffer = self.slots.take(wait)
        if buffer is None and wait:
            buffer = self.slots.take_further()  # prefetched units hold all buffers until they are gathered: allocate one more
        if buffer is None:
            return None
        slots, taken, source = self.slots, buffer, buffer[: out.nbytes].view(out.dtype)

        def second_hop() -> Work:
            copied = self.copy(out, source, Tier.HOST, Tier.DEVICE)
            slots.give(taken, copied)
            return copied

        hops = Then(rest.read(0, source), second_hop)
        if self.comm.imagined:  # imagined reads are not polled: enqueue the second hop at once
            self.streams.run_beside(hops.done)
        return hops

    def enter(self, category: str, nbytes: int, tier: Tier) -> None:
        """Enter bytes in the ledger until `close`."""
        self.ledger.enter(category, nbytes, tier)
        self._entered.append((category, nbytes, tier))

    def close(self) -> None:
        """Drop all resting places and remove this run's files."""
        for category, nbytes, tier in self._entered:
            self.ledger.strike(category, nbytes, tier)
        self._entered = []
        for folder in self._folders.values():
            folder.engine.close()
            folder.swap.close()
        self._folders = {}
        for pool in (*self.pools, self.slots, self.landings, self.arrivals):
            if pool is not None:
                pool.close()
