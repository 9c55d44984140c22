"""Codecs of optimizer states: a code of 4 or 8 bits for each element, and one scale for each block of elements.

    as stepped   x0 ..... x255 | x256 ... x511 |        fp32
    at rest      c0 ..... c255 s | c0 ..... c255 s |    int8: 260 bytes for 256 elements

A code is a small floating-point number, so levels are close to each other near zero, as in the dynamic maps of 8-bit Adam
(Dettmers et al., arXiv 2110.02861, section 1.3). A level times the scale of its block is the decoded value. The formats have these
bits, distances of neighbouring levels by their value, and ratios of the largest level to the smallest that is not zero:

                 exponent, mantissa   distance                  largest / smallest
    int8  first moments     3, 4      1/32 to 1/16 of a value   2.0e3, and zero
          squares           4, 4      the same                  1.0e6
    fp8   first moments     4, 3      1/16 to 1/8               2.5e5
          squares           5, 3      the same                  1.7e10
    int4  first moments     2, 1      1/4 to 1/2                12
          squares           3, 1      the same                  450

Levels of second moments lie half a step higher, so that none is zero: a second moment that is rounded to zero would let the next
update explode (Li et al., arXiv 2309.01507, section 4.1).

A level is a half-precision number with one of the lowest exponents. So the processor's conversion between fp32 and fp16 does most
of the work, and 16-bit integers the rest; powers, roots and tables take several times as long (docs/log.md).

A scale is cut to 12 significant bits, so that its product with a level is exact. Then decoded values are encoded to the same bytes
again, since the largest value of a block gives the same scale.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError
from ..tensor.state_column import Codec, Scratch, StateColumn
from ..utils.state_format import StateFormat
from ..utils.torch_compat import FakeTensor
from ..utils.triton import has_triton

# states that are sums or means of squares: at least 0, and a divisor of the update
_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta", "exp_inf"})
_SCALE_NBYTES = 4
# bits of the exponent and of the mantissa in a code of: values with a sign, which has a bit more; squares
_PARTS = {"int8": ((3, 4), (4, 4)), "fp8": ((4, 3), (5, 3)), "int4": ((2, 1), (3, 1))}


@functools.cache
def coded_column(name: str, form: StateFormat) -> StateColumn:
    """Return the column of a state of this name in a format. Equal arguments give the same object."""
    if form.format == "fp32":
        return StateColumn(name)
    if form.format == "bf16":
        return StateColumn(name, torch.bfloat16, noisy=_bf16_noisy if form.stochastic_rounding else None)
    squares = name in _SQUARES
    made = FloatCodec(form.block, *_PARTS[form.format][squares], squares)
    return StateColumn(
        name,
        torch.uint8,
        made.values,
        form.block,
        made.encode,
        made.decode,
        made.encode_noisy if form.stochastic_rounding else None,
        f"{made.name}/{form.block}",
        made,
    )


def labelled_column(name: str, label: str) -> StateColumn:
    """Return the column of a state by the label of its encoding, "e3m4/256". Raise ValueError for an unknown one."""
    _, _, block = label.partition("/")
    try:
        columns = [coded_column(name, StateFormat(form, int(block))) for form in _PARTS]
    except (ConfigError, ValueError):
        columns = []
    for column in columns:
        if column.label == label:
            return column
    raise ValueError(f"{name} is encoded as {label!r}, which this version does not know")


@dataclass(frozen=True)
class Formats:
    """Function from the name of a state to its column (StatePlan.make).

    The column is that of `declared`, by the optimizer's class; else one in the format that `by_name` has, else in `others`.
    """

    declared: tuple[StateColumn, ...] = ()
    by_name: tuple[tuple[str, StateFormat], ...] = ()
    others: StateFormat | None = None

    def __call__(self, name: str) -> StateColumn:
        """Return the column of a state of this name."""
        if found := [column for column in self.declared if column.name == name]:
            return found[0]
        form = dict(self.by_name).get(name, self.others)
        return StateColumn(name) if form is None else coded_column(name, form)


def _bf16_noisy(values: Tensor, noise: Tensor) -> Tensor:
    """Round fp32 values to bf16 at random: noise (n,), from 0 to 1, is added to the lower 16 bits, which are then cut off."""
    bits = values.float().view(torch.int32) + (noise * 65536).to(torch.int32)
    return (bits & -65536).view(torch.float32).to(torch.bfloat16)


def _triton_for(codes: Tensor) -> ModuleType | None:
    """Return the module of Triton's kernels where these codes allow them, else None: torch's operators give the same bytes."""
    if not codes.is_cuda or isinstance(codes, FakeTensor) or not has_triton(codes.device):
        return None
    from . import triton_state_codecs

    return triton_state_codecs


class _Memory(NamedTuple):
    """Memory of a chunk's intermediate values, (blocks, block), and of its scales, (blocks, 1)."""

    scaled: Tensor
    halves: Tensor
    numbers: Tensor  # the bits of `halves`, int16
    signs: Tensor
    scales: Tensor
    bits: Tensor  # of `scales`, int32
    inverse: Tensor
    # constants as tensors: torch takes twice as long to start an operator with a Python number
    factor: Tensor
    cut: Tensor
    unit: Tensor
    middle: Tensor
    sign: Tensor
    aligned: Tensor
    below: Tensor
    kept: Tensor


