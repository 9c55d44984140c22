"""Sums of gradients in rank order, in fp32, in chunks that stay in cache; sums of squares in the same order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK_NUMEL = 1 << 17  # number of elements summed at a time: three fp32 chunks stay in a core's L2 cache


def sum_in_rank_order(parts: Sequence[Tensor], out: Tensor, *, scale: float, accumulate: bool) -> float | None:
    """Compute out = [out +] scale * (parts[0] + parts[1] + ...), in fp32 (fp64 for fp64 parts), in chunks that stay in cache.

    Returns the sum of out's squares where it costs nothing extra (CPU, out not rounded), else None.
    """
    numel = out.numel()
    on_host = out.device.type == "cpu"
    chunk = min(CHUNK_NUMEL, numel) if on_host else numel
    # without scratch, `out` is written with the sum of the first two parts: no later part may be `out` itself
    aliased = any(part.data_ptr() == out.data_ptr() for part in parts[2:])
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    direct = out.dtype == dtype and not accumulate and not aliased
    scratch = None if direct else torch.empty(chunk, dtype=dtype, device=out.device)
    cast = None if parts[0].dtype == dtype else torch.empty(chunk, dtype=dtype, device=out.device)
    square_sum = 0.0 if on_host and out.dtype == dtype else None
    for begin in range(0, numel, max(chunk, 1)):
        target = out[begin : begin + chunk]
        total = target if scratch is None else scratch[: target.numel()]
        _sum_chunk([part[begin : begin + chunk] for part in parts], total, None if cast is None else cast[: total.numel()])
        if scale != 1.0:
            total.mul_(scale)
        if scratch is not None:
            target.add_(total) if accumulate else target.copy_(total)
        if square_sum is not None:
            square_sum += torch.dot(target, target).item()
    return square_sum


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


def _sum_chunk(parts: list[Tensor], total: Tensor, cast: Tensor | None) -> None:
    """Compute total = parts[0] + parts[1] + ... in fp32; `cast` holds one converted part where parts are not fp32."""
    if cast is None and len(parts) > 1:
        torch.add(parts[0], parts[1], out=total)
        rest = parts[2:]
    else:
        total.copy_(parts[0])
        rest = parts[1:]
    for part in rest:
        total.add_(part if cast is None else cast.copy_(part))
