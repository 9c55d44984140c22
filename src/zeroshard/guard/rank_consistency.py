"""Checks, before a model is changed, that ranks have the same model, optimizer, options and values.

The flat layout follows from all of these: if one of them differed, ranks would reduce different parameters together.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import sys
import zlib
from itertools import zip_longest

import torch
from torch import Tensor, nn

from ..config import Config, Offload
from ..engine.comm.base import Comm
from ..engine.comm.messages import exchange_values
from ..engine.inner_optimizer import optimizer_groups
from ..engine.parameter import ParamSpec
from ..errors import ModelMismatch
from ..policies import find_blocks
from ..tensor.sharded_tensor import ShardedTensor, checksum
from ..utils.aligned import host_bytes

_PER_RANK = {"path", "offload_path"}  # options that may differ: each rank may have a disk of its own


def check_same_model(
    comm: Comm, model: nn.Module, specs: list[ParamSpec], config: Config, optimizer: torch.optim.Optimizer | None,
    mesh: str = "",
) -> None:  # fmt: skip
    """Raise ModelMismatch on every rank if ranks differ, with each rank's version of the first difference (collective).

    mesh: `Axes.layout`.
    """
    if not comm.control.alone:
        check_alike(comm, _described(model, specs, config, optimizer, mesh))


def check_alike(comm: Comm, described: dict[str, list[str]], verb: str = "zs.shard", compared: str = "models") -> None:
    """Raise ModelMismatch on every rank if ranks' descriptions differ (collective). described: texts, by kind, of what is compared."""
    digest = hashlib.sha256(repr(described).encode()).digest()  # 32 bytes; descriptions travel only where they differ
    if len(set(comm.exchange(digest, f"{verb}: compare {compared}"))) == 1:
        return
    everyone = exchange_values(comm, described, f"{verb}: find difference")
    for what in described:
        rows = zip_longest(*(rank[what] for rank in everyone), fillvalue=f"no such {what}")
        differing = [(position, row) for position, row in enumerate(rows) if len(set(row)) > 1]
        if differing:
            shown = differing if what == "option" else differing[:1]
            columns = zip(*(row for _, row in shown), strict=True)
            text = "; ".join(f"rank {rank}: {', '.join(column)}" for rank, column in enumerate(columns))
            where = f"at {what} {shown[0][0]}" if what in ("parameter", "buffer") else f"in {what}s"
            raise ModelMismatch(
                f"{'' if verb == 'zs.shard' else f'{verb}: '}ranks built different models or optimizers, or gave different options. "
                f"First difference, {where}: {text}. Build the same model and optimizer, in the same order, with the same options on "
                "every rank."
            )
    raise AssertionError("digests differ, descriptions do not")


def _described(
    model: nn.Module, specs: list[ParamSpec], config: Config, optimizer: torch.optim.Optimizer | None, mesh: str
) -> dict[str, list[str]]:  # fmt: skip
    """Return all that must be the same on every rank as texts, by kind."""
    parameters = []
    for spec in specs:
        tied = f", tied {len(spec.owners)} times" if len(spec.owners) > 1 else ""
        parameters.append(f"{spec.name} {_kind(spec.original, spec.whole_shape)}{'' if spec.requires_grad else ' frozen'}{tied}")
    options = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Offload):
            fields = [f.name for f in dataclasses.fields(value) if f.name not in _PER_RANK]
            options += [f"{field.name}.{name}={getattr(value, name)!r}" for name in fields]
        elif field.name == "units" and callable(value):  # its address differs between ranks
            options.append(f"units={[name for name, _ in find_blocks(model, value)]}")
        elif field.name not in _PER_RANK:
            options.append(f"{field.name}={value!r}")
    return {
        "parameter": parameters,
        "buffer": [f"{name} {_kind(buffer)}" for name, buffer in model.named_buffers()],
        **described_optimizer(specs, optimizer),
        "option": [*options, f"mesh={mesh}"],
    }


def described_optimizer(specs: list[ParamSpec], optimizer: torch.optim.Optimizer | None) -> dict[str, list[str]]:
    """Return all of an optimizer that must be the same on every rank as texts, by kind."""
    kinds, placed = ["no optimizer"], []
    if optimizer is not None:
        kinds = [f"{type(optimizer).__name__} with {len(optimizer.param_groups)} parameter groups"]
        for number, group in enumerate(optimizer.param_groups):
            values = {key: _comparable(group[key]) for key in sorted(group.keys() - {"params", "param_names"})}
            kinds += [f"group {number}: {key}={value}" for key, value in values.items() if value is not None]
        groups = optimizer_groups(optimizer)  # the parameters of a group lie together in the layout
        for spec in specs:
            place = groups.get(id(spec.original))
            placed.append(f"{spec.name} in {'no group' if place is None else f'group {place}'}")
    return {"optimizer option": kinds, "parameter group": placed}


def _kind(tensor: Tensor, shape: tuple[int, ...] | None = None) -> str:
    where = " on meta" if tensor.is_meta else " sharded" if isinstance(tensor, ShardedTensor) else ""
    return f"{shape or tuple(tensor.shape)} {tensor.dtype}{where}"


def _comparable(value: object) -> str | None:
    """Return a text of an option's value that is equal on ranks with equal values; None for a value that has no such text."""
    if isinstance(value, Tensor):  # a learning rate on the device
        return str(value.tolist()) if not value.is_meta and value.numel() == 1 else None
    if isinstance(value, (list, tuple)):
        parts = [_comparable(part) for part in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str, torch.dtype)) else None


