"""A benchmark of quantization on one CPU thread, beside a memory copy and the same arithmetic over whole tensors.

    python -m benchmarks.codecs                         64 MB of fp32 values, blocks of 256
    python -m benchmarks.codecs --block 1024 --huge-pages

Speed is bytes read and written per second. Packing reads 4 bytes a value and writes 1 (int8, fp8) or 0.5 (int4), and a step
(scale) for each block; the copy reads 4 and writes 4. Contenders take turns in each round; times are medians over rounds, ratios
medians of the ratios within a round. *whole* is the obvious program: abs, amax, a division, round, clamp and a conversion, each
over the whole tensor into a new tensor, whose pages the system clears each time. With MALLOC_MMAP_THRESHOLD_ and
MALLOC_TRIM_THRESHOLD_ set to 17179869184 pages are reused, as with `keep_host_memory`. tests/comm/test_codecs.py compares values.

DeepSpeed's quantizer is no contender: it has kernels for GPUs only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from statistics import median
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.codecs import CODECS, DEFAULT_BLOCK, codec_of
from zeroshard.memory.io.aligned import empty_aligned
from zeroshard.planner.simulator.micro_benchmark import median_ratio, seconds, take_turns

from .tables import PLAIN, Column, Goal, Sheet, goals_sheet, show

COPY = "memory copy"
SECTION_NUMEL, SECTION_ROUNDS = 1 << 24, 9  # in `zeroshard bench`: 64 MiB, larger than processor caches
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
def measure(
    numel: int = 1 << 24, rounds: int = 9, *, block: int = DEFAULT_BLOCK, huge_pages: bool = False
) -> list[dict[str, Any]]:
    """Measure all contenders on one thread; return one row for each. numel: number of values, a multiple of the block.

    Keys: name, ms, bytes_per_value, gb_s (1e9 bytes read and written a second); of_copy: gb_s over that of the memory copy;
    over_whole: speed over that of the same arithmetic over whole tensors, None in the rows of the latter and of the copy.
    """
    new = partial(_new, huge_pages=huge_pages)
    values, out = new(4 * numel).view(torch.float32).normal_(), new(4 * numel).view(torch.float32).zero_()
    actions: dict[str, Callable[[], object]] = {COPY: lambda: out.copy_(values)}
    nbytes = {COPY: 8.0}
    for name in CODECS:
        codec = codec_of(name, block)
        packed, whole = new(codec.packed_nbytes(numel)).zero_(), whole_pack(name, values, block)
        codec.pack(values, packed)
        found: dict[str, Callable[[], object]] = {
            f"{name} pack": partial(codec.pack, values, packed),
            f"{name} unpack": partial(codec.unpack, packed, out),
            f"{name} pack, whole": partial(whole_pack, name, values, block),
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
    return [_row(name, samples, nbytes[name], numel) for name in actions]


def _new(nbytes: int, *, huge_pages: bool) -> Tensor:
    return empty_aligned(nbytes) if huge_pages else torch.empty(nbytes, dtype=torch.uint8)


def _row(name: str, samples: dict[str, list[float]], bytes_per_value: float, numel: int) -> dict[str, Any]:
    median_s, whole = median(samples[name]), samples.get(f"{name}, whole")
    return {
        "name": name,
        "ms": 1e3 * median_s,
        "bytes_per_value": bytes_per_value,
        "gb_s": bytes_per_value * numel / median_s / 1e9,
        "of_copy": bytes_per_value / 8 * median_ratio(samples[COPY], samples[name]),
        "over_whole": median_ratio(whole, samples[name]) if whole else None,
    }


def measure_section() -> list[dict[str, Any]]:
    return measure(SECTION_NUMEL, SECTION_ROUNDS)


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
    return Sheet.of("Block quantization of fp32 values, 1 thread", COLUMNS, rows, [(NOTE, PLAIN)])


def main(argv: list[str] | None = None) -> int:
    """Run the command line (see the head of this file); return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.codecs", description="Measure quantization on the CPU.")
    add = parser.add_argument
    add("--millions", type=int, default=16, help="values, in units of 2^20 (default: 16)")
    add("--rounds", type=int, default=9, help="timed runs of each contender (default: 9)")
    add("--block", type=int, default=DEFAULT_BLOCK, help=f"values with one step (default: {DEFAULT_BLOCK})")
    add("--huge-pages", action="store_true", help="tensors in 2 MiB pages, where a copy is faster")
    given = parser.parse_args(argv)
    if min(given.millions, given.rounds) < 1:
        parser.error("expected --millions and --rounds of at least 1")
    rows = measure(given.millions << 20, given.rounds, block=given.block, huge_pages=given.huge_pages)
    show(sheet(rows), goals_sheet(goals(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
