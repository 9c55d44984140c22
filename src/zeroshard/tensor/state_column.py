"""Columns: how an optimizer state with a value for each element of its parameter rests.

    the optimizer's tensor (n,)      e0 ...... e63 | e64 ..... e127 |        values of the dtype that is stepped
        encode |   ^ decode
    at rest    (n x values/elements) c0 .. c63, s0 | c64 .. c127, s1 |     elements = 64; values = 68 bytes, 4 of them the scale s

All other states (`step`) are scalars: they belong to a run, or to a whole parameter, and every rank has them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeGuard, TypeVar

import torch
from torch import Tensor

from ..utils.torch_compat import FakeTensor

_MOST_KEPT = 1 << 19  # elements of scratch memory that a thread keeps, more than a chunk has; whole shards get new memory
_MOST_ELEMENTS = 4096  # of one block: a step on the host works on slabs that begin at multiples of this
Views = TypeVar("Views")


def _as_it_is(values: Tensor) -> Tensor:
    return values


class Codec(Protocol):
    """Encoding and decoding between given tensors, without new memory, as a step opens and closes its chunks."""

    def views(self, coded: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes and the scales of whole blocks at rest, each (blocks, ...), in the memory of `coded`."""

    def write(self, values: Tensor, codes: Tensor, scales: Tensor, noise: Tensor | None = None) -> None:
        """Encode whole blocks, `values` (n,). noise (n,): for stochastic rounding."""

    def read(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Decode whole blocks to `out` (n,), fp32."""


class Scratch:
    """Memory for intermediate values on CPUs, which each thread keeps: the C library would map and unmap it for each chunk.

    A tensor is valid until the same thread asks for the same name again. Tensors of other devices, fake ones, and those of more than
    _MOST_KEPT elements are new in each call.
    """

    def __init__(self) -> None:
        self._own = threading.local()

    def flat(self, numel: int, name: str, dtype: torch.dtype, beside: Tensor) -> Tensor:
        """Return memory (numel,) on the device of the tensor `beside`, not initialised."""
        if self._is_not_kept(numel, beside):
            return torch.empty(numel, dtype=dtype, device=beside.device)
        kept: Tensor | None = getattr(self._own, name, None)
        if kept is None or kept.numel() < numel:
            kept = torch.empty(numel, dtype=dtype, device="cpu")
            setattr(self._own, name, kept)
        return kept[:numel]

    def kept(self, numel: int, beside: Tensor, make: Callable[[int, Tensor], Views]) -> Views:
        """Return make(numel, beside), views of this memory for chunks of `numel` elements; the same ones at the next call."""
        if self._is_not_kept(numel, beside):
            return make(numel, beside)
        made: dict[int, Views] = self._own.__dict__.setdefault("(made)", {})
        if numel not in made:
            if len(made) > 3:
                made.clear()
            made[numel] = make(numel, beside)
        return made[numel]

    @staticmethod
    def _is_not_kept(numel: int, beside: Tensor) -> bool:
        return numel > _MOST_KEPT or not beside.is_cpu or isinstance(beside, FakeTensor)


@dataclass(frozen=True)
class StateColumn:
    """One optimizer state: each block of `elements` elements rests as `values` values of `dtype`.

    dtype: None for the dtype of the stepped values. encode: the optimizer's tensor (n,) -> the values at rest; decode: the
    reverse. Both take whole blocks, and their results are cast. encode(decode(x)) must be x, so that a state which is saved and
    loaded keeps its bits; zeros must decode to zeros, since new states are zero-filled. noisy: encode with stochastic rounding, as
    steps do: it also takes noise (n,), uniform from 0 to 1. label: the name of the encoding in checkpoints (state_codecs.py:
    labelled_column); "": checkpoints hold decoded values. codec: the same encoding from memory to memory.
    """

    name: str
    dtype: torch.dtype | None = None
    values: int = 1
    elements: int = 1
    encode: Callable[[Tensor], Tensor] = _as_it_is
    decode: Callable[[Tensor], Tensor] = _as_it_is
    noisy: Callable[[Tensor, Tensor], Tensor] | None = None
    label: str = ""
    codec: Codec | None = None

    def __post_init__(self) -> None:
        assert 0 < self.elements <= _MOST_ELEMENTS and _MOST_ELEMENTS % self.elements == 0 and self.values > 0

    def count(self, numel: int) -> int:
        """Return the number of values at rest for `numel` elements (whole blocks): the position of element `numel`'s values."""
        assert numel % self.elements == 0, f"{self.name}: {numel} elements are not whole blocks of {self.elements}"
        return numel // self.elements * self.values

    def nbytes(self, numel: int, stepped: torch.dtype) -> int:
        """Return the bytes that `numel` elements take at rest, the last block filled up. stepped: dtype of the stepped values."""
        return -(-numel // self.elements) * self.values * (self.dtype or stepped).itemsize

    def blocks(self, start: int, stop: int) -> tuple[int, int]:
        """Return the least range of whole blocks around elements [start, stop)."""
        return start // self.elements * self.elements, -(-stop // self.elements) * self.elements

    def decoded(self, coded: Tensor, start: int, numel: int) -> Tensor:
        """Return elements [start, start + numel), cut out of the blocks around them: `coded`."""
        skipped = start % self.elements  # elements of the first block before `start`
        return self.decode(coded)[skipped : skipped + numel]

    def plain(self, stepped: torch.dtype) -> bool:
        """Return True where the optimizer's tensor rests as it is."""
        return self.encode is self.decode is _as_it_is and self.dtype in (None, stepped)


@dataclass(frozen=True)
class StatePlan:
    """The columns of one parameter's states.

    columns: those that its first step will make, for plans of memory; unnamed ones for a class whose states are not known. make:
    returns the column for a state's name, once the first step has made that state; None: states rest as the optimizer has them.
    """

    columns: tuple[StateColumn, ...] = ()
    make: Callable[[str], StateColumn] | None = None

    @property
    def coded(self) -> bool:
        """True where some state rests in another form than the optimizer has it."""
        return self.make is not None

    def column(self, name: str) -> StateColumn:
        """Return the column of a state of this name."""
        return StateColumn(name) if self.make is None else self.make(name)


def is_column(value: object, shape: tuple[int, ...]) -> TypeGuard[Tensor]:
    """Return True for a state with a value for each element of a tensor of this shape, False for a scalar."""
    return isinstance(value, Tensor) and tuple(value.shape) == shape


def declared_columns(optimizer: torch.optim.Optimizer | None) -> dict[str, StateColumn]:
    """Return the columns that an optimizer's class declares as `state_columns`, by name: states that rest encoded."""
    return {column.name: column for column in getattr(type(optimizer), "state_columns", ())}
