"""`zs.shard(stage="auto")`: chooses the stage and the tiers at run time, by the memory that is free.

    bytes that each choice would hold (tiers/room.py:held_by) + activations of the sample --> the first in CHOICES that fits on every rank

Ranks exchange their free memory, so that all choose the same. CHOICES are also those of `zeroshard plan --auto`, which chooses a
mesh, micro-batches, activation checkpoints as well.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.topology import check, imagined_topology
from ..config import CHOICES, DEVICE_NAMES, STATES, Config, Tier
from ..engine.comm.base import DirectComm
from ..engine.comm.messages import exchange_values
from ..engine.inner_optimizer import optimizer_groups
from ..engine.parameter import ParamSpec
from ..engine.shard_model import Inventory
from ..engine.topology import Parts
from ..errors import ConfigError, ZeroshardError
from ..formats.state_plans import state_plans
from ..policies import partition
from ..tiers.room import held_by
from ..utils import torch_compat
from ..utils.host import host_identity
from ..utils.host_memory import limits
from ..utils.tensor_tree import find_tensors
from ..utils.torch_compat import FakeTensorMode, without_fake_logs

AUTO = "auto"
_UNKNOWN = 1 / 3  # fraction of the device left for activations if no sample tells their size
_FREE = 0.1  # fraction of the device left beside known activations, for temporaries and fragmentation


def is_auto(stage: object, options: Mapping[str, object], sample: object) -> bool:
    """Return whether stage="auto" was given. Raise ConfigError for options that it chooses, and for a sample without it."""
    auto = isinstance(stage, str) and stage == AUTO
    given = [name for name in (*STATES, "preset") if options.get(name) is not None]
    if auto and given:
        raise ConfigError(f"stage='auto' chooses the offload options as well: leave out {given[0]}, or give a stage from 0 to 3.")
    if sample is not None and not auto:
        raise ConfigError("sample: only stage='auto' uses it, to measure activations. Leave sample out, or give stage='auto'.")
    return auto


def choose(
    config: Config, comm: DirectComm, model: nn.Module, specs: list[ParamSpec], optimizer: torch.optim.Optimizer | None, sample: object,
    parts: Parts | None = None,
) -> Config:  # fmt: skip
    """Return `config` with the first of CHOICES that fits on every rank (collective).

    sample: an input of the model, or a tuple or mapping of them; its forward runs on fake tensors, to measure the activations
    that are saved for backward. parts: the groups along a mesh's inner axis. Raise ConfigError, on every rank, if nothing fits.
    """
    check(config, comm, parts)
    kept = None if sample is None else _kept_nbytes(model, sample, config)
    room = _room(comm, specs, kept)
    activations = f"beside {_gib(kept or 0)} of activations"
    if kept is None:
        activations = "with a third left for activations (pass sample= to measure them)"
    states = state_plans(config, optimizer, specs)
    inventory = Inventory(partition(model, config, specs), states, optimizer_groups(optimizer))
    tried: list[str] = []
    for stage, tiers in CHOICES:
        if (comm.world_size == 1) != (stage == 0) and set(tiers) == {Tier.DEVICE}:
            continue
        no_folder = Tier.DISK in tiers and config.offload_path is None
        if no_folder or (Tier.HOST in tiers and Tier.DISK not in tiers and not comm.streams.separate_host):
            continue
        try:
            chosen: dict[str, Any] = {name: DEVICE_NAMES[tier] for name, tier in zip(STATES, tiers, strict=True)}
            candidate = dataclasses.replace(config, stage=stage, **chosen)
        except ConfigError:  # it conflicts with an option
            continue
        held = _held(inventory, candidate, comm, parts)
        places = [f"{name.removeprefix('offload_')} on {place}" for name, place in chosen.items() if place != "none"]
        words = ", ".join([f"stage {stage}", *places])
        if all(held.get(tier, 0) <= nbytes for tier, nbytes in room.items()):
            if comm.rank == 0:
                takes = f"{words} takes {_gib(held[Tier.DEVICE])} of the {_gib(room[Tier.DEVICE])} of a rank's device"
                before = f"; {tried[-1]} does not fit" if tried else ""
                print(f"zeroshard: stage='auto': {takes}, {activations}{before}", file=sys.stderr)
            return candidate
        tried.append(f"{words} {_gib(held[Tier.DEVICE])}")
    raise ConfigError(
        f"stage='auto': no stage fits into the {_gib(room[Tier.DEVICE])} that each rank's device has for it (host: "
        f"{_gib(room[Tier.HOST])}); on the device they take: {', '.join(tried)}. Use more ranks, offload_path= a folder on a local disk, "
        "or `zeroshard plan` to see what would fit."
    )


def _room(comm: DirectComm, specs: list[ParamSpec], kept: int | None) -> dict[Tier, int]:
    """Return the bytes of device and host that every rank has for its states (collective). kept: bytes of activations, if known.

    What the device has includes the model's present parameters; on a CPU all ranks of a host share its memory.
    """
    host = min((limit.nbytes for limit in limits()), default=0) or sys.maxsize
    device, on_cuda = host, comm.device.type == "cuda"
    if on_cuda:
        free, _ = torch.cuda.mem_get_info(comm.device)
        device = free + torch.cuda.memory_reserved(comm.device) - torch.cuda.memory_allocated(comm.device)
    device += sum(spec.original.nbytes for spec in specs if spec.original.device.type == comm.device.type)
    told = exchange_values(comm, [device, host, list(host_identity()), kept or 0], "zs.shard: stage='auto'")
    sharers = {tuple(each[2]): sum(other[2] == each[2] for other in told) for each in told}
    device = min(each[0] // (1 if on_cuda else sharers[tuple(each[2])]) for each in told)
    host = min(each[1] // sharers[tuple(each[2])] for each in told)
    activations = max(each[3] for each in told)
    return {Tier.DEVICE: round(device * (1 - _FREE if kept is not None else 1 - _UNKNOWN)) - activations, Tier.HOST: host}


def _held(inventory: Inventory, config: Config, comm: DirectComm, parts: Parts | None) -> dict[Tier, int]:
    """Return the bytes that one rank would hold, by tier; on a CPU, bytes of the host count as the device's."""
    near, separate = comm.nodes.count(comm.nodes[comm.rank]), comm.streams.separate_host
    comms = imagined_topology(config, comm.world_size, near, separate, comm.copies, parts)
    found: dict[Tier, int] = {Tier.DEVICE: 0}
    for (_, planned, _), nbytes in held_by(inventory.lay_out(config, comms)).items():
        tier = Tier.DEVICE if planned is Tier.HOST and not separate else planned
        found[tier] = found.get(tier, 0) + nbytes
    return found


