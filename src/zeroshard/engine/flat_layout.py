"""Layout of parameters in a flat buffer: pure arithmetic, no communication, no tensors.

    flat buffer  | w0 ........ | b0 . | w1 ............ | pad |     numel = world_size x shard_numel
    shards       |   rank 0   |   rank 1   |   rank 2   |

Words: a *slot* is the place of one parameter in the flat buffer; a *piece* is the part of a slot that lies in
one rank's shard. All offsets are in elements. Two ranks, w = 1 2 3, and an alignment of 2 (in fact at least 32): the buffer is
1 2 3 0, the shards 1 2 and 3 0; rank 1's piece has elements [2, 3) of w, at 0 of its shard.

Slots and shards start at multiples of ALIGNMENT, or of a multiple of it where encoded optimizer states rest in longer blocks,
which no boundary may cut. Vector kernels then have no remainder loop inside a shard, so elementwise results do not depend on the
cut of a buffer: for this reason all stages give the same bits.

Invariants: slots do not overlap and ascend; shards tile the buffer; pieces of a slot over all ranks tile it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 32  # elements: two AVX-512 vectors of fp32, a multiple of NCCL's 16 bytes in every dtype


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Slot:
    """Place of one parameter: elements [offset, offset + numel) of the flat buffer."""

    shape: tuple[int, ...]
    offset: int
    numel: int

    @property
    def stop(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Piece:
    """The part of slot `index` in one shard.

    start, stop: elements of the flattened parameter; shard_offset: where the piece begins in the shard.
    """

    index: int
    start: int
    stop: int
    shard_offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """A flat buffer of `world_size` shards of `shard_numel` elements each. Slots and shards start at multiples of `alignment`."""

    slots: tuple[Slot, ...]
    world_size: int
    shard_numel: int
    alignment: int = ALIGNMENT

    def __post_init__(self) -> None:
        assert self.world_size >= 1 and self.alignment % ALIGNMENT == 0 and self.shard_numel % self.alignment == 0
        end = 0
        for slot in self.slots:
            assert slot.offset >= end and slot.offset % self.alignment == 0 and slot.numel == math.prod(slot.shape)
            end = slot.stop
        assert end <= self.numel

    @classmethod
    def build(cls, shapes: Sequence[Sequence[int]], world_size: int, alignment: int = ALIGNMENT) -> FlatLayout:
        """Lay parameters of the given shapes one after another and cut the buffer in `world_size` shards."""
        slots: list[Slot] = []
        offset = 0
        for shape in shapes:
            numel = math.prod(shape)
            slots.append(Slot(tuple(shape), offset, numel))
            offset = round_up(offset + numel, alignment)
        shard_numel = round_up(max(-(-offset // world_size), 1), alignment)  # at least one block: no shard is empty
        return cls(tuple(slots), world_size, shard_numel, alignment)

    @property
    def numel(self) -> int:
        return self.world_size * self.shard_numel

    @property
    def true_numel(self) -> int:
        """Number of elements of the parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Return [start, stop) of a rank's shard in the flat buffer."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def piece(self, index: int, rank: int) -> Piece:
        """Return the part of slot `index` in the shard of `rank`; an empty one is at offset 0."""
        slot = self.slots[index]
        begin, end = self.shard_range(rank)
        start, stop = max(slot.offset, begin), min(slot.stop, end)
        if start >= stop:
            return Piece(index, 0, 0, 0)  # the slot has no element in this shard
        return Piece(index, start - slot.offset, stop - slot.offset, start - begin)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return one piece per slot in the shard of `rank`, in the order of the slots."""
        return tuple(self.piece(index, rank) for index in range(len(self.slots)))

    def paddings(self) -> tuple[tuple[int, int], ...]:
        """Return [start, stop) of every gap of the flat buffer that belongs to no parameter."""
        gaps: list[tuple[int, int]] = []
        end = 0
        for slot in self.slots:
            if slot.offset > end:
                gaps.append((end, slot.offset))
            end = slot.stop
        if end < self.numel:
            gaps.append((end, self.numel))
        return tuple(gaps)
