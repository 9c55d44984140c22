"""Checks, before a model is changed, that ranks have the same model, optimizer, options and values.

The flat layout follows from all of these: if one of them differed, ranks would reduce different parameters together.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import zlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.base import Comm
from ..comm.codec import exchange_values
from ..config import Config, Offload
from ..errors import ModelMismatch
from ..tensor.sharded_tensor import ShardedTensor
from .auto_wrap import find_blocks
from .parameter import ParamSpec

_PER_RANK = {"path", "offload_path"}  # options that may differ: each rank may have a disk of its own


def check_same_model(
    comm: Comm, model: nn.Module, specs: list[ParamSpec], config: Config, optimizer: torch.optim.Optimizer | None,
    parts: list[list[int]] | None = None,
) -> None:  # fmt: skip
    """Raise ModelMismatch on every rank if ranks differ, with each rank's version of the first difference (collective).

    parts: groups of ranks of the mesh.
    """
    if comm.world_size == 1 or comm.imagined:
        return
    described = {
        "parameter": [_parameter(spec) for spec in specs],
        "buffer": [f"{name} {_kind(buffer)}" for name, buffer in model.named_buffers()],
        "optimizer option": list(_optimizer(optimizer)),
        "parameter group": list(_placed(specs, optimizer)),
        "option": [*_options(model, config), f"mesh={parts}"],
    }
    digest = hashlib.sha256(repr(described).encode()).digest()  # 32 bytes; descriptions travel only where they differ
    if len(set(comm.exchange(digest, "zs.shard: compare models"))) == 1:
        return
    everyone = exchange_values(comm, described, "zs.shard: find difference")
    for what in described:
        rows = zip_longest(*(rank[what] for rank in everyone), fillvalue=f"no such {what}")
        differing = [(position, row) for position, row in enumerate(rows) if len(set(row)) > 1]
        if differing:
            shown = differing if what == "option" else differing[:1]
            columns = zip(*(row for _, row in shown), strict=True)
            text = "; ".join(f"rank {rank}: {', '.join(column)}" for rank, column in enumerate(columns))
            where = f"at {what} {shown[0][0]}" if what in ("parameter", "buffer") else f"in {what}s"
            raise ModelMismatch(
                f"ranks built different models or optimizers, or gave different options. First difference, {where}: {text}. "
                "Build the same model and optimizer, in the same order, with the same options on every rank."
            )
    raise AssertionError("digests differ, descriptions do not")


def _parameter(spec: ParamSpec) -> str:
    tied = f", tied {len(spec.owners)} times" if len(spec.owners) > 1 else ""
    return f"{spec.name} {_kind(spec.original)}{'' if spec.requires_grad else ' frozen'}{tied}"


def _kind(tensor: Tensor) -> str:
    where = " on meta" if tensor.is_meta else " sharded" if isinstance(tensor, ShardedTensor) else ""
    return f"{tuple(tensor.shape)} {tensor.dtype}{where}"


def _optimizer(optimizer: torch.optim.Optimizer | None) -> Iterator[str]:
    """Yield texts of the optimizer's class, and of the comparable options of each parameter group."""
    if optimizer is None:
        yield "no optimizer"
        return
    yield f"{type(optimizer).__name__} with {len(optimizer.param_groups)} parameter groups"
    for number, group in enumerate(optimizer.param_groups):
        for key in sorted(group.keys() - {"params", "param_names"}):
            value = _comparable(group[key])
            if value is not None:
                yield f"group {number}: {key}={value}"


def _comparable(value: Any) -> str | None:
    """Return a text of an option's value that is equal on ranks with equal values; None for a value that has no such text."""
    if isinstance(value, Tensor):  # a learning rate on the device
        return str(value.tolist()) if not value.is_meta and value.numel() == 1 else None
    if isinstance(value, (list, tuple)):
        parts = [_comparable(part) for part in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str, torch.dtype)) else None


def _placed(specs: list[ParamSpec], optimizer: torch.optim.Optimizer | None) -> Iterator[str]:
    """Yield the optimizer group of each parameter, since the parameters of a group lie together in the layout."""
    groups = optimizer_groups(optimizer)
    for spec in specs if optimizer is not None else ():
        number = groups.get(id(spec.original))
        yield f"{spec.name} in {'no group' if number is None else f'group {number}'}"