def _kept_nbytes(model: nn.Module, sample: object, config: Config) -> int:
    """Return the bytes that autograd saves in a forward on fake tensors, scaled to the dtype in which the model will compute."""
    storages: dict[int, torch.UntypedStorage] = {}
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def keep(tensor: Tensor) -> Tensor:
        storages.setdefault(torch_compat.storage_id(tensor.untyped_storage()), tensor.untyped_storage())
        return tensor

    args: tuple[object, ...] = sample if isinstance(sample, tuple) else (sample,)  # a list is one input
    named = {}
    if isinstance(sample, Mapping):
        args, named = (), dict(sample)
    try:
        with without_fake_logs(), mode, torch.random.fork_rng(devices=[]):
            fake: dict[str, Tensor] = {
                name: mode.from_tensor(value) for name, value in (*model.named_parameters(), *model.named_buffers())
            }
            own = {torch_compat.storage_id(value.untyped_storage()) for value in fake.values()}
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                output = torch.func.functional_call(model, fake, args, named)
            nbytes = sum(storage.nbytes() for key, storage in storages.items() if key not in own)
            nbytes += sum(tensor.nbytes for tensor in find_tensors(output))
    except ZeroshardError:
        raise
    except Exception as error:
        raise ConfigError(
            "sample: the model's forward of it failed on fake tensors, which have shapes and no values: "
            f"{type(error).__name__}: {str(error).rstrip('.')}. Give inputs as model(*sample) takes them; if the forward reads values of "
            "tensors, leave sample out."
        ) from error
    low = config.compute_dtype.itemsize
    given = max((param.element_size() for param in model.parameters()), default=low)
    return nbytes * low // given if config.precision != "fp32" else nbytes


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3g} GiB"
