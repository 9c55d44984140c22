"""Rests: the places where flat shards of model states rest between uses. Here all on the device; tiers/ has the other tiers.

    device  <--- streams, pinned copies --->  host  <--- file engine, O_DIRECT --->  disk             (tiers/storage.py)

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
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..config import Offload, Tier
from ..errors import OffloadIOError
from ..tensor.state_column import StateColumn
from ..utils import torch_compat
from ..utils.aligned import empty_aligned, zeros
from ..utils.work import OVER, Work
from .comm.base import DirectComm
from .comm.pool import StagingPool
from .comm.streams import Copy, Streams
from .ledger import Ledger, making
from .sizes import Buffers


class Links:
    """The links between one rank's tiers: copies, counted in its ledger, and buffers. separate: the device has its own memory."""

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


class Rest(ABC):
    """The resting place of (numel,) elements of one dtype, zeros at first. All offsets are in elements.

    A subclass sets the five fields, and has `read`, `write`, `load` and `store`; also `view`, where the host can use the elements
    in place. One that a program registers (`zeroshard.seam.register`) is made as `cls(numel, dtype, links)`: its tier is
    Tier.HOST, `resident` is False, and `links.device` is where `load` returns elements. Threads: one at a time, that of the rank
    or of a delayed step; a Work's methods are called in the thread that has called `read` or `write`.
    """

    tier: Tier
    dtype: torch.dtype
    numel: int
    resident: bool  # whether the device can compute with it in place

    @property
    def nbytes(self) -> int:
        return self.nbytes_of(self.numel)

    @property
    def encoding(self) -> tuple[StateColumn, Rest] | None:
        """The form in which the elements rest, and the resting place of the encoded ones; None where they rest as they are."""
        return None

    @property
    def halves(self) -> tuple[Rest, Rest] | None:
        """The resting places of the upper and the lower halves of the elements, where these rest apart."""
        return None

    def nbytes_of(self, numel: int) -> int:
        """Return the bytes that `numel` elements take at rest."""
        return numel * self.dtype.itemsize

    def view(self, start: int, stop: int) -> Tensor | None:
        """Return elements [start, stop) if the host can use them in place, else None."""
        return None

    @abstractmethod
    def read(self, start: int, out: Tensor) -> Work:
        """Start to copy elements [start, start + n) to `out` (n,), host memory. Return the running copy; `OVER`: it is over."""

    @abstractmethod
    def write(self, start: int, source: Tensor) -> Work:
        """Start to copy `source` (n,), host memory, to elements [start, start + n). A later `read` gets what was written."""

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


class Departure(ABC):
    """Moves reduced gradient shards from the device to their `rest` on another tier (tiers/gradient_offload.py).

    dtype: in which gradients leave the device. arriving: what is being copied to the host, to be added or written there; or None.
    """

    rest: Rest
    dtype: torch.dtype
    arriving: tuple | None

    @abstractmethod
    def landing(self) -> Tensor:
        """Return device memory (shard_numel,) for the result of the coming reduction."""

    @abstractmethod
    def leave(self, add: bool) -> Tensor | None:
        """Start to move the result to `rest`, or add it. Return its square sum if the device is separate and nothing is added."""

    @abstractmethod
    def progress(self) -> None:
        """Add or write the gradient that is copied to the host, if the copy is done."""

    @abstractmethod
    def settle(self) -> None:
        """Return when the gradient is at rest."""

    @abstractmethod
    def abandon(self) -> None:
        """Drop the gradient, because its backward was given up."""


PARTS = ("optimizer", "masters", "parameters", "gradients")  # that can be away


class Away:
    """The states of a model that were moved to another tier for a while: here none (tiers/moved_states.py).

    lent: name of the running context in which the parameters have other, read-only values (AveragedModel.swapped()); "": none.
    """

    lent = ""

    def __contains__(self, part: str) -> bool:
        return False

    @property
    def any(self) -> bool:
        """True if any state is away."""
        return False

    def forget(self) -> None:
        """Drop the states that are away, after a failure of a disk or a peer."""

    def check(self, *parts: str) -> None:
        """Raise StatesAway where one of these parts, some of PARTS, is away; without arguments, where any is."""


