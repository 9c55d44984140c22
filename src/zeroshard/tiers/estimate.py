"""The host memory and disk space that a model takes by the end of its first step, and whether they are there.

    Group --needs--> bytes by (category, tier, folder)                 pure arithmetic, on the sizes of buffers to be made
    Need of every rank + what each limit leaves --shortage--> None, or a table of what is missing

All ranks come to the same verdict before any of them has allocated: a rank that the kernel kills later can not say why.
Activations are left out, and what the model gives back (its own parameters) is deducted, so that nothing that fits is refused.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ..config import Config, Offload, Placement, Tier, written
from ..engine.flat_layout import round_up
from ..engine.ledger import GRADIENTS, MASTERS, OPTIMIZER, PARAMETERS
from ..engine.sizes import BUFFERS, Buffers, Group
from ..errors import OUT_OF_MEMORY_PAGE
from ..utils.host import host_identity
from ..utils.host_memory import Limit

PAGE_NBYTES = 4096  # regions on disk and mapped memory begin at multiples of this
_CATEGORIES = (PARAMETERS, GRADIENTS, MASTERS, OPTIMIZER, BUFFERS)

Place = tuple[str, Tier, str | None]  # category, tier, folder on disk


def needs(config: Config, separate: bool, groups: Sequence[Group], repeated: bool = True) -> dict[Place, int]:
    """Return the bytes that one rank will hold, by place, except buffers of two-hop and compressed collectives (`Comm.needed`).

    separate: the device has a memory of its own. repeated: a step may have several backwards that are reduced.
    """
    found: dict[Place, int] = defaultdict(int)

    def add(category: str, offload: Offload, nbytes: int) -> None:
        on_disk = offload.tier is Tier.DISK
        found[category, offload.tier, offload.path if on_disk else None] += round_up(nbytes, PAGE_NBYTES) if on_disk else nbytes

    device, row = Offload(), config.row
    for group in groups:
        sharded = row.parameter is Placement.SHARDED and not group.whole
        place, numel = (config.offload_param, group.shard_numel) if sharded else (device, group.numel)
        add(PARAMETERS, place, numel * group.dtype.itemsize)
        stepped = group.shard_numel if row.optimizer is Placement.SHARDED else group.numel
        if group.gradient is None:
            if group.master is not None:
                add(MASTERS, group.states, stepped * group.master.itemsize)
            continue
        sharded = row.gradient is Placement.SHARDED
        place, numel = (config.offload_gradient, group.shard_numel) if sharded else (device, group.numel)
        add(GRADIENTS, place, numel * group.gradient.itemsize)
        if config.delayed_update is not None and group.states.tier is not Tier.DEVICE:  # a second one (GradientBuffer.hand_over)
            add(GRADIENTS, config.offload_gradient, group.shard_numel * group.gradient.itemsize)
        if group.master is not None:
            add(MASTERS, group.states, stepped * group.master.itemsize)
        stepped = stepped if row.optimizer is Placement.SHARDED else group.unpadded or stepped
        for column in group.columns:
            add(OPTIMIZER, group.states, column.nbytes(stepped, group.stepped))
    sizes = Buffers.of(config, separate, groups)
    fetched, landed = math.prod(sizes.fetched[:2]) if sizes.fetched else 0, math.prod(sizes.landed)
    found[BUFFERS, Tier.DEVICE, None] += sizes.device_nbytes
    found[BUFFERS, Tier.HOST, None] += _arena_nbytes(config, separate, groups)
    if separate:
        passing = repeated or config.offload_gradient.tier is Tier.DISK
        found[BUFFERS, Tier.HOST, None] += landed * passing + fetched * (config.offload_param.tier is Tier.DISK)
    return dict(found)


def _arena_nbytes(config: Config, separate: bool, groups: Sequence[Group]) -> int:
    """Return the bytes of the arena through which the host's step moves what it can not use in place (host_step.py)."""
    offload = config.offload_optimizer
    limit_nbytes, total, largest = offload.buffer_count * offload.buffer_nbytes, 0, 0

    def away(tier: Tier) -> bool:
        return tier is Tier.DISK or (tier is Tier.DEVICE and separate)

    for group in groups:
        if group.gradient is None or group.states.tier is Tier.DEVICE:
            continue
        rests_away = away(group.states.tier)
        sizes = [column.nbytes(column.elements, group.stepped) / column.elements for column in group.columns if rests_away]
        sizes += [group.master.itemsize] if rests_away and group.master is not None else []
        if away(Tier.DEVICE if group.whole else config.offload_param.tier):
            sizes.append(group.dtype.itemsize)
        if away(config.offload_gradient.tier):
            sizes.append(group.gradient.itemsize)
        nbytes = math.ceil(group.shard_numel * sum(sizes)) + 2 * PAGE_NBYTES * len(sizes)
        total, largest = total + nbytes, max(largest, min(nbytes, offload.buffer_nbytes))
    return min(round_up(total + largest, PAGE_NBYTES), limit_nbytes)


