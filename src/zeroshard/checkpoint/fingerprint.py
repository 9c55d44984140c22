"""The identity of parameters that a checkpoint leaves out: a checksum that does not depend on how they are sharded.

The checksum is the sum over all elements of a hash of (bits, position), modulo 2^64, so ranks can add up those of their slices,
however sharded. `exact` is of the values as they rest; `rounded` and `half` are of the values rounded to bfloat16 and float16, so
that a base model in another precision is recognised. (Float16 and bfloat16 copies of one model count as different: rounding to
float16 and then to bfloat16 differs from rounding once.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..seam import Part, StateSlice

_CHUNK_NUMEL = 1 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POSITION, _SPREAD, _MIX = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB  # odd, below 2^63


@dataclass(frozen=True)
class Identity:
    """Identity of one parameter or of a part of it. The identities of all parts add up (`+`) to the parameter's."""

    dtype: str
    shape: list[int]
    exact: str  # 16 hexadecimal digits
    rounded: str
    half: str = ""

    def __add__(self, other: Identity) -> Identity:
        """Return the identity of two disjoint parts together."""
        add = lambda a, b: f"{(int(a, 16) + int(b, 16)) % 2**64:016x}"  # noqa: E731
        return Identity(
            self.dtype, self.shape, add(self.exact, other.exact), add(self.rounded, other.rounded), add(self.half, other.half)
        )

    def same(self, other: Identity) -> bool:
        """Return whether both are identities of the same values, compared in the lower of their precisions."""
        if list(self.shape) != list(other.shape):
            return False
        if self.dtype == other.dtype:
            return self.exact == other.exact
        as_half = "torch.float16" in (self.dtype, other.dtype) and "torch.bfloat16" not in (self.dtype, other.dtype)
        return self.half == other.half if as_half else self.rounded == other.rounded


@torch.no_grad()
def identities(parameters: Iterable[StateSlice]) -> dict[str, Identity]:
    """Return the identities of this rank's slices, by name; the caller adds up all ranks'.

    A tile has an identity of its own. The shards along model axes add up to the identity of the whole parameter.
    """
    found = {}
    for each in parameters:
        if not each.counted:  # another rank along a model axis has the same elements and counts them
            continue
        name, part, shape = each.name, each.part, each.shape
        if part is not None and each.tile:
            name, part, shape = f"{name}[{part.dim}:{part.start}:{part.stop}]", None, each.extents
        exact = rounded = half = 0
        for first in range(each.start, each.stop, _CHUNK_NUMEL):
            last = min(first + _CHUNK_NUMEL, each.stop)
            given = each.host(first - each.start, last - each.start)
            places = _places(first, last, part).mul_(_SPREAD)  # overflows modulo 2^64
            exact += _sum(given, places)
            rounded += _sum(given.to(torch.bfloat16), places)
            half += _sum(given.to(torch.float16), places)
        found[name] = Identity(str(each.dtype), list(shape), *(f"{total % 2**64:016x}" for total in (exact, rounded, half)))
    return found


def _places(first: int, last: int, part: Part | None) -> Tensor:
    """Return the positions of elements [first, last) of a flattened part in the flattened whole, (last - first,)."""
    at = torch.arange(first, last, device="cpu")
    if part is None:
        return at
    places, stride = torch.zeros_like(at), 1
    flat = part.unpacked
    for size, offset, extent in reversed([*zip(flat.extents, flat.box.offsets, flat.whole_shape, strict=True)]):
        places += (at % size + offset) * stride
        at, stride = at // size, stride * extent
    return places


def _sum(given: Tensor, places: Tensor) -> int:
    bits = given.contiguous().view(_BITS[given.itemsize]).long()
    mixed = (bits + 1) * _POSITION + places  # int64 arithmetic wraps modulo 2^64
    mixed ^= mixed >> 29
    mixed *= _MIX
    mixed ^= mixed >> 32
    return int(mixed.sum()) % 2**64


def totals(told: Iterable[Mapping[str, Sequence[Any]]]) -> dict[str, Identity]:
    """Return the identities of whole parameters, by name. told: from each rank the fields of its parts' identities."""
    found: dict[str, Identity] = {}
    for name, fields in (item for theirs in told for item in theirs.items()):
        found[name] = found[name] + Identity(*fields) if name in found else Identity(*fields)
    return found