class Tiers(Links):
    """Makes the resting places of one model's states, here all on the device (tiers/storage.py: others), and owns their buffers.

    Threads: the rank's own, and that of a delayed step, which reads and writes masters, states and the gradients handed to it.
    The rank's own thread does not touch these meanwhile; a FileRest checks that (`ThreadsMet`). Only the thread that uses the
    Comm sends word of failures to peers.

    failure: error of the first request that failed; from then on every use of the states raises it, as some of them may be of
    one step and some of the next.
    """

    def __init__(self, comm: DirectComm, ledger: Ledger) -> None:
        super().__init__(comm.device, comm.streams, ledger)
        self.comm = comm
        self.pools: list[StagingPool] = []  # device: gradients to be reduced; offloaded shards that are about to be gathered
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

    def rest(self, category: str, offload: Offload, numel: int, dtype: torch.dtype) -> Rest:
        """Return a new resting place, zero-filled and entered in the ledger."""
        self.enter(category, numel * dtype.itemsize, offload.tier)
        return self.place(offload, numel, dtype)

    def place(self, offload: Offload, numel: int, dtype: torch.dtype) -> Rest:
        """Return a new resting place, zero-filled, whose bytes the caller enters in the ledger."""
        with making():
            return MemoryRest(zeros(numel, dtype=dtype, device=self.device), Tier.DEVICE, self)

    def over(self, tensor: Tensor) -> Rest:
        """Return a resting place over a tensor on the device, whose bytes its owner enters in the ledger."""
        return MemoryRest(tensor, Tier.DEVICE, self)

    def make_away(self) -> Away:
        """Return the record of the states that were moved to another tier for a while."""
        return Away()

    def halves(self, high: Rest, low: Rest) -> Rest:
        """Return a resting place of fp32 masters as two halves: the bf16 values, and the 16 bits that these lack."""
        raise AssertionError("masters rest as they are stepped")

    def coded(self, rest: Rest, column: StateColumn, numel: int, dtype: torch.dtype) -> Rest:
        """Return a Rest of `numel` elements of a state, in the optimizer's dtype, over `rest`, which holds them encoded."""
        raise AssertionError("states rest as they are stepped")

    def reserve(self, sizes: Buffers) -> None:
        """Make the pools of constant size through which states pass between tiers: none, all rest on the device."""

    def abandon(self) -> None:
        """Let go of the pools, since the units could not be made."""
        self.pools = []

    def open_folder(self, offload: Offload) -> None:
        """Check an offload option's folder on disk, and make this run's own in it: nothing to do, nothing rests on a disk."""

    def check_space(self, mine: dict[str, int], on_host: list[dict[str, int]]) -> None:
        """Raise SwapError where folders are too small. mine: bytes by folder; on_host: the same of each rank of this host."""

    def fetch(self, rest: Rest, out: Tensor, wait: bool) -> Work | None:
        """Start to copy a whole rest to the device, to `out` (numel,). Without `wait`: None where no buffer is free."""
        raise AssertionError("what rests on the device is gathered from where it is")

    def departure(self, rest: Rest, send_dtype: torch.dtype) -> tuple[Rest, Departure | None]:
        """Return where a gradient shard rests, and what moves it there; None if reductions write their result there themselves.

        rest: the place that was made for the shard. send_dtype: the dtype in which gradients are sent.
        """
        return rest, None

    def stepping(self, groups: list[dict[str, Any]]) -> contextlib.AbstractContextManager[None]:
        """Context of a step by the optimizer's own class on the device. groups: its options, in which a plan sets `foreach`."""
        return contextlib.nullcontext()

    def enter(self, category: str, nbytes: int, tier: Tier) -> None:
        """Enter bytes in the ledger until `close`."""
        self.ledger.enter(category, nbytes, tier)
        self._entered.append((category, nbytes, tier))

    def drop(self, category: str, rest: Rest) -> None:
        """Take the bytes of a resting place, which the caller lets go of, out of the ledger."""
        held = rest.encoding[1] if rest.encoding is not None else rest
        entry = category, held.numel * held.dtype.itemsize, held.tier
        self._entered.remove(entry)
        self.ledger.strike(*entry)

    def close(self) -> None:
        """Drop all resting places and remove this run's files."""
        for category, nbytes, tier in self._entered:
            self.ledger.strike(category, nbytes, tier)
        self._entered = []
        self.close_folders()
        for pool in self.every_pool:
            pool.close()

    @property
    def every_pool(self) -> list[Any]:
        """All pools through which states pass."""
        return [*self.pools]

    def close_folders(self) -> None:
        """Remove this run's files: there are none."""