def _options(model: nn.Module, config: Config) -> Iterator[str]:
    """Yield texts of all options; of a function that chooses units its result, since its address differs between ranks."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Offload):
            parts = [f for f in dataclasses.fields(value) if f.name not in _PER_RANK]
            yield from (f"{field.name}.{part.name}={getattr(value, part.name)!r}" for part in parts)
        elif field.name == "units" and callable(value):
            yield f"units={[name for name, _ in find_blocks(model, value)]}"
        elif field.name not in _PER_RANK:
            yield f"{field.name}={value!r}"


def optimizer_groups(optimizer: torch.optim.Optimizer | None) -> dict[int, int]:
    """Return id of each parameter -> index of its optimizer group."""
    groups = optimizer.param_groups if optimizer is not None else ()
    return {id(param): number for number, group in enumerate(groups) for param in group["params"]}


def agree_on_values(comm: Comm, tensors: list[tuple[str, Tensor]]) -> list[str]:
    """Copy rank 0's values to ranks whose values differ (collective); return the names that differed. tensors: whole ones."""
    if comm.world_size == 1 or comm.imagined:
        return []
    sums = [zlib.crc32(_bytes(tensor)) for _, tensor in tensors]
    everyone = exchange_values(comm, sums, "zs.shard: compare values")
    differing = [i for i in range(len(tensors)) if len({sums[i] for sums in everyone}) > 1]
    for i in differing:
        name, tensor = tensors[i]
        data = bytes(_bytes(tensor)) if comm.rank == 0 else b""
        given = comm.exchange(data, f"zs.shard: values of {name}")[0]
        if comm.rank != 0:
            with torch.no_grad():
                flat = torch.frombuffer(bytearray(given), dtype=tensor.dtype)
                distinct(tensor.data, tensor).copy_(distinct(flat.view(tensor.shape), tensor))
    return [tensors[i][0] for i in differing]


def agree_on_initial_values(
    group: Comm, peers: Comm, model: nn.Module, specs: list[ParamSpec], *, parameters: bool, buffers: bool
) -> None:
    """Copy rank 0's values to all data-parallel ranks, as DDP does (collective).

    Args:
        group: the data-parallel ranks. peers: all ranks that hold parameters which model axes do not cut; these must be alike.
        parameters: False if the values of parameters will come from a checkpoint. buffers: copy values of buffers, too.

    Raises:
        ModelMismatch: parameters differ along model axes (on all ranks).
    """
    whole = [spec for spec in specs if not (spec.original.is_meta or isinstance(spec.original, ShardedTensor))]
    if parameters and peers.world_size > group.world_size and not peers.imagined:
        _check_replicas(peers, group.rank == 0, [(spec.name, spec.original) for spec in whole if spec.part is None])
    tensors: list[tuple[str, Tensor]] = [(spec.name, spec.original) for spec in whole if parameters]
    tensors += [(name, buffer) for name, buffer in model.named_buffers() if buffers and not buffer.is_meta]
    differing = agree_on_values(group, tensors)
    if differing and group.rank == 0:
        print(
            f"zeroshard: ranks had different initial values ({len(differing)} tensors, first {differing[0]}): all ranks have those of "
            "rank 0 now",
            file=sys.stderr,
        )


def _check_replicas(comm: Comm, first: bool, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Raise ModelMismatch, on all ranks, if tensors that model axes do not cut differ along these axes (collective).

    comm: all ranks with these tensors. first: this rank is the first of its data-parallel ranks, whose values the others copy.
    """
    mine = {name: (tuple(tensor.shape), zlib.crc32(_bytes(tensor))) for name, tensor in tensors} if first else None
    everyone = [told for told in exchange_values(comm, mine, "zs.shard: compare values along model axes") if told is not None]
    names = [name for name in everyone[0] if any(told.get(name) != everyone[0][name] for told in everyone)]
    if names:
        raise ModelMismatch(
            f"{len(names)} parameters, first {names[0]}, are no DTensors and differ along the model's axes of the mesh (tp, ep). Give all "
            "ranks the same values (the same seed before the model is made); make each part of a larger parameter a DTensor "
            "(parallelize_module, distribute_tensor, DTensor.from_local)."
        )


def distinct(value: Tensor, like: Tensor) -> Tensor:
    """Return the elements of `value` that have memory of their own in `like`, an expanded tensor: the first of shared rows."""
    for dim, stride in enumerate(like.stride()):
        value = value.narrow(dim, 0, 1) if stride == 0 and like.shape[dim] > 1 else value
    return value


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")
