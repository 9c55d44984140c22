"""Matrix products of groups of rows, each with a matrix of its own: torch's grouped product where it can be used, else a loop."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .torch_compat import FakeTensor

_ALIGNED_NBYTES = 16  # torch's kernels need strides that are multiples of this
_ON_GPUS = (8, 0)  # compute capability of the oldest GPUs that have a kernel


def grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return (S, N): rows [ends[g - 1], ends[g]) of `rows` (S, M) times matrices[g] (M, N), for every g; differentiable.

    matrices: (G, M, N). ends: (G,) integers, that of the last group S. A group may be empty.
    """
    if isinstance(rows, FakeTensor):  # in a plan: shapes, bytes and flops are right
        return rows @ matrices[0]
    if not _has_kernel(rows, matrices):
        bounds = [0, *ends.tolist()]
        return torch.cat([rows[a:b] @ matrix for a, b, matrix in zip(bounds, bounds[1:], matrices, strict=False)])
    product = F.grouped_mm(rows, matrices, offs=ends.to(torch.int32))
    if product.requires_grad:
        product.register_hook(Tensor.contiguous)  # the kernel's backward refuses expanded gradients
    return product


def _has_kernel(rows: Tensor, matrices: Tensor) -> bool:
    widths = matrices.shape[1:]
    if not len(rows):  # the kernel's backward fails
        return False
    aligned = all(width * rows.itemsize % _ALIGNED_NBYTES == 0 for width in widths)
    known = rows.dtype == matrices.dtype and rows.dtype in (torch.float32, torch.bfloat16, torch.float16)
    new = rows.device.type != "cuda" or torch.cuda.get_device_capability(rows.device) >= _ON_GPUS
    return hasattr(F, "grouped_mm") and aligned and known and new
