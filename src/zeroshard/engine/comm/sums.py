"""Sums of gradients in rank order, in fp32, in chunks: on a CPU they stay in cache, on a GPU they bound the memory of totals.

The sums of squares are computed in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

CHUNK_NUMEL = 1 << 17  # number of elements summed at a time: three fp32 chunks stay in a core's L2 cache
GPU_CHUNK_NUMEL = 1 << 22  # the same on a GPU: 16 MiB of fp32 totals, of which each kernel takes longer than its launch
RECEIVED_NBYTES = 1 << 29  # slices of all ranks that a reduction on a GPU receives at a time


def piece_numel(rows: Tensor) -> int:
    """Return how many elements of each slice, `rows` (ranks, n), a reduction on a GPU receives at most at a time."""
    return max(RECEIVED_NBYTES // (rows.shape[0] * rows.itemsize) // 1024 * 1024, 1024)


def sum_in_rank_order(parts: Sequence[Tensor], out: Tensor, *, scale: float, accumulate: bool) -> float | None:
    """Compute out = [out +] scale * (parts[0] + parts[1] + ...), in fp32 (fp64 for fp64 parts), in chunks.

    Returns the sum of out's squares where it costs nothing extra (CPU, out not rounded), else None.
    """
    on_cpu = out.device.type == "cpu"
    chunk = min(CHUNK_NUMEL if on_cpu else GPU_CHUNK_NUMEL, out.numel())
    # without scratch, `out` is written with the sum of the first two parts: no later part may be `out` itself
    aliased = any(part.data_ptr() == out.data_ptr() for part in parts[2:])
    dtype = sum_dtype(parts[0])
    rounded = parts[0].dtype != dtype
    # a GPU's kernels convert while they add; `device`, since the caller's default device may be another
    scratch = torch.empty(chunk, dtype=dtype, device=out.device) if rounded and on_cpu else None

    def fill(begin: int, total: Tensor) -> None:
        pieces = [part[begin : begin + chunk] for part in parts]
        converted = None if scratch is None else scratch[: total.numel()]
        if not rounded and len(pieces) > 1:
            torch.add(pieces[0], pieces[1], out=total)
            rest = pieces[2:]
        else:
            total.copy_(pieces[0])
            rest = pieces[1:]
        for piece in rest:
            total.add_(piece if converted is None else converted.copy_(piece))

    return sum_by_chunks(fill, out, chunk, dtype, scale=scale, accumulate=accumulate, aliased=aliased)


def sum_dtype(part: Tensor) -> torch.dtype:
    """Return the dtype in which such parts are added up."""
    return torch.promote_types(part.dtype, torch.float32)


def sum_by_chunks(
    fill: Callable[[int, Tensor], None], out: Tensor, chunk: int, dtype: torch.dtype, *, scale: float, accumulate: bool,
    aliased: bool = False,
) -> float | None:  # fmt: skip
    """Compute out = [out +] scale * the totals of `fill`, `chunk` elements at a time; return as `sum_in_rank_order`.

    fill: (begin, total) -> None: fills `total` (n,) of `dtype` with the sum of elements `begin` to `begin` + n. aliased: `fill`
    reads `out` after it has begun to write `total`, so `total` must not be a part of `out`.
    """
    numel, direct = out.numel(), out.dtype == dtype and not accumulate and not aliased
    scratch = None if direct else torch.empty(chunk, dtype=dtype, device=out.device)
    squares = 0.0 if out.device.type == "cpu" and out.dtype == dtype else None
    for begin in range(0, numel, max(chunk, 1)):
        target = out[begin : begin + chunk]
        total = target if scratch is None else scratch[: target.numel()]
        fill(begin, total)
        if scale != 1.0:
            total.mul_(scale)
        if scratch is not None:
            target.add_(total) if accumulate else target.copy_(total)
        if squares is not None:
            squares += square_sum(target)
    return squares


def exact_share(num_ranks: int) -> float:
    """Return the largest power of two up to 1 / num_ranks (3 ranks: 1/4): scaled by it, sums over ranks do not overflow fp16."""
    return 2.0 ** -(num_ranks - 1).bit_length()


def nonfinite_ranks(parts: Sequence[Tensor], out: Tensor) -> tuple[int, ...]:
    """Return the ranks whose parts are not finite, given that their sum is not.

    A part that is `out` itself was overwritten by the sum: its rank is returned only if all other parts are finite.
    """
    in_place = [rank for rank, part in enumerate(parts) if part.data_ptr() == out.data_ptr()]
    found = [rank for rank, part in enumerate(parts) if rank not in in_place and not torch.isfinite(part).all()]
    return tuple(found or in_place)


def square_sum(tensor: Tensor) -> float:
    """Return the sum of squares of a 1-D CPU tensor: fp32 dot products of chunks, added in fp64."""
    parts = tensor.split(CHUNK_NUMEL)
    if tensor.dtype not in (torch.float32, torch.float64):
        parts = tuple(part.float() for part in parts)
    return sum((torch.dot(part, part).item() for part in parts), 0.0)


def device_square_sum(*tensors: Tensor) -> Tensor:
    """Return the sum of squares of tensors on a device, from norms in fp32 or wider: 0-D, fp64, and the host does not wait."""
    norms = [torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors]
    return torch.stack(norms).double().square().sum()
