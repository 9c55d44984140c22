"""Symmetric quantization in blocks: int8, int4 and fp8 (e4m3) with one fp32 step for each block of values.

    packed = steps | codes | zeros            numel values in nblocks = ceil(numel / block) blocks, the last one shorter
             steps: nblocks x fp32, in the host's byte order
             codes: int8, fp8: one byte a value, in the order of values
                    int4: ceil(n / 2) bytes for a block of n: byte i = code of value i in the low nibble, of value
                    ceil(n / 2) + i (0 if there is none) in the high one, both in two's complement
             zeros: padding to a multiple of 4 bytes

    step  = max(amax * fp32(1 / most), 2^-100)      amax: the largest magnitude in the block; most: 127, 7 or 448
    code  = round(value / step), to nearest even    (fp8: to the nearest e4m3 number, ties to even)
    value = code * step                             every operation in fp32, rounded once

Invariants: the error is at most half a step (and a rounding of fp32), for fp8 2^-4 of the value or 2^-10 of the step;
zeros are exact; magnitudes below 2^-101 become zero. A block with an infinity or a NaN has the step infinity and codes 0: all
of it is NaN after unpacking, and other blocks are unaffected. The bytes are equal on CPU, GPU with torch and GPU with Triton: all
operations round as IEEE 754 says, and none depends on denormals or on fused multiply-add.

Steps are fp32: fp16 lacks the range of gradients and of their smallest blocks, bf16 would make steps up to 0.8% longer
and save 0.8% of the bytes (int8, blocks of 256). The least step keeps quotients finite, so that no block is a special case.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from ...errors import ConfigError, did_you_mean
from ...utils import compression
from ...utils.triton import has_triton
from .base import Codec

DEFAULT_BLOCK = 256  # values with one step: 1.6% more bytes for int8, 3.1% for int4
LEAST_BLOCK, LARGEST_BLOCK = 32, 1 << 14  # values; 32 is the alignment of slots and shards
LEAST_STEP = 2.0**-100  # keeps quotients finite, so that no block is a special case
STEP_NBYTES = 4
# Added to a quotient below 2^22, this leaves the nearest integer (ties to even) in the low bits of the sum: one pass fewer than
# rounding and converting.
ROUNDING = 1.5 * 2.0**23
# Number of values in one pass on the CPU: values and quotients, 1 MB each, stay in the cache over six calls of 1 to 2 us each.
# On a core with 1 MB of second-level cache 2^16 takes 1.4 times as long, 2^17 1.1 times, 2^19 5% less.
CPU_CHUNK_NUMEL = 1 << 18


class BlockCodec(Codec):
    """Base class of the three codecs: blocks, steps, and passes over chunks."""

    most: float  # code of the largest magnitude in a block
    unit = 1.0  # `_decode` gives values in multiples of `unit * step`: a power of two, so that nothing is rounded twice
    rounding = ROUNDING  # the constant that `_quotients` adds
    decodes_in_passes = False  # `_decode` needs scratch memory

    def __init__(self, block: int = DEFAULT_BLOCK) -> None:
        if type(block) is not int or not LEAST_BLOCK <= block <= LARGEST_BLOCK or block & (block - 1):
            raise ConfigError(f"{self.name}: block: expected a power of two from {LEAST_BLOCK} to {LARGEST_BLOCK}, got {block!r}")
        self.block = block

    def __repr__(self) -> str:
        return f"{self.name} in blocks of {self.block}"

    def nblocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def packed_nbytes(self, numel: int) -> int:
        return self.nblocks(numel) * STEP_NBYTES + (self._codes_nbytes(numel) + 3 & -4)

    def _codes_nbytes(self, numel: int) -> int:
        return -(-numel * compression.CODECS[self.name] // 8)  # blocks are whole bytes

    def _chunk_blocks(self, numel: int, device: torch.device) -> int:
        """Return the number of blocks in one pass: as many as stay in the cache, or all of them on a GPU."""
        return self.nblocks(min(CPU_CHUNK_NUMEL, numel) if device.type == "cpu" else numel)

    def _chunks(self, values: Tensor, steps: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield values (n, width), steps (n, 1) and codes (bytes,) of some whole blocks at a time; last of the shorter block."""
        nblocks, rows = values.numel() // self.block, self._chunk_blocks(values.numel(), values.device)
        whole = nblocks * self.block
        if nblocks:
            bodies = codes[: self._codes_nbytes(whole)].split(self._codes_nbytes(rows * self.block))
            yield from zip(values[:whole].view(-1, self.block).split(rows), steps[:nblocks].split(rows), bodies, strict=True)
        if whole < values.numel():
            end = codes[self._codes_nbytes(whole) : self._codes_nbytes(values.numel())]
            yield values[whole:].view(1, -1), steps[nblocks : nblocks + 1], end

    # -- packing -----------------------------------------------------------------------------------------------------

    def _pack(self, values: Tensor, out: Tensor) -> None:
        numel, device = values.numel(), values.device
        steps_nbytes = self.nblocks(numel) * STEP_NBYTES
        codes = out[steps_nbytes:]
        codes[self._codes_nbytes(numel) :].zero_()
        if (kernels := self._triton_for(values, out)) is not None:
            return kernels.pack(self.name, self.most, self.block, values, out[:steps_nbytes].view(torch.float32), codes)
        steps = torch.empty(self.nblocks(numel), 1, dtype=torch.float32, device=device)
        passes = _Passes(self, self._chunk_blocks(numel, device), device)
        for chunk in self._chunks(values, steps, codes):
            passes.pack(*chunk)
        out[:steps_nbytes].copy_(steps.view(torch.uint8).view(-1))

    @abstractmethod
    def _quotients(self, values: Tensor, steps: Tensor, out: Tensor, row: Tensor) -> None:
        """Fill out (n, width) with values (n, width) / steps (n, 1), in the form that `_encode` reads. All fp32."""

    @abstractmethod
    def _encode(self, quotients: Tensor, codes: Tensor) -> None:
        """Fill codes (bytes,) uint8 from the result of `_quotients`, which may be overwritten."""

    # -- unpacking ---------------------------------------------------------------------------------------------------

    def _unpack(self, packed: Tensor, out: Tensor) -> None:
        numel, on_host = out.numel(), out.device.type == "cpu"
        if out.dtype == torch.float32:
            return self._unpack_stretch(packed, numel, 0, out)
        chunk = min(CPU_CHUNK_NUMEL, numel) if on_host else numel
        scratch = torch.empty(chunk, dtype=torch.float32, device=out.device)
        for begin in range(0, numel, chunk):
            target = out[begin : begin + chunk]
            self._unpack_stretch(packed, numel, begin, scratch[: target.numel()])
            target.copy_(scratch[: target.numel()])

    def _unpack_stretch(self, packed: Tensor, numel: int, begin: int, out: Tensor) -> None:
        step_bytes, codes = self._parts(packed, numel, begin, out.numel())
        if (kernels := self._triton_for(out, packed)) is not None:
            return kernels.unpack(self.name, self.block, step_bytes.view(torch.float32), codes, out, add=False)
        steps = torch.empty(step_bytes.numel() // STEP_NBYTES, 1, dtype=torch.float32, device=out.device)
        steps.view(torch.uint8).view(-1).copy_(step_bytes)  # a copy, since `step_bytes` need not be aligned
        if self.unit != 1.0:
            steps.mul_(self.unit)
        room = self._chunk_blocks(out.numel(), out.device) * self.block if self.decodes_in_passes else 0
        scratch = torch.empty(room, dtype=torch.int16, device=out.device)
        for target, factors, found in self._chunks(out, steps, codes):
            self._decode(found, target, scratch)
            target.mul_(factors)

    def _parts(self, packed: Tensor, numel: int, begin: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the bytes of the steps of `count` values from `begin` on, and the codes from there on."""
        first, end = begin // self.block, self.nblocks(begin + count)
        codes = packed[self.nblocks(numel) * STEP_NBYTES + self._codes_nbytes(begin) :]
        return packed[first * STEP_NBYTES : end * STEP_NBYTES], codes

    @abstractmethod
    def _decode(self, codes: Tensor, out: Tensor, scratch: Tensor) -> None:
        """Fill out (n, width) fp32 with codes (bytes,) uint8 as numbers, in multiples of `unit`.

        scratch: int16, as large as a chunk where `decodes_in_passes`, else empty.
        """

    def _add_stretch(self, packed: Tensor, numel: int, begin: int, total: Tensor, term: Tensor) -> None:
        if (kernels := self._triton_for(total, packed)) is None:
            return super()._add_stretch(packed, numel, begin, total, term)
        step_bytes, codes = self._parts(packed, numel, begin, total.numel())
        kernels.unpack(self.name, self.block, step_bytes.view(torch.float32), codes, total, add=True)

    def _triton_for(self, values: Tensor, packed: Tensor) -> ModuleType | None:
        """Return the module of Triton's kernels where it has this codec and these tensors allow them, else None.

        torch's kernels give the same bytes.
        """
        # the kernels read steps as fp32, at aligned addresses
        if values.device.type != "cuda" or packed.data_ptr() % STEP_NBYTES or not has_triton(values.device):
            return None
        from . import triton_kernels

        return triton_kernels if self.name in triton_kernels.KINDS else None


class _Passes:
    """Scratch memory of the passes that turn one chunk of values into codes."""

    def __init__(self, codec: BlockCodec, nblocks: int, device: torch.device) -> None:
        self.codec, self.on_host = codec, device.type == "cpu"
        self.quotients = torch.empty(nblocks, codec.block, dtype=torch.float32, device=device)
        # a row, not a scalar: torch's loop is not vectorised where two operands are constant along a row
        self.row = torch.full((1, codec.block), codec.rounding, dtype=torch.float32, device=device)
        self.factors = torch.full((2, 1, 1), 1 / codec.most, dtype=torch.float32, device=device)
        self.factors[1].neg_()  # for the smallest value: -min is a magnitude
        self._allot(nblocks)

    def _allot(self, nblocks: int) -> None:
        device = self.quotients.device
        self.extremes = torch.empty(2, nblocks, 1, dtype=torch.float32, device=device)
        self.largest, self.smallest = self.extremes.unbind(0)
        self.candidates = torch.full((3, nblocks, 1), LEAST_STEP, dtype=torch.float32, device=device)  # max: the block's step
        self.of_extremes = self.candidates[:2]

    def pack(self, values: Tensor, steps: Tensor, codes: Tensor) -> None:
        """Compute steps (n, 1) and codes (bytes,) of values (n, width)."""
        codec, quotients, row = self.codec, self.quotients, self.row
        if values.shape != quotients.shape:  # the last chunk
            n, width = values.shape
            quotients, row = quotients.view(-1)[: n * width].view(n, width), row[:, :width]
            self._allot(n)
        if values.dtype != torch.float32:
            values = quotients.copy_(values)
        torch.amax(values, 1, keepdim=True, out=self.largest)  # amax and amin, since abs would need a further pass that writes
        torch.amin(values, 1, keepdim=True, out=self.smallest)
        torch.mul(self.extremes, self.factors, out=self.of_extremes)
        torch.amax(self.candidates, 0, out=steps)
        # NaN passes through amax and amin. On a GPU, where reading the maximum would make the host wait, all steps are checked
        finite = self.on_host and math.isfinite(steps.max().item())
        if not finite:
            bad = ~torch.isfinite(steps)
            steps.masked_fill_(bad, math.inf)
        codec._quotients(values, steps, quotients, row)
        if not finite:
            quotients.masked_fill_(bad, codec.rounding)
        codec._encode(quotients, codes)


class Int8(BlockCodec):
    """int8: one byte a value, from -127 to 127 steps."""

    name, most = "int8", 127.0

    def _quotients(self, values: Tensor, steps: Tensor, out: Tensor, row: Tensor) -> None:
        torch.addcdiv(row, values, steps, out=out)

    def _encode(self, quotients: Tensor, codes: Tensor) -> None:
        codes.copy_(quotients.view(torch.int32).view(-1))  # the low byte

    def _decode(self, codes: Tensor, out: Tensor, scratch: Tensor) -> None:
        out.view(-1).copy_(codes.view(torch.int8))


class Int4(Int8):
    """int4: half a byte a value, from -7 to 7 steps."""

    name, most = "int4", 7.0
    decodes_in_passes = True
    unit = 1 / 16  # `_decode` leaves each nibble in the upper half of a byte, which takes one operation
    rounding = ROUNDING + 8  # codes from 1 to 15, so that nothing is borrowed from the other nibble

    def _encode(self, quotients: Tensor, codes: Tensor) -> None:
        bits, half = quotients.view(torch.int32), -(-quotients.shape[1] // 2)
        upper = bits[:, half:]
        bits[:, : upper.shape[1]].add_(upper, alpha=16)  # into the high nibble
        if quotients.shape[1] % 2:
            bits[:, half - 1] += 8 * 16  # no value: code 0, with the 8 that `rounding` adds to all codes
        codes.view(-1, half).copy_(bits[:, :half])
        codes.bitwise_xor_(0x88)  # from code + 8 to two's complement

    def _decode(self, codes: Tensor, out: Tensor, scratch: Tensor) -> None:
        (n, width), half = out.shape, -(-out.shape[1] // 2)
        codes, nibbles = codes.view(torch.int8).view(n, half), scratch.view(torch.int8)[: n * 2 * half].view(n, 2 * half)
        torch.bitwise_left_shift(codes, 4, out=nibbles[:, :half])
        torch.bitwise_and(codes, -16, out=nibbles[:, half:])
        out.copy_(nibbles[:, :width])


class Fp8(BlockCodec):
    """fp8: one byte a value in float8_e4m3fn, precise to 2^-4 of each value, not of the block's largest."""

    name, most = "fp8", 448.0
    decodes_in_passes = True
    unit = 2.0**8  # from the exponent bias of e4m3 to that of fp16
    rounding = 0.0

    def _quotients(self, values: Tensor, steps: Tensor, out: Tensor, row: Tensor) -> None:
        torch.div(values, steps, out=out)

    def _encode(self, quotients: Tensor, codes: Tensor) -> None:
        codes.view(torch.float8_e4m3fn).copy_(quotients.view(-1))

    def _decode(self, codes: Tensor, out: Tensor, scratch: Tensor) -> None:
        """Decode by way of fp16, which is e4m3 with one exponent bit more: torch's own conversion takes ten times as long."""
        bits = scratch[: codes.numel()].copy_(codes.view(torch.int8))  # sign extension: the sign is in all upper bits
        bits.bitwise_left_shift_(7).bitwise_and_(~0x4000)
        out.view(-1).copy_(bits.view(torch.float16))


CODECS: dict[str, type[BlockCodec]] = {codec.name: codec for codec in (Int8, Int4, Fp8)}


def codec_of(name: str, block: int = DEFAULT_BLOCK) -> BlockCodec:
    """Return the codec of a name: "int8", "int4" or "fp8". block: values that share one step, a power of two from 32 to 16384.

    Raises ConfigError for another name or block.
    """
    if name not in CODECS:
        raise ConfigError(f"codec: expected one of {', '.join(CODECS)}, got {name!r}.{did_you_mean(name, CODECS)}")
    return CODECS[name](block)
