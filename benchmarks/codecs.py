"""A benchmark of quantization on one CPU thread, beside a memory copy and the same arithmetic over whole tensors.

    zeroshard bench --sections codecs                   64 MiB of fp32 values, blocks of 256

Speed is bytes read and written per second. Packing reads 4 bytes a value and writes 1 (int8, fp8) or 0.5 (int4), and a step
(scale) for each block; the copy reads 4 and writes 4. Contenders take turns in each round; times are medians over rounds, ratios
medians of the ratios within a round. *whole* is the obvious program: abs, amax, a division, round, clamp and a conversion, each
over the whole tensor into a new tensor, whose pages the system clears each time. With MALLOC_MMAP_THRESHOLD_ and
MALLOC_TRIM_THRESHOLD_ set to 17179869184 pages are reused, as with `keep_host_memory`. tests/comm/test_codecs.py compares values.

DeepSpeed's quantizer is no contender: it has kernels for GPUs only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from statistics import median
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.codecs import CODECS, DEFAULT_BLOCK, codec_of
from zeroshard.utils.sheets import PLAIN, Sheet

from .micro_benchmark import median_ratio, seconds, take_turns
from .tables import Column, Goal, sheet_of

COPY = "memory copy"
COPY_GOAL, WHOLE_GOAL = 0.5, 2.0
COLUMNS = (
    Column("", itemgetter("name")),
    Column("ms", itemgetter("ms"), ".2f"),
    Column("bytes/value", itemgetter("bytes_per_value"), ".2f"),
    Column("GB/s", itemgetter("gb_s"), ".1f"),
    Column("of a copy", itemgetter("of_copy"), ".2f"),
    Column("x whole", itemgetter("over_whole"), ".1f"),
)
NOTE = "x whole: how many times faster than the same arithmetic over whole tensors. DeepSpeed's quantizer has no CPU kernels."


def whole_pack(name: str, values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return steps (scales) and codes of `values`, by operations over the whole tensor. Its length is a multiple of `block`."""
    blocks, most = values.view(-1, block), CODECS[name].most
    steps = blocks.abs().amax(1, keepdim=True) / most
    if name == "fp8":
        return steps, (blocks / steps).clamp(-most, most).to(torch.float8_e4m3fn)
    codes = (blocks / steps).round().clamp(-most, most).to(torch.int8)
    return steps, codes if name == "int8" else (codes[:, : block // 2] & 15) | (codes[:, block // 2 :] << 4)


def whole_unpack(name: str, steps: Tensor, codes: Tensor) -> Tensor:
    """Return the values, (nblocks, block), that the steps and codes of `whole_pack` stand for."""
    if name == "int4":
        codes = torch.cat([(codes << 4) >> 4, codes >> 4], 1)
    return codes.float() * steps


@torch.no_grad()
def measure(numel: int = 1 << 24, rounds: int = 9) -> list[dict[str, Any]]:
    """Measure all contenders on one thread; return one row for each. numel: values, a multiple of the block; by default 64 MiB,
    larger than processor caches.

    Keys: name, ms, bytes_per_value, gb_s (1e9 bytes read and written a second); of_copy: gb_s over that of the memory copy;
    over_whole: speed over that of the same arithmetic over whole tensors, None in the rows of the latter and of the copy.
    """
    values, out = torch.randn(numel), torch.zeros(numel)
    actions: dict[str, Callable[[], object]] = {COPY: lambda: out.copy_(values)}
    nbytes = {COPY: 8.0}
    for name in CODECS:
        codec = codec_of(name, DEFAULT_BLOCK)
        packed, whole = torch.zeros(codec.packed_nbytes(numel), dtype=torch.uint8), whole_pack(name, values, DEFAULT_BLOCK)
        codec.pack(values, packed)
        found: dict[str, Callable[[], object]] = {
            f"{name} pack": partial(codec.pack, values, packed),
            f"{name} unpack": partial(codec.unpack, packed, out),
            f"{name} pack, whole": partial(whole_pack, name, values, DEFAULT_BLOCK),
            f"{name} unpack, whole": partial(whole_unpack, name, *whole),
        }
        actions |= found
        nbytes |= dict.fromkeys(found, 4 + codec.packed_nbytes(numel) / numel)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        samples = take_turns({name: partial(seconds, action) for name, action in actions.items()}, rounds, warmup=1)
    finally:
        torch.set_num_threads(threads)
    rows = []
    for name, times in samples.items():
        whole_times = samples.get(f"{name}, whole")
        rows.append({
            "name": name, "ms": 1e3 * median(times), "bytes_per_value": nbytes[name],
            "gb_s": nbytes[name] * numel / median(times) / 1e9, "of_copy": nbytes[name] / 8 * median_ratio(samples[COPY], times),
            "over_whole": median_ratio(whole_times, times) if whole_times else None,
        })  # fmt: skip
    return rows


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    """Return the goals with the values that the rows of one `measure` give."""
    found = []
    for row in rows:
        if row["over_whole"] is not None:
            found.append(Goal(f"{row['name']}: bytes/s over a memory copy's", row["of_copy"], COPY_GOAL, "codecs", at_least=True))
            found.append(Goal(f"{row['name']}: speed over whole tensors", row["over_whole"], WHOLE_GOAL, "codecs", at_least=True))
    return found


def sheet(rows: list[dict[str, Any]]) -> Sheet:
    """Return the rows of one `measure` as a table."""
    return sheet_of("Block quantization of fp32 values, 1 thread", COLUMNS, rows, [(NOTE, PLAIN)])