class FloatCodec(Codec):
    """Codec of blocks of `block` elements. squares: values are at least 0, and no level is zero.

    exponent, mantissa: number of bits of a code for these parts of a number. Codes of values that are no squares have a further bit,
    the sign.
    """

    def __init__(self, block: int, exponent: int, mantissa: int, squares: bool) -> None:
        self.block, self.exponent, self.mantissa, self.squares, self.scratch = block, exponent, mantissa, squares, Scratch()
        bits = exponent + mantissa + (not squares)
        if bits not in (4, 8):
            raise NotImplementedError(f"e{exponent}m{mantissa}: expected codes of 4 or 8 bits, two or one in a byte, got {bits}.")
        self.name, self.packed = f"e{exponent}m{mantissa}", bits == 4
        self.codes_nbytes = block * bits // 8
        self.values = self.codes_nbytes + _SCALE_NBYTES
        self.shift = 10 - mantissa  # bits of a half number's mantissa that a code lacks
        self.unused = unused = 0 if squares else 5 - exponent  # bits of a half number's exponent that are always 0
        # as the last fields of _Memory. unit: a code's last bit in a half number; middle: half of it; sign: the bit of the sign;
        # aligned: a factor that shifts the unused bits out; below: number of bits below a code after that; kept: the bits that
        # are valid after a code with a sign was widened to 16 bits
        self.constants = (
            1 << self.shift, 1 << self.shift - 1, -1 << 15, 1 << unused, self.shift + unused, (-1 << 15) + (1 << 10 + exponent) - 1
        )  # fmt: skip
        # the largest level as a half number, whose exponent 31 would be infinity; the levels of squares lie half a step higher
        self.top = (2 - 2.0 ** -(mantissa + squares)) * 2.0 ** (min(2**exponent - 1, 30) - 15)
        self.factor = (1 + 2.0**-18) / self.top  # so that a scale, after the cut, is the same for decoded values

    def encode(self, values: Tensor) -> Tensor:
        """Return the bytes at rest of whole blocks, each value rounded to the nearest level."""
        return self.encode_noisy(values, None)

    def encode_noisy(self, values: Tensor, noise: Tensor | None) -> Tensor:
        """Return the bytes at rest of whole blocks, rounded at random. noise (n,): uniform from 0 to 1."""
        coded = torch.empty(values.numel() // self.block * self.values, dtype=torch.uint8, device=values.device)
        self.write(values, *self.views(coded), noise)
        return coded

    def decode(self, coded: Tensor) -> Tensor:
        """Return the fp32 values of whole blocks."""
        out = torch.empty(coded.numel() // self.values * self.block, device=coded.device)
        self.read(*self.views(coded), out)
        return out

    def views(self, coded: Tensor) -> tuple[Tensor, Tensor]:
        rows = coded.view(-1, self.values)
        codes = rows[:, : self.codes_nbytes]
        return codes if self.squares else codes.view(torch.int8), rows[:, self.codes_nbytes :].view(torch.float32)

    def _memory(self, numel: int, beside: Tensor) -> _Memory:
        """Return memory for the intermediate values of a chunk."""
        flat = functools.partial(self.scratch.flat, beside=beside)
        halves = flat(numel, "halves", torch.float16).view(-1, self.block)
        scales, inverse = (flat(numel // self.block, name, torch.float32).view(-1, 1) for name in ("scales", "inverse"))
        return _Memory(
            flat(numel, "scaled", torch.float32).view(-1, self.block), halves, halves.view(torch.int16),
            flat(numel, "signs", torch.int16).view(-1, self.block), scales, scales.view(torch.int32), inverse,
            torch.tensor(self.factor, device="cpu"), torch.tensor(0x7FFFF000, dtype=torch.int32, device="cpu"),
            *torch.tensor(self.constants, dtype=torch.int16, device="cpu").unbind(),
        )  # fmt: skip

    def write(self, values: Tensor, codes: Tensor, scales: Tensor, noise: Tensor | None = None) -> None:
        rows = values.view(-1, self.block)
        if rows.dtype is not torch.float32:
            rows = rows.float()
        if noise is None and (kernels := _triton_for(codes)) is not None:
            return kernels.write(self, rows, codes, scales)
        memory = self.scratch.kept(values.numel(), codes, self._memory)
        largest, inverse, numbers = memory.scales, memory.inverse, memory.numbers
        torch.amax(rows, 1, keepdim=True, out=largest)
        if not self.squares:
            torch.maximum(largest, torch.amin(rows, 1, keepdim=True, out=inverse).neg_(), out=largest)
        largest.mul_(memory.factor)
        memory.bits.bitwise_and_(memory.cut)  # 12 significant bits
        scales.copy_(largest)
        torch.reciprocal(largest, out=inverse).clamp_(max=2.0**126)  # blocks of zeros have the scale 0
        scaled = torch.mul(rows, inverse, out=memory.scaled)
        if noise is not None:
            scaled = self._dithered(scaled, noise.view_as(scaled))
        memory.halves.copy_(scaled)
        if not self.squares:
            signs = torch.bitwise_and(numbers, memory.sign, out=memory.signs)
            numbers.add_(memory.middle).mul_(memory.aligned).add_(signs)  # the sign goes beside the code
        numbers.bitwise_right_shift_(memory.below)
        if self.packed:
            numbers, low = numbers[:, self.block // 2 :], numbers[:, : self.block // 2]
            numbers.mul_(16).add_(low.bitwise_and_(15))
        codes.copy_(numbers)

    def read(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        values = out.view(-1, self.block)
        if (kernels := _triton_for(codes)) is not None:
            return kernels.read(self, codes, scales, values)
        memory = self.scratch.kept(out.numel(), codes, self._memory)
        numbers = memory.numbers
        if self.packed:
            half = self.block // 2
            numbers[:, :half].copy_(codes & 15 if self.squares else (codes << 4) >> 4)
            numbers[:, half:].copy_(codes >> 4)
        else:
            numbers.copy_(codes)
        numbers.mul_(memory.unit)
        if self.squares:
            numbers.add_(memory.middle)
        else:
            numbers.bitwise_and_(memory.kept)  # of the bits that are copies of the sign, the first
        values.copy_(memory.halves).mul_(scales)

    def _dithered(self, scaled: Tensor, noise: Tensor) -> Tensor:
        """Round to one of the two next levels at random, with the value itself as the mean."""
        middle = 1 << self.shift - 1 if self.squares else 0
        below = (scaled.abs().half().view(torch.int16) - middle).clamp_(min=0) >> self.shift << self.shift
        low, high = (
            (below + more).view(torch.float16).float().clamp_(max=self.top) for more in (middle, middle + (1 << self.shift))
        )
        return torch.copysign(torch.where(scaled.abs() - low > noise * (high - low), high, low), scaled)
