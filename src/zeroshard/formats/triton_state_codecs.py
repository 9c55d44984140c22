"""The codecs of optimizer states on a GPU, in one pass each way, with the bytes of state_codecs.py.

A program reads whole blocks once: 5 bytes an element each way for codes of 8 bits, where torch's operations one after the other
move some 40. Division rounds to nearest (`div_rn`) and fused multiply-add is off, so the bits are those of torch's kernels.
`state_codecs` imports this file only where it has found Triton and a GPU for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from .state_codecs import FloatCodec

PROGRAM_NUMEL = 4096  # elements of a program: several blocks, or one longer block


def write(codec: FloatCodec, rows: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Encode rows (blocks, block) fp32, each to the nearest level, to codes and scales, views of the bytes at rest."""
    _launch(_write, codec, rows, codes, scales, FACTOR=codec.factor)


def read(codec: FloatCodec, codes: Tensor, scales: Tensor, values: Tensor) -> None:
    """Decode codes and scales, views of the bytes at rest, to values (blocks, block) fp32."""
    _launch(_read, codec, values, codes, scales)


def _launch(kernel, codec: FloatCodec, values: Tensor, codes: Tensor, scales: Tensor, **constants: float) -> None:
    blocks, rows = values.shape[0], max(PROGRAM_NUMEL // codec.block, 1)
    kernel[(-(-blocks // rows),)](
        values, codes, scales, blocks, codes.stride(0), scales.stride(0), BLOCK=codec.block, ROWS=rows, SIGNED=not codec.squares,
        PACKED=codec.packed, UNUSED=codec.unused, SHIFT=codec.shift, enable_fp_fusion=False, **constants,
    )  # fmt: skip


@triton.jit
def _code(x, inverse, SIGNED: tl.constexpr, PACKED: tl.constexpr, UNUSED: tl.constexpr, SHIFT: tl.constexpr):
    """Return the codes of values, int32; one with a sign has it in its highest bit."""
    bits = (x * inverse).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    if SIGNED:
        bits = ((bits & 0x7FFF) + (1 << (SHIFT - 1))) << UNUSED | bits & 0x8000
    return (bits >> (SHIFT + UNUSED)) & (15 if PACKED else 255)


@triton.jit
def _write(
    values, codes, scales, blocks, code_stride, scale_stride, BLOCK: tl.constexpr, ROWS: tl.constexpr, SIGNED: tl.constexpr,
    PACKED: tl.constexpr, UNUSED: tl.constexpr, SHIFT: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at, mask = values + block * BLOCK, block < blocks
    x = tl.load(at + tl.arange(0, BLOCK)[None, :], mask=mask, other=0.0)
    scale = tl.max(tl.abs(x) if SIGNED else x, axis=1)[:, None] * FACTOR
    scale = (scale.to(tl.int32, bitcast=True) & 0x7FFFF000).to(tl.float32, bitcast=True)
    tl.store(scales + block * scale_stride, scale, mask=mask)
    inverse = tl.minimum(tl.math.div_rn(tl.full((ROWS, 1), 1.0, tl.float32), scale), 8.507059173023462e37)  # 2^126
    if PACKED:  # load the values again, from the cache, as the two halves of each block
        i = tl.arange(0, BLOCK // 2)[None, :]
        low, high = tl.load(at + i, mask=mask, other=0.0), tl.load(at + BLOCK // 2 + i, mask=mask, other=0.0)
        code = _code(low, inverse, SIGNED, PACKED, UNUSED, SHIFT) | _code(high, inverse, SIGNED, PACKED, UNUSED, SHIFT) << 4
    else:
        i = tl.arange(0, BLOCK)[None, :]
        code = _code(x, inverse, SIGNED, PACKED, UNUSED, SHIFT)
    tl.store(codes + block * code_stride + i, code.to(tl.uint8).to(codes.dtype.element_ty, bitcast=True), mask=mask)


@triton.jit
def _read(
    values, codes, scales, blocks, code_stride, scale_stride, BLOCK: tl.constexpr, ROWS: tl.constexpr, SIGNED: tl.constexpr,
    PACKED: tl.constexpr, UNUSED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    i, mask = tl.arange(0, BLOCK)[None, :], block < blocks
    code = tl.load(codes + block * code_stride + (i % (BLOCK // 2) if PACKED else i), mask=mask, other=0).to(tl.int32)
    if PACKED:
        code = tl.where(i < BLOCK // 2, code, code >> 4)
    code &= 15 if PACKED else 255
    bits = code << SHIFT
    if SIGNED:
        bits = (bits << UNUSED & 0x7FFF) >> UNUSED | (bits << UNUSED & 0x8000)
    else:
        bits += 1 << (SHIFT - 1)
    number = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    scale = tl.load(scales + block * scale_stride, mask=mask, other=0.0)
    tl.store(values + block * BLOCK + i, number * scale, mask=mask)
