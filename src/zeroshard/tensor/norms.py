"""Norms of sharded tensors (collective), equal to one process's norms. All norms of one call take one exchange.

    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)     p.grad.norm()     torch._foreach_norm(gradients)

Each rank sends the norms of its slices, one number for each tensor; the norm of a tensor is the norm of these (5, of 3 and 4), in
fp64 and in rank order, so that all ranks compute the same bits. Results are ordinary tensors, complete when a call returns. For a
slice without elements a rank sends the neutral number (0, or inf for a negative order).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ZeroshardError
from ..utils import torch_compat
from ..utils.tensor_tree import find_tensors
from ..utils.torch_compat import OpOverload
from .home import Sliced


class ShownNorm(Tensor):
    """Norm of a tensor of a model that shows itself as DTensors, and the norm of such norms: programs ask it for `full_tensor()`.

    device_mesh: that of the parameters; every rank has the norm.
    """

    device_mesh: Any

    @classmethod
    def __torch_function__(cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        with torch_compat.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        shown = [tensor for tensor in find_tensors(args) if isinstance(tensor, cls)]
        return cls.of(result, shown[0].device_mesh) if func in _OF_NORMS and shown else result

    @classmethod
    def of(cls, norm: Tensor, mesh: object) -> ShownNorm:
        """Return a norm that shows a mesh."""
        shown = norm.as_subclass(cls)
        shown.device_mesh = mesh
        return shown

    @property
    def placements(self) -> tuple[object, ...]:
        """Replicate() along each axis of the mesh, as of what FSDP2's clipping returns."""
        from torch.distributed.tensor import Replicate  # takes a second

        return (Replicate(),) * self.device_mesh.ndim

    def full_tensor(self) -> Tensor:
        """Return it as an ordinary tensor."""
        return self.as_subclass(Tensor)

    to_local = full_tensor


# what torch's clip_grad_norm_ computes of norms, up to the total norm that it returns
_OF_NORMS = (torch.stack, torch.linalg.vector_norm, Tensor.to)


def take_norms(func: OpOverload, args: tuple, kwargs: dict) -> object:
    """Compute torch.linalg.vector_norm, or torch._foreach_norm of tensors of which some or all are sharded (collective).

    Return NotImplemented for a norm along some of the dimensions, and where autograd would record it.
    """
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    several = isinstance(given["self"], (list, tuple))
    tensors: Sequence[Tensor] = given["self"] if several else [given["self"]]
    dim, order, dtype = given.get("dim"), float(given.get("ord", 2)), given.get("dtype")
    if dim is not None and len({d % max(tensors[0].dim(), 1) for d in dim}) != tensors[0].dim():  # not over all dimensions
        return NotImplemented
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):  # a gradient would reach only the slice
        return NotImplemented
    found: list[Tensor] = [t if isinstance(t, Sliced) else torch.linalg.vector_norm(t, order, dtype=dtype) for t in tensors]
    groups: dict[int, dict[int, Sliced]] = {}  # sharded tensors by the ranks that compute their norms together
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, Sliced):
            groups.setdefault(id(tensor._home.meeting), {})[index] = tensor
    for group in groups.values():
        # torch tells the dtype of its result, and raises for one that it does not accept
        kinds = {tensor.dtype for tensor in group.values()}
        dtypes = {own: torch.linalg.vector_norm(torch.empty(0, dtype=own), dtype=dtype).dtype for own in kinds}
        for (index, tensor), norm in zip(group.items(), _combined(list(group.values()), order), strict=True):
            found[index] = norm.to(tensor.device, dtypes[tensor.dtype])
            if tensor._home.shown is not None:
                found[index] = ShownNorm.of(found[index], tensor._home.shown.place(tensor._home.distribution)[0])
    if several:
        return found
    return found[0].view((1,) * tensors[0].dim()) if given.get("keepdim") else found[0]


def _combined(tensors: list[Sliced], order: float) -> Tensor:
    """Return the norms, (len(tensors),) in fp64 on the host, of tensors of one group of ranks (collective)."""
    measured = torch.stack([_measured(tensor, order) for tensor in tensors]).cpu()  # one transfer for all tensors
    undivided = any(tensor._of_gradient and tensor._home.undivided for tensor in tensors)
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    name = f"{'the gradient of ' if tensors[0]._of_gradient else ''}{tensors[0]._home.name}"
    tensors[0]._home.before_meeting("a norm (torch's clipping takes them, zs.clip_grad_norm_(model, max_norm) does not)")
    names = zlib.crc32("\n".join(tensor._home.name for tensor in tensors).encode()).to_bytes(4, "little")
    # undivided may differ between ranks: all raise, or none
    payload = bytes([undivided]) + names + measured.numpy().tobytes()
    everyone = tensors[0]._home.meeting.exchange(payload, f"norm of {name}{more} (collective: every rank must ask for it)")
    if any(part[0] for part in everyone):
        raise ZeroshardError(
            f"the norm of {name} is not known before the step: zs.backward(model, loss, weight=...) leaves weighted sums, which the step "
            "divides by the sum of weights. Clip with zs.clip_grad_norm_(model, max_norm) or zs.shard(..., max_grad_norm=...)."
        )
    if len({part[1:5] for part in everyone}) > 1:
        raise ZeroshardError(
            f"ranks ask for norms of different tensors at once, this one for that of {name}{more}: ask for the same ones in the same "
            "order on every rank, as of model.parameters(). (DeepSpeed's named_parameters() has a rank's own experts alone.)"
        )
    rows = [torch.frombuffer(bytearray(part[5:]), dtype=torch.float64) for part in everyone]
    table = torch.stack(rows)  # (world, tensors)
    return table.sum(0) if order == 0 else torch.linalg.vector_norm(table, order, dim=0)  # order 0 counts elements


def _measured(tensor: Sliced, order: float) -> Tensor:
    """Return the norm of this rank's slice, 0-D in fp64; the neutral number if the slice is empty or does not count."""
    local = tensor._local
    # neutral in a sum of powers and in a maximum or minimum
    if not tensor._home.counts or (local.numel() == 0 and tensor.numel() > 0):
        return torch.full((), math.inf if order < 0 else 0.0, dtype=torch.float64, device=local.device)
    wide = torch.promote_types(local.dtype, torch.float32)
    return torch.linalg.vector_norm(local, order, dtype=wide).double()


def allow_foreach(*kinds: type) -> None:
    """Let torch.nn.utils.clip_grad_norm_ use foreach for these classes by default: one exchange for all parameters.

    They are added to torch's list of foreach types, as torch's own module adds DTensor.
    """
    known = torch_compat.FOREACH_TYPES
    known += [kind for kind in kinds if kind not in known]
