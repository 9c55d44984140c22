"""Codecs of optimizer states: a code of 4 or 8 bits for each element, and one scale for each block of elements.

    as stepped   x0 ..... x255 | x256 ... x511 |        fp32
    at rest      c0 ..... c255 s | c0 ..... c255 s |    int8: 260 bytes for 256 elements

Levels are close to each other near zero, as in the dynamic maps of 8-bit Adam (Dettmers et al., arXiv 2110.02861, section 1.3),
and computed by a power instead of looked up, which vectorises on every device. With r the square root (second moments: the
fourth root) of the block's largest magnitude:

    first moments    x = y |y|   y = r c / 127               c = -127 ... 127    smallest level 6e-5 of the largest
    second moments   x = y^4     y = r (c + 0.5) / 255.5     c = 0 ... 255       smallest level 1e-11 of the largest, no zero:

a second moment that is rounded to zero would let the next update explode (Li et al., arXiv 2309.01507, section 4.1). int4 has
the same powers. fp8 (e4m3) has relative precision as it is; second moments rest as square roots, to fit its range.

A scale is cut to 12 significant bits. So decoded values are encoded to the same bytes again: the largest value of a block gives
the same scale, whichever way the power has rounded its last bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError
from ..utils.state_format import StateFormat
from .state_column import Codec, Scratch, StateColumn

# states that are sums or means of squares: at least 0, and a divisor of the update
_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta", "exp_inf"})
_SCALE_NBYTES = 4
_E4M3_TOP, _E4M3_LEAST = 448.0, 2.0**-9

# (codes before rounding, power, shift, largest code) -> codes; the level of a code is (code + shift) ** power
Round = Callable[[Tensor, int, float, float], Tensor]


@functools.cache
def coded_column(name: str, form: StateFormat) -> StateColumn:
    """Return the column of a state of this name in a format. Equal arguments give the same object."""
    if form.format == "fp32":
        return StateColumn(name)
    if form.format == "bf16":
        return StateColumn(name, torch.bfloat16, noisy=_bf16_noisy if form.stochastic_rounding else None)
    squares = name in _SQUARES
    codec: type[_Codec] = {"int8": _Int8, "int4": _Int4, "fp8": _Fp8}[form.format]
    made = codec(form.block, squares)
    return StateColumn(
        name,
        torch.uint8,
        made.values,
        form.block,
        made.encode,
        made.decode,
        made.encode_noisy if form.stochastic_rounding else None,
        f"{form.format}/{form.block}",
        made,
    )


def labelled_column(name: str, label: str) -> StateColumn:
    """Return the column of a state by the label of its encoding, "int8/256". Raise ValueError for an unknown one."""
    form, _, block = label.partition("/")
    try:
        return coded_column(name, StateFormat(form, int(block)))
    except (ConfigError, ValueError) as error:
        raise ValueError(f"{name} is encoded as {label!r}, which this version does not know") from error


@dataclass(frozen=True)
class Formats:
    """Maker of columns (StatePlan.make): those that the optimizer's class declares, else a format by name, or the same for all."""

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
    """Round fp32 values to bf16 at random: noise (n,), from 0 to 1, is added to the 16 bits that go."""
    bits = values.float().view(torch.int32) + (noise * 65536).to(torch.int32)
    return (bits & -65536).view(torch.float32).to(torch.bfloat16)


def _scales(largest: Tensor) -> Tensor:
    """Return scales cut to 12 significant bits: a largest value a few units in the last place off gives the same scale."""
    raised = largest * (1 + 2.0**-18)
    return (raised.view(torch.int32) & -(1 << 12)).view(torch.float32)


def _inverse(scales: Tensor, top: float) -> Tensor:
    """Return top / scales; 0 for blocks of zeros."""
    return torch.where(scales > 0, top / scales, scales)


def _nearest(codes: Tensor, power: int, shift: float, last: float) -> Tensor:
    return codes.round_()


def _at_random(noise: Tensor) -> Round:
    """Return a rounding whose mean, in the values that the codes stand for, is the value itself."""

    def rounded(codes: Tensor, power: int, shift: float, last: float) -> Tensor:
        low = codes.floor().clamp_(min=0.0)
        below, above = (low + shift) ** power, (low + shift + 1) ** power
        return (low + ((codes + shift) ** power > below + noise.view_as(codes) * (above - below))).clamp_(max=last)

    return rounded


