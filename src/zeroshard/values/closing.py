"""zs.close: gathers whole values, and makes the parameters of a sharded model ordinary again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..engine import hooks
from ..engine.runtime import Runtime, runtime_of
from ..engine.unit import ParamGroup
from ..engine.user_hooks import give_back
from ..engine.verbs import begin
from ..errors import StatesAway, ZeroshardError
from ..tensor.attributes import attributes_of
from ..tensor.part import Distribution
from ..tensor.sharded_tensor import ReplicatedParameter, set_data
from ..utils.torch_compat import carry_hooks, own_parameters, swap


def close(model: nn.Module, *, restore: bool = True) -> nn.Module:
    """Make a sharded model an ordinary one again, with whole parameters, and free all states and buffers (collective).

    The optimizer cannot be used afterwards. Parameters get the dtype that they had before zs.shard, and the values of their fp32
    masters, if they have any. Frozen parameters have no masters and stay rounded to the precision, unless `dtypes` names them.

    Args:
        restore: False for a model that is too large for one rank: close frees the parameters too and removes the files of
            offloaded states, and the model cannot be used any more.

    After the failure of a disk or a peer, parameters can not be gathered: close removes the files and raises the error again.
    """
    runtime = runtime_of(model)
    if runtime.closed:  # with restore=False
        return model
    begin(runtime, "zs.close")
    try:
        runtime.tiers.check()
        runtime.moved.check()
        runtime.comm.exchange(b"", "zs.close: begin")  # a rank may still be writing to memory that the others are about to read
    except StatesAway:
        raise
    except ZeroshardError:
        runtime.moved.forget()
        runtime.tiers.close()
        raise
    if runtime.gate.saver is not None:
        runtime.gate.saver.close()
    for unit in runtime.units:
        unit.entries.swap_out()
        unit.cancel_unshard()
        whole = [(group, whole_values(group, runtime)) for group in unit.groups] if restore else []
        unit.reshard()
        unit.guard(not restore)  # restore=False: compute parameters that the program kept raise when used
        for group, values in whole:
            for index, value in enumerate(values):
                restore_parameter(group, index, value)
    if restore:
        hooks.detach(runtime)
        for optimizer in list(runtime.optimizers.waiting):
            optimizer.give_back()
    for optimizer in runtime.optimizers.sharded:
        optimizer.core.close()
    for group in runtime.groups:
        if group.grads is not None:
            group.grads.close()
        group.values.cancel_fetch()
        group.values.release()
    runtime.tiers.close()
    runtime.closed = True
    runtime.comm.exchange(b"", "zs.close")  # no rank may still use the buffers that `release` frees
    runtime.topology.release()
    runtime.end_answering()
    runtime.units, runtime.groups = [], []  # drops the references to them
    if restore:
        del runtime.model.__dict__["_zeroshard"]  # with restore=False the hooks stay: they raise ModelClosed
    return model


@torch.no_grad()
def whole_values(group: ParamGroup, runtime: Runtime, masters: bool = True) -> list[Tensor]:
    """Return copies of all whole parameters of a group, with `masters` from masters if there are any (collective)."""
    flat = group.values.full
    if masters:
        runtime.gate.refresh([group])
    if masters and group.masters.rest is not None and not group.masters.whole:
        source = group.comm.allocate(group.layout.shard_numel, group.masters.rest.dtype, whole=False)
        source.tensor.copy_(group.masters.rest.load(0, group.masters.rest.numel))
        runtime.comm.exchange(b"", "masters in place")  # peers may read `source` from here on ...
        flat = torch.empty(group.layout.numel, dtype=group.masters.rest.dtype, device=runtime.comm.device)
        group.comm.reserve(source.number, group.layout.shard_numel, group.masters.rest.dtype)
        group.comm.gather(flat, source, "gather masters").wait()
        runtime.comm.exchange(b"", "masters gathered")  # ... until here, where it may be freed
    elif masters and group.masters.rest is not None:
        if group.values.behind:
            group.gather().wait()
        flat = group.masters.rest.load(0, group.masters.rest.numel)
    elif group.values.sharded:
        group.gather().wait()
    return [flat[s.offset : s.stop].view(s.shape).clone() for s in group.layout.slots]


def restore_parameter(group: ParamGroup, index: int, value: Tensor) -> None:
    """Make parameter `index` of a group an ordinary one again, with this value, in the dtype in which it was given."""
    spec, param = group.specs[index], group.params[index]
    value = value.to(spec.given_dtype)
    if group.values.sharded:
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
                own_parameters(owner)[attribute] = compute
    else:
        set_data(param, value)
        give_back(param)
        if type(param) is ReplicatedParameter:
            object.__setattr__(param, "__class__", nn.Parameter)
        param.__dict__.pop("_home", None)
    if spec.distribution is not None:
        owner, attribute = spec.owners[0]
        whole = _restored(own_parameters(owner)[attribute], spec.distribution)
        for owner, attribute in spec.owners:
            own_parameters(owner)[attribute] = whole


def _restored(local: nn.Parameter, distribution: Distribution) -> nn.Parameter:
    """Return the DTensor parameter over a local one that is no longer in a flat buffer (zs.close)."""
    whole = nn.Parameter(distribution.wrap(local.detach()), requires_grad=local.requires_grad)
    whole.__dict__.update({name: value for name, value in local.__dict__.items() if name != "_distribution"})
    return whole
