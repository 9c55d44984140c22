"""zs.close: gathers whole values, and makes the parameters of a sharded model ordinary again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..tensor import distributed
from ..tensor.attributes import attributes_of
from ..tensor.sharded_tensor import ReplicatedParameter, set_data
from ..utils import torch_compat
from ..utils.torch_compat import carry_hooks, swap
from .runtime import Runtime
from .unit import ParamGroup
from .user_hooks import give_back


@torch.no_grad()
def whole_values(group: ParamGroup, runtime: Runtime) -> list[Tensor]:
    """Return copies of all whole parameters of a group, from masters if there are any (collective)."""
    if runtime.optimizer is not None:
        runtime.gate.wait()
        runtime.optimizer.core.refresh_masters(group)
    flat = torch.empty(0)
    if group.master is not None and not group.masters.whole:
        source = group.comm.allocate(group.layout.shard_numel, group.master.dtype, whole=False)
        source.tensor.copy_(group.master.load(0, group.master.numel))
        runtime.comm.exchange(b"", "masters in place")  # peers may read `source` from here on ...
        flat = torch.empty(group.layout.numel, dtype=group.master.dtype, device=runtime.comm.device)
        group.comm.reserve(source.number, group.layout.shard_numel, group.master.dtype)
        group.comm.gather(flat, source, "gather masters").wait()
        runtime.comm.exchange(b"", "masters gathered")  # ... until here, where it may be freed
    elif group.master is not None:
        flat = group.master.load(0, group.master.numel)
    else:
        group.values.gather().wait()
        flat = group.values.full
    return [flat[s.offset : s.stop].view(s.shape).clone() for s in group.layout.slots]


def restore_parameter(group: ParamGroup, index: int, value: Tensor) -> None:
    """Make parameter `index` of a group an ordinary one again, with this value, in the dtype in which it was given."""
    _restore_local(group, index, value)
    spec = group.specs[index]
    if spec.distribution is not None:
        owner, attribute = spec.owners[0]
        whole = distributed.restored(torch_compat.own_parameters(owner)[attribute], spec.distribution)
        for owner, attribute in spec.owners:
            torch_compat.own_parameters(owner)[attribute] = whole


def _restore_local(group: ParamGroup, index: int, value: Tensor) -> None:
    spec, param = group.specs[index], group.params[index]
    value = value.to(spec.given_dtype)
    if not group.values.sharded:
        set_data(param, value)
        give_back(param)
        if type(param) is ReplicatedParameter:
            object.__setattr__(param, "__class__", nn.Parameter)
        param.__dict__.pop("_home", None)
        return
    compute = group.compute[index]
    give_back(compute)
    compute.data = value
    compute.requires_grad_(param.requires_grad)  # the user may have switched it
    compute.__dict__.update(attributes_of(param))
    del param.__dict__["_compute"]
    if swap(param, compute):
        carry_hooks(compute, param)
    else:
        for owner, attribute in spec.owners:
            torch_compat.own_parameters(owner)[attribute] = compute


def end(runtime: Runtime) -> None:
    """Mark the model as closed: free buffers, files and communicators, and drop the references to units (collective)."""
    for group in runtime.groups:
        if group.grads is not None:
            group.grads.close()
        group.values.forget()
        group.values.release()
    runtime.reductions.pool.close()
    runtime.tiers.close()
    runtime.closed = True
    runtime.comm.exchange(b"", "zs.close")  # no rank may still use the buffers that `release` frees
    runtime.topology.release()
    runtime.end_answering()
    runtime.units, runtime.groups = [], []
