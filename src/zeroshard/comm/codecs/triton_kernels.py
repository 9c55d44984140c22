"""Block quantization on a GPU, in one pass each: what block_quantization.py describes, with equal bytes.

One program packs or unpacks `rows` blocks. It reads values once and writes codes and steps: five bytes a value for int8, where
torch's operations one after the other move some fifty. Division is rounded to nearest (`div_rn`), and fused multiply-add is
off, so that the bits are those of torch's kernels. Without Triton, with unaligned bytes, and for fp8 on a GPU before compute
capability 8.9, torch's kernels do the same.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .block_quantization import BlockCodec

PROGRAM_NUMEL = 2048  # values of one program: some blocks, or one that is longer
BYTE_CODES, NIBBLES, FP8 = 0, 1, 2
KINDS = {"int8": BYTE_CODES, "int4": NIBBLES, "fp8": FP8}


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable(device: torch.device, packed: Tensor, name: str) -> bool:
    """Whether the kernels serve these packed bytes on this device."""
    if not _installed() or packed.data_ptr() % 4:
        return False
    return torch.cuda.get_device_capability(device) >= ((8, 9) if name == "fp8" else (7, 0))


def pack(codec: BlockCodec, values: Tensor, out: Tensor) -> None:
    """values (numel,) of any floating dtype -> out (packed_nbytes(numel),) uint8, at a multiple of 4 bytes."""
    numel, nblocks = values.numel(), codec.nblocks(values.numel())
    steps, codes = out[: 4 * nblocks].view(torch.float32), out[4 * nblocks :]
    codes[codec._codes_nbytes(numel) :].zero_()
    if values.dtype == torch.float64:
        values = values.float()  # here, as torch rounds it
    rows = max(PROGRAM_NUMEL // codec.block, 1)
    kernels().pack[(-(-nblocks // rows),)](
        values, steps, codes, numel, 1 / codec.most, BLOCK=codec.block, ROWS=rows, KIND=KINDS[codec.name], enable_fp_fusion=False
    )


def unpack(codec: BlockCodec, packed: Tensor, numel: int, begin: int, out: Tensor, *, add: bool) -> None:
    """out (n,) fp32 = [out +] values begin to begin + n of the `numel` packed ones; begin is a multiple of the block."""
    count = out.numel()
    steps = packed[: 4 * codec.nblocks(numel)].view(torch.float32)[begin // codec.block :]
    codes = packed[4 * codec.nblocks(numel) + codec._codes_nbytes(begin) :]
    rows = max(PROGRAM_NUMEL // codec.block, 1)
    kernels().unpack[(-(-codec.nblocks(count) // rows),)](
        steps, codes, out, count, BLOCK=codec.block, ROWS=rows, KIND=KINDS[codec.name], ADD=add, enable_fp_fusion=False
    )


@functools.cache
def kernels() -> SimpleNamespace:
    """Compiled when first used. Triton takes its time to import, and is not there on every machine."""
    import triton
    import triton.language as tl

    # pointers count in elements; the last block of n values has its second half at ceil(n / 2)
    def _pack(values, steps, codes, numel, factor, BLOCK: tl.constexpr, ROWS: tl.constexpr, KIND: tl.constexpr):
        block = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        at = block * BLOCK + tl.arange(0, BLOCK)[None, :]
        x = tl.load(values + at, mask=at < numel, other=0.0).to(tl.float32)
        magnitude = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)[:, None]  # NaN above infinity
        bad = magnitude >= 0x7F800000
        step = tl.maximum(magnitude.to(tl.float32, bitcast=True) * factor.to(tl.float32), 7.888609052210118e-31)  # 2^-100
        step = tl.where(bad, float("inf"), step)
        tl.store(steps + block, step, mask=block * BLOCK < numel)
        if KIND == 1:
            HALF: tl.constexpr = BLOCK // 2
            half = (tl.minimum(numel - block * BLOCK, BLOCK) + 1) // 2
            i = tl.arange(0, HALF)[None, :]
            first = block * BLOCK + i
            low = tl.load(values + first, mask=(i < half) & (first < numel), other=0.0).to(tl.float32)
            high = tl.load(values + first + half, mask=(i < half) & (first + half < numel), other=0.0).to(tl.float32)
            low = (tl.math.div_rn(low, step + low * 0.0 * 0.0) + 12582912.0).to(tl.int32, bitcast=True) & 15
            high = (tl.math.div_rn(high, step + high * 0.0 * 0.0) + 12582912.0).to(tl.int32, bitcast=True) & 15
            code = tl.where(bad, 0, low | (high << 4)).to(tl.uint8)
            tl.store(codes + block * HALF + i, code, mask=(i < half) & (block * BLOCK < numel))
        else:
            quotient = tl.where(bad, 0.0, tl.math.div_rn(x, step))
            if KIND == 0:
                code = (quotient + 12582912.0).to(tl.int32, bitcast=True).to(tl.uint8)
            else:
                code = quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
            tl.store(codes + at, code, mask=at < numel)

    return SimpleNamespace()
