"""Memory and disk space for a laid-out model: how much it will take, whether that is there, and the opening of its tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import Tensor

from ..config import Config, Placement, Tier
from ..engine.comm.base import DirectComm
from ..engine.comm.messages import exchange_values
from ..engine.ledger import GATHERED, GRADIENTS, Ledger
from ..engine.parameter import ParamSpec
from ..engine.prefetch import most_gathered
from ..engine.rest import Tiers
from ..engine.shard_model import ModelLayout
from ..engine.sizes import BUFFERS, rests_away
from ..engine.topology import needed
from ..errors import ConfigError, HostMemoryError, OffloadIOError
from ..policies import ROOT
from ..tensor.sharded_tensor import ShardedTensor
from ..utils.host import host_identity
from ..utils.host_memory import keep_freed_memory, limits
from .estimate import Need, Place, needs, shortage
from .imagined import ImaginedTiers
from .storage import FurtherTiers


def needs_of(layout: ModelLayout) -> dict[Place, int]:
    """Return the bytes that this rank will hold, without gathered units."""
    groups = [(group, (group.sizes.shard_numel, group.sizes.dtype)) for group in layout.groups]
    found = needs(layout.config, layout.separate, [group.sizes for group, _ in groups])
    if not layout.inventory.states:  # no optimizer: gradients on the device take no memory before the first backward
        found.pop((GRADIENTS, Tier.DEVICE, None), None)
    # secondary shards, partial sums between hops, quantized buffers, and quantization errors that are kept
    values = [(group.values, shard) for group, shard in groups]
    trained = [(group.gradients, shard) for group, shard in groups if group.sizes.gradient is not None]
    beside = needed(values, [(comm, (numel, layout.config.sent_dtype(dtype))) for comm, (numel, dtype) in trained])
    found[BUFFERS, Tier.DEVICE, None] = beside + sum(sizes.device_nbytes for _, sizes in layout.buffers())
    return found


def held_by(layout: ModelLayout) -> dict[Place, int]:
    """Return the bytes that this rank will hold, gathered units included."""
    found, config, shards = needs_of(layout), layout.config, layout.topology.shards
    away = rests_away(config.offload_param.tier, layout.separate)
    mapped = shards.copies and config.map_shared and not away
    if config.row.parameter is Placement.SHARDED and shards.world_size > 1 and not mapped:
        sizes = [[group.sizes for group in groups if not group.sizes.whole] for groups in layout.units]
        numbered = zip(layout.inventory.units, sizes, strict=True)
        nbytes = {unit.name: sum(each.numel * each.dtype.itemsize for each in groups) for unit, groups in numbered}
        order, limit = [name for name in nbytes if name != ROOT], config.prefetch_limit_nbytes
        found[GATHERED, Tier.DEVICE, None] = nbytes.get(ROOT, 0) + most_gathered(order, nbytes, limit and (not away) * limit)
    return found


def farther(layout: ModelLayout, on_host: set[Tier]) -> Iterator[tuple[dict[str, object], dict[str, int]]]:
    """Yield (options of a higher stage or a further tier, bytes by category that a rank would then hold of the host's memory)."""
    for options in layout.config.farther():
        try:
            config = replace(layout.config, offload_path=layout.config.offload_path or ".", **options)
        except ConfigError:  # it conflicts with another option
            continue
        yield options, Need.of(needs_of(layout.inventory.lay_out(config, layout.topology)), on_host, 0, []).parts


def open_tiers(config: Config, comm: DirectComm, ledger: Ledger) -> Tiers:
    """Make the tiers of a model; raise on all ranks if a folder on disk can not be used (collective). No check of free space.

    Sets the process's allocator: to keep freed memory (`keep_host_memory`, on a CPU), or to return it if parameters rest on disk.
    """
    if config.offload_param.tier is Tier.DISK:
        keep_freed_memory(large=False)
    elif config.keep_host_memory and comm.device.type == "cpu":
        keep_freed_memory()
    tiers, offloads = (
        (ImaginedTiers if comm.imagined else FurtherTiers)(comm, ledger),
        (config.offload_param, config.offload_gradient, config.offload_optimizer),
    )

    def open_folders() -> None:
        for offload in offloads:
            tiers.open_folder(offload)

    if any(offload.tier is Tier.DISK for offload in offloads):
        try:
            _agree(open_folders, tiers, "zs.shard: offload folders")
        except BaseException:
            tiers.close()
            raise
    return tiers


def _agree(attempt: Callable[[], object], tiers: Tiers, label: str) -> None:
    """Call a function that uses disks. If it failed on any rank, raise the first such rank's error on every rank (collective)."""
    problem: Exception | None = None
    try:
        attempt()
    except (ConfigError, OSError, OffloadIOError) as error:
        problem = error
    found = next((error for error in exchange_values(tiers.comm, problem, label) if error is not None), None)
    if found is not None:
        raise found


def given_back_by(specs: list[ParamSpec], optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of host memory that parameters and states take until their values are in the buffers."""
    values: list[Any] = [s.original._local if isinstance(s.original, ShardedTensor) else s.original for s in specs]
    states = optimizer.state.values() if optimizer is not None else ()
    values += [value for entries in states for value in entries.values() if type(value) is Tensor]
    return sum(value.nbytes for value in values if value is not None and value.device.type == "cpu")


def check_room(
    config: Config, tiers: Tiers, find: Callable[[], dict[Place, int]], what: str,
    changes: Callable[[set[Tier]], Iterable[tuple[dict[str, object], dict[str, int]]]] = lambda on_host: (), given_back: int = 0,
) -> None:  # fmt: skip
    """Raise, on every rank, HostMemoryError or SwapError if the ranks of some host have too little memory or disk (collective).

    find: returns the bytes that this rank will hold beside what it holds now. changes: returns, for the tiers that are in the
    host's memory, options under which it would hold less, as `estimate.shortage` takes them. given_back: bytes of the host's memory
    that this rank holds now, and will not then.
    """
    comm, offloads = tiers.comm, (config.offload_param, config.offload_gradient, config.offload_optimizer)
    if comm.imagined or (comm.device.type != "cpu" and all(offload.tier is Tier.DEVICE for offload in offloads)):
        return
    on_host = {Tier.HOST} | ({Tier.DEVICE} if comm.device.type == "cpu" else set())
    mine = Need.of(find(), on_host, given_back, limits())
    everyone = [Need.told(*other) for other in exchange_values(comm, astuple(mine), f"{what}: memory")]
    text = shortage(everyone, changes(on_host))
    if text is not None:
        raise HostMemoryError(text)
    if any(other.disk for other in everyone):
        check_disk(tiers, mine.disk, what)


def check_disk(tiers: Tiers, mine: dict[str, int], what: str) -> None:
    """Raise, on every rank, SwapError if a disk of some host is too small for its ranks (collective). mine: bytes by folder."""
    everyone = exchange_values(tiers.comm, (host_identity(), mine), f"{what}: space on disks")
    same = [theirs for host, theirs in everyone if host == host_identity()]
    _agree(lambda: tiers.check_space(mine, same), tiers, f"{what}: do they have room")
