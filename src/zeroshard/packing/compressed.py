"""Comms whose gathers, or reductions, send fewer bytes: qwZ and qgZ (ZeRO++, arXiv 2306.10209, sections 4.1 and 4.3).

    gather   shard -> pack --comm--> unpack all           all ranks compute with the same values; the shard is unchanged
    reduce   whole -> pack each slice --comm--> unpack, sum in fp32 in rank order

Packed values are bytes, which any Comm gathers: in one hop, in two (values are packed once for both), and as a secondary
shard. A reduction in two hops works over two compressed Comms: values are packed, and lose precision, twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..engine.comm.base import Collective, Comm, Hop, Outcome, Region, Reserved, Wrapper
from ..engine.comm.pool import StagingPool
from ..engine.ledger import RESIDUALS, STAGING, Ledger, claimed
from ..engine.topology import Errors
from .codecs.base import Codec, ErrorFeedback
from .hierarchical import buffers

Active = Callable[[], bool]


class _Compressed(Wrapper):
    """Base class of both directions: a codec, and a pool of buffers for packed bytes."""

    packs_reductions: bool  # else gathers

    def __init__(self, comm: Comm, codec: Codec, ledger: Ledger, active: Active, errors: Errors) -> None:
        """active: returns False during warm-up, when nothing is compressed. errors: receives the measured errors."""
        super().__init__(comm)
        self.codec, self.ledger, self.active, self.errors = codec, ledger, active, errors
        self._nbytes = self._most = 0
        self._pool: StagingPool | None = None

    def _packed_nbytes(self, numel: int) -> int:
        """Return the bytes of one packed shard: a multiple of 64, so that regions keep their alignment."""
        return -(-self.codec.packed_nbytes(numel) // 64) * 64

    def _pack(self, values: Tensor, packed: Tensor, label: str) -> None:
        if self.imagined:
            self.streams.packed(values.nbytes + packed.nbytes)
            return
        self.codec.pack(values, packed)
        self.errors.note(label, self.control.progress.step, lambda: self.codec.error(values, packed))

    def hops(self, kind: str, numel: int, dtype: torch.dtype, tag: int = 0) -> list[Hop]:
        if (kind == "reduce") != self.packs_reductions or not self.active():
            return self.comm.hops(kind, numel, dtype)
        return self.comm.hops(kind, self._packed_nbytes(numel), torch.uint8)

    def open(self) -> None:
        super().open()
        if self._pool is None:
            self._pool = StagingPool(self.comm, self.ledger, self._nbytes, *buffers(self._most))

    def release(self) -> None:
        self._pool.close() if self._pool is not None else None
        super().release()


class CompressedGathers(_Compressed):
    """Comm whose gathers are compressed."""

    packs_reductions = False

    def __init__(self, comm: Comm, codec: Codec, ledger: Ledger, active: Active, errors: Errors) -> None:
        super().__init__(comm, codec, ledger, active, errors)
        self.copies = False
        self._precise: dict[int, Callable[[], Tensor | None]] = {}

    def read_precise(self, number: int, precise: Callable[[], Tensor | None]) -> None:
        self._precise[number] = precise

    def reserve(self, number: int, numel: int, dtype: torch.dtype) -> None:
        plain = 0 if self.active() else numel * dtype.itemsize  # during warm-up shards are sent uncompressed
        self.comm.reserve(number, max(plain, self._packed_nbytes(numel)), torch.uint8)
        self._nbytes, self._most = max(self._nbytes, self._packed_nbytes(numel)), self._most + 1

    def needed(self, values: Sequence[Reserved], slices: Sequence[Reserved]) -> int:
        packed = [self._packed_nbytes(numel) for numel, _ in values]
        plain = [0 if self.active() else numel * dtype.itemsize for numel, dtype in values]
        usual = buffers(0)[0]  # for the unit in use and the one ahead: packed shards sent, and those received
        beneath = [(max(each), torch.uint8) for each in zip(packed, plain, strict=True)]
        return usual * (1 + self.world_size) * max(packed, default=0) + self.comm.needed(beneath, slices)

    def gather(self, full: Tensor, source: Region, label: str, tag: int | None = None) -> Collective:
        if not self.active():
            return self.comm.gather(full, source, label, tag)
        number = source.number if tag is None else tag
        numel = full.numel() // self.world_size
        nbytes = self._packed_nbytes(numel)
        packed = torch.empty(self.world_size * nbytes, dtype=torch.uint8, device=full.device)
        self.ledger.enter(STAGING, packed.nbytes)
        if self.comm.holds(number):  # secondary shards are packed already
            work = self.comm.gather(packed, Region(packed, [], number=number), label)
        else:
            assert self._pool is not None
            slot, region = self._pool.take(nbytes, torch.uint8, whole=False)
            precise = self._precise.get(number, lambda: None)()
            values = source.shards[self.rank] if precise is None else precise
            assert values is not None
            self._pack(values, region.tensor[: self.codec.packed_nbytes(numel)], label)
            work = self.comm.gather(packed, region, label, tag=number)
            self._pool.give(slot, work)

        def unpack() -> None:
            if self.imagined:
                self.streams.packed(packed.nbytes + full.nbytes)
            else:
                for row, part in zip(full.view(self.world_size, -1), packed.view(self.world_size, -1), strict=True):
                    self.codec.unpack(part[: self.codec.packed_nbytes(numel)], row)
            self.ledger.strike(STAGING, packed.nbytes)

        return _Unpacked(work, unpack)


class _Unpacked(Collective):
    """Gather of packed shards; `wait` unpacks them."""

    def __init__(self, work: Collective, unpack: Callable[[], None]) -> None:
        self.work, self.sent = work, work.sent
        self._unpack: Callable[[], None] | None = unpack

    def wait(self) -> None:
        self.work.wait()
        unpack, self._unpack = self._unpack, None
        if unpack is not None:
            unpack()

    def done(self) -> bool:
        return self._unpack is None or self.work.done()

    def drain(self) -> None:
        self.wait()
        self.work.drain()

    def drained(self) -> bool:
        return self._unpack is None and self.work.drained()

    def missing(self) -> list[int] | None:
        return self.work.missing()


class CompressedReductions(_Compressed):
    """Comm whose reductions are compressed. feedback: add the packing error of the last gradient to the next (error feedback)."""

    packs_reductions = True

    def __init__(
        self, comm: Comm, codec: Codec, ledger: Ledger, active: Active, errors: Errors, *, feedback: bool = False
    ) -> None:
        super().__init__(comm, codec, ledger, active, errors)
        self.feedback = ErrorFeedback(codec) if feedback else None

    @property
    def packs(self) -> bool:  # type: ignore[override]
        return self.active()

    def reserve_slices(self, numel: int, dtype: torch.dtype) -> None:
        self.comm.reserve_slices(numel, dtype)
        self._nbytes, self._most = max(self._nbytes, self.world_size * self._packed_nbytes(numel)), self._most + 1

    def reduce(self, source: Region, out: Tensor, *, scale: float, accumulate: bool, tag: int, label: str) -> Collective:
        if not self.active():
            return self.comm.reduce(source, out, scale=scale, accumulate=accumulate, tag=tag, label=label)
        numel = source.tensor.numel() // self.world_size
        size, nbytes = self.codec.packed_nbytes(numel), self._packed_nbytes(numel)
        assert self._pool is not None
        slot, region = self._pool.take(self.world_size * nbytes, torch.uint8, whole=True)
        slices = zip(source.tensor.view(self.world_size, -1), region.tensor.view(self.world_size, -1)[:, :size], strict=True)
        for rank, (row, part) in enumerate(slices):
            if self.feedback is None:
                self._pack(row, part, label)
            else:
                self._pack_with_feedback(self.feedback, (tag, rank), row, part, label)

        def combine(parts: list[Tensor]) -> Outcome:
            packed = [part[:size] for part in parts]
            total = self.codec.unpack_sum(packed, out, scale=scale, accumulate=accumulate)
            if total is None or math.isfinite(total):
                return total, ()
            culprits, values = [], torch.empty(numel, device=out.device)
            for rank, part in zip(self.ranks, packed, strict=True):
                self.codec.unpack(part, values)
                if not torch.isfinite(values).all():
                    culprits.append(rank)
            return total, tuple(culprits)

        work = self.comm.collect(region, combine, tag=tag, label=label)
        if self.imagined:  # `combine` never runs, so its kernels are reported here
            self.streams.packed(region.tensor.nbytes + out.nbytes)
        self._pool.give(slot, work)
        return work

    def _pack_with_feedback(
        self, feedback: ErrorFeedback, buffer: tuple[int, int], row: Tensor, part: Tensor, label: str
    ) -> None:
        """Pack a slice with the residual of its buffer, which is made on first use."""
        if buffer not in feedback.residuals:
            feedback.residuals[buffer] = claimed(torch.zeros_like(row, dtype=torch.float32))
            self.ledger.enter(RESIDUALS, feedback.residuals[buffer].nbytes)
        if self.imagined:
            self.streams.packed(row.nbytes + part.nbytes + 2 * feedback.residuals[buffer].nbytes)
            return
        feedback.pack(buffer, row, part)

        def lost() -> float:
            norm = row.float().norm().item()
            return feedback.residuals[buffer].norm().item() / norm if norm else 0.0

        self.errors.note(label, self.control.progress.step, lost)

    def needed(self, values: Sequence[Reserved], slices: Sequence[Reserved]) -> int:
        packed = max((self.world_size * self._packed_nbytes(numel) for numel, _ in slices), default=0)
        lost = 4 * self.world_size * sum(numel for numel, _ in slices) if self.feedback is not None else 0
        return buffers(0)[0] * packed + lost + self.comm.needed(values, slices)

    def forget(self) -> None:
        if self.feedback is not None:
            self.ledger.strike(RESIDUALS, sum(residual.nbytes for residual in self.feedback.residuals.values()))
            self.feedback.clear()

    def release(self) -> None:
        self.forget()
        super().release()