def agree_on_values(comm: Comm, tensors: list[tuple[str, Tensor]], label: str = "zs.shard: compare values") -> list[str]:
    """Copy rank 0's values to ranks whose values differ (collective); return the names that differed. tensors: whole ones."""
    if comm.control.alone:
        return []
    sums = struct.Struct(f"<{len(tensors)}I")
    _, told = comm.control.compare(sums.pack(*(checksum(tensor) for _, tensor in tensors)), label)
    everyone = [sums.unpack(part) for part in told or ()]  # none: all are alike
    differing = [i for i, column in enumerate(zip(*everyone, strict=True)) if len(set(column)) > 1]
    for i in differing:
        name, tensor = tensors[i]
        data = bytes(host_bytes(tensor)) if comm.rank == 0 else b""
        given = comm.exchange(data, f"{label.partition(':')[0]}: values of {name}")[0]
        if comm.rank != 0:
            with torch.no_grad():
                flat = torch.frombuffer(bytearray(given), dtype=tensor.dtype)
                distinct(tensor.data, tensor).copy_(distinct(flat.view(tensor.shape), tensor))
    return [tensors[i][0] for i in differing]


def agree_on_initial_values(
    group: Comm, peers: Comm, model: nn.Module, specs: list[ParamSpec], *, parameters: bool, buffers: bool,
    divided: tuple[Comm, list[ParamSpec]] | None = None,
) -> None:  # fmt: skip
    """Copy rank 0's values to all data-parallel ranks, as DDP does (collective).

    Args:
        group: the data-parallel ranks. peers: all ranks that hold parameters which model axes do not cut; these must be alike.
        parameters: False if the values of parameters will come from a checkpoint. buffers: copy values of buffers, too.
        divided: the ranks of `group` that hold the same experts, and the parameters of these, which are copied among them alone.

    Raises:
        ModelMismatch: parameters differ along model axes (on all ranks).
    """
    whole = [spec for spec in specs if not (spec.original.is_meta or isinstance(spec.original, ShardedTensor))]
    if parameters:
        _refuse_other_writes(specs)
    if parameters and peers.world_size > group.world_size and not peers.imagined:
        uncut = [(spec.name, spec.original) for spec in whole if spec.part is None]
        sums = (
            {name: (tuple(tensor.shape), zlib.crc32(host_bytes(tensor))) for name, tensor in uncut} if group.rank == 0 else None
        )
        everyone = exchange_values(peers, sums, "zs.shard: compare values along model axes")
        told = [each for each in everyone if each is not None]  # of the first of each rank's data-parallel ranks
        names = [name for name in told[0] if any(other.get(name) != told[0][name] for other in told)]
        if names:
            raise ModelMismatch(
                f"{len(names)} parameters, first {names[0]}, are no DTensors and differ along the model's axes of the mesh (tp, ep). Give "
                "all ranks the same values (the same seed before the model is made); make each part of a larger parameter a DTensor "
                "(parallelize_module, distribute_tensor, DTensor.from_local)."
            )
    experts = [] if divided is None else [spec for spec in divided[1] if spec in whole and parameters]
    tensors: list[tuple[str, Tensor]] = [(spec.name, spec.original) for spec in whole if parameters and spec not in experts]
    tensors += [(name, buffer) for name, buffer in model.named_buffers() if buffers and not buffer.is_meta]
    differing = agree_on_values(group, tensors)
    if divided is not None:
        differing += agree_on_values(divided[0], [(spec.name, spec.original) for spec in experts])
    if differing and group.rank == 0:
        print(
            f"zeroshard: ranks had different initial values ({len(differing)} tensors, first {differing[0]}): all ranks have those of "
            "rank 0 now",
            file=sys.stderr,
        )


def _refuse_other_writes(specs: list[ParamSpec]) -> None:
    """Raise ModelMismatch, on all ranks, for parameters of zs.init that ranks have written differently once these were cut."""
    born = {spec.name: spec.original._home for spec in specs if isinstance(spec.original, ShardedTensor)}
    names = [name for name, home in born.items() if home.traced]
    if not names:
        return
    comm = born[names[0]].comm  # all ranks of zs.init, among which parameters are cut
    traces = struct.Struct(f"<{len(names)}I")
    mine = traces.pack(*(born[name].trace for name in names))
    _, told = comm.control.compare(mine, "zs.shard: compare what was written under zs.init")
    if told is None:
        return
    everyone = [traces.unpack(part) for part in told]
    found = [name for name, told in zip(names, zip(*everyone, strict=True), strict=True) if len(set(told)) > 1]
    if found:
        raise ModelMismatch(
            f"ranks have written different values into {', '.join(found[:5])}{' ...' * (len(found) > 5)} after zs.init had cut it: each "
            "rank would hold a part of another model. Write the same on every rank (same seed), or let one rank write: `with "
            "zs.gathered(module, modifier_rank=0):`."
        )


def distinct(value: Tensor, like: Tensor) -> Tensor:
    """Return the elements of `value` that have memory of their own in `like`, an expanded tensor: the first of shared rows."""
    for dim, stride in enumerate(like.stride()):
        value = value.narrow(dim, 0, 1) if stride == 0 and like.shape[dim] > 1 else value
    return value