class _Codec(Codec):
    """Codec of blocks of `block` elements. squares: for values of at least 0 that have no level at zero."""

    bits = 8

    def __init__(self, block: int, squares: bool) -> None:
        self.block, self.squares, self.scratch = block, squares, Scratch()
        self.codes_nbytes = block * self.bits // 8
        self.values = self.codes_nbytes + _SCALE_NBYTES

    def encode(self, values: Tensor) -> Tensor:
        """Return the bytes at rest of whole blocks, each value rounded to the nearest level."""
        return self._encoded(values, None)

    def encode_noisy(self, values: Tensor, noise: Tensor) -> Tensor:
        """Return the bytes at rest of whole blocks, rounded at random. noise (n,): uniform from 0 to 1."""
        return self._encoded(values, noise)

    def _encoded(self, values: Tensor, noise: Tensor | None) -> Tensor:
        coded = torch.empty(values.numel() // self.block * self.values, dtype=torch.uint8, device=values.device)
        self.write(values, coded, noise)
        return coded

    def decode(self, coded: Tensor) -> Tensor:
        """Return the fp32 values of whole blocks."""
        out = torch.empty(coded.numel() // self.values * self.block, device=coded.device)
        self.read(coded, out)
        return out

    def write(self, values: Tensor, coded: Tensor, noise: Tensor | None = None) -> None:
        rows, out = values.to(torch.float32).view(-1, self.block), coded.view(-1, self.values)
        scales = self._put(rows, out[:, : self.codes_nbytes], _nearest if noise is None else _at_random(noise))
        out[:, self.codes_nbytes :].view(torch.float32).copy_(scales)

    def read(self, coded: Tensor, out: Tensor) -> None:
        rows = coded.view(-1, self.values)
        self._get(rows[:, : self.codes_nbytes], rows[:, self.codes_nbytes :].view(torch.float32), out.view(-1, self.block))

    def _put(self, rows: Tensor, codes: Tensor, rounded: Round) -> Tensor:
        """Write the codes of rows (blocks, block) to `codes`, uint8; return the scales (blocks, 1)."""
        raise NotImplementedError

    def _get(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the values (blocks, block) of codes to `out`, fp32."""
        raise NotImplementedError


class _Power(_Codec):
    """Levels y |y| for signed values, y^4 for squares. Codes are whole numbers: -top ... top, or 0 ... 2^bits - 1 for squares."""

    top: int

    def _codes(self, rows: Tensor, rounded: Round) -> tuple[Tensor, Tensor]:
        """Return the codes of rows, in fp32, and the scales. Roots exceed it by 2^-11 of it at most: no code is too large."""
        roots = self.scratch.like(rows, "roots")
        if self.squares:
            torch.sqrt(rows, out=roots).sqrt_()
            last, scales = 2.0**self.bits - 1, _scales(roots.amax(1, keepdim=True))
            return rounded(roots.mul_(_inverse(scales, last + 0.5)).sub_(0.5), 4, 0.5, last), scales
        torch.abs(rows, out=roots).sqrt_()
        scales = _scales(roots.amax(1, keepdim=True))
        codes = rounded(roots.mul_(_inverse(scales, self.top)), 2, 0.0, self.top)
        return torch.copysign(codes, rows, out=codes), scales

    def _expand(self, codes: Tensor, scales: Tensor) -> None:
        """Replace codes by their values."""
        if self.squares:
            levels = codes.add_(0.5).mul_(scales / (2.0**self.bits - 0.5))
            levels.mul_(levels).mul_(levels)
        else:
            levels = codes.mul_(scales / self.top)
            levels.mul_(torch.abs(levels, out=self.scratch.like(levels, "roots")))


class _Int8(_Power):
    top = 127

    def _put(self, rows: Tensor, codes: Tensor, rounded: Round) -> Tensor:
        found, scales = self._codes(rows, rounded)
        codes.view(torch.int8).copy_(found.sub_(128) if self.squares else found)  # int8: its conversion is vectorised
        return scales

    def _get(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        out.copy_(codes.view(torch.int8))
        self._expand(out.add_(128) if self.squares else out, scales)


class _Int4(_Power):
    """The first half of a block is in the low bits of its bytes, the second half in the high ones."""

    bits, top = 4, 7

    def _put(self, rows: Tensor, codes: Tensor, rounded: Round) -> Tensor:
        found, scales = self._codes(rows, rounded)
        numbers, half = found if self.squares else found.add_(8), self.block // 2
        codes.copy_(numbers[:, half:].mul_(16).add_(numbers[:, :half]))
        return scales

    def _get(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        half = self.block // 2
        out[:, :half].copy_(codes & 15)
        out[:, half:].copy_(codes >> 4)
        self._expand(out if self.squares else out.sub_(8), scales)


class _Fp8(_Codec):
    """Codes of e4m3; squares rest as their roots, of which none is zero."""

    def _put(self, rows: Tensor, codes: Tensor, rounded: Round) -> Tensor:
        values = self.scratch.like(rows, "roots")
        if self.squares:
            torch.sqrt(rows, out=values)
        else:
            values.copy_(rows)
        scales = _scales(torch.maximum(values.amax(1, keepdim=True), -values.amin(1, keepdim=True)))
        scaled = values.mul_(_inverse(scales, _E4M3_TOP))
        if rounded is not _nearest:
            scaled = self._rounded(scaled, rounded)
        scaled.clamp_(_E4M3_LEAST if self.squares else -_E4M3_TOP, _E4M3_TOP)
        codes.copy_(scaled.to(torch.float8_e4m3fn).view(torch.uint8))
        return scales

    def _rounded(self, scaled: Tensor, rounded: Round) -> Tensor:
        """Round to multiples of the distance between neighbouring numbers of e4m3, which have 3 bits of mantissa."""
        exponents = torch.frexp(scaled).exponent.clamp_(min=-5)  # 2^-9 apart below 2^-6
        steps = torch.ldexp(torch.ones_like(scaled), exponents - 4)
        levels = rounded(scaled.abs() / steps, 2 if self.squares else 1, 0.0, math.inf)
        return torch.copysign(levels * steps, scaled)

    def _get(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        numbers = self.scratch.like(out, "numbers", torch.int32).copy_(codes)
        # torch's own conversion from e4m3 is not vectorised on CPUs
        torch.index_select(_e4m3(codes.device), 0, numbers.view(-1), out=out.view(-1))
        out.mul_(scales / _E4M3_TOP)
        if self.squares:
            out.mul_(out)


@functools.cache
def _e4m3(device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)
