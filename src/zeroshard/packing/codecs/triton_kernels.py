"""Block quantization on a GPU, in one pass each way: the format of block_quantization.py, with equal bytes.

A program reads the values of some blocks once and writes codes and steps: five bytes a value for int8, where torch's
operations one after the other move some fifty. Division rounds to nearest (`div_rn`) and fused multiply-add is off, so the
bits are those of torch's kernels; e4m3 is computed in integer arithmetic, which every GPU has. `block_quantization` imports
this file only where it has found Triton and a GPU for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAM_NUMEL = 2048  # values per program: several blocks, or one longer block
INT8, INT4, FP8 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
KINDS = {"int8": 0, "int4": 1, "fp8": 2}  # codec -> number of its kernel
_ROUNDING = tl.constexpr(1.5 * 2.0**23)  # see block_quantization.ROUNDING
_SMALL_ROUNDING = tl.constexpr(1.5 * 2.0**14)  # the same for multiples of 2^-9
_LEAST_STEP = tl.constexpr(2.0**-100)


def pack(name: str, most: float, block: int, values: Tensor, steps: Tensor, codes: Tensor) -> None:
    """Quantize values (numel,) of any floating dtype to steps (nblocks,) fp32 and codes (bytes,) uint8 of the codec `name`."""
    if values.dtype == torch.float64:
        values = values.float()
    rows = max(PROGRAM_NUMEL // block, 1)
    _pack[(-(-steps.numel() // rows),)](
        values, steps, codes, values.numel(), BLOCK=block, ROWS=rows, KIND=KINDS[name], FACTOR=1 / most, enable_fp_fusion=False
    )


def unpack(name: str, block: int, steps: Tensor, codes: Tensor, out: Tensor, *, add: bool) -> None:
    """Compute out (n,) fp32 = [out +] the values of steps (nblocks or more,) fp32 and codes (bytes or more,) uint8."""
    rows = max(PROGRAM_NUMEL // block, 1)
    _unpack[(-(-out.numel() // (block * rows)),)](
        steps, codes, out, out.numel(), BLOCK=block, ROWS=rows, KIND=KINDS[name], ADD=add, enable_fp_fusion=False
    )


@triton.jit
def _quotient(x, step, bad):
    """Return x / step, rounded to nearest; 0 in blocks that are not finite."""
    x, step = tl.broadcast(x, step)
    return tl.where(bad, 0.0, tl.math.div_rn(x, step))


@triton.jit
def _integer(quotient):
    """Return the nearest integer, ties to even, in the low bits of an int32."""
    return (quotient + _ROUNDING).to(tl.int32, bitcast=True)


@triton.jit
def _e4m3(quotient):
    """Return the code nearest to a quotient of at most 448, ties to even.

    Normal numbers are an fp32 with 20 bits fewer; below 2^-6, numbers are multiples of 2^-9.
    """
    bits = quotient.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(quotient) + _SMALL_ROUNDING).to(tl.int32, bitcast=True) & 15
    return tl.where(magnitude < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _pack(values, steps, codes, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, FACTOR: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(values + at, mask=at < numel, other=0.0).to(tl.float32)
    magnitude = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)[:, None]  # ordered as integers: NaN above infinity
    bad = magnitude >= 0x7F800000
    step = tl.maximum(magnitude.to(tl.float32, bitcast=True) * FACTOR, _LEAST_STEP)
    step = tl.where(bad, float("inf"), step)
    tl.store(steps + block, step, mask=block * BLOCK < numel)
    if KIND == INT8:
        tl.store(codes + at, _integer(_quotient(x, step, bad)).to(tl.uint8), mask=at < numel)
    elif KIND == FP8:
        tl.store(codes + at, _e4m3(_quotient(x, step, bad)).to(tl.uint8), mask=at < numel)
    else:  # INT4: load the values again, from the cache, as the two halves of each block
        n = tl.minimum(numel - block * BLOCK, BLOCK)
        half = (n + 1) // 2
        i = tl.arange(0, BLOCK // 2)[None, :]
        first = values + block * BLOCK + i
        low = tl.load(first, mask=i < half, other=0.0).to(tl.float32)
        high = tl.load(first + half, mask=i < n - half, other=0.0).to(tl.float32)
        code = (_integer(_quotient(low, step, bad)) & 15) | ((_integer(_quotient(high, step, bad)) & 15) << 4)
        tl.store(codes + block * (BLOCK // 2) + i, code.to(tl.uint8), mask=i < half)


@triton.jit
def _unpack(steps, codes, out, numel, BLOCK: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr, ADD: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    at = block * BLOCK + i
    step = tl.load(steps + block, mask=block * BLOCK < numel, other=0.0)
    if KIND == INT4:
        half = (tl.minimum(numel - block * BLOCK, BLOCK) + 1) // 2
        byte = tl.load(codes + block * (BLOCK // 2) + tl.where(i < half, i, i - half), mask=at < numel, other=0).to(tl.int32)
        nibble = tl.where(i < half, byte, byte >> 4) & 15
        code = ((nibble ^ 8) - 8).to(tl.float32)
    else:
        code = tl.load(codes + at, mask=at < numel, other=0).to(tl.int8, bitcast=True)
        if KIND == FP8:  # the same bits as an fp16, with one more in the exponent, are the value times 2^-8
            code = ((code.to(tl.int16) << 7) & -0x4001).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        code = code.to(tl.float32)
    value = code * step
    if ADD:
        value += tl.load(out + at, mask=at < numel, other=0.0)
    tl.store(out + at, value, mask=at < numel)
