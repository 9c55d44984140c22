"""The bytes that a rank sends in a step, by option: formulas beside counts of imagined ranks, and the memory of each option.

`table` makes those of docs/learn/network.md: of 8 nodes of 8 ranks, and of 128 of 8.
The runtime itself runs a step of stage 3 in bf16 on fake tensors, which have sizes but no data. The model has only matrices, and
needs no padding. Volumes are in units of M, the bytes of its parameters in 16 bits. There are R nodes of S ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.papers import counted
from zeroshard.utils.sheets import markdown

_DIM, _BLOCK, _RANK = 8192, 256, 4
_NUMEL = 4 * _DIM**2  # of four square matrices
_INT8, _INT4 = 1 / 2 + 2 / _BLOCK, 1 / 4 + 2 / _BLOCK  # bytes over those in 16 bits: codes, and a step of 4 bytes a block
_TOP_K = 0.01 * 8 / 2  # likewise, of 1% of the values: value and index, 4 bytes each
_LOW_RANK = 4 * _RANK * 2 / _DIM  # two factors of a square matrix, each reduced and gathered in fp32

Share = Callable[[int, int], float]  # (R, S) -> bytes that a rank sends, in units of M


def _flat(volume: float) -> tuple[Share, Share]:
    return lambda r, s: volume * (r - 1) / r, lambda r, s: volume * (s - 1) / (r * s)


def _hops(between: float, inside: float) -> tuple[Share, Share]:
    return lambda r, s: between * (r - 1) / (r * s), lambda r, s: inside * (s - 1) / s


@dataclass(frozen=True)
class Row:
    """Options of zs.shard, and the formulas of the bytes that a rank then sends between nodes and inside of its node."""

    name: str
    options: Mapping[str, Any]
    volumes: tuple[Share, Share]


def rows(place: int) -> list[Row]:
    """Return all rows of the table, for nodes of `place` ranks."""
    weights = {"zero_quantized_weights": "int8"}
    int8, int4 = {"zero_quantized_gradients": "int8"}, {"zero_quantized_gradients": "int4"}
    flat, hpz, mics = {"hierarchical": False}, {"zero_hpz_partition_size": place}, {"shard_size": place}
    return [
        Row("plain, one hop", flat, _flat(3)),
        Row("two hops", {}, _hops(3, 3)),
        Row("hpZ", hpz, _hops(2, 3)),
        Row("groups (HSDP, MiCS)", mics, _hops(2, 3)),
        Row("groups, replicate_optimizer=False", {**mics, "replicate_optimizer": False}, _hops(2, 3)),
        Row("qwZ", weights, _hops(2 * _INT8 + 1, 2 * _INT8 + 1)),
        Row("qgZ int8", int8, _hops(2 + _INT8, 2 + _INT8)),
        Row("qgZ int4", int4, _hops(2 + _INT4, 2 + _INT4)),
        Row("hpZ, qwZ, qgZ int8", {**hpz, **weights, **int8}, _hops(2 * _INT8, 3 * _INT8)),
        Row("hpZ, qwZ, qgZ int4", {**hpz, **weights, **int4}, _hops(_INT8 + _INT4, 2 * _INT8 + _INT4)),
        Row("groups, qwZ, qgZ int8", {**mics, **weights, **int8}, _hops(_INT8 + 1, 3 * _INT8)),
        Row("top_k, 1%", {"zero_quantized_gradients": "top_k"}, _hops(2 + _TOP_K, 2 + _TOP_K)),
        Row("low_rank, 4", {"zero_quantized_gradients": "low_rank"}, _hops(2 + _LOW_RANK, 2 + _LOW_RANK)),
    ]


def measure(row: Row, nodes: int, place: int) -> counted.Counted:
    """Run one step of the runtime on imagined ranks; return the counts of rank 0. place: ranks of a node."""
    options = {"precision": "bf16", "gradient_dtype": None, **row.options}
    return counted.count(_NUMEL, nodes * place, of_unit=2, node_size=place, stage=3, **options)


def table(nodes: int, place: int) -> str:
    """Return a markdown table of formulas beside measurements."""
    headings = ("", "between: formula", "measured", "inside: formula", "measured", "states", "secondary shards", "lost, kept")
    lines = []
    for row in rows(place):
        found, theory = measure(row, nodes, place), [share(nodes, place) for share in row.volumes]
        between = sum(found.between.values())
        nbytes = (between, found.sent_nbytes - between, found.states_nbytes, found.secondary, found.lost)
        measured = [each / (2 * _NUMEL) for each in nbytes]
        values = (theory[0], measured[0], theory[1], *measured[1:])
        lines.append([row.name, *(f"{value:.3f}" if value else "" for value in values)])
    return markdown(headings, lines)