@dataclass(frozen=True)
class Need:
    """The memory of its host that one rank will take, and what the limits leave there.

    parts: bytes by category; released_nbytes: what the model and optimizer hold now and give back; disk: bytes by folder.
    """

    parts: dict[str, int]
    released_nbytes: int
    limits: Sequence[Limit]
    disk: dict[str, int] = field(default_factory=dict)
    host: tuple[str, str] = ("", "")
    pid: int = 0

    @classmethod
    def of(cls, found: dict[Place, int], on_host: set[Tier], released_nbytes: int, limits: Sequence[Limit]) -> Need:
        """Return the Need for `found`, the result of `needs`. on_host: the tiers that are in the host's memory."""
        parts: dict[str, int] = defaultdict(int)
        disk: dict[str, int] = defaultdict(int)
        for (category, tier, folder), nbytes in found.items():
            if tier in on_host:
                parts[category] += nbytes
            elif folder is not None:
                disk[folder] += nbytes
        return cls(dict(parts), released_nbytes, list(limits), dict(disk), host_identity(), os.getpid())

    @classmethod
    def told(cls, parts: dict, released_nbytes: int, limits: list, disk: dict, host: tuple, pid: int) -> Need:
        """Return the Need of which another rank has sent the fields (`dataclasses.astuple`)."""
        return cls(parts, released_nbytes, [Limit(*limit) for limit in limits], disk, host, pid)

    @property
    def nbytes(self) -> int:
        """Bytes that will be held in addition to what is held now."""
        return max(sum(self.parts.values()) - self.released_nbytes, 0)


def shortage(everyone: Sequence[Need], changes: Iterable[tuple[dict[str, object], dict[str, int]]]) -> str | None:
    """Return why the ranks' states do not fit the memory of some host, with a table and a remedy; None if they fit.

    changes: options and what a rank would hold with them by category (`Need.parts`), the cheapest first.
    """
    # ranks that are threads share their process's limits, and all ranks of a host share the host's
    totals: dict[tuple[object, ...], int] = defaultdict(int)
    for need in everyone:
        for sharers in ((need.host,), (need.host, need.pid)):
            totals[sharers] += need.nbytes
    for rank, need in enumerate(everyone):
        for limit in need.limits:
            if totals[(need.host, need.pid) if limit.of_process else (need.host,)] > limit.nbytes:
                among = [n for n in everyone if n.host == need.host and (n.pid == need.pid or not limit.of_process)]
                return _table(rank, need, limit, among, changes)
    return None


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3f}"


def _table(
    rank: int, need: Need, limit: Limit, sharers: list[Need], changes: Iterable[tuple[dict[str, object], dict[str, int]]]
) -> str:  # fmt: skip
    total = sum(n.nbytes for n in sharers)
    among = "its process" if limit.of_process else f"host {need.host[0]}"
    lines = [
        f"rank {rank}: host memory is too small: {_gib(total)} GiB are needed by the {len(sharers)} rank(s) of {among}, "
        f"{_gib(limit.nbytes)} GiB are available ({limit.name}). Nothing was allocated.",
        f"{'GiB':<34}{'this rank':>12}{f'{len(sharers)} rank(s)':>12}",
    ]
    rows = [(name, [n.parts.get(name, 0) for n in sharers], need.parts.get(name, 0)) for name in _CATEGORIES]
    rows.append(("held by the model now, given back", [-n.released_nbytes for n in sharers], -need.released_nbytes))
    rows.append(("needed", [n.nbytes for n in sharers], need.nbytes))
    lines += [f"{name:<34}{_gib(mine):>12}{_gib(sum(everyone)):>12}" for name, everyone, mine in rows if any(everyone)]
    lines.append(f"{'available':<46}{_gib(limit.nbytes):>12}")
    frees = [(total - sum(replace(n, parts=parts).nbytes for n in sharers), options) for options, parts in changes]
    enough = next((each for each in frees if each[0] >= total - limit.nbytes), None)
    freed, options = enough or max(frees, key=lambda each: each[0], default=(0, {}))
    alone = "" if enough else ", which alone is not enough"
    ways = [f"{written(options)} ({_gib(freed)} GiB less{alone})"] * (freed > 0)
    ways += ["fewer ranks on this host"] * (len(sharers) > 1) + [limit.remedy]
    lines.append(f"To go on: {'; or '.join(ways)}. {OUT_OF_MEMORY_PAGE} has others.")
    return "\n".join(lines)
