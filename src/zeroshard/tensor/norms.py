"""Norms of sharded tensors (collective), equal to one process's norms. All norms of one call take one exchange.

    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)     p.grad.norm()     torch._foreach_norm(gradients)

Each rank sends the norms of its slices, one number for each tensor; the norm of a tensor is the norm of these, in fp64 and in
rank order, so that all ranks compute the same bits. Results are ordinary tensors, complete when a call returns. For a slice
without elements a rank sends the neutral number (0, or inf for a negative order).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import ZeroshardError
from ..utils import torch_compat


class Slices(Protocol):
    """The part of a sharded tensor's interface (tensor/sharded_tensor.py) that is used here."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    _local: Tensor
    _home: Any
    _of_gradient: bool

    def numel(self) -> int:
        """Return the number of elements of the whole tensor."""


def whole_norm(func: Any, args: tuple, kwargs: dict, kind: type) -> Any:
    """Compute torch.linalg.vector_norm of a tensor of class `kind` (collective).

    Return NotImplemented for a norm along some of the dimensions, and where autograd would record it.
    """
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    tensor, dim, order = given["self"], given.get("dim"), given.get("ord", 2)
    if dim is not None and len({d % max(tensor.dim(), 1) for d in dim}) != tensor.dim():  # not over all dimensions
        return NotImplemented
    if _grows(tensor):
        return NotImplemented
    (norm,) = norms([tensor], order, given.get("dtype"), kind)
    return norm.view((1,) * tensor.dim()) if given.get("keepdim") else norm


def foreach_norm(func: Any, args: tuple, kwargs: dict, kind: type) -> Any:
    """Compute torch._foreach_norm of tensors, some or all of class `kind` (collective); NotImplemented as in `whole_norm`."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    if any(map(_grows, given["self"])):
        return NotImplemented
    return norms(given["self"], given.get("ord", 2), given.get("dtype"), kind)


def _grows(tensor: Tensor) -> bool:
    """Return whether autograd would record a norm of the tensor; its gradient would reach only the slice, and be lost."""
    return torch.is_grad_enabled() and tensor.requires_grad


def norms(tensors: Sequence[Any], order: float, dtype: torch.dtype | None, kind: type) -> list[Tensor]:
    """Return the norm of each tensor; norms of tensors of class `kind` are over all ranks (collective)."""
    order = float(order)
    plain = [None if isinstance(t, kind) else t for t in tensors]
    found: list[Any] = [None if t is None else torch.linalg.vector_norm(t, order, dtype=dtype) for t in plain]
    groups: dict[int, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if found[index] is None:
            groups.setdefault(id(tensor._home.meeting), []).append(index)
    for indices in groups.values():
        mine = [tensors[index] for index in indices]
        dtypes = {own: _result_dtype(own, dtype) for own in {tensor.dtype for tensor in mine}}
        for index, tensor, norm in zip(indices, mine, _combined(mine, order), strict=True):
            found[index] = norm.to(tensor.device, dtypes[tensor.dtype])
    return found


def _combined(tensors: list[Slices], order: float) -> Tensor:
    """Return the norms, (len(tensors),) in fp64 on the host, of tensors of one group of ranks (collective)."""
    measured = torch.stack([_measured(tensor, order) for tensor in tensors]).cpu()  # one transfer for all tensors
    undivided = any(tensor._of_gradient and tensor._home.undivided for tensor in tensors)
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    name = f"{'the gradient of ' if tensors[0]._of_gradient else ''}{tensors[0]._home.name}"
    tensors[0]._home.before_meeting("a norm (torch's clipping takes them, zs.clip_grad_norm_(model, max_norm) does not)")
    payload = bytes([undivided]) + measured.numpy().tobytes()  # undivided may differ between ranks: all raise, or none
    everyone = tensors[0]._home.meeting.exchange(payload, f"norm of {name}{more} (collective: every rank must ask for it)")
    if any(part[0] for part in everyone):
        raise ZeroshardError(
            f"the norm of {name} is not known before the step: zs.backward(model, loss, weight=...) leaves weighted sums, which the step "
            "divides by the sum of weights. Clip with zs.clip_grad_norm_(model, max_norm) or zs.shard(..., max_grad_norm=...)."
        )
    rows = [torch.frombuffer(bytearray(part[1:]), dtype=torch.float64) for part in everyone]
    table = torch.stack(rows)  # (world, tensors)
    return table.sum(0) if order == 0 else torch.linalg.vector_norm(table, order, dim=0)  # order 0 counts elements


def _measured(tensor: Slices, order: float) -> Tensor:
    """Return the norm of this rank's slice, 0-D in fp64; the neutral number if the slice is empty or does not count."""
    local = tensor._local
    # neutral in a sum of powers and in a maximum or minimum
    if not tensor._home.counts or (local.numel() == 0 and tensor.numel() > 0):
        return torch.full((), math.inf if order < 0 else 0.0, dtype=torch.float64, device=local.device)
    wide = torch.promote_types(local.dtype, torch.float32)
    return torch.linalg.vector_norm(local, order, dtype=wide).double()


def _result_dtype(of: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of torch's result. Raise torch's error for a dtype that it does not accept."""
    return torch.linalg.vector_norm(torch.empty(0, dtype=of), dtype=wanted).dtype


def allow_foreach(*kinds: type) -> None:
    """Let torch.nn.utils.clip_grad_norm_ use foreach for these classes by default: one exchange for all parameters.

    They are added to torch's list of foreach types, as torch's own module adds DTensor.
    """
    known = torch_compat.FOREACH_TYPES
    known += [kind for kind in kinds if kind not in known]
