"""Tiers (device, host, disk): the resting places of shards of model states on host and disk, and the moves between tiers.

    device  <--- streams, pinned copies --->  host  <--- file engine, O_DIRECT --->  disk

engine/rest.py describes a `Rest`. Source: ZeRO-Infinity, arXiv 2104.07857, sections 5.1 and 6.3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..config import OWN_RESTS, Offload, Tier
from ..engine.comm.base import DirectComm
from ..engine.ledger import STAGING, Ledger
from ..engine.rest import Departure, MemoryRest, Rest, Tiers
from ..engine.sizes import Buffers
from ..errors import OffloadIOError
from ..tensor.state_column import StateColumn
from ..utils.aligned import empty_aligned
from ..utils.one_thread import Turn, one_thread
from ..utils.work import OVER, Then, Work
from .estimate import PAGE_NBYTES
from .forms import CodedRest, SplitRest
from .gradient_offload import GradientOffload, narrowed
from .io.async_file import Engine, File
from .io.swap_folder import SwapFolder
from .moved_states import MovedStates
from .pool import BufferPool

_PIECES, _PIECE_NBYTES = 4, 2 << 20  # buffers for values that are converted for a disk: one for each thread of the engine
_SEGMENT_NBYTES = 1 << 30  # least length of a file in a swap folder; files are sparse, so unused parts cost nothing


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
        """Start a request, after waiting for earlier ones on the same elements if they or it write. Raises if any has failed."""
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
        with converting(source.numel(), self.dtype, self.tiers) as nbytes:
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
def converting(numel: int, dtype: torch.dtype, tiers: Tiers) -> Iterator[int]:
    """Context for converting values for a disk in host memory: yields its size in bytes, which is in the ledger meanwhile."""
    nbytes = min(numel * dtype.itemsize, _PIECES * _PIECE_NBYTES)
    tiers.ledger.enter(STAGING, nbytes, Tier.HOST)
    try:
        yield nbytes
    finally:
        tiers.ledger.strike(STAGING, nbytes, Tier.HOST)


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


class FurtherTiers(Tiers):
    """Tiers with resting places on the device, on the host and on disk; owns the folders and file engines of the latter.

    one_thread: tensors belong to the rank's own thread, so that no helper may step them.
    """

    one_thread = False

    def __init__(self, comm: DirectComm, ledger: Ledger) -> None:
        super().__init__(comm, ledger)
        self.slots: BufferPool | None = None  # host: shards read from disk that are copied to a separate device
        self.landings: BufferPool | None = None  # device: reduced gradient shards that rest on another tier
        self.arrivals: BufferPool | None = None  # host: gradient shards that are then added, or written to disk
        self._folders: dict[str, _Folder] = {}

    def make_away(self) -> MovedStates:  # it refers to the tiers; kept here it would make a cycle
        return MovedStates(self)

    def halves(self, high: Rest, low: Rest) -> Rest:
        return SplitRest(high, low)

    def coded(self, rest: Rest, column: StateColumn, numel: int, dtype: torch.dtype) -> Rest:
        return CodedRest(rest, column, numel, dtype)

    def reserve(self, sizes: Buffers) -> None:
        """Make the pools of constant size through which states pass between tiers."""
        if sizes.fetched is not None and self.separate:  # shards that pass between tiers
            nbytes, count, _ = sizes.fetched
            self.slots = BufferPool(self.ledger, count, nbytes, self.host_buffer, Tier.HOST)
        nbytes, count = sizes.landed
        if nbytes:
            self.landings = BufferPool(self.ledger, count, nbytes, self.device_buffer, Tier.DEVICE)
            self.arrivals = BufferPool(self.ledger, count, nbytes, self.host_buffer, Tier.HOST)

    def abandon(self) -> None:
        super().abandon()
        self.slots = self.landings = self.arrivals = None

    @property
    def every_pool(self) -> list[Any]:
        return [*super().every_pool, *filter(None, (self.slots, self.landings, self.arrivals))]

    def open_folder(self, offload: Offload) -> None:
        """Check an offload option's folder (see SwapFolder) and make this run's own in it; once per path, before any change."""
        if offload.tier is Tier.DISK and offload.path not in self._folders:
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

    def place(self, offload: Offload, numel: int, dtype: torch.dtype) -> Rest:
        """Return a new resting place, zero-filled, whose bytes the caller enters in the ledger."""
        tier = offload.tier
        if tier is Tier.DISK:
            assert offload.path is not None
            folder = self._folders[offload.path]
            return FileRest(*folder.region(numel * dtype.itemsize), numel, dtype, folder.engine, self)
        if offload.own:
            return OWN_RESTS[offload.device](numel, dtype, self)
        if tier is Tier.HOST:
            # torch's pinned allocator would round up to a power of two; and a step on the host is faster in huge pages
            memory = self.host_buffer(numel * dtype.itemsize, offload.pin_memory).zero_()
            return MemoryRest(memory.view(dtype), tier, self)
        return super().place(offload, numel, dtype)

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

        return self.begun(Then(rest.read(0, source), second_hop))

    def begun(self, hops: Then) -> Work:
        """Return two hops whose first has begun; polls or a wait begin the second."""
        return hops

    def at_once(self, numel: int) -> int | None:
        """Return how many of `numel` elements a step takes at a time; None: as many as caches hold."""
        return None

    def departure(self, rest: Rest, send_dtype: torch.dtype) -> tuple[Rest, Departure | None]:
        if rest.resident:
            return rest, None
        rest = narrowed(rest, self, send_dtype)
        return rest, GradientOffload(rest, self, send_dtype)

    def close_folders(self) -> None:
        """Remove this run's files."""
        for folder in self._folders.values():
            folder.engine.close()
            folder.swap.close()
        self._folders = {}
